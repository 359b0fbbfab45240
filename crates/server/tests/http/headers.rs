//! Tests of response headers.

use tidegate_core::Span;

use crate::{client::Answer, listener::TestListener};

const RULES: &str = "
rules:
  - name: api
    when: {path: /api}
    limits: [1/s, 3/min]
    algorithm: sliding_window_log
  - name: login
    when: {path: /login}
    limits: [{algorithm: token_bucket, capacity: 10, refill: 1/h}]
  - name: seen
    limits: [1/s]
    mode: shadow
";

fn check(listener: &TestListener, path: &str, cost: u64) -> Answer {
    let body = format!(r#"{{"entries": {{"path": "{path}"}}, "cost": {cost}}}"#);
    listener.post("/v1/check", &body)
}

fn set<'a>(answer: &'a Answer, names: &[&str]) -> Vec<Option<&'a str>> {
    names.iter().map(|name| answer.header(name)).collect()
}

#[test]
fn allowed_and_denied_responses_have_rate_limit_headers() {
    let listener = TestListener::open(RULES);
    let names = [
        "ratelimit-policy",
        "ratelimit",
        "retry-after",
        "x-ratelimit-limit",
    ];
    let policy = Some(r#""1/s";q=1;w=1, "3/min";q=3;w=60"#);
    let allowed = check(&listener, "/api", 1);
    let state = Some(r#""1/s";r=0;t=1, "3/min";r=2;t=60"#);
    assert_eq!(set(&allowed, &names), [policy, state, None, None]);
    assert_eq!(allowed.header("content-type"), Some("application/json"));
    assert!(allowed.header("date").is_some());
    let denied = check(&listener, "/api", 1);
    assert_eq!(denied.status, 429);
    // For the per-minute limit, `t` would be longer than Retry-After, so it is omitted.
    let state = Some(r#""1/s";r=0;t=1, "3/min";r=2"#);
    assert_eq!(set(&denied, &names), [policy, state, Some("1"), None]);
}

#[test]
fn a_cost_that_never_fits_has_no_retry_after_and_no_rule_has_no_headers() {
    let listener = TestListener::open(RULES);
    let never = check(&listener, "/login", 11);
    assert_eq!(never.status, 429);
    let names = ["ratelimit-policy", "ratelimit", "retry-after"];
    let expected = [
        Some(r#""1/h capacity 10";q=10;w=36000"#),
        Some(r#""1/h capacity 10";r=10"#),
        None,
    ];
    assert_eq!(set(&never, &names), expected);
    assert_eq!(
        set(&check(&listener, "/", 1), &names),
        [None, None, None],
        "a shadow limit is not shown"
    );
}

#[test]
fn legacy_headers_are_optional() {
    let names = [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "ratelimit",
    ];
    let delta = TestListener::open(&format!(
        "headers: {{legacy: delta, ratelimit: false}}\n{RULES}"
    ));
    let expected = [Some("10"), Some("9"), Some("3600"), None];
    assert_eq!(set(&check(&delta, "/login", 1), &names), expected);
    let epoch = TestListener::open(&format!("headers: {{legacy: epoch}}\n{RULES}"));
    let answer = check(&epoch, "/login", 2);
    let expected = [
        Some("10"),
        Some("8"),
        Some("1700007200"),
        Some(r#""1/h capacity 10";r=8;t=7200"#),
    ];
    assert_eq!(set(&answer, &names), expected);
}

#[test]
fn legacy_headers_describe_the_tightest_limit() {
    let listener = TestListener::open(&format!("headers: {{legacy: delta}}\n{RULES}"));
    let names = [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "retry-after",
    ];
    for (millis, path, cost, expected) in [
        (0, "/api", 1, [Some("1"), Some("0"), Some("1"), None]),
        (200, "/api", 1, [Some("1"), Some("0"), Some("1"), Some("1")]),
        (1_000, "/api", 1, [Some("1"), Some("0"), Some("1"), None]),
        // Both the per-second limit and the per-minute limit are exhausted. The per-minute limit
        // takes longer to recover.
        (2_000, "/api", 1, [Some("3"), Some("0"), Some("60"), None]),
        (
            3_000,
            "/api",
            1,
            [Some("3"), Some("0"), Some("59"), Some("57")],
        ),
        (
            3_000,
            "/login",
            11,
            [Some("10"), Some("10"), Some("0"), None],
        ),
        // Only a shadow limit applies.
        (3_000, "/", 1, [None; 4]),
    ] {
        listener.at_millis(millis);
        let answer = check(&listener, path, cost);
        assert_eq!(set(&answer, &names), expected, "{path} at {millis}");
    }
}

#[test]
fn a_block_has_no_legacy_headers() {
    let listener = TestListener::open(
        "headers: {legacy: epoch}\nrules: [{name: all, key: [ip], limits: [1/h]}]",
    );
    let rules = listener.limiter.rules();
    let key = rules
        .rule("all")
        .unwrap()
        .encode_key(&["192.0.2.1"])
        .unwrap();
    let now = listener.limiter.now();
    listener
        .limiter
        .local_store()
        .block(&key, Some(Span::from_secs(60)), "", now);
    let answer = listener.post("/v1/check", r#"{"entries": {"ip": "192.0.2.1"}}"#);
    assert_eq!(answer.status, 429);
    let names = [
        "retry-after",
        "x-ratelimit-limit",
        "x-ratelimit-reset",
        "ratelimit",
    ];
    assert_eq!(set(&answer, &names), [Some("60"), None, None, None]);
}

#[test]
fn a_throttle_is_named_after_its_limit() {
    let listener = TestListener::open("");
    let answer = listener.post("/v1/throttle", r#"{"key": "k", "limits": ["5/10s"]}"#);
    let expected = [Some(r#""5/10s";q=5;w=10"#), Some(r#""5/10s";r=4;t=10"#)];
    assert_eq!(set(&answer, &["ratelimit-policy", "ratelimit"]), expected);
    let answer = listener.post(
        "/v1/throttle",
        r#"{"key": "l", "limits": ["5/10s", "9/100ms"]}"#,
    );
    let expected = [Some(r#""5/10s";q=5;w=10, "9/100ms";q=9"#)];
    assert_eq!(set(&answer, &["ratelimit-policy"]), expected);
}

#[test]
fn headers_optionally_name_rules_and_bodies_always_do() {
    let listener = TestListener::open(&format!("headers: {{rule_names: true}}\n{RULES}"));
    let named = check(&listener, "/login", 1);
    assert_eq!(named.header("ratelimit"), Some(r#""login";r=9;t=3600"#));
    let several = check(&listener, "/api", 1);
    let policy = r#""api:1/s";q=1;w=1, "api:3/min";q=3;w=60"#;
    assert_eq!(several.header("ratelimit-policy"), Some(policy));
    let neutral = check(&TestListener::open(RULES), "/login", 1);
    assert_eq!(
        neutral.header("ratelimit"),
        Some(r#""1/h capacity 10";r=9;t=3600"#)
    );
    assert_eq!(neutral.json()["rule"], "login");
}
