//! Tests of `POST /v1/throttle`.

use serde_json::{Value, json};

use crate::listener::TestListener;

fn ask(listener: &TestListener, key: &str, limit: &str) -> (u16, Value) {
    listener.verdict("/v1/throttle", &format!("{{\"key\": \"{key}\", {limit}}}"))
}

#[test]
fn a_limit_in_the_request_works_without_rules() {
    let listener = TestListener::open("");
    let limit = r#""algorithm": "gcra", "rate": "100/s", "burst": 5, "cost": 1"#;
    let (status, verdict) = ask(&listener, "user:1", limit);
    assert_eq!(status, 200);
    let expected = json!({
        "allowed": true, "rule": null, "limit": 6, "remaining": 5, "reset_after_ms": 10,
        "retry_after_ms": 0, "delay_ms": 0, "exactness": "exact",
        "limits": [{
            "rule": null, "policy": "100/s burst 5", "allowed": true, "over_limit": false, "limit": 6,
            "remaining": 5, "reset_after_ms": 10, "retry_after_ms": 0, "delay_ms": 0, "shadow": false,
        }],
    });
    assert_eq!(verdict, expected);
    let cost_5 = r#""algorithm": "gcra", "rate": "100/s", "burst": 5, "cost": 5"#;
    assert_eq!(ask(&listener, "user:1", cost_5).1["remaining"], 0);
    let (status, denied) = ask(&listener, "user:1", limit);
    assert_eq!(
        (status, &denied["retry_after_ms"], &denied["reason"]),
        (429, &json!(10), &json!("limit"))
    );
    assert_eq!(
        ask(&listener, "user:2", limit).0,
        200,
        "another key has its own count"
    );
}

#[test]
fn every_algorithm_is_accepted_with_every_field() {
    let listener = TestListener::open("");
    let cases = [
        (
            r#""algorithm": "token_bucket", "capacity": 5, "refill": "1/s""#,
            "1/s capacity 5",
            5,
        ),
        (
            r#""capacity": 5, "refill": "1/s", "refill_mode": "interval""#,
            "",
            5,
        ),
        (
            r#""algorithm": "leaky_bucket", "capacity": 3, "leak": "1/s", "queue": true"#,
            "",
            4,
        ),
        (
            r#""algorithm": "fixed_window", "limit": 7, "window": "1d""#,
            "7/d",
            7,
        ),
        (
            r#""algorithm": "fixed_window", "limit": 7, "window": "1h", "anchor": "first_request""#,
            "",
            7,
        ),
        (
            r#""algorithm": "fixed_window", "limit": 7, "anchor": {"calendar": "month", "zone": "Europe/Berlin", "day": 31}"#,
            "",
            7,
        ),
        (
            r#""algorithm": "sliding_window_log", "limit": 2, "window": "90s", "count_denied": true"#,
            "2/90s",
            2,
        ),
        (
            r#""algorithm": "sliding_window_counter", "limit": 2, "window": "1min", "buckets": 6, "strict": false"#,
            "",
            2,
        ),
        (
            r#""algorithm": "sliding_window_counter", "limit": 20, "window": "1min", "soft": "10%""#,
            "",
            20,
        ),
        (
            r#""algorithm": "sliding_window_counter", "limit": 20, "window": "1min", "soft": 10"#,
            "",
            20,
        ),
        (
            r#""algorithm": "gcra", "rate": "7/s", "burst": null"#,
            "7/s burst 0",
            1,
        ),
        (r#""limits": ["100/s burst 20"]"#, "100/s burst 20", 21),
        (r#""limits": ["1/h capacity 9"]"#, "1/h capacity 9", 9),
    ];
    for (number, (limit, policy, quota)) in cases.into_iter().enumerate() {
        let (status, verdict) = ask(&listener, &format!("k{number}"), limit);
        assert_eq!(status, 200, "{limit}: {verdict}");
        assert_eq!(verdict["limit"], quota, "{limit}");
        let shown = verdict["limits"][0]["policy"].as_str().unwrap();
        assert!(shown.starts_with(policy), "{limit} is shown as {shown}");
    }
}

#[test]
fn several_limits_are_one_decision() {
    let listener = TestListener::open("");
    let limits =
        r#""algorithm": "sliding_window_log", "limits": ["1/s", {"limit": 2, "window": "1min"}]"#;
    assert_eq!(ask(&listener, "k", limits).0, 200);
    let (status, denied) = ask(&listener, "k", limits);
    assert_eq!(status, 429);
    assert_eq!(denied["limits"][0]["policy"], "1/s");
    assert_eq!(
        denied["limits"][1]["remaining"], 1,
        "a denied request is charged nowhere"
    );
    listener.at_millis(1_000);
    assert_eq!(ask(&listener, "k", limits).0, 200);
    listener.at_millis(2_000);
    assert_eq!(ask(&listener, "k", limits).1["retry_after_ms"], 58_000);
}

#[test]
fn a_peek_charges_nothing() {
    let listener = TestListener::open("");
    let limit = r#""algorithm": "gcra", "rate": "1/s""#;
    let peek = r#""algorithm": "gcra", "rate": "1/s", "peek": true"#;
    let peeked = ask(&listener, "k", peek);
    assert_eq!(ask(&listener, "k", peek), peeked);
    assert_eq!(ask(&listener, "k", limit), peeked);
    assert_eq!(ask(&listener, "k", peek).0, 429);
}

#[test]
fn escaped_strings_and_any_content_type_are_accepted() {
    let listener = TestListener::open("");
    let mut client = listener.connect();
    let mut ask = |key: &str| {
        let body = format!(r#"{{"k\u0065y": {key}, "capacity": 1, "refill": "1\/h"}}"#);
        let headers = [("content-type", "text/plain")];
        client
            .ask("POST", "/v1/throttle", &headers, body.as_bytes())
            .status
    };
    assert_eq!(ask(r#""caf\u00e9\n""#), 200);
    assert_eq!(ask(r#""café\n""#), 429, "the same key, in another spelling");
    assert_eq!(ask(r#""\ud83d\ude00\u0000""#), 200);
}
