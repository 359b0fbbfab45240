//! Tests of `/v1/top`.

use serde_json::{Value, json};
use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{
    Charge, Cost, Effect, MemoryBounds, MemoryStore, Timestamp,
    top::{MAX_TOP_RULES, TopBounds},
};
use tidegate_limiter::{
    DecisionRequest, KeyMask, ServerLimiter,
    top::{OtherServers, TopError, TopQuery},
};

use crate::listener::{RULES, TestListener};

const START_MS: u64 = 1_699_999_980_000;

fn top(listener: &TestListener, query: &str) -> Value {
    let answer = listener.ask("GET", &format!("/v1/top{query}"), "");
    assert_eq!(answer.status, 200, "{query}");
    answer.json()
}

/// Charges the rule `r` for the address `ip`. The rule admits two requests per minute for each
/// address.
fn charge(listener: &TestListener, ip: &str, cost: u64) -> bool {
    listener.charge(&[("path", "/"), ("ip", ip)], cost)
}

#[test]
fn keys_are_ranked_by_requests_denials_and_cost() {
    let listener = TestListener::open();
    for _ in 0..5 {
        charge(&listener, "192.0.2.1", 1);
    }
    for _ in 0..3 {
        charge(&listener, "192.0.2.2", 1);
    }
    assert!(charge(&listener, "192.0.2.3", 2));
    assert!(!charge(&listener, "192.0.2.4", 90));
    let row = |ip: &str, estimate: u64| json!({"key": ["/", ip], "estimate": estimate, "error": 0});
    let total = json!({"requests": 10, "denied": 5, "cost": 8 + 2 + 90});
    assert_eq!(
        top(&listener, "?rule=r"),
        json!({
            "rule": "r",
            "by": "requests",
            "over_ms": 300_000,
            // Because periods consist of whole time slices, the period can begin up to a minute
            // earlier.
            "from_ms": START_MS - 300_000,
            "until_ms": START_MS,
            "total": total,
        "servers": 1,
            "rows": [
                row("192.0.2.1", 5),
                row("192.0.2.2", 3),
                row("192.0.2.3", 1),
                row("192.0.2.4", 1),
            ],
        })
    );
    let rows = |query: &str| top(&listener, query)["rows"].clone();
    assert_eq!(
        rows("?rule=r&by=denied"),
        json!([
            row("192.0.2.1", 3),
            row("192.0.2.2", 1),
            row("192.0.2.4", 1)
        ])
    );
    assert_eq!(
        rows("?by=cost&rule=r&n=3"),
        json!([
            row("192.0.2.4", 90),
            row("192.0.2.1", 5),
            row("192.0.2.2", 3)
        ])
    );
    // A peek is not counted.
    let before = top(&listener, "?rule=r");
    let key = listener.ask("GET", "/v1/keys/r/%2F/192.0.2.1", "");
    assert_eq!(key.status, 200);
    assert_eq!(top(&listener, "?rule=r"), before);
}

#[test]
fn without_a_rule_every_row_names_its_rule_and_each_request_counts_once() {
    let listener = TestListener::open();
    for _ in 0..3 {
        charge(&listener, "192.0.2.1", 1);
    }
    let mut buffer = Vec::new();
    let key = tidegate_limiter::throttle_key(b"user:7", &mut buffer).unwrap();
    let rules = Config::parse("rules: [{name: t, limits: [1/h]}]")
        .unwrap()
        .rules;
    let unnamed =
        tidegate_core::Limits::new(rules.rule("t").unwrap().limits().iter().cloned().collect())
            .unwrap();
    let charges = [Charge::new(key, &unnamed, Cost::ONE).unwrap()];
    let request = DecisionRequest {
        charges: &charges,
        now: listener.limiter.now(),
        effect: Effect::Charge,
        within: None,
    };
    let mut outcomes = Vec::new();
    assert!(listener.limiter.decide(request, &mut outcomes).is_ready());
    let list = top(&listener, "");
    assert_eq!(
        list["total"],
        json!({"requests": 4, "denied": 1, "cost": 4})
    );
    assert!(list.get("rule").is_none());
    let row = |rule: Value, key: Value, estimate: u64| json!({"rule": rule, "key": key, "estimate": estimate, "error": 0});
    let mut rows = list["rows"].as_array().unwrap().clone();
    rows.sort_by_key(Value::to_string);
    let mut expected = [
        row(json!("r"), json!(["/", "192.0.2.1"]), 3),
        row(json!("all of it"), json!([]), 3),
        row(Value::Null, json!(["user:7"]), 1),
    ];
    expected.sort_by_key(Value::to_string);
    assert_eq!(rows, expected);
}

