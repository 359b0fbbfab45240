//! Tests of requests waiting for concurrency slots (`wait_ms`). The clock is manual, so only
//! releases, disconnects and socket timeouts end a wait.

use std::{thread, time::Duration};

use serde_json::{Value, json};
use tidegate::RateLimiter as _;

use crate::{client::Client, listener::TestListener};

const RULES: &str = r"
rules:
  - name: at-work
    key: customer
    cost: 1
    limits: {algorithm: concurrency, limit: 1, lease: 60s, wait: 30s, queue: 3}
";

/// The maximum number of attempts, one per millisecond. All attempts together take longer than any
/// test step.
const ATTEMPTS: usize = 30_000;

const ENTRIES: &str = r#""entries": {"customer": "acme"}"#;

/// Waits until `count` requests are waiting.
fn until_waiting(listener: &TestListener, count: usize) {
    for _ in 0..ATTEMPTS {
        if listener.limiter.wait_queues().count() == count {
            return;
        }
        #[expect(clippy::disallowed_methods, reason = "another thread is waited for")]
        thread::sleep(Duration::from_millis(1));
    }
    panic!("{count} requests should wait");
}

fn reserve(listener: &TestListener) -> String {
    let (status, verdict) = listener.verdict("/v1/reserve", &format!("{{{ENTRIES}}}"));
    assert_eq!(status, 200, "{verdict}");
    verdict["reservation"].as_str().unwrap().to_owned()
}

fn settle(listener: &TestListener, token: &str) {
    let body = json!({"reservation": token, "cost": 1}).to_string();
    assert_eq!(listener.post("/v1/settle", &body).status, 200);
}

/// Sends a request, and does not wait for its response.
fn send(listener: &TestListener, path: &str, body: &str) -> Client {
    let mut client = listener.connect();
    let length = body.len();
    client.send(format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
    ));
    client
}

fn waiting_check(wait_ms: u64) -> String {
    format!("{{{ENTRIES}, \"wait_ms\": {wait_ms}}}")
}

#[test]
fn waiting_requests_get_their_slots_in_order() {
    let listener = TestListener::open(RULES);
    let mut token = reserve(&listener);
    let mut waiting = Vec::new();
    for count in 1..=3 {
        waiting.push(send(&listener, "/v1/reserve", &waiting_check(30_000)));
        until_waiting(&listener, count);
    }
    // The queue is full, so the next request is denied immediately.
    let (status, verdict) = listener.verdict("/v1/check", &waiting_check(30_000));
    assert_eq!((status, &verdict["allowed"]), (429, &json!(false)));
    for (mut client, left) in waiting.into_iter().zip([2, 1, 0]) {
        settle(&listener, &token);
        let answer = client.read_answer(false);
        assert_eq!(answer.status, 200, "{answer:?}");
        token = answer.json()["reservation"].as_str().unwrap().to_owned();
        until_waiting(&listener, left);
    }
    // A check that had to wait also keeps its slot until the slot's lease expires.
    let mut check = send(&listener, "/v1/check", &waiting_check(30_000));
    until_waiting(&listener, 1);
    settle(&listener, &token);
    assert_eq!(check.read_answer(false).status, 200);
    let metrics = listener.limiter.exposition();
    for sample in [
        "tidegate_waiting_requests 0\n",
        "tidegate_wait_duration_seconds_count{result=\"admitted\"} 4\n",
        "tidegate_wait_duration_seconds_count{result=\"denied\"} 0\n",
        // Each request is counted once, regardless of how often it was evaluated.
        "tidegate_decisions_total{listener=\"http\",outcome=\"allowed\"} 5\n",
        "tidegate_decisions_total{listener=\"http\",outcome=\"limit\"} 1\n",
        "tidegate_rule_decisions_total{rule=\"at-work\",outcome=\"allowed\"} 5\n",
    ] {
        assert!(metrics.contains(sample), "{sample}{metrics}");
    }
}

#[test]
fn a_request_without_a_wait_is_denied_at_once() {
    let listener = TestListener::open(RULES);
    let _token = reserve(&listener);
    for body in [format!("{{{ENTRIES}}}"), waiting_check(0)] {
        assert_eq!(listener.verdict("/v1/check", &body).0, 429);
    }
    let metrics = listener.limiter.exposition();
    assert!(metrics.contains("tidegate_wait_duration_seconds_count{result=\"denied\"} 0\n"));
}

#[test]
fn a_request_that_waits_in_vain_gets_an_ordinary_denial() {
    let listener = TestListener::open(RULES);
    let _token = reserve(&listener);
    let (status, verdict) = listener.verdict("/v1/check", &waiting_check(20));
    assert_eq!(status, 429);
    let (_, at_once) = listener.verdict("/v1/check", &waiting_check(0));
    assert_eq!(verdict, at_once, "the shape of a denial is the same");
    assert_eq!(verdict["retry_after_estimated"], true);
    let metrics = listener.limiter.exposition();
    assert!(metrics.contains("tidegate_wait_duration_seconds_count{result=\"denied\"} 1\n"));
    assert!(metrics.contains("tidegate_decisions_total{listener=\"http\",outcome=\"limit\"} 2\n"));
}

