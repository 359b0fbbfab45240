//! Tests of `RateLimitService`'s wire format. The case files in `vectors/` test the service's
//! decisions.

use std::time::Duration;

use tidegate_config::envoy::{HeaderNames, RlsSettings};
use tonic::{Code as Status, Request};

use crate::{
    listener::TestListener,
    proto::envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, rate_limit::Unit},
        },
    },
};

const V3: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const V2: &str = "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit";

const SHOP: &str = "\
domain: shop
descriptors:
  - key: user
    metadata: {tier: gold, weight: 2, tags: [a, null, true]}
    rate_limit: {unit: minute, requests_per_unit: 3, name: per-user}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 9}}
";

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: (*key).to_owned(),
        value: (*value).to_owned(),
    };
    RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        ..RateLimitDescriptor::default()
    }
}

fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest {
        domain: "shop".to_owned(),
        descriptors,
        hits_addend: 0,
    }
}

#[tokio::test]
async fn a_status_describes_its_descriptor() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    listener.at_seconds(15);
    let mut client = listener.connect().await;
    let asked = request(vec![
        descriptor(&[("user", "alice")]),
        descriptor(&[("week", "")]),
        descriptor(&[("nobody", "cares")]),
    ]);
    let answer: RateLimitResponse = client.call(V3, asked).await.unwrap();
    assert_eq!(answer.overall_code(), Code::Ok);
    let [user, week, none] = &answer.statuses[..] else {
        panic!("{answer:?}");
    };
    let limit = user.current_limit.as_ref().unwrap();
    assert_eq!(
        (limit.requests_per_unit, limit.unit(), limit.name.as_str()),
        (3, Unit::Minute, "per-user")
    );
    assert_eq!((user.code(), user.limit_remaining), (Code::Ok, 2));
    let reset = user.duration_until_reset.unwrap();
    assert_eq!((reset.seconds, reset.nanos), (45, 0));
    assert_eq!(week.current_limit.as_ref().unwrap().unit(), Unit::Week);
    assert_eq!((none.code(), none.limit_remaining), (Code::Ok, 0));
    assert!(none.current_limit.is_none() && none.duration_until_reset.is_none());
    assert!(answer.response_headers_to_add.is_empty() && answer.dynamic_metadata.is_none());
}

#[tokio::test]
async fn the_v2_service_answers_like_v3() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    let mut codes = Vec::new();
    for path in [V3, V2, V2, V3] {
        let asked = request(vec![descriptor(&[("user", "alice")])]);
        let answer: RateLimitResponse = client.call(path, asked).await.unwrap();
        codes.push(answer.overall_code());
    }
    assert_eq!(codes, [Code::Ok, Code::Ok, Code::Ok, Code::OverLimit]);
}

#[tokio::test]
async fn hits_refunds_and_overrides_come_with_the_descriptor() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    let mut left = async |hits: Option<u64>, is_negative_hits| {
        let asked = RateLimitDescriptor {
            hits_addend: hits,
            is_negative_hits,
            ..descriptor(&[("week", "")])
        };
        let answer: RateLimitResponse = client.call(V3, request(vec![asked])).await.unwrap();
        answer.statuses[0].limit_remaining
    };
    assert_eq!(left(Some(4), false).await, 5);
    assert_eq!(left(Some(0), false).await, 5, "a peek");
    assert_eq!(left(Some(3), true).await, 8);
    assert_eq!(left(Some(1 << 40), true).await, 9);
    assert_eq!(left(None, false).await, 8);

    let limit = RateLimitOverride {
        requests_per_unit: 7,
        unit: Unit::Hour.into(),
    };
    let asked = RateLimitDescriptor {
        limit: Some(limit),
        ..descriptor(&[("user", "bob")])
    };
    let answer: RateLimitResponse = client.call(V3, request(vec![asked])).await.unwrap();
    let applied = answer.statuses[0].current_limit.clone().unwrap();
    assert_eq!((applied.requests_per_unit, applied.unit()), (7, Unit::Hour));
}

#[tokio::test]
async fn headers_and_metadata_are_added_if_configured() {
    let settings: RlsSettings = {
        let mut settings = RlsSettings::default();
        settings.response_headers = Some(HeaderNames::default());
        settings.dynamic_metadata = true;
        settings
    };
    let listener = TestListener::for_envoy(settings, SHOP);
    let mut client = listener.connect().await;
    let asked = request(vec![descriptor(&[("user", "alice")])]);
    let answer: RateLimitResponse = client.call(V3, asked).await.unwrap();
    let headers = answer.response_headers_to_add.iter();
    let headers: Vec<_> = headers
        .map(|header| (header.key.as_str(), header.value.as_str()))
        .collect();
    assert_eq!(
        headers,
        [
            ("RateLimit-Limit", "3"),
            ("RateLimit-Remaining", "2"),
            ("RateLimit-Reset", "60")
        ]
    );
    let metadata = format!("{:?}", answer.dynamic_metadata.unwrap());
    for part in [
        "\"domain\": Value { kind: Some(StringValue(\"shop\")) }",
        "\"weight\": Value { kind: Some(NumberValue(2.0)) }",
        "ListValue(ListValue { values: [Value { kind: Some(StringValue(\"a\")) }, Value { kind: Some(NullValue(NullValue)) }, Value { kind: Some(BoolValue(true)) }] })",
    ] {
        assert!(metadata.contains(part), "{part} is not in {metadata}");
    }
}

