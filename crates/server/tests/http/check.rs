//! `POST /v1/check` and `/v1/peek`: the verdict, its headers, and what is charged.

use serde_json::{Value, json};

use crate::door::Door;

const LOGIN: &str = r#"{"entries": {"ip": "203.0.113.9", "path": "/login"}}"#;

const RULES: &str = "
rules:
  - name: login
    when: {path: /login}
    key: [ip]
    limits: [{algorithm: token_bucket, capacity: 2, refill: 1/s}]
";

/// The names of the members of a JSON object, sorted.
fn names(value: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn a_request_is_allowed_until_it_is_not_and_again_when_it_was_told() {
    let door = Door::open(RULES);
    let first = door.post("/v1/check", LOGIN);
    assert_eq!(first.status, 200, "{first:?}");
    assert_eq!(first.header("content-type"), Some("application/json"));
    let verdict = first.json();
    assert_eq!(verdict["allowed"], true);
    assert_eq!(verdict["rule"], "login");
    assert_eq!(
        (&verdict["limit"], &verdict["remaining"]),
        (&json!(2), &json!(1))
    );
    assert!(verdict.get("reason").is_none(), "{verdict}");
    assert_eq!(first.header("ratelimit"), Some("\"login\";r=1;t=1"));
    assert_eq!(first.header("ratelimit-policy"), Some("\"login\";q=2;w=2"));
    assert_eq!(first.header("retry-after"), None);

    assert_eq!(door.post("/v1/check", LOGIN).status, 200);
    door.at_millis(1);
    let denied = door.post("/v1/check", LOGIN);
    assert_eq!(denied.status, 429, "{denied:?}");
    let verdict = denied.json();
    assert_eq!(verdict["reason"], "limit");
    assert_eq!(verdict["retry_after_ms"], 999);
    assert_eq!(denied.header("retry-after"), Some("1"));
    door.at_millis(999);
    assert_eq!(door.post("/v1/check", LOGIN).status, 429);
    door.at_millis(1_000);
    assert_eq!(door.post("/v1/check", LOGIN).status, 200);
}

#[test]
fn the_verdict_has_the_fields_of_the_contract() {
    let door = Door::open(RULES);
    let verdict = door
        .post(
            "/v1/check",
            r#"{"entries": {"ip": "a", "path": "/login"}, "cost": 3}"#,
        )
        .json();
    let expected = "allowed delay_ms exactness limit limits reason remaining reset_after_ms retry_after_ms rule";
    assert_eq!(names(&verdict).join(" "), expected);
    for field in
        "allowed limit policy remaining reset_after_ms retry_after_ms rule shadow".split(' ')
    {
        assert!(
            verdict["limits"][0].get(field).is_some(),
            "{field}: {verdict}"
        );
    }
    assert_eq!(verdict["exactness"], "exact");
}

#[test]
fn what_can_never_pass_has_no_retry_after() {
    let door = Door::open(RULES);
    let body = r#"{"entries": {"ip": "a", "path": "/login"}, "cost": 3}"#;
    let reply = door.post("/v1/check", body);
    assert_eq!(reply.status, 429);
    assert_eq!(reply.json()["retry_after_ms"], Value::Null);
    assert_eq!(reply.header("retry-after"), None);
    assert!(reply.header("ratelimit").is_some(), "{reply:?}");
}

#[test]
fn a_request_that_no_rule_matches_is_allowed() {
    let reply = Door::open(RULES).post("/v1/check", r#"{"entries": {}}"#);
    assert_eq!(reply.status, 200);
    let verdict = reply.json();
    assert_eq!(
        (&verdict["allowed"], &verdict["rule"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(verdict["limits"], json!([]));
    assert_eq!(reply.header("ratelimit"), None);
}

#[test]
fn peeking_charges_nothing() {
    let door = Door::open(RULES);
    for _ in 0..5 {
        let reply = door.post("/v1/peek", LOGIN);
        assert_eq!(
            (reply.status, &reply.json()["allowed"]),
            (200, &json!(true))
        );
    }
    assert_eq!(door.post("/v1/check", LOGIN).json()["remaining"], 1);
}

#[test]
fn shadow_never_denies_and_soft_admits_a_little_more() {
    let door = Door::open("
rules:
  - {name: shadow, mode: shadow, when: {path: /a}, limits: [{algorithm: fixed_window, limit: 1, window: 1min}]}
  - {name: soft, when: {path: /b}, limits: [{algorithm: fixed_window, limit: 10, window: 1min, soft: 10%}]}
");
    let ask = |path: &str| {
        door.post(
            "/v1/check",
            &format!(r#"{{"entries": {{"path": "{path}"}}}}"#),
        )
    };
    ask("/a");
    let second = ask("/a");
    assert_eq!(second.status, 200, "{second:?}");
    let line = &second.json()["limits"][0];
    assert_eq!(
        (&line["allowed"], &line["shadow"]),
        (&json!(false), &json!(true))
    );

    for _ in 0..10 {
        assert_eq!(ask("/b").json()["limits"][0]["over_limit"], false);
    }
    let over = ask("/b");
    assert_eq!(
        (over.status, &over.json()["limits"][0]["over_limit"]),
        (200, &json!(true))
    );
    assert_eq!(ask("/b").status, 429);
}

#[test]
fn a_block_denies_with_its_reason() {
    let door = Door::open(RULES);
    let rules = door.limiter.rules();
    let key = rules
        .rule("login")
        .unwrap()
        .encode_key(&["203.0.113.9"])
        .unwrap();
    let span = tidegate_core::Span::from_secs(60);
    assert!(
        door.limiter
            .store()
            .block(&key, Some(span), "abuse", door.limiter.now())
    );
    let reply = door.post("/v1/check", LOGIN);
    assert_eq!(
        (reply.status, &reply.json()["reason"]),
        (429, &json!("blocked"))
    );
    assert_eq!(reply.header("retry-after"), Some("60"));
}
