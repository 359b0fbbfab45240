//! Tests `/json` and `/healthcheck` over real sockets.

use std::{cell::RefCell, net::TcpListener, sync::Arc};

use serde_json::{Map, Value, json};
use tidegate_config::{
    Headers,
    envoy::{DomainFiles, StoreFailure},
};
use tidegate_core::Span;
use tidegate_envoy::{
    Code, CurrentLimit, Descriptor, DescriptorStatus, Metadata, RateLimitAnswer, RateLimitRequest,
    ResponseHeader, Unit, Variables, settings_from_variables,
};
use tidegate_net::{Bounds, Server};
use tidegate_server::listener::http::{self, HttpContext};

use crate::{
    cases::{add, assert_all_ran, folder, hold},
    client::{Answer, Client},
    format::{ConfigFile, HttpCase},
    runner::{self, Report},
    store::gone,
    subject::{Started, StoreKind, Subject},
};

/// The configuration of the HTTP cases.
const SHOP: &str = "
domain: shop
descriptors:
  - key: api_key
    rate_limit: {unit: minute, requests_per_unit: 3}";

/// A subject that calls the service over HTTP.
pub(crate) struct OverHttp {
    client: RefCell<Client>,
    _server: Server,
}

impl OverHttp {
    pub(crate) fn new(started: &Started) -> Self {
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let context = HttpContext {
            limiter: Arc::clone(&started.limiter),
            headers: Headers::default(),
            identity: Arc::default(),
            rate_limits: Some(Arc::clone(&started.service)),
            token: None,
            hosts: Vec::new(),
            tls: None,
        };
        let listener = http::listen(&server, socket, Bounds::default(), context).unwrap();
        Self {
            client: RefCell::new(Client::connect(listener.local_addr())),
            _server: server,
        }
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        self.client
            .borrow_mut()
            .ask(method, path, &[], body.as_bytes())
    }
}

impl Subject for OverHttp {
    async fn ask(&self, request: &RateLimitRequest) -> Result<RateLimitAnswer, String> {
        let answer = Self::ask(self, "POST", "/json", &written(request).to_string());
        match answer.status {
            200 | 429 => Ok(read(&answer)),
            400 => {
                assert_eq!(answer.body, "Bad Request\n");
                Err(answer.header("x-tidegate-problem").unwrap().to_owned())
            }
            status => panic!("{status}: {answer:?}"),
        }
    }
}

fn written(request: &RateLimitRequest) -> Value {
    let descriptors: Vec<Value> = request.descriptors.iter().map(described).collect();
    json!({"domain": request.domain, "descriptors": descriptors, "hitsAddend": request.hits_addend})
}

fn described(descriptor: &Descriptor) -> Value {
    let entries = descriptor
        .entries
        .iter()
        .map(|(key, value)| json!({"key": key, "value": value}));
    let mut members = Map::new();
    members.insert("entries".into(), entries.collect());
    members.insert("isNegativeHits".into(), json!(descriptor.is_negative_hits));
    // Protobuf JSON writes 64-bit integers as strings.
    members.extend(
        descriptor
            .hits_addend
            .map(|hits| ("hitsAddend".into(), json!(hits.to_string()))),
    );
    members.extend(descriptor.limit.map(|limit| {
        let limit =
            json!({"requestsPerUnit": limit.requests_per_unit, "unit": limit.unit.as_str()});
        ("limit".into(), limit)
    }));
    Value::Object(members)
}

fn read(answer: &Answer) -> RateLimitAnswer {
    let body = answer.json();
    let code = code(&body["overallCode"]);
    assert_eq!(answer.status, if code == Code::Ok { 200 } else { 429 });
    assert_eq!(answer.header("content-type"), Some("application/json"));
    RateLimitAnswer {
        overall_code: code,
        statuses: body["statuses"]
            .as_array()
            .unwrap()
            .iter()
            .map(status)
            .collect(),
        response_headers: list(&body["responseHeadersToAdd"])
            .iter()
            .map(header)
            .collect(),
        dynamic_metadata: body.get("dynamicMetadata").map(metadata),
    }
}

fn status(value: &Value) -> DescriptorStatus {
    DescriptorStatus {
        code: code(&value["code"]),
        current_limit: value.get("currentLimit").map(|limit| CurrentLimit {
            requests_per_unit: number(&limit["requestsPerUnit"]),
            unit: limit["unit"]
                .as_str()
                .map_or(Unit::Unknown, |unit| Unit::parse(unit).unwrap()),
            name: limit["name"].as_str().map(Arc::from),
        }),
        limit_remaining: number(&value["limitRemaining"]),
        duration_until_reset: value["durationUntilReset"]
            .as_str()
            .map(|text| Span::from_secs(text.strip_suffix('s').unwrap().parse().unwrap())),
    }
}

