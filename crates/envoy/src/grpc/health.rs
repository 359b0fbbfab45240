//! `grpc.health.v1.Health`: reports whether this server should receive requests.

use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt as _, stream};
use tidegate_net::Shutdown;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::proto::grpc::health::v1::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
    health_server::Health,
};
use crate::RateLimitService;

/// The names that clients can query: the empty name for the whole server, the usual name in Envoy
/// health checks, and the services of this listener.
const SERVICES: [&str; 6] = [
    "",
    "ratelimit",
    super::RATE_LIMIT,
    super::RATE_LIMIT_V2,
    super::KUADRANT,
    super::QUOTA,
];

/// The health service. Until a shutdown is announced, every name is healthy, with one exception: a
/// name that depends on the rate limit service is healthy only if that service is healthy.
#[derive(Clone, Debug)]
pub(super) struct HealthService {
    shutdown: Shutdown,
    rate_limits: Option<Arc<RateLimitService>>,
}

impl HealthService {
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
        } else if self.shutdown.is_announced() || !self.has_healthy_dependencies(service) {
            ServingStatus::NotServing
        } else {
            ServingStatus::Serving
        }
    }

    /// Returns whether all dependencies of `service` are healthy.
    fn has_healthy_dependencies(&self, service: &str) -> bool {
        let depends = !matches!(service, "" | super::QUOTA);
        let rate_limits = self.rate_limits.as_ref().filter(|_| depends);
        rate_limits.is_none_or(|service| service.is_healthy())
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        match self.status(&request.get_ref().service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found("unknown service")),
            status => Ok(Response::new(answer(status))),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// Streams the current status and each change. The stream ends when a shutdown is announced.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let watcher = Watcher {
            changes: self.rate_limits.as_ref().map(|service| service.health()),
            healthy: self.clone(),
            service: request.into_inner().service,
            last_sent: None,
        };
        let states = stream::unfold(watcher, Watcher::next).map(|status| Ok(answer(status)));
        Ok(Response::new(Box::pin(states)))
    }
}

/// The state of a `Watch` call.
#[derive(Debug)]
struct Watcher {
    healthy: HealthService,
    service: String,
    /// The health changes of the rate limit service, if there is one.
    changes: Option<watch::Receiver<bool>>,
    last_sent: Option<ServingStatus>,
}

impl Watcher {
    /// Waits for a status that differs from the last sent status. Returns `None` once the last
    /// status before a shutdown has been sent.
    async fn next(mut self) -> Option<(ServingStatus, Self)> {
        loop {
            // Check for a shutdown before reading the status. With the opposite order, the last
            // status might not be sent.
            let is_last = self.healthy.shutdown.is_announced();
            let status = self.healthy.status(&self.service);
            if self.last_sent != Some(status) {
                self.last_sent = Some(status);
                return Some((status, self));
            }
            if is_last {
                return None;
            }
            tokio::select! {
                () = self.healthy.shutdown.announced() => {}
                () = changed(self.changes.as_mut()) => {}
            }
        }
    }
}

/// Waits for a change. Waits forever if no change is possible.
async fn changed(changes: Option<&mut watch::Receiver<bool>>) {
    if let Some(changes) = changes
        && changes.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}