#[test]
fn a_rule_in_shadow_mode_lists_whom_it_would_deny() {
    let listener = TestListener::open();
    // The limit is 1,000 units, and its soft range permits up to 100 more.
    assert!(listener.charge(&[], 1_000));
    for _ in 0..3 {
        assert!(listener.charge(&[], 900));
    }
    let query = "?rule=all%20of%20it&by=denied";
    let list = top(&listener, query);
    assert_eq!(
        list["total"],
        json!({"requests": 4, "denied": 3, "cost": 3_700})
    );
    assert_eq!(
        list["rows"],
        json!([{"key": [], "estimate": 3, "error": 0}])
    );
    // A shadow rule denies nothing, so the list by denials is empty.
    let list = top(&listener, "?by=denied");
    assert_eq!(list["total"]["denied"], 0);
    assert_eq!(list["rows"], json!([]));
}

#[test]
fn a_blocked_key_counts_as_denied() {
    let listener = TestListener::open();
    let blocked = listener.ask("PUT", "/v1/blocks/r/%2F/192.0.2.9", "");
    assert_eq!(blocked.status, 200);
    assert!(!charge(&listener, "192.0.2.9", 1));
    let row = json!([{"key": ["/", "192.0.2.9"], "estimate": 1, "error": 0}]);
    assert_eq!(top(&listener, "?rule=r&by=denied")["rows"], row);
    // The rule `all of it` did not deny the request.
    assert_eq!(top(&listener, "?rule=all%20of%20it")["total"]["denied"], 0);
}

/// The response increases the request's cost. The additional cost is partly denied, and is not
/// counted as another request.
#[test]
fn a_cost_that_rises_with_the_response_is_still_one_request() {
    let listener = TestListener::open();
    charge(&listener, "192.0.2.1", 1);
    let before = top(&listener, "?rule=r");
    assert_eq!(
        before["total"],
        json!({"requests": 1, "denied": 0, "cost": 1})
    );
    let rules = listener.limiter.rules();
    let rule = rules.rule("r").unwrap();
    let key = rule.encode_key(&["/", "192.0.2.1"]).unwrap();
    let excess = Charge::new(&key, rule.limits(), Cost::new(5).unwrap()).unwrap();
    let now = listener.limiter.now();
    assert!(tidegate::rate_limiter::charge_excess(&*listener.limiter, excess, now).is_ready());
    let key = listener.ask("GET", "/v1/keys/r/%2F/192.0.2.1", "").json();
    assert_eq!(key["limits"][0]["remaining"], 0);
    assert_eq!(top(&listener, "?rule=r"), before);
}

#[test]
fn each_period_forgets_in_its_time() {
    let listener = TestListener::open();
    charge(&listener, "192.0.2.1", 1);
    let requests = |secs: u64, over: &str| {
        listener.at_secs(secs);
        let list = top(&listener, &format!("?rule=r&over={over}"));
        list["total"]["requests"].as_u64().unwrap()
    };
    let minute = 60;
    for (over, length, slice) in [
        ("5m", 5 * minute, minute),
        ("15m", 15 * minute, minute),
        ("1h", 60 * minute, 5 * minute),
        ("1d", 1_440 * minute, 60 * minute),
    ] {
        assert_eq!(requests(length, over), 1, "{over}");
        assert_eq!(requests(length + slice, over), 0, "{over}");
    }
}

