//! `POST /v1/throttle`: the limit comes with the request.

use serde_json::json;

use crate::{door::Door, wire::assert_problem};

#[test]
fn a_limit_that_comes_with_the_request_needs_no_rules() {
    let door = Door::open("rules: []");
    let body = r#"{"key": "user:1", "algorithm": "gcra", "rate": "100/s", "burst": 5, "cost": 1}"#;
    for left in (0..=5).rev() {
        let reply = door.post("/v1/throttle", body);
        assert_eq!(
            (reply.status, &reply.json()["remaining"]),
            (200, &json!(left)),
            "{reply:?}"
        );
    }
    let denied = door.post("/v1/throttle", body);
    assert_eq!(
        (denied.status, &denied.json()["retry_after_ms"]),
        (429, &json!(10))
    );
    assert_eq!(denied.header("retry-after"), Some("1"));
    let other = body.replace("user:1", "user:2");
    assert_eq!(
        door.post("/v1/throttle", &other).status,
        200,
        "keys count apart"
    );
}

#[test]
fn several_limits_are_one_decision() {
    let door = Door::open("rules: []");
    let body = r#"{"key": "k", "algorithm": "sliding_window_log", "limits": ["1/s", "20/min"]}"#;
    assert_eq!(door.post("/v1/throttle", body).status, 200);
    let denied = door.post("/v1/throttle", body).json();
    assert_eq!(
        denied["limits"][1]["remaining"], 19,
        "a denied request is charged nowhere"
    );
}

#[test]
fn mistakes_name_their_field() {
    let door = Door::open("rules: []");
    for (body, word) in [
        (r#"{"algorithm": "gcra", "rate": "1/s"}"#, "key"),
        (r#"{"key": "", "algorithm": "gcra", "rate": "1/s"}"#, "key"),
        (r#"{"key": 7, "algorithm": "gcra", "rate": "1/s"}"#, "key"),
        (
            r#"{"key": "k", "algorithm": "gcra", "rate": "1/s", "cost": 0}"#,
            "cost",
        ),
        (
            r#"{"key": "k", "algorithm": "gcra", "rate": "1/s", "cost": -1}"#,
            "cost",
        ),
        (
            r#"{"key": "k", "algorithm": "gcra", "rate": "1/s", "peek": 1}"#,
            "peek",
        ),
        (
            r#"{"key": "k", "algorithm": "gcra", "rate": "often"}"#,
            "rate",
        ),
        (r#"{"key": "k", "algorithm": "gcra"}"#, "rate"),
        (
            r#"{"key": "k", "algorithm": "gkra", "rate": "1/s"}"#,
            "algorithm",
        ),
        (
            r#"{"key": "k", "algorithm": "gcra", "rate": "1/s", "brust": 5}"#,
            "burst",
        ),
        (r#"{"key": "k", "limits": "1/s"}"#, "limits"),
        (r#"{"key": "k", "limits": ["x"]}"#, "limits[0]"),
    ] {
        assert_problem(&door.post("/v1/throttle", body), 400, &[word]);
    }
    let long = json!({"key": "k".repeat(1_024), "algorithm": "gcra", "rate": "1/s"});
    assert_problem(&door.post("/v1/throttle", &long.to_string()), 400, &["key"]);
}
