//! Tests of the protocol: the first request, ACK and NACK, health, and reported metrics and
//! problems.

use std::sync::Arc;

use tidegate_config::envoy::{DomainFiles, RlsSettings, header};
use tidegate_envoy::{Descriptor, RateLimitRequest, Variables};
use tidegate_net::prometheus::{self, Format};
use tonic::Status;

use super::{
    control_plane::{ControlPlane, RunningClient, packed, response},
    plane::Plane as _,
};
use crate::{
    overrides::{admitted, set},
    proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
    },
    subject::{Started, StoreKind},
};

/// Returns a resource with one limit per minute for the key `user`.
pub(super) fn limiting(domain: &str, requests: u32) -> RateLimitConfig {
    RateLimitConfig {
        name: domain.to_owned(),
        domain: domain.to_owned(),
        descriptors: vec![RateLimitDescriptor {
            key: "user".to_owned(),
            rate_limit: Some(RateLimitPolicy {
                unit: RateLimitUnit::Minute.into(),
                requests_per_unit: requests,
                ..RateLimitPolicy::default()
            }),
            ..RateLimitDescriptor::default()
        }],
    }
}

pub(super) fn started() -> Started {
    Started::new(&Variables::new(), 1_700_000_040).unwrap()
}

fn metrics(client: &RunningClient) -> String {
    let client = Arc::clone(&client.client);
    prometheus::encode(Format::Text, move |page| client.collect(page))
}

#[tokio::test]
async fn the_first_request_describes_the_node() {
    let mut plane = ControlPlane::start().await;
    let mut config = plane.config();
    config.node.id = "envoy-ratelimit".to_owned();
    config.node.cluster = "edge".to_owned();
    config.node.metadata = vec![("team".to_owned(), "a".to_owned())];
    config.node.zone = "eu-1a".to_owned();
    config.headers = vec![header("authorization", "Bearer x").unwrap()];
    let started = started();
    let _client = RunningClient::start(config, &started.service);
    let mut stream = plane.accept().await;
    assert_eq!(stream.headers.get("authorization").unwrap(), "Bearer x");
    let node = stream.subscription("").await.node.unwrap();
    assert_eq!((&*node.id, &*node.cluster), ("envoy-ratelimit", "edge"));
    assert_eq!(node.locality.unwrap().zone, "eu-1a");
    assert!(node.metadata.unwrap().fields.contains_key("team"));
    assert_eq!(node.user_agent_name, "tidegate");
}

#[tokio::test]
async fn the_service_is_healthy_once_it_has_a_configuration() {
    let mut plane = ControlPlane::start().await;
    let started = started();
    let client = RunningClient::start(plane.config(), &started.service);
    assert!(client.client.is_waiting() && !started.service.is_healthy());
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let wrong = packed(&limiting("", 3));
    stream.send(("1", "a", ""), vec![wrong]).await.unwrap_err();
    assert!(client.client.is_waiting() && !started.service.is_healthy());
    let good = packed(&limiting("shop", 3));
    stream.send(("2", "b", ""), vec![good]).await.unwrap();
    assert!(!client.client.is_waiting() && started.service.is_healthy());
    assert_eq!(client.client.version().as_deref(), Some("2"));
    assert_eq!(client.client.problem(), None);
}

#[tokio::test]
async fn a_nack_names_every_mistake_and_keeps_all_domains() {
    let mut plane = ControlPlane::start().await;
    let started = started();
    let client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let both = |shop: u32| vec![packed(&limiting("shop", shop)), packed(&limiting("api", 5))];
    stream.send(("1", "a", ""), both(3)).await.unwrap();
    assert_eq!(started.service.domains(), 2);

    let mut wrong = limiting("api", 5);
    wrong.descriptors[0].key.clear();
    wrong.descriptors[0].rate_limit.as_mut().unwrap().unit = 0;
    let resources = vec![packed(&limiting("shop", 9)), packed(&wrong)];
    let error = stream.send(("2", "b", "1"), resources).await.unwrap_err();
    assert_eq!(
        error,
        "api: descriptors[0]: descriptor has empty key; api: descriptors[0].rate_limit.unit: invalid \
         rate limit unit 'UNKNOWN'; use one of second, minute, hour, day, week, month, year"
    );
    assert_eq!(client.client.last_mistakes().len(), 2);
    assert_eq!(client.client.version().as_deref(), Some("1"));
    assert_eq!(
        started.service.domains(),
        2,
        "the last good set stays active"
    );

    // A response with another resource type is ignored, so the next ACK belongs to the following
    // response.
    let other = response("3", "c", Vec::new());
    let type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
    stream
        .respond_with(
            crate::proto::envoy::service::discovery::v3::DiscoveryResponse { type_url, ..other },
        )
        .await;
    stream.send(("4", "d", "1"), both(4)).await.unwrap();
    assert!(client.client.last_mistakes().is_empty());
    let page = metrics(&client);
    for line in [
        "tidegate_envoy_xds_connected 1",
        "tidegate_envoy_xds_connections_total{result=\"ok\"} 1",
        "tidegate_envoy_xds_responses_total{result=\"acked\"} 2",
        "tidegate_envoy_xds_responses_total{result=\"rejected\"} 1",
        "tidegate_envoy_xds_responses_total{result=\"ignored\"} 1",
        "tidegate_envoy_xds_resources 2",
        "tidegate_envoy_xds_last_response_timestamp_seconds 1700000040",
        "tidegate_envoy_config_loads_total{result=\"ok\"} 2",
        "tidegate_envoy_config_loads_total{result=\"failed\"} 1",
        "tidegate_envoy_last_config_load_success 1",
        "tidegate_envoy_domains 2",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}:\n{page}");
    }
}

