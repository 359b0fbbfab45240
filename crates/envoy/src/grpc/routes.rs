//! Routes each call to its service by the request path.

use std::{
    convert::Infallible, future::Future, io, net::IpAddr, pin::Pin, sync::Arc, time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use tidegate_limiter::{metrics::ListenerKind, trace};
use tidegate_net::Shutdown;
use tokio::time::{Instant, timeout};
use tonic::{Status, body::Body};
use tonic_reflection::server::Builder;
use tower_service::Service;
use tracing::Instrument as _;

use super::{
    GrpcContext, MAX_MESSAGE_BYTES, QUOTA, authorization,
    health::HealthService,
    kuadrant::{self, KuadrantMethod},
    proto::{
        DESCRIPTORS,
        envoy::service::auth::v3::CheckResponse,
        envoy::service::rate_limit_quota::v3::rate_limit_quota_service_server::RateLimitQuotaServiceServer,
        envoy::service::ratelimit::v3::{RateLimitResponse, rate_limit_response::Code},
        grpc::health::v1::health_server::HealthServer,
    },
    quota::StreamedQuotas,
    rate_limit,
    unary::{self, GrpcResponseBody},
};

/// The paths of `ShouldRateLimit`. Like [`CHECK`] and the methods of [`kuadrant`], this method is
/// handled without tonic.
const SHOULD_RATE_LIMIT: [&str; 2] = [
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit",
];

/// The path of `Check`, the method of the authorization service.
const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";

type RouteFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// A service that handles all calls whose path starts with its name.
struct GrpcRoute {
    service: &'static str,
    call: Box<dyn Fn(Request<Incoming>) -> RouteFuture + Send + Sync>,
}

/// All services of the gRPC listener.
pub(super) struct GrpcRoutes {
    context: GrpcContext,
    streamed: Vec<GrpcRoute>,
}

impl std::fmt::Debug for GrpcRoutes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let services = self.streamed.iter().map(|route| route.service);
        f.debug_list().entries(services).finish()
    }
}

impl GrpcRoutes {
    pub(super) fn new(context: GrpcContext, shutdown: &Shutdown) -> io::Result<Self> {
        let quotas = StreamedQuotas::new(
            Arc::clone(&context.quotas),
            context.limiter.clock().clone(),
            shutdown.clone(),
        );
        let quotas =
            RateLimitQuotaServiceServer::new(quotas).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let health = HealthService::new(shutdown.clone(), context.rate_limits.clone());
        let health = HealthServer::new(health).max_decoding_message_size(MAX_MESSAGE_BYTES);
        // This call cannot fail, because the descriptors are compiled into the binary.
        let reflection = || Builder::configure().register_encoded_file_descriptor_set(DESCRIPTORS);
        let v1 = reflection().build_v1().map_err(io::Error::other)?;
        let v1alpha = reflection().build_v1alpha().map_err(io::Error::other)?;
        Ok(Self {
            context,
            streamed: vec![
                GrpcRoute::to(QUOTA, quotas),
                GrpcRoute::to("grpc.health.v1.Health", health),
                GrpcRoute::to("grpc.reflection.v1.ServerReflection", v1),
                GrpcRoute::to("grpc.reflection.v1alpha.ServerReflection", v1alpha),
            ],
        })
    }

