//! Tests of recent denials, explanations and key lists.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tidegate_core::{Charge, Cost, Effect};
use tidegate_limiter::KeyMask;

use crate::listener::{KEY, RULES, START_MILLIS, TestListener};

/// Removes the fields `members`, which other tests cover, from `document`.
fn without(mut document: Value, members: &[&str]) -> Value {
    for member in members {
        document.as_object_mut().unwrap().remove(*member);
    }
    document
}

#[test]
fn a_denial_is_listed_with_its_rule_key_limit_and_wait() {
    let listener = TestListener::open();
    assert_eq!(
        listener.ask("GET", "/v1/denials", "").json(),
        json!({"rows": [], "lost": 0})
    );
    assert!(listener.spend() && listener.spend());
    listener.at_secs(10);
    assert!(!listener.spend());
    let list = listener.ask("GET", "/v1/denials", "");
    assert_eq!(list.status, 200);
    let list = list.json();
    assert_eq!(
        (list["rows"].as_array().unwrap().len(), &list["lost"]),
        (1, &json!(0))
    );
    let row = &list["rows"][0];
    assert!(
        row["policy"].as_str().unwrap().starts_with("2/min"),
        "{row}"
    );
    let expected = json!({
        "at_ms": START_MILLIS + 10_000, "rule": "r", "key": ["/a b", "::"], "reason": "limit",
        "retry_after_ms": 20_000, "listener": "http", "mode": "enforce",
        "entries": {"path": "/a b", "ip": "::"},
    });
    assert_eq!(without(row.clone(), &["policy", "at"]), expected);

    let count = |query: &str| {
        let list = listener
            .ask("GET", &format!("/v1/denials?{query}"), "")
            .json();
        list["rows"].as_array().unwrap().len()
    };
    listener.at_secs(20);
    assert!(!listener.spend());
    assert_eq!(count(""), 2);
    assert_eq!(count("rule=r&key=%2Fa%20b&key=::"), 2);
    assert_eq!(count("rule=r&key=%2Fa%20b&key=::1"), 0);
    let hashed = listener.ask("GET", "/v1/denials?key=hash:0123456789abcdef&key=::", "");
    let hint = "`key` takes the value itself, and not its hash";
    assert_eq!(hashed.json()["hint"], hint);
    // If the query contains an address in another form, no denial is found. The hint contains the
    // normalised form.
    for query in [
        "rule=r&key=%2Fa%20b&key=0:0:0:0:0:0:0:0",
        "key=%2Fa%20b&key=0::0",
    ] {
        let list = listener
            .ask("GET", &format!("/v1/denials?{query}"), "")
            .json();
        assert_eq!(list["rows"], json!([]));
        let hint = list["hint"].as_str().unwrap();
        assert!(hint.contains("count this address as `::"), "{hint}");
    }
    assert_eq!(count("since=5s"), 1);
    assert_eq!(count("n=1"), 1);
    assert_eq!(count("rule=all%20of%20it"), 0);
}

