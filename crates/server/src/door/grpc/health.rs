//! `grpc.health.v1.Health`: whether to send requests here.

use std::pin::Pin;

use futures_util::{Stream, StreamExt as _, stream};
use tonic::{Request, Response, Status};

use super::proto::grpc::health::v1::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
    health_server::Health,
};
use crate::net::Shutdown;

/// The services that have a health: the server as a whole, and the name under which Envoy is usually told to ask.
const SERVICES: [&str; 3] = ["", "ratelimit", super::QUOTA];

/// Healthy until the shutdown begins.
#[derive(Clone, Debug)]
pub(super) struct Healthy(pub(super) Shutdown);

impl Healthy {
    fn status(&self, service: &str) -> ServingStatus {
        if !SERVICES.contains(&service) {
            ServingStatus::ServiceUnknown
        } else if self.0.has_begun() {
            ServingStatus::NotServing
        } else {
            ServingStatus::Serving
        }
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

    /// The state now; and when the shutdown begins, that it has changed, and the end.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (watched, service) = (self.clone(), request.into_inner().service);
        let now = answer(self.status(&service));
        let last = async move {
            watched.0.begun().await;
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
