//! Tests of Limitador limits files, through Limitador's HTTP API and through the rate limit
//! service.

use serde_json::{Value, json};
use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_core::Span;
use tidegate_envoy::{
    Code, CommitRequest, Descriptor, File, RateLimitRequest, ReserveRequest, read_limitador,
};
use tidegate_limiter::metrics::ListenerKind;

use crate::{
    client::Answer,
    http::OverHttp,
    subject::{Started, StoreKind},
};

const LIMITS: &str = "
- namespace: api
  max_value: 3
  seconds: 60
  name: posts
  conditions: [\"descriptors[0]['req.method'] == 'POST'\"]
  variables: [\"descriptors[0]['user_id']\"]
- namespace: api
  max_value: 10
  seconds: 3600
  conditions:
  - descriptors[0]['req.method'] != 'OPTIONS'
- {namespace: llm, max_value: 100, seconds: 86400, conditions: ['descriptors[0][\"limit.a\"] == \"1\"'], variables: ['descriptors[0][\"user\"]']}
- {namespace: two, max_value: 1, seconds: 60, conditions: ['descriptors[1].plan == \"free\"']}
- {namespace: none, max_value: 0, seconds: 60}
";

const START: u64 = 1_700_000_047;

fn started() -> Started {
    let mut settings = RlsSettings::default();
    settings.limitador_api = true;
    let started = Started::with(StoreKind::Memory, settings, DomainFiles::One, START);
    load(&started, LIMITS);
    started
}

fn load(started: &Started, limits: &str) {
    let file = File {
        name: "limits.yaml".to_owned(),
        text: limits.to_owned(),
    };
    started.service.load(read_limitador(vec![file]).unwrap());
}

/// A client of Limitador's HTTP API.
struct Api(OverHttp);

impl Api {
    fn post(&self, path: &str, body: &Value) -> Answer {
        self.0.ask("POST", path, &body.to_string())
    }

    fn get(&self, path: &str) -> Value {
        let answer = self.0.ask("GET", path, "");
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// Sends a request for `user`. Returns the HTTP status.
    fn of(&self, path: &str, user: &str, delta: u64) -> u16 {
        self.post(path, &asked(user, delta)).status
    }
}

fn asked(user: &str, delta: u64) -> Value {
    let values = json!({"req.method": "POST", "user_id": user});
    json!({"namespace": "api", "values": values, "delta": delta})
}

#[test]
fn a_request_is_checked_and_reported() {
    let started = started();
    let api = Api(OverHttp::new(&started));
    for _ in 0..5 {
        let checked = api.post("/check", &asked("a", 3));
        assert_eq!((checked.status, checked.body.as_str()), (200, "null"));
    }
    let checked = api.post("/check", &asked("a", 4));
    assert_eq!(
        (checked.status, checked.body.as_str()),
        (429, "Too many requests")
    );
    for expected in [200, 200, 200, 429, 429] {
        let answer = api.post("/check_and_report", &asked("a", 1));
        assert_eq!((answer.status, answer.body.as_str()), (expected, "null"));
        assert!(answer.header("x-ratelimit-limit").is_none());
    }
    // The denied requests were not counted, so 3 of 10 hits are used.
    assert_eq!(api.of("/check_and_report", "b", 3), 200);
    assert_eq!(api.of("/check", "c", 4), 429, "over the limit of the user");
    assert_eq!(api.of("/check_and_report", "c", 3), 200);
    assert_eq!(
        api.of("/check_and_report", "d", 2),
        429,
        "9 of 10 are spent"
    );
    assert_eq!(api.of("/check", "d", 1), 200);
    // A report is counted even if it exceeds the limits.
    let reported = api.post("/report", &asked("d", 20));
    assert_eq!((reported.status, reported.body.as_str()), (200, "null"));
    assert_eq!(api.of("/check", "e", 1), 429);
    assert_eq!(api.of("/check", "e", 0), 429, "29 of 10 are spent");
    // The windows began at the first request.
    started.set(START + 3_599);
    assert_eq!(api.of("/check", "e", 1), 429);
    started.set(START + 3_600);
    assert_eq!(api.of("/check", "a", 1), 200);
}

#[test]
fn headers_describe_the_limits() {
    let started = started();
    let api = Api(OverHttp::new(&started));
    let mut body = asked("a", 2);
    for (name, delta, remaining) in [
        (json!("none"), 0, None),
        (Value::Null, 0, None),
        (json!("DraftVersion03"), 2, Some("1")),
        (json!("DRAFT_VERSION_03"), 1, Some("0")),
        (json!("another"), 0, None),
    ] {
        body["response_headers"] = name;
        body["delta"] = json!(delta);
        let answer = api.post("/check_and_report", &body);
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-ratelimit-remaining"), remaining);
    }
    body["response_headers"] = json!("DraftVersion03");
    body["delta"] = json!(1);
    started.set(START + 20);
    let denied = api.post("/check_and_report", &body);
    assert_eq!(denied.status, 429);
    for (name, value) in [
        ("x-ratelimit-limit", "3, 3;w=60;name=\"posts\", 10;w=3600"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "40"),
    ] {
        assert_eq!(denied.header(name), Some(value), "{name}");
    }
}

#[test]
fn limits_and_counters_are_listed() {
    let started = started();
    let api = Api(OverHttp::new(&started));
    assert_eq!(api.get("/counters/api"), json!([]));
    assert_eq!(api.of("/report", "böb", 2), 200);
    assert_eq!(api.of("/check", "never", 1), 200);
    started.set(START + 10);
    let posts = json!({
        "id": null,
        "namespace": "api",
        "max_value": 3,
        "seconds": 60,
        "name": "posts",
        "conditions": ["descriptors[0]['req.method'] == 'POST'"],
        "variables": ["descriptors[0]['user_id']"],
    });
    let all = json!({
        "id": null,
        "namespace": "api",
        "max_value": 10,
        "seconds": 3600,
        "name": null,
        "conditions": ["descriptors[0]['req.method'] != 'OPTIONS'"],
        "variables": [],
    });
    assert_eq!(api.get("/limits/api"), json!([posts, all]));
    assert_eq!(api.get("/limits/unknown"), json!([]));
    let counters = json!([
        {
            "limit": posts,
            "set_variables": {"descriptors[0]['user_id']": "böb"},
            "remaining": 1,
            "expires_in_seconds": 50,
        },
        {"limit": all, "set_variables": {}, "remaining": 8, "expires_in_seconds": 3590},
    ]);
    assert_eq!(api.get("/counters/api"), counters);
    assert_eq!(api.get("/counters/a%70i"), counters);
    assert_eq!(api.get("/counters/llm"), json!([]));
    assert!(api.get("/status")["started_at"].is_string());
}

#[test]
fn wrong_requests_are_rejected_with_the_reason() {
    let started = started();
    let api = Api(OverHttp::new(&started));
    for (body, field) in [
        (json!({"namespace": "api", "values": {}}), "delta"),
        (json!({"namespace": "api", "delta": 1}), "values"),
        (json!({"values": {}, "delta": 1}), "namespace"),
        (
            json!({"namespace": 5, "values": {}, "delta": 1}),
            "namespace",
        ),
        (
            json!({"namespace": "api", "values": {"a": 5}, "delta": 1}),
            "values",
        ),
        (
            json!({"namespace": "api", "values": {}, "delta": -1}),
            "delta",
        ),
        (
            json!({"namespace": "api", "values": {}, "delta": 1.5}),
            "delta",
        ),
        (
            json!({"namespace": "api", "values": {}, "delta": 1, "response_headers": 3}),
            "response_headers",
        ),
    ] {
        for path in ["/check", "/report", "/check_and_report"] {
            let answer = api.post(path, &body);
            assert_eq!(answer.status, 400, "{answer:?}");
            assert_eq!(answer.json()["field"], field, "{answer:?}");
        }
    }
    let oversized = json!({"namespace": "x".repeat(2_000), "values": {}, "delta": 1});
    assert_eq!(api.post("/check", &oversized).status, 400);
    for (method, path, status) in [
        ("GET", "/check", 405),
        ("POST", "/status", 405),
        ("DELETE", "/limits/api", 405),
        ("GET", "/limits/", 404),
        ("GET", "/limits/a/b", 404),
        ("GET", "/metrics", 404),
    ] {
        assert_eq!(
            api.0.ask(method, path, "").status,
            status,
            "{method} {path}"
        );
    }
    let absent = api.0.ask("GET", "/metrics", "");
    for path in ["/check_and_report", "/limits/{namespace}", "/v1/check"] {
        assert!(absent.body.contains(path), "{absent:?}");
    }
    let largest = json!({"namespace": "api", "values": {"req.method": "GET"}, "delta": u64::MAX});
    assert_eq!(api.post("/check_and_report", &largest).status, 429);
    assert_eq!(api.post("/report", &largest).status, 200);
    let unknown = json!({"namespace": "unknown", "values": {}, "delta": 9, "more": true});
    assert_eq!(api.post("/check_and_report", &unknown).status, 200);
    let none = json!({"namespace": "none", "values": {}, "delta": 1});
    assert_eq!(api.post("/check_and_report", &none).status, 429);
}

/// Without a Limitador limits file, the paths of Limitador's API do not exist.
#[test]
fn the_api_belongs_to_the_limits_file() {
    let started = Started::with(
        StoreKind::Memory,
        RlsSettings::default(),
        DomainFiles::One,
        START,
    );
    let api = Api(OverHttp::new(&started));
    for path in ["/check", "/status", "/limits/api"] {
        let absent = api.0.ask("GET", path, "");
        assert_eq!(absent.status, 404, "{path}");
        assert!(!absent.body.contains("/check_and_report"), "{absent:?}");
    }
}

fn request(domain: &str, descriptors: &[&[(&str, &str)]]) -> RateLimitRequest {
    let descriptor = |entries: &&[(&str, &str)]| Descriptor {
        entries: entries
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        ..Descriptor::default()
    };
    RateLimitRequest {
        domain: domain.to_owned(),
        descriptors: descriptors.iter().map(descriptor).collect(),
        hits_addend: 0,
    }
}

#[tokio::test]
async fn envoy_is_limited_by_the_limits_file() {
    let started = started();
    let posts = request("api", &[&[("req.method", "POST"), ("user_id", "a")]]);
    let mut codes = Vec::new();
    for _ in 0..5 {
        let answer = started.service.should_rate_limit(&posts).await.unwrap();
        assert!(answer.statuses.is_empty());
        codes.push(answer.overall_code);
        let checked = started
            .service
            .check_rate_limit(ListenerKind::Grpc, &posts, None);
        assert!(checked.await.unwrap().statuses.is_empty());
    }
    assert_eq!(codes[..3], [Code::Ok; 3]);
    assert_eq!(codes[3..], [Code::OverLimit; 2]);
    // The per-user limit does not apply, because its variable has no value. The limit for all users
    // has 7 of 10 hits left.
    let mut anonymous = request("api", &[&[("req.method", "POST")]]);
    anonymous.hits_addend = 7;
    let answer = started.service.should_rate_limit(&anonymous).await.unwrap();
    assert_eq!(answer.overall_code, Code::Ok);
    let options = request("api", &[&[("req.method", "OPTIONS")]]);
    let answer = started.service.should_rate_limit(&options).await.unwrap();
    assert_eq!(answer.overall_code, Code::Ok, "no limit applies");
    // If an entry is missing, neither `==` nor `!=` holds.
    let nothing = request("api", &[&[("user_id", "a")]]);
    let answer = started.service.should_rate_limit(&nothing).await.unwrap();
    assert_eq!(answer.overall_code, Code::Ok);
    // The limit's condition is on the second descriptor.
    let free = request("two", &[&[("a", "b")], &[("plan", "free")]]);
    let paid = request("two", &[&[("plan", "free")], &[("plan", "paid")]]);
    for (request, expected) in [
        (&free, Code::Ok),
        (&paid, Code::Ok),
        (&free, Code::OverLimit),
    ] {
        let answer = started.service.should_rate_limit(request).await.unwrap();
        assert_eq!(answer.overall_code, expected);
    }
}

/// As in Limitador, a reload that changes the maximum or the name of a limit keeps the limit's
/// counts.
#[test]
fn a_reload_keeps_the_counts() {
    let started = started();
    let api = Api(OverHttp::new(&started));
    assert_eq!(api.of("/report", "a", 3), 200);
    assert_eq!(api.of("/check", "a", 1), 429);
    load(
        &started,
        &LIMITS
            .replace("max_value: 3", "max_value: 5")
            .replace("posts", "post"),
    );
    assert_eq!(api.of("/check", "a", 2), 200);
    assert_eq!(api.of("/check", "a", 3), 429);
}

/// As in Limitador, the order and repetition of conditions and variables have no effect.
#[test]
fn other_orders_and_repetitions_keep_the_counts() {
    let limit = |conditions: [&str; 3], variables: [&str; 3]| {
        let limit = json!({
            "namespace": "api", "max_value": 3, "seconds": 60,
            "conditions": conditions, "variables": variables,
        });
        json!([limit]).to_string()
    };
    let (post, any) = (
        "descriptors[0]['req.method'] == 'POST'",
        "descriptors[0].user_id != 'z'",
    );
    let (user, method) = ("descriptors[0].user_id", "descriptors[0]['req.method']");
    let started = started();
    load(&started, &limit([post, any, any], [user, method, user]));
    let api = Api(OverHttp::new(&started));
    assert_eq!(api.of("/report", "a", 2), 200);
    load(&started, &limit([any, post, post], [method, user, method]));
    assert_eq!(api.of("/check", "a", 1), 200);
    assert_eq!(api.of("/check", "a", 2), 429);
    let counters = api.get("/counters/api");
    assert_eq!(counters.as_array().unwrap().len(), 1, "{counters}");
}

#[tokio::test]
async fn kuadrant_reserves_by_the_limits_file() {
    let started = started();
    let asked = request("llm", &[&[("limit.a", "1"), ("user", "u")]]);
    let reserve = || ReserveRequest {
        domain: asked.domain.clone(),
        descriptors: asked.descriptors.clone(),
        amount: 60,
        ttl: Some(Span::from_secs(30)),
    };
    let service = &started.service;
    let reserved = service.reserve(ListenerKind::Grpc, reserve(), None).await;
    let reserved = reserved.unwrap();
    assert_eq!(reserved.code, Code::Ok);
    let second = service.reserve(ListenerKind::Grpc, reserve(), None).await;
    assert_eq!(
        second.unwrap().code,
        Code::Ok,
        "each holds half of the limit"
    );
    let third = service.reserve(ListenerKind::Grpc, reserve(), None).await;
    assert_eq!(third.unwrap().code, Code::OverLimit);
    let commit = |actual_amount| CommitRequest {
        domain: asked.domain.clone(),
        descriptors: asked.descriptors.clone(),
        reservation_id: reserved.reservation_id.clone(),
        actual_amount,
    };
    assert!(service.commit(commit(80), None).await.unwrap());
    assert!(!service.commit(commit(80), None).await.unwrap());
    let api = Api(OverHttp::new(&started));
    assert_eq!(
        api.get("/counters/llm")[0]["remaining"],
        0,
        "80 and 50 of 100"
    );
    started.set(START + 30);
    started.limiter.expire_reservations().await;
    assert_eq!(api.get("/counters/llm")[0]["remaining"], 20);
}