#[tokio::test]
async fn a_lost_connection_keeps_the_rules_and_is_reported() {
    let mut plane = ControlPlane::start().await;
    let started = started();
    let client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let resources = vec![packed(&limiting("shop", 3))];
    stream.send(("1", "a", ""), resources).await.unwrap();
    stream.fail(Status::unavailable("going away")).await;
    let mut stream = plane.accept().await;
    stream.subscription("1").await;
    assert_eq!(started.service.domains(), 1);
    let page = metrics(&client);
    assert!(
        page.contains("tidegate_envoy_xds_streams_ended_total 1"),
        "{page}"
    );
    drop((stream, plane));
    let mut problem = None;
    while !problem
        .as_deref()
        .is_some_and(|text: &str| text.contains("refused"))
    {
        tokio::task::yield_now().await;
        problem = client.client.problem();
    }
    assert_eq!(started.service.domains(), 1);
    assert!(started.service.is_healthy());
    assert!(metrics(&client).contains("tidegate_envoy_xds_connected 0"));
}

/// In state-of-the-world xDS, a resource that is missing in a response has been removed.
#[tokio::test]
async fn an_absent_resource_is_removed() {
    let mut plane = ControlPlane::start().await;
    let started = started();
    let _client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let both = vec![packed(&limiting("a", 3)), packed(&limiting("b", 5))];
    stream.send(("1", "a", ""), both).await.unwrap();
    assert_eq!(started.service.domains(), 2);
    let one = vec![packed(&limiting("b", 5))];
    stream.send(("2", "b", "1"), one).await.unwrap();
    assert_eq!(started.service.domains(), 1);
    stream.send(("3", "c", "2"), Vec::new()).await.unwrap();
    assert_eq!(started.service.domains(), 0);
}

/// Overrides belong to the name of a rule, so an update of the configuration keeps them.
#[tokio::test]
async fn an_override_survives_an_update() {
    let mut plane = ControlPlane::start().await;
    let started = started();
    let _client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let of_keys = |requests| {
        let mut config = limiting("shop", requests);
        config.descriptors[0].key = "api_key".to_owned();
        vec![packed(&config)]
    };
    stream.send(("1", "a", ""), of_keys(3)).await.unwrap();
    set(&started, "acme", "7/min").await;
    stream.send(("2", "b", "1"), of_keys(4)).await.unwrap();
    assert_eq!(admitted(&started, "acme").await, 7);
    assert_eq!(admitted(&started, "other").await, 4);
}

/// Envoy Gateway's rules have two levels, or more levels if a route has several conditions.
#[tokio::test]
async fn the_metrics_have_the_names_of_envoyproxy_ratelimit_on_request() {
    let mut plane = ControlPlane::start().await;
    let mut settings = RlsSettings::default();
    settings.ratelimit_metrics = true;
    let started = Started::with(StoreKind::Memory, settings, DomainFiles::One, 1_700_000_040);
    let client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let mut config = limiting("eg/http", 3);
    let leaf = limiting("", 2).descriptors.remove(0);
    let middle = RateLimitDescriptor {
        key: "rule-0".to_owned(),
        value: "rule-0".to_owned(),
        descriptors: vec![leaf],
        ..RateLimitDescriptor::default()
    };
    config.descriptors.push(RateLimitDescriptor {
        key: "route".to_owned(),
        value: "route".to_owned(),
        descriptors: vec![middle],
        ..RateLimitDescriptor::default()
    });
    stream
        .send(("1", "a", ""), vec![packed(&config)])
        .await
        .unwrap();
    let entry = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let route = vec![
        entry("route", "route"),
        entry("rule-0", "rule-0"),
        entry("user", "u"),
    ];
    for entries in [
        vec![entry("user", "u")],
        route.clone(),
        route.clone(),
        route,
    ] {
        let request = RateLimitRequest {
            domain: "eg/http".to_owned(),
            descriptors: vec![Descriptor {
                entries,
                ..Descriptor::default()
            }],
            hits_addend: 1,
        };
        started.service.should_rate_limit(&request).await.unwrap();
    }
    let page = metrics(&client);
    for line in [
        "# TYPE ratelimit_service_rate_limit_total_hits counter",
        "ratelimit_service_rate_limit_total_hits{domain=\"eg/http\",key1=\"route_route\",key2=\"rule-0_rule-0\"} 3",
        "ratelimit_service_rate_limit_over_limit{domain=\"eg/http\",key1=\"route_route\",key2=\"rule-0_rule-0\"} 1",
        "ratelimit_service_rate_limit_within_limit{domain=\"eg/http\",key1=\"user\",key2=\"\"} 1",
        "ratelimit_service_config_load_success 1",
        "ratelimit_service_config_load_error 0",
        "ratelimit_service_should_rate_limit_error{err_type=\"service_error\"} 0",
        "ratelimit_service_response_time_seconds_count{grpc_method=\"ShouldRateLimit\"} 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}:\n{page}");
    }
    // An OpenMetrics scrape has the same metric names.
    let collected = Arc::clone(&client.client);
    let page = prometheus::encode(Format::OpenMetrics, move |page| collected.collect(page));
    for line in [
        "# TYPE ratelimit_service_config_load_success unknown",
        "ratelimit_service_config_load_success 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}:\n{page}");
    }
}
