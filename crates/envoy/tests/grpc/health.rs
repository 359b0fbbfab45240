//! Tests of `grpc.health.v1.Health`.

use std::time::Duration;

use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_envoy::{File, LoadedConfig, read};
use tonic::Code;

use crate::{
    listener::TestListener,
    proto::grpc::health::v1::{
        HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
    },
};

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

fn request(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.to_owned(),
    }
}

#[tokio::test]
async fn the_server_and_its_services_are_healthy() {
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    for service in [
        "",
        "ratelimit",
        "envoy.service.ratelimit.v3.RateLimitService",
        "envoy.service.ratelimit.v2.RateLimitService",
        "envoy.service.rate_limit_quota.v3.RateLimitQuotaService",
        "kuadrant.service.ratelimit.v1.RateLimitService",
    ] {
        let health: HealthCheckResponse = client.call(CHECK, request(service)).await.unwrap();
        assert_eq!(health.status(), ServingStatus::Serving, "{service}");
    }
    let unknown = client
        .call::<_, HealthCheckResponse>(CHECK, request("weather"))
        .await;
    assert_eq!(unknown.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn watchers_are_notified_of_the_shutdown_and_do_not_delay_it() {
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    let mut watched = client
        .watch::<_, HealthCheckResponse>(WATCH, request("ratelimit"))
        .await;
    let now = watched.message().await.unwrap().unwrap();
    assert_eq!(now.status(), ServingStatus::Serving);

    listener.server.announce_shutdown();
    let last = watched.message().await.unwrap().unwrap();
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert!(watched.message().await.unwrap().is_none());
    // The shutdown has been announced but has not begun, so new connections are still served.
    let mut late = listener.connect().await;
    let health: HealthCheckResponse = late.call(CHECK, request("")).await.unwrap();
    assert_eq!(health.status(), ServingStatus::NotServing);

    let dropped = tokio::spawn(listener.server.shutdown(Duration::from_secs(30)));
    assert_eq!(dropped.await.unwrap(), 0, "no connection was dropped");
}

#[tokio::test]
async fn watching_an_unknown_service_returns_service_unknown() {
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    let mut watched = client
        .watch::<_, HealthCheckResponse>(WATCH, request("weather"))
        .await;
    let now = watched.message().await.unwrap().unwrap();
    assert_eq!(now.status(), ServingStatus::ServiceUnknown);
}

/// With `healthy_with_a_domain`, a load balancer that watches the health service sends requests
/// only while the configuration has a domain.
#[tokio::test]
async fn watchers_are_notified_when_domains_come_and_go() {
    let mut settings = RlsSettings::default();
    settings.healthy_with_a_domain = true;
    let listener = TestListener::without_a_domain(settings);
    let service = listener.rate_limits.as_deref().unwrap();
    let mut client = listener.connect().await;
    let mut watched = client
        .watch::<_, HealthCheckResponse>(WATCH, request("ratelimit"))
        .await;
    let mut whole = client
        .watch::<_, HealthCheckResponse>(WATCH, request(""))
        .await;
    let expected = [
        (None, ServingStatus::NotServing),
        (Some("domain: shop"), ServingStatus::Serving),
        (Some(""), ServingStatus::NotServing),
    ];
    for (file, status) in expected {
        if let Some(text) = file {
            service.load(loaded(text));
        }
        let update = watched.message().await.unwrap().unwrap();
        assert_eq!(update.status(), status, "{file:?}");
    }
    // The server sends no message if the status does not change.
    service.load(loaded(""));
    service.load(loaded("domain: shop"));
    let update = watched.message().await.unwrap().unwrap();
    assert_eq!(update.status(), ServingStatus::Serving);
    listener.server.announce_shutdown();
    let mut of_the_whole = Vec::new();
    while let Some(update) = whole.message().await.unwrap() {
        of_the_whole.push(update.status());
    }
    assert_eq!(
        of_the_whole,
        [ServingStatus::Serving, ServingStatus::NotServing],
        "the server as a whole was serving all the time"
    );
}

/// Parses a configuration with `text` as its only file. If `text` is empty, the configuration has
/// no files.
fn loaded(text: &str) -> LoadedConfig {
    let file = File {
        name: "shop.yaml".to_owned(),
        text: text.to_owned(),
    };
    let files = if text.is_empty() {
        Vec::new()
    } else {
        vec![file]
    };
    read(files, DomainFiles::One).unwrap()
}