fn code(value: &Value) -> Code {
    match value.as_str() {
        Some("OK") => Code::Ok,
        Some("OVER_LIMIT") => Code::OverLimit,
        other => panic!("not a code: {other:?}"),
    }
}

fn header(value: &Value) -> ResponseHeader {
    ResponseHeader {
        name: value["key"].as_str().unwrap().into(),
        value: value["value"].as_str().unwrap().to_owned(),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns a number. A missing field counts as 0.
fn number(value: &Value) -> u32 {
    value
        .as_u64()
        .map_or(0, |number| u32::try_from(number).unwrap())
}

fn metadata(value: &Value) -> Metadata {
    match value {
        Value::Null => Metadata::Null,
        Value::Bool(truth) => Metadata::Truth(*truth),
        Value::Number(number) => Metadata::Number(number.as_f64().unwrap()),
        Value::String(text) => Metadata::text(text),
        Value::Array(items) => Metadata::List(items.iter().map(metadata).collect()),
        Value::Object(members) => Metadata::map(
            members
                .iter()
                .map(|(name, value)| (Arc::from(name.as_str()), metadata(value))),
        ),
    }
}

#[tokio::test]
async fn envoy_cases_hold_over_http() {
    hold(OverHttp::new).await;
}

#[tokio::test]
async fn envoy_http_cases_hold() {
    let mut report = Report::default();
    for (_, cases) in runner::files(&folder()) {
        for case in &cases.http_json_cases {
            let failures = run(case)
                .await
                .into_iter()
                .map(|failure| format!("{}: {failure}", case.id))
                .collect();
            add(&mut report, Report { ran: 1, failures });
        }
    }
    assert_all_ran(&report);
}

/// Sends the case's request and returns the differences from the expectation. Some cases, which are
/// recognised by their ID, need special preparation.
async fn run(case: &HttpCase) -> Vec<String> {
    const OK: &str =
        r#"{"domain":"shop","descriptors":[{"entries":[{"key":"api_key","value":"a"}]}]}"#;
    const SNAKE: &str = r#"{"domain":"shop","hits_addend":2,"descriptors":[{"entries":[{"key":"api_key","value":"a"}],
        "limit":{"requests_per_unit":5,"unit":"HOUR"},"is_negative_hits":false}]}"#;
    let mut settings = Variables::new();
    let mut config = vec![ConfigFile {
        name: "shop.yaml".into(),
        yaml: SHOP.into(),
    }];
    let (mut before, mut body) = (0, case.body.as_deref());
    match case.id.as_str() {
        "json-over" => (before, body) = (3, Some(OK)),
        "json-snake-case" => body = Some(SNAKE),
        "healthcheck-bad" => {
            settings.insert(
                "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED".into(),
                "true".into(),
            );
            config.clear();
        }
        "json-backend-error" => body = Some(OK),
        _ => {}
    }
    let path = case.path.as_deref().unwrap_or("/json");
    if body.is_none() && path == "/json" {
        return vec!["has no body to send".into()];
    }
    let methods = match case.method.as_deref() {
        Some("any") => vec!["GET", "POST", "PUT"],
        Some(method) => vec![method],
        None if path == "/json" => vec!["POST"],
        None => vec!["GET"],
    };
    let mut failures = Vec::new();
    for method in methods {
        let started = match case.id.as_str() {
            "json-backend-error" => with_unavailable_store(&settings).await,
            _ => Started::new(&settings, 1_700_000_040).unwrap(),
        };
        started.load(&config).unwrap();
        let listener = OverHttp::new(&started);
        for _ in 0..before {
            listener.ask(method, path, body.unwrap_or_default());
        }
        failures.extend(differences(
            case,
            &listener.ask(method, path, body.unwrap_or_default()),
        ));
    }
    failures
}

/// Starts a service with `store_failure: error` and an unreachable Redis.
async fn with_unavailable_store(variables: &Variables) -> Started {
    let mut settings = settings_from_variables(variables).unwrap();
    settings.store_failure = StoreFailure::Error;
    let redis = gone().await;
    let store_kind = StoreKind::Redis(&redis, "gone");
    Started::with(store_kind, settings, DomainFiles::One, 1_700_000_040)
}

fn differences(case: &HttpCase, answer: &Answer) -> Vec<String> {
    let mut found = Vec::new();
    if answer.status != case.expect_status {
        found.push(format!(
            "expect_status: expected {}, got {answer:?}",
            case.expect_status
        ));
    }
    let is_same = match &case.expect_body {
        None => true,
        Some(Value::String(text)) => *text == answer.body,
        Some(expected) => is_like(expected, &answer.json()),
    };
    if !is_same {
        found.push(format!(
            "expect_body: expected {:?}, got {}",
            case.expect_body, answer.body
        ));
    }
    if case.content_type.is_some() && case.content_type.as_deref() != answer.header("content-type")
    {
        found.push(format!(
            "content_type: expected {:?}, got {answer:?}",
            case.content_type
        ));
    }
    found
}