#[tokio::test]
async fn an_invalid_request_is_an_error_with_the_reason() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    let user = || vec![descriptor(&[("user", "alice")])];
    let override_without_unit = RateLimitDescriptor {
        limit: Some(RateLimitOverride::default()),
        ..descriptor(&[("user", "alice")])
    };
    let long = "x".repeat(70_000);
    for (asked, code, message) in [
        (
            RateLimitRequest {
                domain: String::new(),
                ..request(user())
            },
            Status::Unknown,
            "rate limit domain must not be empty",
        ),
        (
            request(Vec::new()),
            Status::Unknown,
            "rate limit descriptor list must not be empty",
        ),
        (
            request(vec![override_without_unit]),
            Status::InvalidArgument,
            "descriptors[0].limit.unit",
        ),
        (
            request(vec![descriptor(&[("user", "alice")]); 5_000]),
            Status::InvalidArgument,
            "descriptors: ",
        ),
        (
            request(vec![descriptor(&[("user", "alice"); 100])]),
            Status::InvalidArgument,
            "descriptors[0].entries: ",
        ),
        (
            request(vec![descriptor(&[("user", &long)])]),
            Status::InvalidArgument,
            "descriptors[0].entries: ",
        ),
        (
            request(vec![descriptor(&[("user", &long.repeat(40))])]),
            Status::ResourceExhausted,
            "the maximum of 262144 bytes",
        ),
    ] {
        let error = client
            .call::<_, RateLimitResponse>(V3, asked)
            .await
            .unwrap_err();
        assert_eq!(error.code(), code, "{error:?}");
        assert!(error.message().contains(message), "{error:?}");
    }
    let answer: RateLimitResponse = client.call(V3, request(user())).await.unwrap();
    assert_eq!(answer.statuses[0].limit_remaining, 2, "nothing was charged");
    let exposition = listener.limiter.exposition();
    assert!(
        exposition.contains("tidegate_bad_requests_total{listener=\"grpc\"} 7\n"),
        "{exposition}"
    );
    assert!(
        exposition.contains("tidegate_decisions_total{listener=\"grpc\",outcome=\"allowed\"} 1\n"),
        "{exposition}"
    );
}

/// A message whose fields have different types than in `RateLimitRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct Nonsense {
    #[prost(bytes = "vec", tag = "1")]
    domain: Vec<u8>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    descriptors: Vec<Vec<u8>>,
}

#[tokio::test]
async fn a_malformed_message_is_rejected() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    for asked in [
        Nonsense {
            domain: vec![0xff],
            descriptors: Vec::new(),
        },
        Nonsense {
            domain: b"shop".to_vec(),
            descriptors: vec![vec![0x0a, 0x7f]],
        },
        Nonsense {
            domain: b"shop".to_vec(),
            descriptors: vec![vec![0xff; 12]],
        },
    ] {
        let error = client
            .call::<_, RateLimitResponse>(V3, asked)
            .await
            .unwrap_err();
        assert_eq!(error.code(), Status::InvalidArgument, "{error:?}");
        assert!(error.message().contains("malformed"), "{error:?}");
    }
}

#[tokio::test]
async fn a_short_deadline_is_met() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    let mut hurried = Request::new(request(vec![descriptor(&[("user", "alice")])]));
    hurried.set_timeout(Duration::from_secs(5));
    let answer: RateLimitResponse = client.request(V3, hurried).await.unwrap();
    assert_eq!(answer.statuses[0].limit_remaining, 2);
}

#[tokio::test]
async fn without_a_configuration_every_reply_is_an_error() {
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    let asked = request(vec![descriptor(&[("user", "alice")])]);
    let error = client
        .call::<_, RateLimitResponse>(V3, asked)
        .await
        .unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Status::Unknown, "no rate limit configuration loaded")
    );
}

#[tokio::test]
async fn health_follows_the_configuration() {
    use crate::proto::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse};
    let mut settings = RlsSettings::default();
    settings.healthy_with_a_domain = true;
    let listener = TestListener::without_a_domain(settings);
    let mut client = listener.connect().await;
    for (service, status) in [("", 1), ("ratelimit", 2)] {
        let asked = HealthCheckRequest {
            service: service.to_owned(),
        };
        let health: HealthCheckResponse = client
            .call("/grpc.health.v1.Health/Check", asked)
            .await
            .unwrap();
        assert_eq!(health.status, status, "{service}");
    }
}
