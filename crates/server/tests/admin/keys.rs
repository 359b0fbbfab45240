//! Tests of the state of one key.

use serde_json::{Value, json};
use tidegate_core::{AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, notation};

use crate::listener::{KEY, TestListener};

fn path() -> String {
    format!("/v1/keys/{KEY}")
}

#[test]
fn inspecting_a_key_shows_every_limit_and_charges_nothing() {
    let listener = TestListener::open();
    let limit = |policy: &str, limit: u64, remaining: u64, reset: u64, retry: u64| {
        json!({
            "policy": policy, "limit": limit, "remaining": remaining,
            "reset_after_ms": reset, "retry_after_ms": retry,
        })
    };
    let standing = |limits: Value| json!({"rule": "r", "key": ["/a b", "::"], "mode": "enforce", "block": null, "override": null, "limits": limits});
    let untouched = standing(json!([
        limit("2/min capacity 2", 2, 2, 0, 0),
        limit("100/h capacity 100", 100, 100, 0, 0),
    ]));
    let shown = listener.ask("GET", &path(), "");
    assert_eq!(shown.status, 200);
    assert_eq!(
        without_capacity(&shown.json()),
        without_capacity(&untouched)
    );
    assert_eq!(
        listener.limiter.local_store().stats().keys,
        0,
        "a lookup creates no key"
    );

    assert!(listener.spend() && listener.spend() && !listener.spend());
    let spent = standing(json!([
        limit("2/min capacity 2", 2, 0, 60_000, 30_000),
        limit("100/h capacity 100", 100, 98, 72_000, 0),
    ]));
    for _ in 0..2 {
        let shown = listener.ask("GET", &path(), "").json();
        assert_eq!(without_capacity(&shown), without_capacity(&spent));
    }
    listener.at_secs(30);
    assert_eq!(
        listener.ask("GET", &path(), "").json()["limits"][0]["remaining"],
        1
    );
}

/// Removes the capacity from policies. Other tests cover the format of policies.
fn without_capacity(document: &Value) -> Value {
    let mut document = document.clone();
    for limit in document["limits"].as_array_mut().unwrap() {
        let policy = limit["policy"]
            .as_str()
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .to_owned();
        limit["policy"] = policy.into();
    }
    document
}

#[test]
fn a_blocked_key_shows_its_limits_and_its_block() {
    let listener = TestListener::open();
    assert!(listener.spend());
    listener.ask(
        "PUT",
        &format!("/v1/blocks/{KEY}"),
        r#"{"for": "1h", "reason": "why"}"#,
    );
    let shown = listener.ask("GET", &path(), "").json();
    assert_eq!(shown["block"]["reason"], "why");
    assert_eq!(shown["limits"][0]["remaining"], 1);
    assert_eq!(shown["limits"][0]["retry_after_ms"], 3_600_000);
    assert_eq!(shown["limits"][1]["retry_after_ms"], 3_600_000);
    let blocks = format!("/v1/blocks/{KEY}");
    listener.ask("PUT", &blocks, r#"{"for": "forever"}"#);
    let shown = listener.ask("GET", &path(), "").json();
    assert_eq!(shown["limits"][0]["retry_after_ms"], Value::Null);
}

#[test]
fn a_spent_key_passes_when_its_block_and_its_limit_allow_it() {
    let listener = TestListener::open();
    assert!(listener.spend() && listener.spend() && !listener.spend());
    listener.ask("PUT", &format!("/v1/blocks/{KEY}"), r#"{"for": "10s"}"#);
    let shown = listener.ask("GET", &path(), "").json();
    let waits = [0, 1].map(|at| shown["limits"][at]["retry_after_ms"].clone());
    assert_eq!(waits, [json!(60_000), json!(10_000)]);
}

#[test]
fn a_reset_clears_the_counters() {
    let listener = TestListener::open();
    assert_eq!(
        listener.ask("DELETE", &path(), "").status,
        404,
        "there are no counters"
    );
    assert!(listener.spend() && listener.spend() && !listener.spend());
    let reset = listener.ask("DELETE", &path(), "");
    assert_eq!((reset.status, &reset.json()["reset"]), (200, &json!(true)));
    assert!(listener.spend());
}

#[test]
fn invalid_requests_get_an_explanation() {
    let listener = TestListener::open();
    assert_eq!(listener.ask("GET", "/v1/keys/s/a/b", "").status, 404);
    assert!(
        listener
            .ask("GET", "/v1/keys/r/a", "")
            .problem()
            .starts_with("key: ")
    );
    let answer = listener.ask("PUT", &path(), "");
    assert_eq!(
        (answer.status, answer.header("allow")),
        (405, Some("GET, DELETE"))
    );
    assert_eq!(listener.ask("GET", "/v1/keys", "").status, 404);
}

#[test]
fn a_throttle_key_can_be_reset() {
    let listener = TestListener::open();
    let (now, mut room, mut outcomes) = (listener.limiter.now(), Vec::new(), Vec::new());
    let key = tidegate_limiter::throttle_key("a b/c".as_bytes(), &mut room).unwrap();
    let rate = notation::rate("1/h").unwrap();
    let limit = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow).build();
    let limits = Limits::new(vec![limit.unwrap()]).unwrap();
    let charge = Charge::new(key, &limits, Cost::ONE).unwrap();
    let mut spend = || {
        let store = listener.limiter.local_store();
        store.check(&[charge], now, Effect::Charge, &mut outcomes) == Decision::Admitted
    };
    assert!(spend() && !spend());
    let reset = listener.ask("DELETE", "/v1/throttles/a%20b%2Fc", "");
    assert_eq!(
        (reset.status, reset.json()["reset"].clone()),
        (200, true.into())
    );
    assert!(spend());
    assert_eq!(
        listener.ask("DELETE", "/v1/throttles/nobody", "").status,
        404
    );
    assert_eq!(listener.ask("DELETE", "/v1/throttles/", "").status, 400);
    let wrong = listener.ask("GET", "/v1/throttles/x", "");
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("DELETE")));
}
