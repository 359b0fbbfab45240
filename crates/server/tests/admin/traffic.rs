//! Tests of traffic counts for the last 15 minutes.

use serde_json::{Value, json};

use crate::listener::{KEY, TestListener};

fn traffic(listener: &TestListener, query: &str) -> Value {
    let answer = listener.ask("GET", &format!("/v1/traffic{query}"), "");
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[test]
fn decisions_are_counted_by_rule_in_buckets_of_five_seconds() {
    let listener = TestListener::open();
    assert!(listener.spend() && listener.spend() && !listener.spend());
    // The running server takes a sample every second.
    let limiter = &listener.limiter;
    limiter.sample_traffic();
    listener.at_secs(7);
    listener.ask("PUT", &format!("/v1/blocks/{KEY}"), "");
    assert!(!listener.spend());
    let document = traffic(&listener, "?over=10s");
    let expected = json!({"requests": [3, 1], "denied": [1, 1], "shadow_denied": [0, 0]});
    assert_eq!(document["total"], expected);
    let mut rule = expected;
    rule["rule"] = "r".into();
    assert_eq!(document["rules"], json!([rule]), "a rule without traffic");
    let start = 1_699_999_980_000_u64;
    assert_eq!(document["from_ms"], start);
    assert_eq!(document["now_ms"], start + 7_000);
    assert_eq!(document["bucket_ms"], 5_000);
}

#[test]
fn fifteen_minutes_are_returned_unless_less_is_asked_for() {
    let listener = TestListener::open();
    assert!(listener.spend());
    let buckets = |query: &str| {
        let document = traffic(&listener, query);
        document["total"]["requests"].as_array().unwrap().len()
    };
    assert_eq!(buckets(""), 180);
    assert_eq!(buckets("?over=15m"), 180);
    assert_eq!(buckets("?over=1ms"), 1);
    assert_eq!(buckets("?over=6s"), 2);
    for (query, problem) in [
        (
            "?over=16min",
            "over: the server keeps traffic statistics for the last 15min",
        ),
        ("?over=ages", "over: expected a duration"),
        (
            "?ower=1min",
            "ower: is not a parameter; did you mean `over`?",
        ),
    ] {
        let answer = listener.ask("GET", &format!("/v1/traffic{query}"), "");
        assert_eq!(answer.status, 400, "{query}");
        assert!(
            answer.problem().starts_with(problem),
            "{}",
            answer.problem()
        );
    }
    let answer = listener.ask("POST", "/v1/traffic", "");
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET")));
}

/// If a rule is removed or renamed, the chart of past denials must not change.
#[test]
fn traffic_of_a_removed_rule_stays_until_it_is_old() {
    let listener = TestListener::open();
    assert!(listener.spend());
    assert_eq!(traffic(&listener, "")["rules"][0]["rule"], "r");
    let without = "rules: [{name: other-rule, limits: [1/s]}]";
    std::fs::write(listener.file.path(), without).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    listener.at_secs(60);
    assert_eq!(traffic(&listener, "")["rules"][0]["rule"], "r");
    listener.at_secs(16 * 60);
    assert_eq!(traffic(&listener, "")["rules"], json!([]));
}