#[test]
fn a_block_is_listed_and_so_are_the_denials_of_a_former_rule() {
    let listener = TestListener::open();
    listener.ask("PUT", &format!("/v1/blocks/{KEY}"), r#"{"for": "10s"}"#);
    assert!(!listener.spend());
    let row = listener.ask("GET", "/v1/denials", "").json()["rows"][0].clone();
    assert_eq!(
        (&row["reason"], &row["policy"], &row["retry_after_ms"]),
        (&json!("blocked"), &Value::Null, &json!(10_000))
    );
    let renamed = RULES.replace("name: r\n", "name: s\n");
    std::fs::write(listener.file.path(), renamed).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let of_former = listener.ask("GET", "/v1/denials?rule=r", "").json();
    assert_eq!(of_former["rows"][0]["rule"], "r");
}

#[test]
fn an_explanation_names_the_entry_that_was_probably_meant() {
    let listener = TestListener::open();
    let hint = |entries: &str| {
        let body = format!(r#"{{"entries": {entries}}}"#);
        listener.ask("POST", "/v1/explain", &body).json()["hint"].clone()
    };
    assert_eq!(
        hint(r#"{"pth": "/a", "ip": "::"}"#),
        "no rule uses the entry pth; did you mean path?"
    );
    assert_eq!(hint(r#"{"path": "/a", "unrelated": "x"}"#), Value::Null);
}

#[test]
fn an_explanation_says_that_a_plan_does_not_exist() {
    let listener = TestListener::open();
    let rules = "
plans: {pro: {r: 100/min}, max: {r: 200/min}, one: {s: 300/min}}
rules:
  - {name: r, key: ip, limits: 10/min, plan: tier}
  - {name: s, key: ip, limits: 10/min, plan: tier}
";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    for (tier, hint) in [
        (
            "gold",
            json!("tier names the plan `gold`: rule \"r\" has no such plan; it has max, pro"),
        ),
        ("pro", Value::Null),
        ("one", Value::Null),
    ] {
        let body = format!(r#"{{"entries": {{"ip": "192.0.2.1", "tier": "{tier}"}}}}"#);
        let explained = listener.ask("POST", "/v1/explain", &body).json();
        assert_eq!(explained["hint"], hint);
    }
}

#[test]
fn an_explanation_has_every_rule_and_charges_nothing() {
    let listener = TestListener::open();
    let body = r#"{"entries": {"path": "/a b", "ip": "::"}, "raw": true}"#;
    let explain = || listener.ask("POST", "/v1/explain", body).json();
    let first = explain();
    assert_eq!(
        (&first["allowed"], &first["retry_after_ms"]),
        (&json!(true), &json!(0))
    );
    assert_eq!(first["rules"][0]["limits"][0]["remaining"], 2);
    assert_eq!(listener.limiter.local_store().stats().keys, 0);
    assert!(listener.spend() && listener.spend());

    for _ in 0..3 {
        let explained = explain();
        let rules = explained["rules"].as_array().unwrap();
        assert_eq!(rules.len(), 2);
        assert_eq!(
            without(explained.clone(), &["rules"]),
            json!({
                "allowed": false, "reason": "limit", "retry_after_ms": 30_000, "exactness": "exact",
                "entries": {"path": "/a b", "ip": "::"},
            })
        );
        let denying = without(rules[0].clone(), &["limits"]);
        assert_eq!(
            denying,
            json!({
                "rule": "r", "applies": true, "mode": "enforce", "key": ["/a b", "::"], "cost": 1,
                "allowed": false, "reason": "limit", "retry_after_ms": 30_000,
            })
        );
    }
}

#[test]
fn an_explanation_says_why_a_rule_does_not_apply() {
    let listener = TestListener::open();
    let because = |query: &str, body: &str| {
        let explained = listener.ask("POST", &format!("/v1/explain{query}"), body);
        assert_eq!(explained.status, 200, "{}", explained.body);
        explained.json()
    };
    let explained = because("", r#"{"entries": {"path": "login?x=1"}, "cost": 5}"#);
    assert_eq!(
        explained["rules"][0],
        json!({"rule": "r", "applies": false, "because": "the request has no ip, which is part of the rule's key"})
    );
    let shadow = &explained["rules"][1];
    assert_eq!(
        (&shadow["mode"], &shadow["cost"], &shadow["allowed"]),
        (&json!("shadow"), &json!(5), &json!(true))
    );
    assert_eq!(explained["entries"], json!({"path": "/login"}));
    let explained = because(
        "",
        r#"{"entries": {"path": "login", "ip": "::"}, "raw": true}"#,
    );
    assert_eq!(
        explained["rules"][0]["because"],
        "path is login, but the rule requires /**"
    );
    let only = because("?rule=r", r#"{"entries": {}}"#);
    assert_eq!(only["rules"].as_array().unwrap().len(), 1);
    assert_eq!(
        only["rules"][0]["because"],
        "the request has no path, but the rule requires /**"
    );
}

#[test]
fn an_explanation_names_the_allow_list_and_the_block_and_a_shadow_denial() {
    let listener = TestListener::open();
    let rules = "
allow: [{ip: {cidr: 192.0.2.0/24}}]
rules:
  - {name: r, key: [ip], limits: [5/h], algorithm: fixed_window}
  - {name: trial, key: [ip], limits: [1/h], algorithm: fixed_window, mode: shadow}
";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let explain = |body: &str| listener.ask("POST", "/v1/explain", body).json();
    let allowed = explain(r#"{"entries": {"ip": "192.0.2.7"}}"#);
    assert_eq!(
        (&allowed["allowed"], &allowed["allowed_by"]),
        (&json!(true), &json!("{ip: {cidr: [192.0.2.0/24]}}"))
    );
    assert_eq!(
        allowed["rules"][0]["because"],
        "the request matches the allow list: {ip: {cidr: [192.0.2.0/24]}}"
    );

    let body = r#"{"entries": {"ip": "10.0.0.1"}, "cost": 2}"#;
    let explained = explain(body);
    assert_eq!(explained["allowed"], true);
    let trial = &explained["rules"][1];
    // The cost exceeds the limit itself, so the request is never admitted.
    assert_eq!(
        (
            &trial["allowed"],
            &trial["reason"],
            &trial["retry_after_ms"]
        ),
        (&json!(false), &json!("limit"), &Value::Null)
    );

    listener.ask(
        "PUT",
        "/v1/blocks/r/10.0.0.1",
        r#"{"for": "10s", "reason": "why"}"#,
    );
    let explained = explain(r#"{"entries": {"ip": "10.0.0.1"}}"#);
    assert_eq!(
        (&explained["reason"], &explained["retry_after_ms"]),
        (&json!("blocked"), &json!(10_000))
    );
    let blocked = &explained["rules"][0];
    assert_eq!(
        (
            &blocked["block"]["reason"],
            &blocked["limits"][0]["retry_after_ms"]
        ),
        (&json!("why"), &json!(10_000))
    );
    assert_eq!(explained["rules"][1]["allowed"], true);
}

#[test]
fn keys_are_listed_page_by_page_with_their_state() {
    let listener = TestListener::open();
    let rules = listener.limiter.rules();
    let rule = rules.rule("r").unwrap();
    let mut outcomes = Vec::new();
    for number in 0..25 {
        let key = rule.encode_key(&[&format!("/{number}"), "::"]).unwrap();
        let charge = Charge::new(&key, rule.limits(), Cost::ONE).unwrap();
        let store = listener.limiter.local_store();
        store.check(
            &[charge],
            listener.limiter.now(),
            Effect::Charge,
            &mut outcomes,
        );
    }
    listener.ask("PUT", "/v1/blocks/r/%2F7/::", r#"{"for": "10s"}"#);
    let (mut listed, mut after) = (BTreeSet::new(), String::new());
    loop {
        let page = listener.ask("GET", &format!("/v1/keys/r?n=10{after}"), "");
        assert_eq!(page.status, 200, "{}", page.body);
        let page = page.json();
        assert_eq!(
            (&page["rule"], &page["mode"]),
            (&json!("r"), &json!("enforce"))
        );
        let rows = page["keys"].as_array().unwrap();
        assert!(rows.len() <= 10, "{page}");
        for row in rows {
            let limit = &row["limits"][0];
            assert_eq!(
                (&limit["remaining"], &limit["limit"]),
                (&json!(1), &json!(2))
            );
            let is_blocked = row["key"][0] == "/7";
            assert_eq!(row["block"].is_object(), is_blocked, "{row}");
            let wait = if is_blocked { 10_000 } else { 0 };
            assert_eq!(limit["retry_after_ms"], wait);
            assert!(
                listed.insert(row["key"].to_string()),
                "{row} is listed twice"
            );
        }
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(listed.len(), 25);
    // A rule without key entries has a single key, whose URL path contains no values.
    let only = listener.ask("GET", "/v1/keys/all%20of%20it", "").json();
    assert_eq!((&only["key"], only["keys"].is_null()), (&json!([]), true));
    let listed = listener.ask("GET", "/v1/keys/all%20of%20it?n=1", "").json();
    assert_eq!(listed["keys"], json!([]));
}

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "a table of requests and their problems"
)]
fn wrong_parameters_are_named_with_what_is_accepted() {
    let listener = TestListener::open();
    let refused = |method: &str, path: &str, body: &str| {
        let refused = listener.ask(method, path, body);
        assert!(
            (400..500).contains(&refused.status),
            "{path}: {}",
            refused.status
        );
        (refused.status, refused.problem())
    };
    let entries = r#"{"entries": {"ip": "::"}}"#;
    for (method, path, body, status, problem) in [
        (
            "GET",
            "/v1/denials?rule=q",
            "",
            404,
            "there is no rule \"q\"; did you mean \"r\"?",
        ),
        (
            "GET",
            "/v1/denials?n=0",
            "",
            400,
            "n: must be a number from 1 to 1000, got `0`",
        ),
        (
            "GET",
            "/v1/denials?n=1001",
            "",
            400,
            "n: must be a number from 1 to 1000, got `1001`",
        ),
        (
            "GET",
            "/v1/denials?n=1e2",
            "",
            400,
            "n: must be a number from 1 to 1000, got `1e2`; write 100",
        ),
        (
            "GET",
            "/v1/denials?n=1&n=2",
            "",
            400,
            "n: is given twice; give it once",
        ),
        ("GET", "/v1/denials?since=soon", "", 400, "since: "),
        (
            "GET",
            "/v1/denials?sinc=1h",
            "",
            400,
            "sinc: is not a parameter; did you mean `since`?",
        ),
        (
            "GET",
            "/v1/denials?rule=%FF",
            "",
            400,
            "rule: is not UTF-8 after percent-decoding",
        ),
        (
            "GET",
            "/v1/denials?rule=r&key=a",
            "",
            400,
            "key: rule \"r\" has a key of 2 values (path, ip), got 1; repeat `key` for each value",
        ),
        ("POST", "/v1/denials", "", 405, "this path accepts only GET"),
        ("GET", "/v1/explain", "", 405, "this path accepts only POST"),
        (
            "POST",
            "/v1/explain",
            "",
            400,
            "body: is empty; expected an object",
        ),
        ("POST", "/v1/explain", "{}", 400, "entries: is missing"),
        (
            "POST",
            "/v1/explain",
            r#"{"entries": {}, "cots": 1}"#,
            400,
            "cots: unknown field; did you mean `cost`?",
        ),
        (
            "POST",
            "/v1/explain",
            r#"{"entries": {}, "cost": 0}"#,
            400,
            "cost: must be an integer from 1 to 999999999999999, got 0",
        ),
        (
            "POST",
            "/v1/explain",
            r#"{"entries": {"ip": "ten"}}"#,
            400,
            "entries.ip: is not an IP address",
        ),
        (
            "POST",
            "/v1/explain?rule=q",
            entries,
            404,
            "there is no rule \"q\"",
        ),
        (
            "POST",
            "/v1/explain?n=x",
            entries,
            400,
            "n: must be a number from 1 to 1000",
        ),
        ("GET", "/v1/keys/q?n=1", "", 404, "there is no rule \"q\""),
        ("GET", "/v1/keys/q", "", 404, "there is no rule \"q\""),
        (
            "GET",
            "/v1/keys/r?n=1001",
            "",
            400,
            "n: must be a number from 1 to 1000",
        ),
        (
            "GET",
            "/v1/keys/r?after=7",
            "",
            400,
            "after: is not a `next` value of this list",
        ),
        (
            "GET",
            "/v1/keys/r?before=7",
            "",
            400,
            "before: is not a parameter; expected one of after, n",
        ),
    ] {
        let (answered, detail) = refused(method, path, body);
        assert!(
            answered == status && detail.starts_with(problem),
            "{path} {body}: {answered} {detail}"
        );
    }
}

#[test]
fn a_long_list_of_rules_that_do_not_apply_is_cut() {
    let listener = TestListener::open();
    let rules: String = (0..1_200)
        .map(|at| format!("  - {{name: r{at}, when: {{path: /{at}}}, limits: [1/s]}}\n"))
        .collect();
    std::fs::write(listener.file.path(), format!("rules:\n{rules}")).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let explain = |path: &str| {
        let explained = listener
            .ask("POST", path, r#"{"entries": {"path": "/1150"}}"#)
            .json();
        let rows = explained["rules"].as_array().unwrap().clone();
        let applied = rows.iter().find(|row| row["applies"] == true);
        (
            rows.len(),
            explained["omitted"].clone(),
            applied.unwrap()["rule"].clone(),
        )
    };
    assert_eq!(explain("/v1/explain"), (1_001, json!(199), json!("r1150")));
    assert_eq!(
        explain("/v1/explain?n=1"),
        (2, json!(1_198), json!("r1150"))
    );
}

#[test]
fn hashed_lists_and_explanations_reveal_no_value_of_a_blocked_key() {
    let mask = KeyMask::hashed(b"secret");
    let adjusted = mask.clone();
    let listener = TestListener::with_limiter(None, |limiter| limiter.with_key_mask(adjusted));
    assert!(listener.spend());
    let blocked = listener.ask("PUT", &format!("/v1/blocks/{KEY}"), r#"{"reason": "why"}"#);
    assert_eq!(blocked.status, 200);
    assert!(!listener.spend());
    let body = r#"{"entries": {"path": "/a b", "ip": "::"}}"#;
    let explained = listener.ask("POST", "/v1/explain?rule=r", body).json();
    let rows = [
        listener.ask("GET", "/v1/keys/r", "").json()["keys"][0].clone(),
        explained["rules"][0].clone(),
    ];
    for row in rows {
        assert_eq!(row["key"], json!([mask.value("/a b"), mask.value("::")]));
        assert_eq!(row["block"]["reason"], "why");
        assert!(!row.to_string().contains("/a b"), "{row}");
        assert!(!row.to_string().contains("::"), "{row}");
    }
    let denial = &listener.ask("GET", "/v1/denials", "").json()["rows"][0];
    assert_eq!(denial["key"], json!([mask.value("/a b"), mask.value("::")]));
}

#[test]
fn a_rule_without_a_key_takes_no_values() {
    let listener = TestListener::open();
    let rules = "rules: [{name: all, limits: 10/min}]\n";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let none = "key: rule \"all\" has no key (one count for all requests), so it takes no values";
    for (method, path, body, expected) in [
        ("GET", "/v1/keys/all/x", "", ", got 1"),
        (
            "PUT",
            "/v1/overrides/all/x",
            r#"{"limits": "2x"}"#,
            ", got 1",
        ),
        (
            "PUT",
            "/v1/overrides/all/x*",
            r#"{"limits": "2x"}"#,
            ", but the pattern has 1",
        ),
        (
            "GET",
            "/v1/denials?rule=all&key=a&key=b",
            "",
            ", got 2; omit `key`",
        ),
    ] {
        let answer = listener.ask(method, path, body);
        assert_eq!(answer.status, 400, "{path}: {answer:?}");
        assert_eq!(answer.problem(), format!("{none}{expected}"), "{path}");
    }
}
