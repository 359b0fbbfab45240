//! `grpc.health.v1.Health`: whether to send requests here.

use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::watch;
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

    /// The state now, and every other one that it comes to; the end when the shutdown is announced.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let watcher = Watcher {
            changes: self.rate_limits.as_ref().map(|service| service.health()),
            healthy: self.clone(),
            service: request.into_inner().service,
            told: None,
        };
        let states = stream::unfold(watcher, Watcher::next).map(|status| Ok(answer(status)));
        Ok(Response::new(Box::pin(states)))
    }
}

/// Who wants to know whenever the health of a service changes.
#[derive(Debug)]
struct Watcher {
    healthy: Healthy,
    service: String,
    /// Of the rate limit service, if there is one.
    changes: Option<watch::Receiver<bool>>,
    told: Option<ServingStatus>,
}

impl Watcher {
    /// Waits for a state that was not told yet; `None` where none follows.
    async fn next(mut self) -> Option<(ServingStatus, Self)> {
        loop {
            // Looked at before the state is, so that the last state is told.
            let is_last = self.healthy.shutdown.is_announced();
            let status = self.healthy.status(&self.service);
            if self.told != Some(status) {
                self.told = Some(status);
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

/// Waits for a change; forever if there is nothing that could.
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
