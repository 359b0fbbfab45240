//! Tests of manual blocks.

use serde_json::{Value, json};
use tidegate_core::bounds::MAX_BLOCKS;

use crate::listener::{KEY, RULES, TestListener};

fn path() -> String {
    format!("/v1/blocks/{KEY}")
}

#[test]
fn a_block_is_set_listed_shown_and_lifted() {
    let listener = TestListener::open();
    let put = listener.ask("PUT", &path(), r#"{"for": "10m", "reason": "abuse"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    let block = json!({
        "rule": "r", "key": ["/a b", "::"], "reason": "abuse",
        "until": "2023-11-14T22:23:00Z", "until_ms": 1_700_000_580_000_u64, "left_ms": 600_000,
        "persistent": false,
    });
    let mut answer = put.json();
    let hint = answer.as_object_mut().unwrap().remove("hint").unwrap();
    let hint = hint.as_str().unwrap();
    assert!(
        hint.starts_with("this block is lost when the server restarts"),
        "{hint}"
    );
    assert_eq!(answer, block);
    assert!(!listener.spend(), "a block denies");
    assert_eq!(listener.ask("GET", &path(), "").json(), block);
    assert_eq!(
        listener.ask("GET", "/v1/blocks", "").json(),
        json!({"blocks": [block], "count": 1})
    );

    assert_eq!(listener.ask("DELETE", &path(), "").status, 200);
    assert!(listener.spend());
    assert_eq!(
        listener.ask("GET", "/v1/blocks", "").json(),
        json!({"blocks": [], "count": 0})
    );
    for method in ["GET", "DELETE"] {
        let answer = listener.ask(method, &path(), "");
        assert_eq!(answer.status, 404);
        assert!(answer.problem().contains("this key is not blocked"));
    }
}

