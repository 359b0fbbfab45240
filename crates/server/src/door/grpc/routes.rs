//! From a call's path to the service that answers it.

use std::{convert::Infallible, future::Future, io, pin::Pin, sync::Arc, time::Duration};

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::time::timeout;
use tonic::{Status, body::Body};
use tonic_reflection::server::Builder;
use tower_service::Service;

use super::{
    MAX_MESSAGE_BYTES, QUOTA,
    health::Healthy,
    proto::{
        DESCRIPTORS,
        envoy::service::rate_limit_quota::v3::rate_limit_quota_service_server::RateLimitQuotaServiceServer,
        grpc::health::v1::health_server::HealthServer,
    },
    quota::StreamedQuotas,
};
use crate::{limiter::Limiter, net::Shutdown};

type Answered = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// A service that answers calls whose path begins with its name.
struct Route {
    service: &'static str,
    call: Box<dyn Fn(Request<Incoming>) -> Answered + Send + Sync>,
}

/// Every service of the door.
pub(super) struct Routes(Vec<Route>);

impl std::fmt::Debug for Routes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let services = self.0.iter().map(|route| route.service);
        f.debug_list().entries(services).finish()
    }
}

impl Routes {
    pub(super) fn new(limiter: &Arc<Limiter>, shutdown: &Shutdown) -> io::Result<Self> {
        let quotas = StreamedQuotas::new(Arc::clone(limiter), shutdown.clone());
        let quotas =
            RateLimitQuotaServiceServer::new(quotas).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let health = HealthServer::new(Healthy(shutdown.clone()))
            .max_decoding_message_size(MAX_MESSAGE_BYTES);
        // The descriptors were compiled with the server, so that they are sound.
        let reflection = || Builder::configure().register_encoded_file_descriptor_set(DESCRIPTORS);
        let v1 = reflection().build_v1().map_err(io::Error::other)?;
        let v1alpha = reflection().build_v1alpha().map_err(io::Error::other)?;
        Ok(Self(vec![
            Route::to(QUOTA, quotas),
            Route::to("grpc.health.v1.Health", health),
            Route::to("grpc.reflection.v1.ServerReflection", v1),
            Route::to("grpc.reflection.v1alpha.ServerReflection", v1alpha),
        ]))
    }

    /// Answers a call, or begins to, within the time that its caller gives it and at most `most`.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        most: Duration,
    ) -> Result<Response<Body>, Infallible> {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        let Some(route) = self.0.iter().find(|route| route.service == service) else {
            return Ok(Status::unimplemented("no such service here").into_http());
        };
        let time = super::timeout::of(request.headers(), most);
        let answered = timeout(time, (route.call)(request)).await;
        answered.unwrap_or_else(|_| {
            Ok(Status::deadline_exceeded("the time for the call is over").into_http())
        })
    }
}

impl Route {
    fn to<S>(service: &'static str, server: S) -> Self
    where
        S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        let call = Box::new(move |request| -> Answered { Box::pin(server.clone().call(request)) });
        Self { service, call }
    }
}