/// Returns each time slice with requests: its start (in minutes after the start of the test), its
/// number of requests and its number of denials.
fn history(listener: &TestListener, over: &str) -> Vec<[u64; 3]> {
    let query = format!("/v1/history?rule=r&key=%2F&key=192.0.2.1&over={over}");
    let answer = listener.ask("GET", &query, "");
    assert_eq!(answer.status, 200);
    let document = answer.json();
    assert_eq!(document["key"], json!(["/", "192.0.2.1"]));
    let slices = document["slices"].as_array().unwrap().iter();
    let numbers = slices.map(|slice| {
        let exact = |count: &Value| {
            assert_eq!(count["error"], 0);
            count["estimate"].as_u64().unwrap()
        };
        let minutes = slice["at_ms"].as_u64().unwrap().saturating_sub(START_MS) / 60_000;
        [minutes, exact(&slice["requests"]), exact(&slice["denied"])]
    });
    numbers.filter(|[_, requests, _]| *requests > 0).collect()
}

#[test]
fn the_history_of_a_key_has_its_requests_and_denials_in_each_time_slice() {
    let listener = TestListener::open();
    charge(&listener, "192.0.2.2", 1);
    for (minute, requests) in [(0, 1), (1, 3), (3, 2)] {
        listener.at_secs(minute * 60);
        for _ in 0..requests {
            charge(&listener, "192.0.2.1", 1);
        }
    }
    // The rule admits two requests per minute.
    assert_eq!(history(&listener, "5m"), [[0, 1, 0], [1, 3, 1], [3, 2, 0]]);
    assert_eq!(history(&listener, "15m"), history(&listener, "5m"));
    // In a history over an hour or a day, the slices are longer. The first slice begins before the
    // start of the test.
    let of_slices = |over| -> u64 {
        history(&listener, over)
            .iter()
            .map(|[_, requests, _]| requests)
            .sum()
    };
    assert_eq!((of_slices("1h"), of_slices("1d")), (6, 6));
    listener.at_secs(8 * 60);
    assert_eq!(history(&listener, "5m"), [[3, 2, 0]]);
}

#[test]
fn a_history_needs_a_rule_and_its_key() {
    let listener = TestListener::open();
    for (query, status, expected) in [
        ("key=a", 400, "rule=login&key=203.0.113.9"),
        ("rule=s&key=a", 404, "did you mean"),
        ("rule=r&key=a", 400, "key"),
        (
            "rule=r&key=%2F&key=192.0.2.1&over=2h",
            400,
            "5m, 15m, 1h or 1d",
        ),
    ] {
        let answer = listener.ask("GET", &format!("/v1/history?{query}"), "");
        assert_eq!(answer.status, status, "{query}");
        let detail = answer.json()["detail"].to_string();
        assert!(detail.contains(expected), "{query}: {detail}");
    }
    let listener = TestListener::with_limiter(None, |limiter| limiter.with_top(None));
    let answer = listener.ask("GET", "/v1/history?rule=r&key=%2F&key=192.0.2.1", "");
    assert_eq!(answer.status, 409);
}

#[test]
fn wrong_parameters_are_named_with_the_accepted_values() {
    let listener = TestListener::open();
    for (query, status, field, expected) in [
        (
            "by=asked",
            400,
            "by",
            "must be requests, denied or cost, got `asked`",
        ),
        (
            "over=2h",
            400,
            "over",
            "must be 5m, 15m, 1h or 1d, got `2h`",
        ),
        ("n=0", 400, "n", "must be a number from 1 to 1000, got `0`"),
        (
            "n=1001",
            400,
            "n",
            "must be a number from 1 to 1000, got `1001`",
        ),
        (
            "n=-3",
            400,
            "n",
            "must be a number from 1 to 1000, got `-3`",
        ),
        ("n=5&n=6", 400, "n", "is given twice"),
        ("rule=%FF", 400, "rule", "is not UTF-8"),
        ("limit=3", 400, "limit", "expected one of rule, by, over, n"),
        (
            "rule=s",
            404,
            "rule",
            "there is no rule \"s\"; did you mean \"r\"?",
        ),
    ] {
        let answer = listener.ask("GET", &format!("/v1/top?{query}"), "");
        assert_eq!(answer.status, status, "{query}");
        let detail = answer.json()["detail"].to_string();
        let detail = detail.replace("\\\"", "\"");
        assert!(
            detail.contains(expected) && detail.contains(field),
            "{detail}"
        );
    }
    let posted = listener.ask("POST", "/v1/top", "");
    assert_eq!((posted.status, posted.header("allow")), (405, Some("GET")));
}

