//! `grpc.health.v1.Health`: whether to send requests here.

use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt as _, stream};
use tonic::{Request, Response, Status};

use super::proto::grpc::health::v1::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
    health_server::Health,
};
use crate::{envoy::RateLimitService, net::Shutdown};

/// The services that have a health: the server as a whole, the name under which Envoy is usually told to ask, and those that
/// are served.
const SERVICES: [&str; 5] = [
    "",
    "ratelimit",
    super::RATE_LIMIT,
    super::RATE_LIMIT_V2,
    super::QUOTA,
];

/// Healthy until the shutdown is announced, as far as the rate limit service is.
#[derive(Clone, Debug)]
pub(super) struct Healthy {
    shutdown: Shutdown,
    rate_limits: Option<Arc<RateLimitService>>,
}

impl Healthy {
    pub(super) const fn new(
        shutdown: Shutdown,
        rate_limits: Option<Arc<RateLimitService>>,
    ) -> Self {
        Self {
            shutdown,
            rate_limits,
        }
    }

    fn status(&self, service: &str) -> ServingStatus {
        if !SERVICES.contains(&service) {
            ServingStatus::ServiceUnknown
        } else if self.shutdown.is_announced() || !self.decides(service) {
            ServingStatus::NotServing
        } else {
            ServingStatus::Serving
        }
    }

    /// Whether what `service` depends on is there.
    fn decides(&self, service: &str) -> bool {
        let depends = !matches!(service, "" | super::QUOTA);
        let rate_limits = self.rate_limits.as_ref().filter(|_| depends);
        rate_limits.is_none_or(|service| service.is_healthy())
    }
}

#[tonic::async_trait]
impl Health for Healthy {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        match self.status(&request.get_ref().service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found("no such service here")),
            status => Ok(Response::new(answer(status))),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// The state now; and when the shutdown is announced, that it has changed, and the end.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (watched, service) = (self.clone(), request.into_inner().service);
        let now = answer(self.status(&service));
        let last = async move {
            watched.shutdown.announced().await;
            answer(watched.status(&service))
        };
        let states = stream::iter([now]).chain(stream::once(last)).map(Ok);
        Ok(Response::new(Box::pin(states)))
    }
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}