    /// Responds to a call from the client at `peer`, or starts a streaming response. The timeout is
    /// the caller's timeout, capped at `most`.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        most: Duration,
    ) -> Result<Response<GrpcResponseBody>, Infallible> {
        let time = super::timeout::of(request.headers(), most);
        let answered = timeout(time, self.route(request, peer, time)).await;
        answered.unwrap_or_else(|_| {
            Ok(unary::failure(&Status::deadline_exceeded(
                "the deadline of the call has passed",
            )))
        })
    }

    async fn route(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        time: Duration,
    ) -> Result<Response<GrpcResponseBody>, Infallible> {
        let path = request.uri().path();
        let began = Instant::now();
        let remaining = || time.saturating_sub(began.elapsed());
        if let Some(method) = KuadrantMethod::of(path) {
            let span = trace::request_span(ListenerKind::Grpc, method.name(), request.headers());
            // Box this future, because it is larger than the future of `ShouldRateLimit`.
            let answered = Box::pin(self.kuadrant(method, request, remaining));
            return answered.instrument(span).await;
        }
        if SHOULD_RATE_LIMIT.contains(&path) {
            let name = "ShouldRateLimit";
            let span = trace::request_span(ListenerKind::Grpc, name, request.headers());
            return unary::call(request, |message| self.decide(message, remaining()))
                .instrument(span)
                .await;
        }
        if path == CHECK {
            let span = trace::request_span(ListenerKind::Grpc, "Check", request.headers());
            // Box this future, because it is larger than the future of `ShouldRateLimit`.
            let answer = unary::call(request, |message| self.check(peer, message));
            return Box::pin(answer).instrument(span).await;
        }
        let service = path.split('/').nth(1).unwrap_or_default();
        match self.streamed.iter().find(|route| route.service == service) {
            Some(route) => Ok((route.call)(request).await?.map(GrpcResponseBody::Streamed)),
            None => Ok(unary::failure(&Status::unimplemented("unknown service"))),
        }
    }

    async fn check(
        &self,
        peer: IpAddr,
        message: Result<Bytes, Status>,
    ) -> Result<CheckResponse, Status> {
        let checked = match message {
            Ok(message) => authorization::check(&self.context, peer, &message).await,
            Err(status) => Err(status),
        };
        if checked.is_err() {
            let metrics = self.context.limiter.metrics();
            metrics.count_bad_request(ListenerKind::Grpc);
        }
        checked
    }

    /// Responds to a call to Kuadrant's service.
    async fn kuadrant(
        &self,
        method: KuadrantMethod,
        request: Request<Incoming>,
        remaining: impl Fn() -> Duration,
    ) -> Result<Response<GrpcResponseBody>, Infallible> {
        let shared = self.context.rate_limits.as_ref();
        let service = self.context.rate_limits.as_deref();
        let within = || super::timeout::for_store(remaining());
        match method {
            KuadrantMethod::CheckRateLimit => {
                let answer = |message| async {
                    let checked = kuadrant::check_rate_limit(service, message, within()).await;
                    self.counted(checked, |answer| Some(answer.overall_code()))
                };
                unary::call(request, answer).await
            }
            KuadrantMethod::Report => {
                let answer = |message| async {
                    let reported = kuadrant::report(service, message, within()).await;
                    self.counted(reported, |_| None)
                };
                unary::call(request, answer).await
            }
            KuadrantMethod::Reserve => {
                let answer = |message| async {
                    let reserved = kuadrant::reserve(shared, message, within()).await;
                    self.counted(reserved, |answer| Some(answer.code()))
                };
                unary::call(request, answer).await
            }
            KuadrantMethod::Commit => {
                let answer = |message| async {
                    let committed = kuadrant::commit(shared, message, within()).await;
                    self.counted(committed, |_| None)
                };
                unary::call(request, answer).await
            }
        }
    }

    async fn decide(
        &self,
        message: Result<Bytes, Status>,
        time: Duration,
    ) -> Result<RateLimitResponse, Status> {
        let service = self.context.rate_limits.as_deref();
        let decided = match message {
            Ok(message) => {
                rate_limit::decide(service, &message, super::timeout::for_store(time)).await
            }
            Err(status) => Err(status),
        };
        self.counted(decided, |answer| Some(answer.overall_code()))
    }

    /// Counts the result of a call in the metrics. `code_of` returns the response's code if the
    /// call decides a request, and `None` otherwise.
    fn counted<A>(
        &self,
        result: Result<A, Status>,
        code_of: impl Fn(&A) -> Option<Code>,
    ) -> Result<A, Status> {
        let metrics = self.context.limiter.metrics();
        match &result {
            Ok(answer) => {
                if let Some(code) = code_of(answer) {
                    metrics.observe_response(ListenerKind::Grpc, code == Code::OverLimit);
                }
            }
            // Do not count a store failure as a bad request, because it is not the caller's fault.
            Err(status) if status.code() == tonic::Code::Unavailable => {}
            Err(_) => metrics.count_bad_request(ListenerKind::Grpc),
        }
        result
    }
}

impl GrpcRoute {
    fn to<S>(service: &'static str, server: S) -> Self
    where
        S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        let call =
            Box::new(move |request| -> RouteFuture { Box::pin(server.clone().call(request)) });
        Self { service, call }
    }
}