#[test]
fn a_client_that_disconnects_gives_its_turn_on() {
    let listener = TestListener::open(RULES);
    let token = reserve(&listener);
    let gone = send(&listener, "/v1/check", &waiting_check(30_000));
    until_waiting(&listener, 1);
    let pipelining = {
        let mut client = send(&listener, "/v1/check", &waiting_check(30_000));
        client.send("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n");
        client
    };
    until_waiting(&listener, 2);
    let mut patient = send(&listener, "/v1/reserve", &waiting_check(30_000));
    until_waiting(&listener, 3);
    drop(gone);
    until_waiting(&listener, 2);
    // Because of unread bytes, the end of the stream may be detected up to a second late.
    drop(pipelining);
    until_waiting(&listener, 1);
    settle(&listener, &token);
    let verdict: Value = patient.read_answer(false).json();
    assert_eq!(verdict["allowed"], true);
    let metrics = listener.limiter.exposition();
    assert!(metrics.contains("tidegate_wait_duration_seconds_count{result=\"cancelled\"} 2\n"));
}

#[test]
fn an_expired_reservation_wakes_the_next_request() {
    let listener = TestListener::open(RULES);
    let body = format!("{{{ENTRIES}, \"ttl\": \"5s\"}}");
    assert_eq!(listener.verdict("/v1/reserve", &body).0, 200);
    let mut waiting = send(&listener, "/v1/check", &waiting_check(30_000));
    until_waiting(&listener, 1);
    listener.at_millis(5_000);
    let expiry = listener.limiter.expire_reservations();
    futures_util::FutureExt::now_or_never(expiry).unwrap();
    assert_eq!(waiting.read_answer(false).status, 200);
}

/// The retry time is estimated from how long slots have been held, instead of from the end of the
/// lease.
#[test]
fn the_retry_time_comes_from_holding_times() {
    let listener = TestListener::open(RULES);
    let mut now = 0;
    for _ in 0..50 {
        let token = reserve(&listener);
        now += 500;
        listener.at_millis(now);
        settle(&listener, &token);
    }
    let _token = reserve(&listener);
    listener.at_millis(now + 30_000);
    let (_, verdict) = listener.verdict("/v1/check", &waiting_check(0));
    assert_eq!(verdict["retry_after_ms"], 500, "{verdict}");
    assert_eq!(verdict["retry_after_estimated"], true);
    let answer = listener.post("/v1/check", &waiting_check(0));
    assert_eq!(answer.header("retry-after"), Some("1"));
}

/// A rule without a key has one counter for all clients, so a denial by this rule means that the
/// service is busy.
#[test]
fn a_service_at_its_capacity_is_answered_503() {
    let rules = r"
rules:
  - name: service
    limits: {algorithm: concurrency, limit: 1}
  - name: each
    key: customer
    limits: {algorithm: concurrency, limit: 1}
";
    let listener = TestListener::open(rules);
    let check = |customer: &str| {
        let body = format!(r#"{{"entries": {{"customer": "{customer}"}}}}"#);
        let (status, verdict) = listener.verdict("/v1/check", &body);
        (status, verdict["reason"].clone())
    };
    assert_eq!(check("acme").0, 200);
    assert_eq!(check("other"), (503, json!("limit")));
    // The client's own limit also denies the request, so the status is 429.
    assert_eq!(check("acme"), (429, json!("limit")));
    let authorize = listener.authorize("", &[("x-forwarded-uri", "/")]);
    assert_eq!(authorize.status, 503);
}

#[test]
fn a_limit_sent_with_the_request_can_wait() {
    let listener = TestListener::open("rules: []");
    let body =
        r#"{"key": "k", "algorithm": "concurrency", "limit": 1, "lease": "50ms", "wait": "30s"}"#;
    assert_eq!(listener.verdict("/v1/throttle", body).0, 200);
    let mut waiting = send(&listener, "/v1/throttle", body);
    until_waiting(&listener, 1);
    listener.at_millis(50);
    assert_eq!(waiting.read_answer(false).status, 200);
    let wrong = r#"{"key": "k", "algorithm": "concurrency", "limit": 1, "queue": 5}"#;
    let problem = listener.post("/v1/throttle", wrong).problem();
    assert!(
        problem.starts_with("queue: applies only with `wait`"),
        "{problem}"
    );
}

#[test]
fn mistakes_name_their_field() {
    let listener = TestListener::open(RULES);
    for (path, wait, expected) in [
        (
            "/v1/check",
            "60001",
            "wait_ms: 60001 exceeds the maximum of 60000",
        ),
        ("/v1/reserve", "-1", "wait_ms: expected"),
        ("/v1/check", "\"2s\"", "wait_ms: expected"),
        ("/v1/peek", "100", "wait_ms: unknown field"),
    ] {
        let answer = listener.post(path, &format!("{{{ENTRIES}, \"wait_ms\": {wait}}}"));
        assert_eq!(answer.status, 400);
        let problem = answer.problem();
        assert!(problem.starts_with(expected), "{path} {wait}: {problem}");
    }
}