#[test]
fn an_address_in_an_uncounted_form_is_refused_unless_services_send_it() {
    let listener = TestListener::open();
    for (written, counted) in [
        ("2001:db8:1::5", Some("2001:db8:1::")),
        ("2001:DB8:1::%2F64", Some("2001:db8:1::")),
        ("192.0.2.1:80", Some("192.0.2.1")),
        ("2001:db8:1::", None),
        ("192.0.2.1", None),
        ("::ffff:1.2.3.4%2F128", Some("1.2.3.4")),
    ] {
        let (block, key) = ["blocks", "keys"]
            .map(|kind| format!("/v1/{kind}/r/%2Fa/{written}"))
            .into();
        let refused = listener.ask("PUT", &block, "");
        let status = if counted.is_some() { 400 } else { 200 };
        assert_eq!(refused.status, status, "{written}: {refused:?}");
        let expected = counted.map(|counted| format!("count this address as `{counted}`:"));
        if let Some(expected) = &expected {
            let problem = refused.problem();
            let begins = format!("key: the listeners {expected} use the normalised form");
            assert!(problem.starts_with(&begins), "{written}: {problem}");
        }
        for (method, path, body) in [("PUT", &block, r#"{"raw": true}"#), ("GET", &key, "")] {
            let answer = listener.ask(method, path, body);
            assert_eq!(answer.status, 200, "{written}: {answer:?}");
            let answer = answer.json();
            // This server has no snapshot, so each response also contains a hint that a restart
            // removes the block.
            let hint = answer["hint"].as_str();
            let hint = hint.filter(|hint| !hint.starts_with("this block is lost"));
            assert_eq!(hint.is_some(), counted.is_some(), "{written}: {hint:?}");
            let expected = expected.as_deref().unwrap_or_default();
            assert!(hint.unwrap_or_default().contains(expected), "{hint:?}");
        }
        assert_eq!(listener.ask("DELETE", &block, "").status, 200, "{written}");
    }
}

#[test]
fn a_block_of_a_literal_asterisk_says_so() {
    let listener = TestListener::open();
    let put = listener
        .ask("PUT", "/v1/blocks/r/%2Fa%2F%2A/192.0.2.1", "")
        .json();
    let hint = put["hint"].as_str().unwrap();
    let expected = "`*` is literal in a block: only the key with exactly `/a/*` is blocked";
    assert!(hint.starts_with(expected), "{hint}");
}

#[test]
fn a_key_that_no_request_has_is_refused() {
    let listener = TestListener::open();
    for (written, network) in [
        ("10.0.0.0%2F8", "10.0.0.0/8"),
        ("2001:db8::%2F32", "2001:db8::/32"),
    ] {
        for (path, shown) in [("%2Fa", "path=/a"), ("%2Fa%20%27b", "'path=/a '\\''b'")] {
            let refused = listener.ask("PUT", &format!("/v1/blocks/r/{path}/{written}"), "");
            assert_eq!(refused.status, 400, "{written}");
            let expected = format!(
                "key: the listeners count single addresses, not a network of this size: block it with `tidegate \
                 block --entry {shown} --entry ip={network} --rule r --for 1h`; if services"
            );
            let problem = refused.problem();
            assert!(problem.starts_with(&expected), "{problem}");
        }
        let block = format!("/v1/entry-blocks/path/%2Fa/ip/{written}?rule=r");
        let blocked = listener.ask("PUT", &block, r#"{"for": "1h"}"#);
        assert_eq!(blocked.status, 200, "{blocked:?}");
        let raw = listener
            .ask("GET", &format!("/v1/keys/r/%2Fa/{written}"), "")
            .json();
        let hint = raw["hint"].as_str().unwrap();
        assert!(hint.contains("`cidr`"), "{hint}");
    }
    for (path, problem) in [
        (
            "/v1/blocks/r/%2Fa/nobody",
            "key: \"nobody\" is not an IP address: a key of rule \"r\" consists of (path, ip), and ip is an address such \
             as 203.0.113.9",
        ),
        (
            "/v1/blocks/r/%2Fa/1.2.3.4%2Fx",
            "key: \"1.2.3.4/x\" is not an IP address: a key of rule \"r\" consists of (path, ip), and ip is an address \
             such as 203.0.113.9",
        ),
        (
            "/v1/blocks/r/%2Fa%3Fx=1/192.0.2.1",
            "key: the listeners count this path as `/a`: use the normalised form",
        ),
        (
            "/v1/blocks/r/%2Fa/hash:0123456789abcdef",
            "key: `hash:0123456789abcdef` is a hash, which lists show in place of the value: use the value itself",
        ),
        (
            "/v1/blocks/r/%2Fa%2F..%2Fb/192.0.2.1",
            "key: the listeners reject a path with the segments `.` or `..`: use the resolved path",
        ),
    ] {
        let refused = listener.ask("PUT", path, "");
        let raw = "; if services send the given form with `raw`, pass --raw (`\"raw\": true`)";
        let expected = (400, format!("{problem}{raw}"));
        assert_eq!((refused.status, refused.problem()), expected);
        // A service that sends entries with `raw` could send this key.
        let blocked = listener.ask("PUT", path, r#"{"raw": true}"#);
        assert_eq!(blocked.status, 200);
        let hint = problem.strip_prefix("key: ").unwrap();
        let (what, _) = hint.split_once(": ").unwrap();
        let raw = format!("{what}: only requests that services send with `raw` have this key; ");
        let blocked = blocked.json()["hint"].as_str().unwrap().to_owned();
        assert!(blocked.starts_with(&raw), "{blocked}");
        assert_eq!(listener.ask("DELETE", path, "").status, 200);
        let nothing = listener.ask("DELETE", path, "").problem();
        let expected = format!(
            "this key is not blocked; {hint}, unless services send the given form with `raw`"
        );
        assert_eq!(nothing, expected);
    }
    let wrong = listener.ask("PUT", &path(), r#"{"raw": 1}"#);
    assert_eq!(wrong.problem(), "raw: expected true or false, got 1");
    let nothing = listener.ask("DELETE", "/v1/blocks/r/%2Fa/2001:db8:1::5", "");
    assert_eq!(nothing.status, 404);
    assert!(nothing.problem().contains("`2001:db8:1::`"), "{nothing:?}");
}

/// Because of the rule's conditions, no request can have the key, even if services send raw
/// entries.
#[test]
fn a_key_that_the_rule_excludes_is_refused() {
    let listener = TestListener::open();
    let rules = "rules: [{name: post, when: {method: POST}, key: [method], limits: [1/s]}, \
        {name: any, key: [method], limits: [1/s]}]";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    for body in ["", r#"{"raw": true}"#] {
        let refused = listener.ask("PUT", "/v1/blocks/post/post", body);
        let problem = "key: rule \"post\" applies only to requests with {method: POST}, so none of these requests has the method \"post\"";
        assert_eq!((refused.status, refused.problem().as_str()), (400, problem));
    }
    assert_eq!(listener.ask("PUT", "/v1/blocks/post/POST", "").status, 200);
    // The hint is only a warning, because a service could send methods in any form.
    let unlikely = listener.ask("PUT", "/v1/blocks/any/post", "");
    assert_eq!(unlikely.status, 200);
    let hint = unlikely.json()["hint"].clone();
    let hint = hint.as_str().unwrap();
    assert!(hint.contains("in upper case: use `POST` instead"), "{hint}");
}

#[test]
fn a_block_expires_unless_it_is_permanent() {
    let listener = TestListener::open();
    let put = listener.ask("PUT", &path(), "").json();
    assert_eq!(
        (&put["left_ms"], &put["reason"]),
        (&json!(3_600_000), &json!("")),
        "the longest window"
    );
    listener.at_secs(3_599);
    assert!(!listener.spend());
    assert_eq!(listener.ask("GET", &path(), "").json()["left_ms"], 1_000);
    listener.at_secs(3_600);
    assert!(listener.spend());

    let put = listener.ask("PUT", &path(), r#"{"for": "forever"}"#).json();
    assert_eq!(
        (&put["left_ms"], &put["until_ms"]),
        (&Value::Null, &Value::Null)
    );
    listener.at_secs(3_000_000_000);
    assert!(!listener.spend());
}

#[test]
fn a_block_without_a_duration_lasts_at_least_a_minute() {
    let listener = TestListener::open();
    reload(
        &listener,
        "rules: [{name: short, limits: [100/s burst 20]}]",
    );
    let put = listener.ask("PUT", "/v1/blocks/short", "");
    assert_eq!(put.json()["left_ms"], 60_000);
}

#[test]
fn a_rule_without_a_key_is_blocked_as_a_whole() {
    let listener = TestListener::open();
    let put = listener.ask("PUT", "/v1/blocks/all%20of%20it", r#"{"for": "1s"}"#);
    assert_eq!((put.status, &put.json()["key"]), (200, &json!([])));
    assert_eq!(
        listener.ask("GET", "/v1/blocks", "").json()["blocks"][0]["rule"],
        "all of it"
    );
}

#[test]
fn an_invalid_body_is_rejected() {
    let listener = TestListener::open();
    let long = format!(r#"{{"reason": "{}"}}"#, "x".repeat(1_025));
    for (body, expected) in [
        (r#"{"for": "soon"}"#, "for: expected a duration"),
        (
            r#"{"for": 10}"#,
            "for: expected a duration such as \"10min\", or \"forever\", got 10",
        ),
        (
            r#"{"for": "0s"}"#,
            "for: a duration must be longer than zero",
        ),
        (
            r#"{"four": "1m"}"#,
            "four: unknown field; did you mean `for`?",
        ),
        (r#"{"reason": 5}"#, "reason: expected a string, got 5"),
        (&long, "reason: 1025 bytes exceed the maximum of 1024"),
        (
            "{",
            "body: is not JSON: EOF while parsing an object at line 1 column 1",
        ),
        ("[]", "body: expected an object, got a list"),
    ] {
        let answer = listener.ask("PUT", &path(), body);
        assert_eq!(answer.status, 400, "{body}");
        let problem = answer.problem();
        assert!(problem.starts_with(expected), "{body}: {problem}");
    }
    assert_eq!(
        listener.ask("GET", "/v1/blocks", "").json(),
        json!({"blocks": [], "count": 0})
    );
}

#[test]
fn a_list_contains_at_most_n_blocks_and_their_number() {
    let listener = TestListener::open();
    for value in ["b", "a", "c"] {
        let path = format!("/v1/blocks/r/%2F{value}/%3A%3A");
        assert_eq!(listener.ask("PUT", &path, "").status, 200, "{value}");
    }
    for (query, listed) in [("", 3), ("?n=2", 2), ("?n=100000", 3)] {
        let list = listener
            .ask("GET", &format!("/v1/blocks{query}"), "")
            .json();
        let blocks = list["blocks"].as_array().unwrap();
        assert_eq!(
            (blocks.len(), &list["count"]),
            (listed, &json!(3)),
            "{query}"
        );
        assert_eq!(blocks[0]["key"], json!(["/a", "::"]), "sorted by key");
    }
    for query in ["?n=0", "?n=100001", "?n=x", "?most=3"] {
        let path = format!("/v1/blocks{query}");
        assert_eq!(listener.ask("GET", &path, "").status, 400, "{query}");
    }
}

#[test]
fn a_key_that_fits_no_rule_is_rejected() {
    let listener = TestListener::open();
    for (path, status, expected) in [
        (
            "/v1/blocks/uploads/x",
            404,
            "there is no rule \"uploads\"; the rules are r, all of it",
        ),
        (
            "/v1/blocks/r/x",
            400,
            "key: rule \"r\" has a key of 2 values (path, ip), got 1",
        ),
        (
            "/v1/blocks/r/x/y/z",
            400,
            "key: rule \"r\" has a key of 2 values (path, ip), got 3 (x, y, z); in a URL, write a slash within a value \
             as %2F",
        ),
        (
            "/v1/blocks/r",
            400,
            "key: rule \"r\" has a key of 2 values (path, ip), got 0",
        ),
        (
            "/v1/blocks/r//y",
            400,
            "entries.path: must not be empty; this entry is part of the key of rule \"r\"",
        ),
        (
            "/v1/blocks/r/%ff/y",
            400,
            "path: a segment is not UTF-8 after percent-decoding",
        ),
    ] {
        for method in ["GET", "PUT", "DELETE"] {
            let answer = listener.ask(method, path, "");
            assert_eq!(
                (answer.status, answer.problem().as_str()),
                (status, expected),
                "{method} {path}"
            );
        }
    }
    let answer = listener.ask("POST", &path(), "");
    assert_eq!(
        (answer.status, answer.header("allow")),
        (405, Some("GET, PUT, DELETE"))
    );
}

#[test]
fn the_number_of_blocks_is_limited() {
    let listener = TestListener::open();
    let rules = listener.limiter.rules();
    let (rule, now) = (rules.rule("r").unwrap(), listener.limiter.now());
    for n in 0..MAX_BLOCKS {
        let key = rule.encode_key(&["/", &n.to_string()]).unwrap();
        assert!(
            listener.limiter.local_store().block(&key, None, "", now),
            "{n}"
        );
    }
    let refused = listener.ask("PUT", &path(), "");
    assert_eq!(
        (refused.status, refused.problem().as_str()),
        (
            409,
            "the maximum of 100000 blocks is reached; lift some blocks first"
        )
    );
    assert!(listener.spend(), "an unblocked key still passes");
    assert_eq!(listener.ask("DELETE", "/v1/blocks/r/%2F/7", "").status, 200);
    assert_eq!(listener.ask("PUT", &path(), "").status, 200);
    assert!(!listener.spend());
}

fn reload(listener: &TestListener, rules: &str) -> Value {
    std::fs::write(listener.file.path(), rules).unwrap();
    let reloaded = listener.ask("POST", "/v1/reload", "");
    assert_eq!(reloaded.status, 200, "{reloaded:?}");
    reloaded.json()
}

/// The store looks up blocks by a hash of the rule's name, so a renamed rule does not enforce its
/// old blocks.
#[test]
fn a_reload_that_renames_a_rule_reports_its_blocks() {
    let listener = TestListener::open();
    for path in [path(), "/v1/blocks/r/%2Fb/::1".to_owned()] {
        let put = listener.ask("PUT", &path, r#"{"raw": true, "reason": "abuse"}"#);
        assert_eq!(put.status, 200, "{put:?}");
    }
    assert_eq!(
        listener.ask("PUT", "/v1/blocks/all%20of%20it", "").status,
        200
    );
    assert_eq!(reload(&listener, RULES), json!({"rules": 2}));

    let reloaded = reload(&listener, &RULES.replace("name: r", "name: renamed"));
    assert_eq!(
        reloaded["inactive_blocks"],
        json!([{"rule": "r", "blocks": 2}])
    );
    let hint = reloaded["hint"].as_str().unwrap();
    let expected =
        "2 blocks are inactive, because their rules no longer exist or have another key: \"r\"; ";
    assert!(hint.starts_with(expected), "{hint}");
    assert!(hint.contains("`tidegate unblock`"), "{hint}");
    let other = listener.ask("DELETE", "/v1/blocks/all%20of%20it", "");
    assert_eq!(other.status, 200, "{other:?}");
    assert!(listener.spend(), "the new rule has no blocks");

    let listed = listener.ask("GET", "/v1/blocks", "").json();
    let named: Vec<_> = listed["blocks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|block| block["inactive"] == "rule no longer exists")
        .map(|block| (&block["rule"], &block["key"], &block["reason"]))
        .collect();
    assert_eq!(named.len(), 2, "{listed}");
    let (rule, reason) = (json!("r"), json!("abuse"));
    assert!(named.contains(&(&rule, &json!(["/a b", "::"]), &reason)));
    assert!(named.contains(&(&rule, &json!(["/b", "::1"]), &reason)));
    let shown = listener.ask("GET", &path(), "").json();
    assert_eq!(
        (&shown["rule"], &shown["inactive"]),
        (&rule, &json!("rule no longer exists"))
    );

    // The block can be lifted under its rule's former name.
    let lifted = listener.ask("DELETE", &path(), "");
    assert_eq!(
        (lifted.status, lifted.json()),
        (
            200,
            json!({"rule": "r", "key": ["/a b", "::"], "unblocked": true})
        )
    );
    let again = listener.ask("DELETE", &path(), "");
    assert_eq!(again.status, 404);
    assert!(again.problem().starts_with("there is no rule \"r\""));

    // When the rule gets its former name back, the second block is enforced again.
    assert_eq!(reload(&listener, RULES), json!({"rules": 2}));
    let block = listener.ask("GET", "/v1/blocks/r/%2Fb/::1", "").json();
    assert_eq!(block["inactive"], Value::Null, "{block}");
}

/// If the number of a rule's key entries changes, no request can match the key of an old block.
#[test]
fn a_reload_that_changes_a_key_reports_its_blocks() {
    let listener = TestListener::open();
    let (two, one) = ("key: [path, ip]", "key: [path]");
    assert_eq!(listener.ask("PUT", &path(), "").status, 200);
    let reloaded = reload(&listener, &RULES.replace(two, one));
    assert_eq!(
        reloaded["inactive_blocks"],
        json!([{"rule": "r", "blocks": 1}])
    );
    let listed = listener.ask("GET", "/v1/blocks", "").json();
    let block = &listed["blocks"][0];
    assert_eq!(
        (&block["rule"], &block["key"], &block["inactive"]),
        (
            &json!("r"),
            &json!(["/a b", "::"]),
            &json!("rule has another key now")
        )
    );
    assert_eq!(listener.ask("DELETE", &path(), "").status, 200);
    assert_eq!(listener.ask("DELETE", &path(), "").status, 400);
    assert_eq!(
        listener.ask("GET", "/v1/blocks", "").json(),
        json!({"blocks": [], "count": 0})
    );
}

/// If a reload replaces a rule's key entries, the key of an old block could match requests that
/// have the blocked values in the new entries.
#[test]
fn a_reload_that_renames_or_reorders_key_entries_reports_its_blocks() {
    let listener = TestListener::open();
    assert_eq!(listener.ask("PUT", &path(), "").status, 200);
    for key in ["key: [path, user]", "key: [ip, path]"] {
        let reloaded = reload(&listener, &RULES.replace("key: [path, ip]", key));
        assert_eq!(
            reloaded["inactive_blocks"],
            json!([{"rule": "r", "blocks": 1}]),
            "{key}"
        );
        let hint = reloaded["hint"].as_str().unwrap();
        assert!(hint.starts_with("1 block is inactive, because"), "{hint}");
        let listed = listener.ask("GET", "/v1/blocks", "").json();
        let shown = listener.ask("GET", &path(), "").json();
        for block in [&listed["blocks"][0], &shown] {
            assert_eq!(
                (&block["rule"], &block["key"], &block["inactive"]),
                (
                    &json!("r"),
                    &json!(["/a b", "::"]),
                    &json!("rule has another key now")
                ),
                "{key}"
            );
        }
    }
    assert_eq!(reload(&listener, RULES), json!({"rules": 2}));
    assert!(!listener.spend(), "the block denies again");
    assert_eq!(listener.ask("DELETE", &path(), "").status, 200);
}

/// Earlier versions stored blocks without the rule's name.
#[test]
fn a_block_of_an_unknown_former_rule_can_be_lifted_too() {
    let listener = TestListener::open();
    let key = tidegate_core::former_key("gone", &["x"]);
    let (store, now) = (listener.limiter.local_store(), listener.limiter.now());
    assert!(store.block(&key, None, "abuse", now));
    let listed = listener.ask("GET", "/v1/blocks", "").json();
    let block = &listed["blocks"][0];
    assert_eq!(
        (&block["rule"], &block["key"], &block["inactive"]),
        (&Value::Null, &Value::Null, &json!("rule no longer exists"))
    );
    let reloaded = reload(&listener, RULES);
    assert_eq!(
        reloaded["inactive_blocks"],
        json!([{"rule": null, "blocks": 1}])
    );
    assert_eq!(listener.ask("DELETE", "/v1/blocks/gone/x", "").status, 200);
    assert_eq!(reload(&listener, RULES), json!({"rules": 2}));
}

#[test]
fn a_block_says_which_block_it_replaced() {
    let listener = TestListener::open();
    let first = listener.ask("PUT", &path(), r#"{"for": "10min", "reason": "one"}"#);
    assert_eq!(first.json()["replaced"], Value::Null, "{first:?}");
    listener.at_secs(60);
    let second = listener.ask("PUT", &path(), r#"{"for": "forever", "reason": "two"}"#);
    assert_eq!(
        second.json()["replaced"],
        json!({
            "reason": "one", "until": "2023-11-14T22:23:00Z", "until_ms": 1_700_000_580_000_u64,
            "left_ms": 540_000,
        })
    );
    let third = listener.ask("PUT", &path(), r#"{"for": "1min", "shorten": true}"#);
    assert_eq!(
        third.json()["replaced"],
        json!({"reason": "two", "until": null, "until_ms": null, "left_ms": null})
    );
    listener.at_secs(120);
    let fourth = listener.ask("PUT", &path(), r#"{"for": "1min"}"#).json();
    assert_eq!(fourth["replaced"], Value::Null, "the third has ended");
}

/// Shortening a block does not change its reason.
#[test]
fn a_block_that_is_shortened_keeps_its_reason() {
    let listener = TestListener::open();
    let put = |body: &str| listener.ask("PUT", &path(), body).json()["reason"].clone();
    assert_eq!(put(r#"{"for": "1h", "reason": "abuse"}"#), "abuse");
    assert_eq!(put(r#"{"for": "2min", "shorten": true}"#), "abuse");
    let other = r#"{"for": "1min", "shorten": true, "reason": "other"}"#;
    assert_eq!(put(other), "other");
    let none = r#"{"for": "1min", "shorten": true, "reason": ""}"#;
    assert_eq!(put(none), "");
    // Without `shorten`, the new block replaces the current block, together with its reason.
    assert_eq!(put(r#"{"for": "1h", "reason": "abuse"}"#), "abuse");
    assert_eq!(put(r#"{"for": "2h"}"#), "");
    // The reason of an expired block is not kept.
    assert_eq!(put(r#"{"for": "3h", "reason": "abuse"}"#), "abuse");
    listener.at_secs(4 * 3_600);
    assert_eq!(put(r#"{"for": "1h", "shorten": true}"#), "");
}

/// A request without a duration must not silently replace a longer block with a block of the
/// default duration.
#[test]
fn a_block_does_not_end_before_the_current_one_unless_that_is_requested() {
    let listener = TestListener::open();
    let shorter = r#"{"for": "1min"}"#;
    for (first, lasts) in [
        (
            r#"{"for": "2h", "reason": "x"}"#,
            "until 2023-11-15T00:13:00Z",
        ),
        (r#"{"for": "forever", "reason": "x"}"#, "until it is lifted"),
    ] {
        assert_eq!(listener.ask("PUT", &path(), first).status, 200);
        for body in ["", shorter] {
            let refused = listener.ask("PUT", &path(), body);
            assert_eq!(refused.status, 409, "{body}: {refused:?}");
            let problem = refused.problem();
            let expected = format!(
                "the key is already blocked {lasts}, which is longer than requested, so nothing was changed"
            );
            assert!(problem.starts_with(&expected), "{problem}");
            assert!(problem.ends_with("pass --shorten (`\"shorten\": true`)"));
            assert_eq!(listener.ask("GET", &path(), "").json()["reason"], "x");
        }
    }
    let shortened = listener.ask("PUT", &path(), r#"{"for": "1min", "shorten": true}"#);
    assert_eq!(shortened.json()["left_ms"], 60_000, "{shortened:?}");
    // A repeated request succeeds even if the clock has been set back slightly.
    listener.at_secs(7);
    assert_eq!(listener.ask("PUT", &path(), shorter).status, 200);
    listener.at_secs(0);
    assert_eq!(listener.ask("PUT", &path(), shorter).status, 200);
    let wrong = listener.ask("PUT", &path(), r#"{"shorten": "yes"}"#);
    assert_eq!(
        wrong.problem(),
        "shorten: expected true or false, got \"yes\""
    );
}
