//! `grpc.health.v1.Health`.

use std::time::Duration;

use tonic::Code;

use crate::{
    door::Door,
    proto::grpc::health::v1::{
        HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
    },
};

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

fn asked(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.to_owned(),
    }
}

#[tokio::test]
async fn the_server_and_its_services_are_healthy() {
    let door = Door::open("");
    let mut client = door.connect().await;
    for service in [
        "",
        "ratelimit",
        "envoy.service.ratelimit.v3.RateLimitService",
        "envoy.service.ratelimit.v2.RateLimitService",
        "envoy.service.rate_limit_quota.v3.RateLimitQuotaService",
    ] {
        let health: HealthCheckResponse = client.call(CHECK, asked(service)).await.unwrap();
        assert_eq!(health.status(), ServingStatus::Serving, "{service}");
    }
    let unknown = client
        .call::<_, HealthCheckResponse>(CHECK, asked("weather"))
        .await;
    assert_eq!(unknown.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn who_watches_is_told_of_the_shutdown_and_not_waited_for() {
    let door = Door::open("");
    let mut client = door.connect().await;
    let mut watched = client
        .watch::<_, HealthCheckResponse>(WATCH, asked("ratelimit"))
        .await;
    let now = watched.message().await.unwrap().unwrap();
    assert_eq!(now.status(), ServingStatus::Serving);

    door.server.announce_shutdown();
    let last = watched.message().await.unwrap().unwrap();
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert!(watched.message().await.unwrap().is_none());
    // It is only said so far: who comes now is served.
    let mut late = door.connect().await;
    let health: HealthCheckResponse = late.call(CHECK, asked("")).await.unwrap();
    assert_eq!(health.status(), ServingStatus::NotServing);

    let dropped = tokio::spawn(door.server.shutdown(Duration::from_secs(30)));
    assert_eq!(dropped.await.unwrap(), 0, "nobody had to be dropped");
}

#[tokio::test]
async fn who_watches_an_unknown_service_is_told_so() {
    let door = Door::open("");
    let mut client = door.connect().await;
    let mut watched = client
        .watch::<_, HealthCheckResponse>(WATCH, asked("weather"))
        .await;
    let now = watched.message().await.unwrap().unwrap();
    assert_eq!(now.status(), ServingStatus::ServiceUnknown);
}
