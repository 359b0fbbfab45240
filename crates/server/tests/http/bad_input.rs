//! Tests that invalid input is rejected with an error that names the field, and that the connection
//! can still be used afterwards.

use std::sync::Mutex;

use proptest::prelude::*;
use serde_json::{Value, json};
use tidegate_core::LimitSpec;

use crate::{client::Client, listener::TestListener};

const RULES: &str = "rules: [{name: all, key: [ip], limits: [1000/s]}]";

fn refused(listener: &TestListener, path: &str, body: &str) -> String {
    let answer = listener.post(path, body);
    assert_eq!(answer.status, 400, "{body}: {answer:?}");
    answer.problem()
}

#[test]
fn invalid_json_is_rejected_with_its_position() {
    let listener = TestListener::open(RULES);
    for path in ["/v1/check", "/v1/peek", "/v1/throttle"] {
        assert_eq!(
            refused(&listener, path, ""),
            "body: is empty; expected an object"
        );
        let problem = refused(&listener, path, "{\"key\":\n  nul}");
        assert_eq!(
            problem,
            "body: is not JSON: expected ident at line 2 column 6"
        );
        assert!(refused(&listener, path, "{} {}").contains("trailing characters"));
        assert!(refused(&listener, path, &"[".repeat(10_000)).contains("recursion limit"));
        assert_eq!(
            refused(&listener, path, "[1]"),
            "body: expected an object, got a list"
        );
    }
    let mut client = listener.connect();
    let answer = client.ask("POST", "/v1/check", &[], b"{\"\xff\": 1}");
    assert_eq!(answer.status, 400);
    assert!(answer.problem().contains("invalid unicode"), "{answer:?}");
}

/// Invalid bodies, each with the expected error.
const BAD_CHECKS: &[(&str, &str)] = &[
    (
        "{}",
        "entries: is missing; it describes the request, such as {\"ip\": \"203.0.113.9\"}",
    ),
    (
        r#"{"entries": []}"#,
        "entries: expected an object of names and strings, got a list",
    ),
    (
        r#"{"entries": {"ip": 9}}"#,
        "entries.ip: expected a string, got 9",
    ),
    (
        r#"{"entries": {"ip": "a", "ip": "b"}}"#,
        "entries.ip: is given twice; give every entry once",
    ),
    (
        r#"{"entries": {}, "costs": 1}"#,
        "costs: unknown field; did you mean `cost`?",
    ),
    (
        r#"{"entries": {}, "cost": 0}"#,
        "cost: must be an integer from 1 to 999999999999999, got 0",
    ),
    (
        r#"{"entries": {}, "cost": -1}"#,
        "cost: must be an integer from 1 to 999999999999999, got -1",
    ),
    (
        r#"{"entries": {}, "cost": 1.5}"#,
        "cost: must be an integer from 1 to 999999999999999, got 1.5",
    ),
    (
        r#"{"entries": {}, "cost": 1e3}"#,
        "cost: must be an integer from 1 to 999999999999999 without a decimal point or an exponent; write 1000",
    ),
    (
        r#"{"entries": {}, "cost": 2.0}"#,
        "cost: must be an integer from 1 to 999999999999999 without a decimal point or an exponent; write 2",
    ),
    (
        r#"{"entries": {}, "cost": 0.0}"#,
        "cost: must be an integer from 1 to 999999999999999, got 0",
    ),
    (
        r#"{"entries": {}, "cost": 1000000000000000}"#,
        "cost: must be an integer from 1 to 999999999999999, got 1000000000000000",
    ),
    (
        r#"{"entries": {}, "cost": -1e300}"#,
        "cost: must be an integer from 1 to 999999999999999, got -1e300",
    ),
    (
        r#"{"entries": {}, "cost": "1"}"#,
        "cost: must be an integer from 1 to 999999999999999, got \"1\"; write 1 without quotes",
    ),
    (
        r#"{"entries": {}, "cost": "1_000"}"#,
        "cost: must be an integer from 1 to 999999999999999, got \"1_000\"; write 1000 without quotes",
    ),
    (
        r#"{"entries": {}, "cost": "0"}"#,
        "cost: must be an integer from 1 to 999999999999999, got \"0\"",
    ),
    (
        r#"{"entries": {}, "cost": 99999999999999999999}"#,
        "cost: must be an integer from 1 to 999999999999999, got 1e20",
    ),
    (
        r#"{"entries": {}, "entries": {}}"#,
        "entries: is given twice; give it once",
    ),
];

