//! Tests of overrides.

use serde_json::{Value, json};
use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_envoy::{File, RateLimitService, read};

use crate::listener::{KEY, RULES, TestListener};

fn path() -> String {
    format!("/v1/overrides/{KEY}")
}

#[test]
fn an_override_is_set_listed_shown_and_removed() {
    let listener = TestListener::open();
    let body = r#"{"limits": ["2/min", "5/h"], "for": "2h", "reason": "launch"}"#;
    let put = listener.ask("PUT", &path(), body);
    assert_eq!(put.status, 200, "{put:?}");
    let mut answer = put.json();
    let hint = answer.as_object_mut().unwrap().remove("hint").unwrap();
    assert!(
        hint.as_str().unwrap().contains("store.memory.snapshot"),
        "{hint}"
    );
    let expected = json!({
        "rule": "r", "key": ["/a b", "::"], "is_pattern": false, "limits": ["2/min", "5/h"],
        "reason": "launch", "until": "2023-11-15T00:13:00Z", "until_ms": 1_700_007_180_000_u64,
        "left_ms": 7_200_000, "persistent": false,
    });
    assert_eq!(answer, expected);
    assert_eq!(listener.ask("GET", &path(), "").json(), expected);
    let list = listener.ask("GET", "/v1/overrides", "").json();
    assert_eq!(
        list,
        json!({"overrides": [expected], "count": 1, "next": null})
    );

    // All endpoints return the override's limits for this key.
    let key = listener.ask("GET", &format!("/v1/keys/{KEY}"), "").json();
    let policies = |document: &Value| {
        let limits = document["limits"].as_array().unwrap().iter();
        limits
            .map(|limit| limit["policy"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(policies(&key), ["2/min", "5/h"]);
    assert_eq!(key["override"]["reason"], "launch");

    // A new override replaces the old one.
    let put = listener.ask("PUT", &path(), r#"{"limits": "3x"}"#).json();
    assert_eq!(
        (&put["factor"], &put["until"]),
        (&json!("3x"), &Value::Null)
    );
    assert_eq!(put["replaced"]["limits"], json!(["2/min", "5/h"]));

    let removed = listener.ask("DELETE", &path(), "");
    assert_eq!(
        removed.json(),
        json!({"rule": "r", "key": ["/a b", "::"], "removed": true})
    );
    for method in ["GET", "DELETE"] {
        let answer = listener.ask(method, &path(), "");
        assert_eq!(answer.status, 404);
        assert!(
            answer.problem().contains("this key has no override"),
            "{answer:?}"
        );
    }
}

#[test]
fn a_limit_that_is_not_a_string_is_rejected_with_its_position() {
    let listener = TestListener::open();
    for (body, field, got) in [
        (r#"{"limits": [7]}"#, "limits[0]", "7"),
        (
            r#"{"limits": ["50/d", {"limit": 5}]}"#,
            "limits[1]",
            "an object",
        ),
        (r#"{"limits": {"limit": 5}}"#, "limits", "an object"),
    ] {
        let answer = listener.ask("PUT", &path(), body);
        assert_eq!(answer.status, 400, "{body}");
        let expected = format!(
            "{field}: expected a string, got {got}; give `limits` as a limit such as \"200/min\" or a factor such \
             as \"2x\", or as a list of limits such as [\"10/s\", \"200/min\"]"
        );
        assert_eq!(answer.problem(), expected, "{body}");
    }
}

/// The limits of an override replace all limits of the rule, not only those with the same window.
#[test]
fn an_override_with_fewer_limits_than_its_rule_says_so() {
    let listener = TestListener::open();
    let hint = |body| {
        let put = listener.ask("PUT", &path(), body).json();
        put["hint"].as_str().unwrap().to_owned()
    };
    let expected = "this override replaces all 2 limits of the rule (2/min, 100/h) with \
                    5/h; list every limit that must stay; this override is lost";
    let fewer = hint(r#"{"limits": ["5/h"]}"#);
    assert!(fewer.starts_with(expected), "{fewer}");
    for body in [r#"{"limits": ["2/min", "5/h"]}"#, r#"{"limits": "2x"}"#] {
        let hint = hint(body);
        assert!(hint.starts_with("this override is lost"), "{hint}");
    }
}

/// An override that has ended may still be stored.
#[test]
fn an_override_that_has_ended_is_not_removed() {
    let listener = TestListener::open();
    let body = r#"{"limits": "2x", "for": "10s"}"#;
    assert_eq!(listener.ask("PUT", &path(), body).status, 200);
    assert_eq!(listener.ask("DELETE", &path(), "").status, 200);
    assert_eq!(listener.ask("PUT", &path(), body).status, 200);
    listener.at_secs(10);
    assert_eq!(listener.ask("DELETE", &path(), "").status, 404);
}

#[test]
fn a_pattern_that_matches_no_address_is_refused() {
    let listener = TestListener::open();
    let rules = "rules: [{name: login, key: ip, limits: 5/h}]";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let put = |pattern: &str, body: &str| {
        let pattern = pattern.replace('/', "%2F");
        listener.ask("PUT", &format!("/v1/overrides/login/{pattern}"), body)
    };
    let wrong = ["foo*", "300.*", "1.2.3.4.*", "203.0.*/16", "2001:DB8:1:*"];
    for pattern in wrong {
        let refused = put(pattern, r#"{"limits": "2x"}"#).problem();
        let expected = format!("key: `{pattern}` matches no address: addresses are written like");
        assert!(refused.starts_with(&expected), "{refused}");
        let raw = put(pattern, r#"{"limits": "2x", "raw": true}"#);
        assert_eq!(raw.status, 200, "{pattern}");
    }
    for pattern in [
        "*",
        "203.*",
        "203.0.113.*",
        "203.0.1*",
        "2001:db8:*",
        // The address 2001:db8:0:0:1:: matches.
        "2001:db8:0:0:*",
        "*.9",
        "*::",
    ] {
        let set = put(pattern, r#"{"limits": "2x"}"#);
        assert_eq!(set.status, 200, "{pattern}");
    }
}

/// An override replaces the whole limit of its rule, with the burst or the capacity.
#[test]
fn an_override_without_the_burst_of_its_rule_says_so() {
    let listener = TestListener::open();
    let rules = "
rules:
  - {name: burst, key: user, limits: [{algorithm: gcra, rate: 5/s, burst: 9}]}
  - {name: bucket, key: user, limits: [1/h capacity 10]}
  - {name: two, key: user, algorithm: gcra, limits: [5/s burst 9, 100/h]}
";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let lost = "this override is lost when the server restarts";
    let burst = "`20/s` does not keep the burst of the rule's limit `5/s burst 9`; to keep it, \
                 write `20/s burst 9`; this override is lost";
    let capacity = "`2/h` does not keep the capacity of the rule's limit `1/h capacity 10`; to \
                    keep it, write `2/h capacity 10`; this override is lost";
    for (rule, limit, expected) in [
        ("burst", json!("20/s"), burst),
        ("burst", json!("20/s burst 1"), lost),
        ("bucket", json!("2/h"), capacity),
        ("bucket", json!("2/h capacity 2"), lost),
        ("bucket", json!("2x"), lost),
        // Only the first limit of the rule has a burst.
        ("two", json!(["20/s", "200/h"]), burst),
        ("two", json!(["20/s burst 9", "200/h"]), lost),
    ] {
        let body = json!({ "limits": limit }).to_string();
        let path = format!("/v1/overrides/{rule}/u");
        let put = listener.ask("PUT", &path, &body).json();
        let hint = put["hint"].as_str().unwrap();
        assert!(hint.starts_with(expected), "{limit}: {hint}");
    }
}

/// The request has no plan, so a factor does not multiply the plan that an override selected.
#[test]
fn a_factor_that_replaces_a_plan_says_what_it_multiplies() {
    let listener = TestListener::open();
    let rules = "
plans: {pro: {r: 100/min}}
rules: [{name: r, key: [path, ip], limits: 10/min, plan: tier}]
";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let hint = |path: &str, body: &str| {
        let put = listener.ask("PUT", path, body).json();
        put["hint"].as_str().unwrap().to_owned()
    };
    let (key, pattern) = (path(), "/v1/overrides/r/%2Fa*/*");
    let lost = "this override is lost when the server restarts";
    let expected = "an override selected plan pro until now; the factor does not multiply its \
                    limits (100/min), but those of the plan that a request names, or else those \
                    of the rule (10/min); to raise the limits of plan pro, list limits instead of \
                    a factor; this override is lost";
    for (path, body, expected) in [
        (&*key, r#"{"limits": "2x"}"#, lost),
        (&key, r#"{"plan": "pro"}"#, lost),
        (&key, r#"{"limits": "200/min"}"#, lost),
        (&key, r#"{"plan": "pro"}"#, lost),
        (&key, r#"{"limits": "2x"}"#, expected),
        (pattern, r#"{"plan": "pro"}"#, lost),
        (pattern, r#"{"limits": "2x"}"#, expected),
        (pattern, r#"{"plan": "pro"}"#, lost),
    ] {
        let hint = hint(path, body);
        assert!(hint.starts_with(expected), "{path} {body}: {hint}");
    }
    // The plan of a shorter pattern applied to the keys of a longer pattern.
    let longer = "/v1/overrides/r/%2Fa%20*/*";
    let covered = hint(longer, r#"{"limits": "2x"}"#);
    assert!(covered.starts_with(expected), "{covered}");
    assert_eq!(listener.ask("DELETE", longer, "").status, 200);
    let other = hint("/v1/overrides/r/%2Fb*/*", r#"{"limits": "2x"}"#);
    assert!(other.starts_with(lost), "{other}");
    // The plan of the pattern applied to the key.
    assert_eq!(listener.ask("DELETE", &key, "").status, 200);
    let hint = hint(&key, r#"{"limits": "3x"}"#);
    assert!(hint.starts_with(expected), "{hint}");
    let entries = json!({"path": "/a b", "ip": "::", "tier": "pro"});
    let body = json!({"entries": entries}).to_string();
    let explained = listener.ask("POST", "/v1/explain", &body).json();
    let rule = &explained["rules"][0];
    assert_eq!(rule["limits"][0]["policy"], "300/min", "{explained}");
    assert_eq!(rule["plan"], "pro");
    assert_eq!(rule["override"]["factor"], "3x");
}

#[test]
fn the_limits_of_an_override_are_enforced_and_explained() {
    let listener = TestListener::open();
    let spent = std::iter::from_fn(|| listener.spend().then_some(()))
        .take(100)
        .count();
    let put = listener.ask("PUT", &path(), r#"{"limits": "2x"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    let more = std::iter::from_fn(|| listener.spend().then_some(()))
        .take(100)
        .count();
    assert_eq!(more, spent, "a factor of 2 adds the limit once more");
    assert_eq!(listener.ask("DELETE", &path(), "").status, 200);
    assert!(
        !listener.spend(),
        "what was spent under the override stays spent"
    );
}

#[test]
fn a_pattern_applies_to_all_keys_that_match_it() {
    let listener = TestListener::open();
    let pattern = "/v1/overrides/r/%2Fa*/*";
    let put = listener.ask("PUT", pattern, r#"{"limits": "7/min"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    assert_eq!(put.json()["is_pattern"], true);
    let key = listener.ask("GET", &format!("/v1/keys/{KEY}"), "").json();
    assert_eq!(key["limits"][0]["policy"], "7/min");
    assert_eq!(key["override"]["pattern"], json!(["/a*", "*"]));
    let own = listener.ask("GET", &path(), "");
    assert_eq!(own.status, 404);
    let expected =
        "this key has no override of its own; the override of the pattern `/a* *` applies to it";
    assert_eq!(own.problem(), expected);
}

#[test]
fn the_list_is_paged_and_searched() {
    let listener = TestListener::open();
    for number in 0..25 {
        let path = format!("/v1/overrides/r/%2Fc{number:02}/::");
        let body = format!(r#"{{"limits": "7/min", "reason": "ticket {number}"}}"#);
        assert_eq!(listener.ask("PUT", &path, &body).status, 200);
    }
    let (mut keys, mut after) = (Vec::new(), String::new());
    loop {
        let page = listener
            .ask("GET", &format!("/v1/overrides?n=10{after}"), "")
            .json();
        assert_eq!(page["count"], 25);
        let found = page["overrides"].as_array().unwrap().iter();
        keys.extend(found.map(|found| found["key"][0].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    let expected: Vec<String> = (0..25).map(|number| format!("/c{number:02}")).collect();
    assert_eq!(keys, expected);
    for (search, count) in [("%2Fc07", 1), ("ticket%202", 6), ("nothing", 0)] {
        let page = listener.ask("GET", &format!("/v1/overrides?rule=r&search={search}"), "");
        let page = page.json();
        assert_eq!(
            page["overrides"].as_array().unwrap().len(),
            count,
            "{search}: {page}"
        );
    }
    let wrong = listener.ask("GET", "/v1/overrides?after=x", "");
    assert_eq!(
        (wrong.status, wrong.problem().starts_with("after: ")),
        (400, true)
    );
    assert_eq!(
        listener.ask("GET", "/v1/overrides?rule=none", "").status,
        404
    );
}

/// The count does not depend on the page. It includes neither other overrides nor those that have
/// ended.
#[test]
fn the_count_is_that_of_the_filter() {
    let listener = TestListener::open();
    let put = |rule: &str, key: &str, fields: &str| {
        let body = format!(r#"{{"limits": "2x", "raw": true, {fields}}}"#);
        let answer = listener.ask("PUT", &format!("/v1/overrides/{rule}{key}"), &body);
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    for number in 0..5 {
        put("r", &format!("/%2Fc{number}/::"), r#""reason": "launch""#);
    }
    put("r", "/%2Fc*/*", r#""reason": "test""#);
    put("r", "/%2Fended/::", r#""reason": "launch", "for": "10s""#);
    put("all%20of%20it", "", r#""reason": "launch""#);
    listener.at_secs(10);
    for (filter, count) in [
        ("", 7),
        ("rule=r&", 6),
        ("search=launch&", 6),
        ("rule=r&search=launch&", 5),
        ("search=c&rule=r&", 6),
        ("search=nothing&", 0),
    ] {
        let (mut listed, mut after) = (0, String::new());
        loop {
            let page = listener.ask("GET", &format!("/v1/overrides?{filter}n=2{after}"), "");
            let page = page.json();
            assert_eq!(page["count"], count, "{filter}{after}");
            listed += page["overrides"].as_array().unwrap().len();
            match page["next"].as_str() {
                Some(next) => after = format!("&after={next}"),
                None => break,
            }
        }
        assert_eq!(listed, count, "{filter}");
    }
}

/// The error for limits that cannot be listed names two other ways, and both work.
#[test]
fn a_rule_with_rates_and_slots_is_overridden_by_a_factor_or_a_plan() {
    let listener = TestListener::open();
    let rule =
        |name: &str, limits: &str| format!("  - {{name: {name}, key: user, limits: [{limits}]}}\n");
    let slots = "{algorithm: concurrency, limit: 5}";
    let rules = format!(
        "plans: {{pro: {{mixed: [100/s, {{algorithm: concurrency, limit: 50}}]}}}}\nrules:\n{}{}{}",
        rule("mixed", &format!("10/s, {slots}")),
        rule("slots-first", &format!("{slots}, 10/s")),
        rule("slots", slots),
    );
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let put =
        |rule: &str, body: &str| listener.ask("PUT", &format!("/v1/overrides/{rule}/alice"), body);
    let factor = "which an override cannot list; write a factor such as 2x, which multiplies all of them, or";
    for limits in [
        r#""20/s""#,
        r#""10 at once""#,
        r#"["20/s", "10 at once"]"#,
        r#""20""#,
    ] {
        let body = format!(r#"{{"limits": {limits}}}"#);
        let refused = put("mixed", &body);
        assert_eq!(refused.status, 400, "{refused:?}");
        let expected = format!(
            "limits: rule \"mixed\" has both rates and slots (10/s, 5 at once), {factor} select a plan of the rule (pro)"
        );
        assert_eq!(refused.problem(), expected, "{limits}");
        let expected = format!(
            "limits: rule \"slots-first\" has both rates and slots (5 at once, 10/s), {factor} add a plan for the \
             rule to the rules file (`plans`), and select it"
        );
        assert_eq!(put("slots-first", &body).problem(), expected, "{limits}");
    }
    for (rule, body, policies) in [
        ("mixed", r#"{"limits": "2x"}"#, ["20/s", "10 at once"]),
        ("mixed", r#"{"plan": "pro"}"#, ["100/s", "50 at once"]),
        ("slots-first", r#"{"limits": "2x"}"#, ["10 at once", "20/s"]),
    ] {
        assert_eq!(put(rule, body).status, 200, "{rule} {body}");
        let key = listener
            .ask("GET", &format!("/v1/keys/{rule}/alice"), "")
            .json();
        for (limit, policy) in key["limits"].as_array().unwrap().iter().zip(policies) {
            assert_eq!(limit["policy"], policy, "{key}");
        }
    }
    assert_eq!(put("slots", r#"{"limits": "10 at once"}"#).status, 200);
}

/// A slash in a URL separates two values of the key.
#[test]
fn a_key_with_a_slash_is_refused_with_the_right_form() {
    let listener = TestListener::open();
    let rules =
        "rules:\n- {name: api, key: route, limits: 5/h}\n- {name: login, key: ip, limits: 5/h}\n";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let put = |path: &str, limits: &str| {
        let body = format!(r#"{{"limits": "{limits}"}}"#);
        listener.ask("PUT", &format!("/v1/overrides/{path}"), &body)
    };
    let expected = "key: rule \"api\" has a key of 1 value (route), got 2 (orders, get); if a value contains a slash, \
                    give it as one value: `orders/get` (in a URL: `orders%2Fget`)";
    let path = "/v1/overrides/api/orders/get";
    for (method, path) in [
        ("PUT", path),
        ("GET", path),
        ("DELETE", path),
        ("PUT", "/v1/blocks/api/orders/get"),
        ("GET", "/v1/keys/api/orders/get"),
    ] {
        let body = if path.contains("overrides") {
            r#"{"limits": "2x"}"#
        } else {
            ""
        };
        let refused = listener.ask(method, path, body);
        assert_eq!(
            (refused.status, &*refused.problem()),
            (400, expected),
            "{method} {path}"
        );
    }
    let refused = put("api/orders/*", "2x").problem();
    assert!(
        refused.ends_with("`orders/*` (in a URL: `orders%2F*`)"),
        "{refused}"
    );
    for path in ["api/orders%2Fget", "api/orders%2F%2A"] {
        assert_eq!(put(path, "2x").status, 200, "{path}");
    }

    let prefix = "key: the listeners count single addresses, not a network of this size: ";
    for (network, advice) in [
        (
            "203.0.113.0%2F24",
            "override its addresses with the pattern `203.0.113.*`; if",
        ),
        (
            "10.0.0.0%2F8",
            "override its addresses with the pattern `10.*`; if",
        ),
        (
            "203.0.113.0%2F25",
            "match the network with `cidr` in the `when` of a rule; if",
        ),
        (
            "2001:db8::%2F32",
            "match the network with `cidr` in the `when` of a rule; if",
        ),
    ] {
        let refused = put(&format!("login/{network}"), "2x").problem();
        let expected = format!("{prefix}{advice}");
        assert!(refused.starts_with(&expected), "{refused}");
    }
    let joined = put("login/203.0.113.0/24", "2x").problem();
    assert!(
        joined.ends_with("`203.0.113.0/24` (in a URL: `203.0.113.0%2F24`)"),
        "{joined}"
    );
    assert_eq!(put("login/203.0.113.*", "2x").status, 200);
    let key = listener
        .ask("GET", "/v1/keys/login/203.0.113.77", "")
        .json();
    assert_eq!(key["limits"][0]["policy"], "10/h", "{key}");
    let refused = listener
        .ask("PUT", "/v1/blocks/login/203.0.113.0%2F24", "")
        .problem();
    let expected = format!(
        "{prefix}block it with `tidegate block --entry ip=203.0.113.0/24 --rule login --for 1h`; if"
    );
    assert!(refused.starts_with(&expected), "{refused}");
    let path = "/v1/entry-blocks/ip/203.0.113.0%2F24?rule=login";
    let blocked = listener.ask("PUT", path, r#"{"for": "1h"}"#);
    assert_eq!(blocked.status, 200, "{blocked:?}");
}

#[test]
fn a_mistake_in_an_override_is_refused_with_the_right_form() {
    let listener = TestListener::open();
    for (path, body, problem) in [
        (
            KEY,
            r#"{"limits": "x2"}"#,
            "limits: expected a factor from 0.001x to 1000x with at most three decimal places, such as 2x or 0.5x, \
             got \"x2\"; write 2x",
        ),
        (
            KEY,
            r#"{"limits": ["200%"]}"#,
            "limits: expected a factor from 0.001x to 1000x with at most three decimal places, such as 2x or 0.5x, \
             got \"200%\"; write 2x",
        ),
        (
            KEY,
            r#"{"limits": "2"}"#,
            "limits: \"2\": expected a rate such as 20/min or 5/10s, got \"2\"; the period is missing: write 2/s, \
             2/min or 2/h; to multiply the limits, write 2x",
        ),
        (
            KEY,
            r#"{"factor": "2x"}"#,
            "factor: unknown field; give the factor as `limits`, such as \"limits\": \"2x\"",
        ),
        (
            KEY,
            r#"{"limits": "10/h, 100/s burst 20"}"#,
            "limits: \"10/h, 100/s burst 20\" contains several limits; give each of them separately: --limit 10/h \
             --limit '100/s burst 20' (`\"limits\": [\"10/h\", \"100/s burst 20\"]`)",
        ),
        (
            KEY,
            r#"{"limits": ["10/h 20/d"]}"#,
            "limits: \"10/h 20/d\" contains several limits; give each of them separately: --limit 10/h --limit 20/d \
             (`\"limits\": [\"10/h\", \"20/d\"]`)",
        ),
        // From `tidegate override r a b --limit 10/h 20/d`.
        (
            "r/a/b/20%2Fd",
            r#"{"limits": "10/h"}"#,
            "key: rule \"r\" has a key of 2 values (path, ip), got 3 (a, b, 20/d); to give several limits, write \
             --limit before each of them: --limit 20/d",
        ),
        (
            "r/a/b/c",
            r#"{"limits": "2x"}"#,
            "key: rule \"r\" has a key of 2 values (path, ip), got 3 (a, b, c); in a URL, write a slash within a \
             value as %2F",
        ),
    ] {
        let answer = listener.ask("PUT", &format!("/v1/overrides/{path}"), body);
        assert_eq!(
            (answer.status, &*answer.problem()),
            (400, problem),
            "{body}"
        );
    }
    let list = listener.ask("GET", "/v1/overrides", "").json();
    assert_eq!(list["count"], 0, "nothing was changed");
}

#[test]
fn bad_overrides_are_rejected() {
    let listener = TestListener::open();
    for (path, body, problem) in [
        (
            KEY,
            r#"{"limits": "1001x"}"#,
            "limits: expected a factor from 0.001x to 1000x",
        ),
        (
            KEY,
            r#"{"limits": ["2x", "3x"]}"#,
            "limits: a factor must be the only item of the list",
        ),
        (
            KEY,
            "{}",
            "limits: is missing; give limits such as [\"200/min\"] or \"2x\", or a plan",
        ),
        (
            KEY,
            r#"{"limits": "often"}"#,
            "limits: \"often\": expected a rate such as 20/min",
        ),
        (
            KEY,
            r#"{"limits": []}"#,
            "limits: must name at least one limit",
        ),
        (
            KEY,
            r#"{"limits": "2x", "plan": "pro"}"#,
            "plan: cannot be combined with `limits`",
        ),
        (KEY, r#"{"plan": "pro"}"#, "plan: rule \"r\" has no plans"),
        (
            KEY,
            r#"{"limits": "2x", "fro": "1h"}"#,
            "fro: unknown field; did you mean `for`?",
        ),
        (
            KEY,
            r#"{"limits": "2x", "reason": 7}"#,
            "reason: expected a string, got 7",
        ),
        (
            "r/%2Fa",
            r#"{"limits": "2x"}"#,
            "key: rule \"r\" has a key of 2 values",
        ),
        (
            "r/%2Fa*",
            r#"{"limits": "2x"}"#,
            "key: rule \"r\" has a key of 2 values (path, ip), but the pattern has 1; write one pattern",
        ),
        (
            "r/%2Fa/2001:DB8::1",
            r#"{"limits": "2x"}"#,
            "key: the listeners count this address as",
        ),
    ] {
        let answer = listener.ask("PUT", &format!("/v1/overrides/{path}"), body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(
            answer.problem().starts_with(problem),
            "{body}: {}",
            answer.problem()
        );
    }
    let answer = listener.ask("PUT", "/v1/overrides/none/a", r#"{"limits": "2x"}"#);
    assert_eq!(answer.status, 404);
    let list = listener.ask("GET", "/v1/overrides", "").json();
    assert_eq!(list["count"], 0, "nothing was changed");
}

#[test]
fn a_wrong_end_is_rejected() {
    let listener = TestListener::open();
    for (path, body, problem) in [
        (
            KEY,
            r#"{"limits": "2x", "until": "9999-01-01T00:00:00Z"}"#,
            "until: is more than ten years from now; give a date up to 2033-11-14T10:13:00Z, or, for no \
             end, use `for` with the value forever instead of `until`",
        ),
        (
            KEY,
            r#"{"limits": "2x", "for": "long"}"#,
            "for: expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"long\"; \
             for no end, write forever",
        ),
        (
            KEY,
            r#"{"limits": "2x", "for": "11y"}"#,
            "for: expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"11y\"; \
             a year is not a unit, and the maximum is 87660h (10 years); for no end, write forever",
        ),
        (
            KEY,
            r#"{"limits": "2x", "for": "600w"}"#,
            "for: \"600w\" exceeds the maximum of 87660h (10 years); for no end, write forever",
        ),
        (
            KEY,
            r#"{"limits": "2x", "until": "tomorrow"}"#,
            "until: expected a date such as",
        ),
        (
            KEY,
            r#"{"limits": "2x", "until": "2030-01-01T09:00:00"}"#,
            "until: expected a date such as 2030-01-31 (00:00 UTC), or a date and time with a time zone \
             such as 2030-01-31T09:00:00Z, got \"2030-01-01T09:00:00\"; for UTC, write 2030-01-01T09:00:00Z",
        ),
        (
            KEY,
            r#"{"limits": "2x", "until": "2023-11-14T22:00:00Z"}"#,
            "until: is in the past; give a time after now, 2023-11-14T22:13:00Z",
        ),
        (
            KEY,
            r#"{"limits": "2x", "for": "1h", "until": "2030-01-01T00:00:00Z"}"#,
            "until: cannot be combined: give one of `for` and `until`",
        ),
    ] {
        let answer = listener.ask("PUT", &format!("/v1/overrides/{path}"), body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(
            answer.problem().starts_with(problem),
            "{body}: {}",
            answer.problem()
        );
    }
    let list = listener.ask("GET", "/v1/overrides", "").json();
    assert_eq!(list["count"], 0, "nothing was changed");
}

/// The overrides of a renamed rule, and those whose rule has another key, can still be listed,
/// shown and removed.
#[test]
fn overrides_without_their_rule_are_listed_shown_and_removed() {
    let listener = TestListener::open();
    let pattern = "/v1/overrides/r/%2Fb*/*".to_owned();
    for path in [path(), pattern.clone()] {
        let put = listener.ask("PUT", &path, r#"{"limits": "2x", "reason": "launch"}"#);
        assert_eq!(put.status, 200, "{put:?}");
    }
    let renamed = RULES.replace("name: r\n", "name: renamed\n");
    let shortened = RULES.replace("key: [path, ip]", "key: [ip]");
    for (changed, inactive) in [
        (&*renamed, json!("rule no longer exists")),
        (&*shortened, json!("rule has another key now")),
        (RULES, Value::Null),
    ] {
        std::fs::write(listener.file.path(), changed).unwrap();
        assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
        for list in [
            "/v1/overrides",
            "/v1/overrides?rule=r",
            "/v1/overrides?search=launch",
        ] {
            let page = listener.ask("GET", list, "").json();
            let listed = page["overrides"].as_array().unwrap();
            let keys: Vec<&Value> = listed.iter().map(|found| &found["key"]).collect();
            assert_eq!(
                keys,
                [&json!(["/a b", "::"]), &json!(["/b*", "*"])],
                "{list}"
            );
            for found in listed {
                assert_eq!(found["rule"], "r", "{list}");
                assert_eq!(found["inactive"], inactive, "{list}");
            }
            let first = listener.ask("GET", &format!("{list}{}n=1", separator(list)), "");
            let after = first.json()["next"].as_str().unwrap().to_owned();
            let rest = format!("{list}{}after={after}", separator(list));
            let rest = listener.ask("GET", &rest, "").json();
            assert_eq!(rest["overrides"], json!([listed[1]]), "{list}");
        }
        let shown = listener.ask("GET", &path(), "").json();
        assert_eq!(shown["inactive"], inactive);
    }
    std::fs::write(listener.file.path(), &renamed).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    for path in [path(), pattern] {
        assert_eq!(listener.ask("DELETE", &path, "").status, 200);
        assert_eq!(listener.ask("GET", &path, "").status, 404);
    }
    let list = listener.ask("GET", "/v1/overrides?rule=r", "");
    assert_eq!(list.status, 404, "{list:?}");
}

fn separator(path: &str) -> char {
    if path.contains('?') { '&' } else { '?' }
}

/// Where the limits of an override are not valid for the rule, or for a plan, the key has the
/// limits of the rule or of the plan.
#[test]
fn an_inactive_override_is_not_shown_as_applied() {
    let listener = TestListener::open();
    let reload = |limits: &str| {
        let rules = format!(
            "plans: {{pro: {{r: 900000000000000/min}}}}\n\
             rules: [{{name: r, key: [path, ip], limits: {limits}, algorithm: fixed_window, plan: tier}}]"
        );
        std::fs::write(listener.file.path(), rules).unwrap();
        let reloaded = listener.ask("POST", "/v1/reload", "");
        assert_eq!(reloaded.status, 200, "{reloaded:?}");
    };
    let inspect = || listener.ask("GET", &format!("/v1/keys/{KEY}"), "").json();
    let explain = |tier: &str| {
        let entries = json!({"path": "/a b", "ip": "::", "tier": tier});
        let body = json!({"entries": entries}).to_string();
        listener.ask("POST", "/v1/explain", &body).json()["rules"][0].clone()
    };
    let policy = |document: &Value| document["limits"][0]["policy"].as_str().unwrap().to_owned();
    let inactive = |document: &Value| document["override"]["inactive"].clone();

    std::fs::write(listener.file.path(), RULES).unwrap();
    let put = listener.ask("PUT", &path(), r#"{"limits": "2x"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    // The factor is valid for the rule's own limits, but not for those of the plan.
    reload("10/min");
    let (inspected, without_plan, with_plan) = (inspect(), explain("none"), explain("pro"));
    for shown in [&inspected, &without_plan] {
        assert_eq!(policy(shown), "20/min", "{shown}");
        assert_eq!(shown["override"]["factor"], "2x");
        assert_eq!(inactive(shown), Value::Null);
    }
    assert_eq!(policy(&with_plan), "900000000000000/min", "{with_plan}");
    assert_eq!(with_plan["plan"], "pro");
    assert_eq!(with_plan["override"]["factor"], "2x");
    let expected = "limits: 2x of 900000000000000/min: ";
    let reason = inactive(&with_plan);
    assert!(reason.as_str().unwrap().starts_with(expected), "{reason}");

    let put = listener.ask("PUT", &path(), r#"{"limits": "7/min"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    assert_eq!(inactive(&explain("pro")), Value::Null);
    // The limit in short notation is not valid for a window that is a calendar day.
    std::fs::write(
        listener.file.path(),
        "rules: [{name: r, key: [path, ip], limits: {algorithm: fixed_window, limit: 9, \
         anchor: {calendar: day}}}]",
    )
    .unwrap();
    let reloaded = listener.ask("POST", "/v1/reload", "");
    assert_eq!(reloaded.status, 200, "{reloaded:?}");
    for shown in [inspect(), explain("pro")] {
        assert_eq!(shown["limits"][0]["limit"], 9, "{shown}");
        let reason = inactive(&shown);
        let expected = "limits: \"7/min\": expected a limit such as 100/day";
        assert!(reason.as_str().unwrap().starts_with(expected), "{reason}");
    }
}

/// An override is looked up by the rule name and the values of the key entries, so it does not
/// apply to a rule with another name or other key entries.
#[test]
fn a_reload_reports_the_overrides_that_become_inactive() {
    let listener = TestListener::open();
    let reload = |rules: &str| {
        std::fs::write(listener.file.path(), rules).unwrap();
        let reloaded = listener.ask("POST", "/v1/reload", "");
        assert_eq!(reloaded.status, 200, "{reloaded:?}");
        reloaded.json()
    };
    for path in [path(), "/v1/overrides/r/%2Fb*/*".to_owned()] {
        let put = listener.ask("PUT", &path, r#"{"limits": "2x", "raw": true}"#);
        assert_eq!(put.status, 200, "{put:?}");
    }
    assert_eq!(reload(RULES)["inactive_overrides"], Value::Null);

    for changed in [
        RULES.replace("name: r\n", "name: renamed\n"),
        RULES.replace("key: [path, ip]", "key: [ip]"),
    ] {
        assert_ne!(changed, RULES);
        let reloaded = reload(&changed);
        assert_eq!(
            reloaded["inactive_overrides"],
            json!([{"rule": "r", "overrides": 2}]),
            "{changed}"
        );
        let hint = reloaded["hint"].as_str().unwrap();
        assert!(
            hint.starts_with("2 overrides are inactive, because the rule"),
            "{hint}"
        );
        assert!(
            hint.contains("`tidegate override RULE KEY --remove`"),
            "{hint}"
        );
    }
    let removed = listener.ask("DELETE", &path(), "");
    assert_eq!(removed.status, 200, "{removed:?}");
}

#[test]
fn a_descriptor_of_envoys_rate_limit_service_is_overridden() {
    let listener = TestListener::open();
    let limiter = std::sync::Arc::clone(&listener.limiter);
    let service = RateLimitService::new(limiter, RlsSettings::default());
    let file = |text: &str| {
        let (name, text) = ("shop.yaml".to_owned(), text.to_owned());
        read(vec![File { name, text }], DomainFiles::One).unwrap()
    };
    service.load(file(
        "domain: shop\ndescriptors: [{key: plan, value: gold, descriptors: \
         [{key: user, rate_limit: {unit: minute, requests_per_unit: 3}}]}]",
    ));
    let path = "/v1/overrides/envoy:shop%2Fplan_gold.user/gold/alice";
    let put = listener.ask("PUT", path, r#"{"limits": "5/min", "reason": "launch"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    assert_eq!(put.json()["rule"], "envoy:shop/plan_gold.user");
    assert_eq!(put.json()["key"], json!(["gold", "alice"]));
    assert_eq!(listener.ask("GET", path, "").json()["reason"], "launch");
    let list_of_rule = "/v1/overrides?rule=envoy:shop%2Fplan_gold.user";
    let list = listener.ask("GET", list_of_rule, "").json();
    assert_eq!(list["overrides"][0]["limits"], json!(["5/min"]));
    for (key, body, status, problem) in [
        (
            "alice",
            r#"{"limits": "5/min"}"#,
            400,
            "has a key of 2 values (plan, user)",
        ),
        (
            "silver/alice",
            r#"{"limits": "5/min"}"#,
            400,
            "rule \"envoy:shop/plan_gold.user\" applies only to requests with {plan: gold}",
        ),
        (
            "gold/alice",
            r#"{"limits": "five"}"#,
            400,
            "limits: \"five\"",
        ),
    ] {
        let path = format!("/v1/overrides/envoy:shop%2Fplan_gold.user/{key}");
        let answer = listener.ask("PUT", &path, body);
        assert_eq!(answer.status, status, "{key}: {answer:?}");
        assert!(answer.problem().contains(problem), "{key}: {answer:?}");
    }
    for (method, path) in [
        ("PUT", "/v1/overrides/envoy:shop%2Fnobody/x"),
        ("GET", "/v1/overrides?rule=envoy:shop%2Fnobody"),
    ] {
        let unknown = listener.ask(method, path, r#"{"limits": "5/min"}"#);
        assert_eq!(unknown.status, 404);
        let expected = "Envoy's rate limit service has no rule \"envoy:shop/nobody\" with a limit";
        assert!(unknown.problem().starts_with(expected), "{unknown:?}");
    }

    // Without the rule, the override is kept and listed as inactive.
    service.load(file("domain: shop\ndescriptors: []"));
    let list = listener.ask("GET", list_of_rule, "").json();
    let former = &list["overrides"][0];
    assert_eq!(former["rule"], "envoy:shop/plan_gold.user");
    assert_eq!(former["key"], json!(["gold", "alice"]));
    assert_eq!(former["inactive"], "rule no longer exists");
    assert_eq!(listener.ask("DELETE", path, "").status, 200);
}
