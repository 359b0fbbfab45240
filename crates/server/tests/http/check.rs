//! Tests of `POST /v1/check` and `POST /v1/peek`.

use serde_json::{Value, json};
use tidegate_core::{MemoryBounds, WhenFull};
use tidegate_net::Bounds;

use crate::listener::TestListener;

const RULES: &str = "
rules:
  - name: api
    when: {path: /api/**}
    key: [customer]
    limits: [2/s, 3/min]
    algorithm: sliding_window_log
  - name: exports
    when: {path: /export}
    limits: [{algorithm: leaky_bucket, capacity: 1, leak: 1/s, queue: true}]
  - name: seen
    when: {path: /seen}
    limits: [{algorithm: fixed_window, limit: 1, window: 1min}]
    mode: shadow
  - name: soft
    when: {path: /soft}
    limits: [{algorithm: fixed_window, limit: 10, window: 1min, soft: 10%}]
";

fn api() -> &'static str {
    r#"{"entries": {"path": "/api/x", "customer": "acme"}}"#
}

#[test]
fn a_verdict_has_exactly_the_documented_fields() {
    let listener = TestListener::open(RULES);
    let (status, verdict) = listener.verdict("/v1/check", api());
    assert_eq!(status, 200);
    let line = |policy: &str, limit: u64, reset: u64| {
        json!({
            "rule": "api", "policy": policy, "allowed": true, "over_limit": false, "limit": limit,
            "remaining": limit - 1, "reset_after_ms": reset, "retry_after_ms": 0, "delay_ms": 0, "shadow": false,
        })
    };
    let expected = json!({
        "allowed": true, "rule": "api", "limit": 2, "remaining": 1, "reset_after_ms": 1_000,
        "retry_after_ms": 0, "delay_ms": 0, "exactness": "exact",
        "limits": [line("2/s", 2, 1_000), line("3/min", 3, 60_000)],
    });
    assert_eq!(verdict, expected);
}

#[test]
fn a_denial_has_a_reason_and_a_time() {
    let listener = TestListener::open(RULES);
    for _ in 0..2 {
        assert_eq!(listener.verdict("/v1/check", api()).0, 200);
    }
    listener.at_millis(400);
    let (status, verdict) = listener.verdict("/v1/check", api());
    assert_eq!(status, 429);
    let field = |name: &str| verdict[name].clone();
    assert_eq!(field("allowed"), false);
    assert_eq!(field("reason"), "limit");
    assert_eq!(field("rule"), "api");
    assert_eq!((field("limit"), field("remaining")), (json!(2), json!(0)));
    assert_eq!(field("retry_after_ms"), 600);
    // The per-minute limit would have admitted the request, so it was not charged.
    assert_eq!(verdict["limits"][1]["allowed"], true);
    assert_eq!(verdict["limits"][1]["remaining"], 1);
    // One millisecond before the reported time, a retry does not succeed.
    listener.at_millis(999);
    assert_eq!(listener.verdict("/v1/check", api()).0, 429);
    listener.at_millis(1_000);
    assert_eq!(listener.verdict("/v1/check", api()).0, 200);
}

#[test]
fn a_peek_answers_what_the_check_would_and_charges_nothing() {
    let listener = TestListener::open(RULES);
    let (peeked, again) = (
        listener.verdict("/v1/peek", api()),
        listener.verdict("/v1/peek", api()),
    );
    assert_eq!(peeked, again);
    assert_eq!(peeked, listener.verdict("/v1/check", api()));
    assert_ne!(peeked, listener.verdict("/v1/peek", api()));
}

#[test]
fn a_request_without_a_rule_is_allowed_and_names_no_rule() {
    let listener = TestListener::open(RULES);
    let expected = json!({
        "allowed": true, "rule": null, "limit": null, "remaining": null, "reset_after_ms": null,
        "retry_after_ms": 0, "delay_ms": 0, "exactness": "exact", "limits": [],
    });
    for entries in [r#"{"path": "/"}"#, "{}", r#"{"path": "/api/x"}"#] {
        let body = format!("{{\"entries\": {entries}}}");
        assert_eq!(
            listener.verdict("/v1/check", &body),
            (200, expected.clone())
        );
    }
}

#[test]
fn a_queue_delays_and_a_cost_that_never_fits_is_reported() {
    let listener = TestListener::open(RULES);
    let export = |cost: u64| format!(r#"{{"entries": {{"path": "/export"}}, "cost": {cost}}}"#);
    assert_eq!(listener.verdict("/v1/check", &export(1)).1["delay_ms"], 0);
    let (status, second) = listener.verdict("/v1/check", &export(1));
    assert_eq!((status, &second["delay_ms"]), (200, &json!(1_000)));
    assert_eq!(second["limits"][0]["delay_ms"], 1_000);
    let (status, third) = listener.verdict("/v1/check", &export(3));
    assert_eq!((status, &third["retry_after_ms"]), (429, &Value::Null));
}

#[test]
fn a_shadow_limit_never_denies_and_a_soft_limit_marks_requests() {
    let listener = TestListener::open(RULES);
    let seen = r#"{"entries": {"path": "/seen"}}"#;
    assert_eq!(listener.verdict("/v1/check", seen).0, 200);
    let (status, verdict) = listener.verdict("/v1/check", seen);
    assert_eq!((status, &verdict["allowed"]), (200, &json!(true)));
    assert_eq!(
        (&verdict["rule"], &verdict["limit"]),
        (&Value::Null, &Value::Null)
    );
    let line = &verdict["limits"][0];
    assert_eq!(
        (&line["shadow"], &line["allowed"]),
        (&json!(true), &json!(false))
    );

    let soft = |cost: u64| format!(r#"{{"entries": {{"path": "/soft"}}, "cost": {cost}}}"#);
    assert_eq!(
        listener.verdict("/v1/check", &soft(10)).1["limits"][0]["over_limit"],
        false
    );
    let (status, over) = listener.verdict("/v1/check", &soft(1));
    assert_eq!(
        (status, &over["limits"][0]["over_limit"]),
        (200, &json!(true))
    );
    assert_eq!(listener.verdict("/v1/check", &soft(1)).0, 429);
}

#[test]
fn a_block_denies_before_any_limit() {
    let listener = TestListener::open(RULES);
    let rules = listener.limiter.rules();
    let key = rules.rule("api").unwrap().encode_key(&["acme"]).unwrap();
    let minute = Some(tidegate_core::Span::from_secs(60));
    assert!(
        listener
            .limiter
            .local_store()
            .block(&key, minute, "", listener.limiter.now())
    );
    let (status, verdict) = listener.verdict("/v1/check", api());
    let expected = json!({
        "allowed": false, "reason": "blocked", "rule": "api", "limit": null, "remaining": null,
        "reset_after_ms": null, "retry_after_ms": 60_000, "delay_ms": 0, "exactness": "exact", "limits": [],
    });
    assert_eq!((status, verdict), (429, expected));
}

#[test]
fn a_full_store_denies_new_keys_and_gives_the_reason() {
    let memory = MemoryBounds {
        max_keys: 1,
        when_full: WhenFull::Deny,
        ..MemoryBounds::default()
    };
    let listener = TestListener::with(RULES, memory, Bounds::default());
    let body =
        |customer: usize| format!(r#"{{"entries": {{"path": "/api", "customer": "{customer}"}}}}"#);
    let denied = (0..1_000).map(|customer| listener.verdict("/v1/check", &body(customer)));
    let (status, verdict) = denied
        .into_iter()
        .find(|(status, _)| *status != 200)
        .unwrap();
    assert_eq!((status, &verdict["reason"]), (503, &json!("store")));
}