#[test]
fn without_lists_the_answer_says_how_to_turn_them_on() {
    let listener = TestListener::with_limiter(None, |limiter| limiter.with_top(None));
    charge(&listener, "192.0.2.1", 1);
    let answer = listener.ask("GET", "/v1/top", "");
    assert_eq!(answer.status, 409);
    assert!(answer.json()["detail"].to_string().contains("`top: off`"));
}

#[test]
fn hashed_keys_reveal_no_value() {
    let listener = TestListener::with_limiter(None, |limiter| {
        limiter
            .with_top(Some(TopBounds::default()))
            .with_key_mask(KeyMask::hashed(b"secret"))
    });
    charge(&listener, "192.0.2.1", 1);
    let answer = listener.ask("GET", "/v1/top", "").json();
    let mask = KeyMask::hashed(b"secret");
    let hashed = json!([mask.value("/"), mask.value("192.0.2.1")]);
    let rows = answer["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["key"] == hashed), "{answer}");
    assert!(!answer.to_string().contains("192.0.2.1"));
}

#[test]
fn a_reload_keeps_the_lists_of_rules_that_keep_their_key() {
    let listener = TestListener::open();
    charge(&listener, "192.0.2.1", 1);
    let reload = |rules: &str| {
        std::fs::write(listener.file.path(), rules).unwrap();
        assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    };
    reload(&RULES.replace("2/min", "3/min"));
    assert_eq!(top(&listener, "?rule=r")["total"]["requests"], 1);
    // Counts are kept after their time slice has ended.
    listener.at_secs(60);
    assert_eq!(top(&listener, "?rule=r")["total"]["requests"], 1);
    reload(&RULES.replace("key: [path, ip]", "key: [ip]"));
    for query in ["?rule=r", "?rule=r&over=1d"] {
        let list = top(&listener, query);
        assert_eq!(list["total"]["requests"], 0);
        assert_eq!(list["rows"], json!([]));
    }
    assert_eq!(top(&listener, "")["total"]["requests"], 1);
    charge(&listener, "192.0.2.1", 1);
    assert_eq!(
        top(&listener, "?rule=r")["rows"][0]["key"],
        json!(["192.0.2.1"])
    );
}

#[test]
fn rules_beyond_the_maximum_have_no_list() {
    let rules: String = (0..=MAX_TOP_RULES)
        .map(|number| {
            format!(
                "  - {{name: rule-{number}, key: [ip], when: {{n: '{number}'}}, limits: [1/h]}}\n"
            )
        })
        .collect();
    let rules = Config::parse(&format!("rules:\n{rules}")).unwrap().rules;
    let clock = Clock::manual(Timestamp::from_micros(1_700_000_000_000_000));
    let store = MemoryStore::new(MemoryBounds::default());
    let limiter = ServerLimiter::new(rules, store, clock).with_top(Some(TopBounds::default()));
    let list = |number: usize| {
        let query = TopQuery {
            rule: Some(format!("rule-{number}")),
            by: Default::default(),
            over: Default::default(),
            count: 1,
        };
        limiter.top(&query, &OtherServers::default())
    };
    assert!(list(MAX_TOP_RULES - 1).is_ok());
    assert!(matches!(list(MAX_TOP_RULES), Err(TopError::Unlisted(_))));
}