/// Returns whether `got` equals `expected`. In `expected`, `<n>s` matches any number of seconds.
fn is_like(expected: &Value, got: &Value) -> bool {
    match (expected, got) {
        (Value::String(expected), Value::String(got)) if expected == "<n>s" => got
            .strip_suffix('s')
            .is_some_and(|seconds| seconds.parse::<u64>().is_ok()),
        (Value::Object(expected), Value::Object(got)) => {
            expected.len() == got.len()
                && expected
                    .iter()
                    .all(|(name, value)| got.get(name).is_some_and(|got| is_like(value, got)))
        }
        (Value::Array(expected), Value::Array(got)) => {
            expected.len() == got.len()
                && expected
                    .iter()
                    .zip(got)
                    .all(|(expected, got)| is_like(expected, got))
        }
        (expected, got) => expected == got,
    }
}

#[test]
fn envoy_http_rejects_invalid_requests() {
    let started = Started::new(&Variables::new(), 0).unwrap();
    started
        .load(&[ConfigFile {
            name: "shop.yaml".into(),
            yaml: SHOP.into(),
        }])
        .unwrap();
    let listener = OverHttp::new(&started);
    let huge = format!(
        r#"{{"domain":"shop","descriptors":[{{"entries":[{{"key":"{}"}}]}}]}}"#,
        "k".repeat(70_000)
    );
    let many = format!(
        r#"{{"domain":"shop","descriptors":[{}]}}"#,
        vec!["{}"; 513].join(",")
    );
    for (body, problem) in [
        ("", "body: is empty; expected an object"),
        ("[]", "body: expected an object, got a list"),
        (r#"{"domain":5}"#, "domain: expected a string, got 5"),
        (
            r#"{"domain":"shop","descriptors":{}}"#,
            "descriptors: expected a list, got an object",
        ),
        (
            r#"{"descriptors":[{"entries":[{"key":"a","v":""}]}]}"#,
            "descriptors[0].entries[0].v: unknown field",
        ),
        (
            r#"{"hitsAddend":4294967296}"#,
            "hitsAddend: expected a non-negative integer that fits the type of the field, got 4294967296",
        ),
        (
            r#"{"descriptors":[{"limit":{"unit":"MOON"}}]}"#,
            "descriptors[0].limit.unit: expected a unit such as MINUTE, got \"MOON\"",
        ),
        (
            r#"{"domain":"shop","descriptors":[{"limit":{"unit":0}}]}"#,
            "descriptors[0].limit.unit: is not a unit of time; use one of SECOND, MINUTE, HOUR, DAY, WEEK, MONTH, YEAR",
        ),
        (
            r#"{"domain":"shop","domain":"shop"}"#,
            "domain: is given twice; give it once",
        ),
        (
            many.as_str(),
            "descriptors: 513 items exceed the maximum of 512",
        ),
        (
            huge.as_str(),
            "descriptors[0].entries: 70000 bytes of keys and values exceed the maximum of 65536",
        ),
    ] {
        let answer = listener.ask("POST", "/json", body);
        let got = (
            answer.status,
            answer.body.as_str(),
            answer.header("x-tidegate-problem"),
        );
        assert_eq!(got, (400, "Bad Request\n", Some(problem)), "{body:.100}");
    }
    assert_eq!(
        listener.ask("POST", "/json", &"x".repeat(300_000)).status,
        413
    );
}

/// The client's request is correct, so the body tells the operator what is wrong.
#[tokio::test]
async fn problems_of_the_server_are_in_the_body() {
    let without_a_configuration = Started::new(&Variables::new(), 1_700_000_040).unwrap();
    let without_a_store = with_unavailable_store(&Variables::new()).await;
    let file = ConfigFile {
        name: "shop.yaml".into(),
        yaml: SHOP.into(),
    };
    without_a_store.load(&[file]).unwrap();
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"api_key","value":"a"}]}]}"#;
    for (started, problem) in [
        (
            &without_a_configuration,
            "no rate limit configuration loaded; correct the files of `envoy.config`, or start its control plane; the log names the problem",
        ),
        (&without_a_store, "the store is unavailable"),
    ] {
        let answer = OverHttp::new(started).ask("POST", "/json", body);
        assert_eq!(answer.status, 400);
        assert_eq!(
            answer.header("content-type"),
            Some("text/plain; charset=utf-8")
        );
        assert_eq!(answer.header("x-tidegate-problem"), Some(problem));
        assert_eq!(answer.body, format!("Bad Request\n{problem}\n"));
    }
}