#[test]
fn mistakes_in_a_check_are_reported() {
    let listener = TestListener::open(RULES);
    let entry = |name: &str, value: &str| format!(r#"{{"entries": {{"{name}": "{value}"}}}}"#);
    let many: Vec<String> = (0..5_000).map(|n| format!("\"e{n}\": \"\"")).collect();
    for (body, expected) in BAD_CHECKS {
        assert_eq!(refused(&listener, "/v1/check", body), *expected, "{body}");
    }
    for (body, expected) in [
        (
            &entry("", "x"),
            "entries: an entry's name must not be empty",
        ),
        (
            &entry("ip", ""),
            "entries.ip: must not be empty; this entry is part of the key of rule \"all\"",
        ),
        (
            &format!("{{\"entries\": {{{}}}}}", many.join(",")),
            "entries: 5000 entries exceed the maximum of 64",
        ),
    ] {
        assert_eq!(refused(&listener, "/v1/check", body), expected, "{body}");
    }
    let long = entry("ip", &"x".repeat(2_000)).replace("}}", "}, \"raw\": true}");
    let long = refused(&listener, "/v1/check", &long);
    assert!(
        long.starts_with("entries.ip: makes a key of ")
            && long.ends_with("; this entry is part of the key of rule \"all\""),
        "{long}"
    );
    let longer = refused(&listener, "/v1/check", &entry("ip", &"x".repeat(9_000)));
    assert_eq!(longer, "entries.ip: 9000 bytes exceed the maximum of 8192");
}

/// Invalid fields beside a key, each with the expected error.
const BAD_THROTTLES: &[(&str, &str)] = &[
    (
        r#""algorithm": "gcr", "rate": "1/s""#,
        "algorithm: expected one of gcra, token_bucket, leaky_bucket, fixed_window, sliding_window_log, sliding_window_counter, concurrency, got \"gcr\"",
    ),
    (r#""algorithm": "gcra""#, "rate: is missing"),
    (
        r#""algorithm": "gcra", "rate": "0/s""#,
        "rate: a rate must be at least 1, got 0; to deny everything, set `algorithm` to fixed_window, `limit` to 0 and `window` to 1min",
    ),
    (
        r#""algorithm": "gcra", "rate": "5 per minute""#,
        "rate: expected a rate such as 20/min or 5/10s, got \"5 per minute\"; a slash separates the number of \
         requests and the period: write 5/min",
    ),
    (
        r#""algorithm": "gcra", "rate": 5"#,
        "rate: expected a rate such as \"20/min\", got 5",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "bursts": 5"#,
        "bursts: unknown field; did you mean `burst`?",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "capacity": 5"#,
        "capacity: is not a field of gcra, which takes rate, burst",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "burst": 1000000000000000"#,
        "burst: 1000000000000000 exceeds the maximum of 999999999999999",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "cost": 0"#,
        "cost: must be an integer from 1 to 999999999999999, got 0",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "peek": 1"#,
        "peek: expected true or false, got 1",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "soft": "x%""#,
        "soft: expected a percentage such as \"10%\", got \"x%\"",
    ),
    (
        r#""algorithm": "gcra", "rate": "1/s", "soft": 2000"#,
        "soft: 2000% exceeds the maximum of 1000%",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "window": "60""#,
        "window: expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"60\"",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "anchor": "monday""#,
        "anchor: expected epoch, first_request, or {\"calendar\": \"month\", \"zone\": \"UTC\"}, got \"monday\"",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "anchor": {}"#,
        "anchor: needs `calendar`: day, week or month",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "anchor": {"calendar": "day", "zone": "Mars"}"#,
        "anchor: zone: \"Mars\" is not an IANA time zone such as UTC or Europe/Berlin",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "anchor": {"calendar": "year"}"#,
        "anchor.calendar: expected one of day, week, month, got \"year\"",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "anchor": {"calendar": "day", "zones": "UTC"}"#,
        "anchor.zones: unknown field; did you mean `zone`?",
    ),
    (
        r#""algorithm": "fixed_window", "limit": 5, "anchor": {"calendar": "day", "calendar": "month"}"#,
        "anchor.calendar: is given twice; give it once",
    ),
    (
        r#""limits": [{"algorithm": "fixed_window", "limit": 5, "anchor": {"calendar": "day", "zone": "UTC", "zone": "UTC"}}]"#,
        "limits[0].anchor.zone: is given twice; give it once",
    ),
    (
        r#""limits": "1/s""#,
        "limits: expected a list of limits such as [\"1/s\", \"20/min\"], got \"1/s\"",
    ),
    (r#""limits": []"#, "limits: must name at least one limit"),
    (
        r#""limits": ["1/s", 5]"#,
        "limits[1]: expected a rate such as \"20/min\" or the fields of a limit, got 5",
    ),
    (
        r#""limits": ["1/s", {"algorithm": "gcra", "rat": "1/s"}]"#,
        "limits[1].rat: unknown field; did you mean `rate`?",
    ),
    (
        r#""limits": ["1/s burst 5"], "algorithm": "fixed_window""#,
        "limits[0]: `burst` is not a field of fixed_window; set `algorithm` to gcra, `rate` to 1/s and `burst` to 5",
    ),
    (
        r#""limits": ["1/s", {"algorithm": "gcra"}]"#,
        "limits[1].rate: is missing",
    ),
    (
        r#""limits": ["1/s"], "burst": 5"#,
        "burst: is outside `limits`; move this field into one of the limits",
    ),
];

#[test]
fn mistakes_in_a_throttle_are_reported() {
    let listener = TestListener::open(RULES);
    let limits: Vec<&str> = vec!["\"1/s\""; 17];
    let check = |rest: &str, expected: &str| {
        let body = format!("{{\"key\": \"k\", {rest}}}");
        assert_eq!(
            refused(&listener, "/v1/throttle", &body),
            expected,
            "{rest}"
        );
    };
    for (rest, expected) in BAD_THROTTLES {
        check(rest, expected);
    }
    let limits = format!("\"limits\": [{}]", limits.join(","));
    check(&limits, "limits: 17 limits exceed the maximum of 16");
}

#[test]
fn keys_are_bounded() {
    let listener = TestListener::open(RULES);
    let limit = r#""algorithm": "gcra", "rate": "1/s""#;
    let with_key = |key: &str| format!("{{\"key\": {key}, {limit}}}");
    assert_eq!(
        refused(&listener, "/v1/throttle", &format!("{{{limit}}}")),
        "key: is missing; give the key to count by"
    );
    assert_eq!(
        refused(&listener, "/v1/throttle", r#"{"key": "k"}"#),
        "limits: is missing; give limits such as [\"20/min\"], or an algorithm with its parameters"
    );
    assert_eq!(
        refused(&listener, "/v1/throttle", &with_key("\"\"")),
        "key: must not be empty"
    );
    assert_eq!(
        refused(&listener, "/v1/throttle", &with_key("null")),
        "key: expected a string, the key to count by, got null"
    );
    let key = |length: usize| with_key(&format!("\"{}\"", "k".repeat(length)));
    assert_eq!(
        refused(&listener, "/v1/throttle", &key(1_024)),
        "key: 1024 bytes exceeds the maximum of 1023"
    );
    assert_eq!(listener.post("/v1/throttle", &key(1_023)).status, 200);
}

#[test]
fn every_mistake_is_listed() {
    let listener = TestListener::open(RULES);
    let body = r#"{"algorithm": "gcra", "rate": "x", "bursts": 1, "cost": 0, "peek": "no"}"#;
    let document = listener.post("/v1/throttle", body).json();
    let mistakes: Vec<&str> = document["mistakes"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let fields: Vec<&str> = mistakes
        .iter()
        .filter_map(|mistake| mistake.split(':').next())
        .collect();
    assert_eq!(fields, ["rate", "bursts", "cost", "peek", "key"]);
    assert_eq!(
        (&document["field"], &document["title"]),
        (&json!("rate"), &json!("Bad Request"))
    );
}

#[test]
fn wrong_methods_and_paths_list_the_right_ones() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect();
    for path in ["/v1/check", "/v1/peek", "/v1/throttle"] {
        let answer = client.ask("GET", path, &[], b"");
        assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
        assert_eq!(answer.problem(), "this path accepts only POST");
    }
    for path in ["/", "/v1/chek", "/v1/check/", "/healthz", "/%76%31/check"] {
        let answer = client.ask("POST", path, &[], b"{}");
        assert_eq!(answer.status, 404, "{path}");
        assert!(answer.problem().contains("/v1/throttle"));
    }
}

#[test]
fn rejected_requests_are_counted_and_denials_are_not() {
    let listener = TestListener::open(RULES);
    refused(&listener, "/v1/check", "{}");
    listener.post("/v1/throttle", r#"{"key": "k", "limits": ["1/h"]}"#);
    listener.post("/v1/throttle", r#"{"key": "k", "limits": ["1/h"]}"#);
    let metrics = listener.limiter.exposition();
    for line in [
        "tidegate_bad_requests_total{listener=\"http\"} 1",
        "tidegate_decisions_total{listener=\"http\",outcome=\"allowed\"} 1",
        "tidegate_decisions_total{listener=\"http\",outcome=\"limit\"} 1",
    ] {
        assert!(
            metrics.lines().any(|found| found == line),
            "{line}: {metrics}"
        );
    }
}

/// Returns bodies that are almost valid, and arbitrary bytes.
fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let others = ["key", "cost", "peek", "limits", "entries", "calendar", "x"];
    let name = prop::sample::select([&others[..], &LimitSpec::FIELDS].concat());
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0_u64..20).prop_map(Value::from),
        "\\PC{0,20}".prop_map(Value::from),
        "[0-9]{1,20}/?[0-9]{0,3}(s|min|h|d|us|)".prop_map(Value::from),
        prop::sample::select(vec![
            "gcra",
            "token_bucket",
            "leaky_bucket",
            "fixed_window",
            "sliding_window_log",
            "sliding_window_counter",
            "1/s",
            "20/min",
            "1d",
            "10%",
            "interval",
            "epoch",
            "first_request",
            "month",
            "UTC",
        ])
        .prop_map(Value::from),
    ];
    let tree = leaf.prop_recursive(3, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name.clone(), inner), 0..8).prop_map(|members| members
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    });
    let json = tree.prop_map(|value| value.to_string().into_bytes());
    let cut = (json.clone(), any::<prop::sample::Index>()).prop_map(|(mut body, at)| {
        body.truncate(at.index(body.len() + 1));
        body
    });
    prop_oneof![4 => json, 1 => cut, 1 => prop::collection::vec(any::<u8>(), 0..64)]
}

#[test]
fn no_body_causes_a_server_error() {
    let listener = TestListener::open(RULES);
    let client: Mutex<Client> = Mutex::new(listener.connect());
    let config = ProptestConfig::with_cases(2_000);
    proptest!(config, |(path in prop::sample::select(vec!["/v1/check", "/v1/peek", "/v1/throttle"]), body in bodies())| {
        // All cases share one connection. If a case breaks the connection, the next case fails.
        let answer = client.lock().unwrap().ask("POST", path, &[], &body);
        prop_assert!(matches!(answer.status, 200 | 400 | 429), "{answer:?}");
        if answer.status == 400 {
            prop_assert!(!answer.problem().is_empty());
        } else {
            prop_assert_eq!(&answer.json()["allowed"], &Value::from(answer.status == 200));
        }
    });
}
