//! Tests of blocks by entries.

use serde_json::{Value, json};
use tidegate_core::bounds::MAX_ENTRY_BLOCK_FORMS;

use crate::listener::TestListener;

const NET: &str = "/v1/entry-blocks/ip/203.0.113.0%2F24";

fn from(listener: &TestListener, ip: &str) -> bool {
    listener.charge(&[("path", "/a"), ("ip", ip)], 1)
}

#[test]
fn an_asterisk_in_a_block_is_literal_and_the_reply_says_so() {
    let listener = TestListener::open();
    let put = listener.ask("PUT", "/v1/entry-blocks/path/%2Fx*", r#"{"for": "1h"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    let hint = put.json()["hint"].clone();
    let expected = "`*` is literal in a block: only requests whose `path` is exactly `/x*` are blocked; to block a \
                    pattern, add a rule with `when: {path: \"/x*\"}` and `limits: 0/h`; this block is lost";
    assert!(hint.as_str().unwrap().starts_with(expected), "{hint}");
    let is_admitted = |path| listener.charge(&[("path", path), ("ip", "::1")], 1);
    assert!(!is_admitted("/x*"));
    assert!(is_admitted("/xy"));
}

#[test]
fn a_network_is_blocked_listed_shown_and_lifted() {
    let listener = TestListener::open();
    assert!(from(&listener, "203.0.113.9"));
    let put = listener.ask("PUT", NET, r#"{"for": "10m", "reason": "abuse"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    let mut answer = put.json();
    let hint = answer.as_object_mut().unwrap().remove("hint").unwrap();
    let hint = hint.as_str().unwrap();
    assert!(
        hint.starts_with("this block is lost when the server restarts"),
        "{hint}"
    );
    let block = json!({
        "rule": null, "entries": {"ip": "203.0.113.0/24"}, "reason": "abuse",
        "until": "2023-11-14T22:23:00Z", "until_ms": 1_700_000_580_000_u64, "left_ms": 600_000,
        "persistent": false,
    });
    assert_eq!(answer, block);
    assert!(!from(&listener, "203.0.113.9"));
    assert!(from(&listener, "203.0.114.9"));
    assert_eq!(listener.ask("GET", NET, "").json(), block);
    let list = |query: &str| {
        let answer = listener.ask("GET", &format!("/v1/entry-blocks{query}"), "");
        answer.json()["blocks"].clone()
    };
    for found in ["", "?search=203.0.113.77", "?search=abuse", "?search=0.113"] {
        assert_eq!(list(found), json!([block]), "{found}");
    }
    assert_eq!(list("?search=203.0.114.1"), json!([]));

    let lifted = listener.ask("DELETE", NET, "").json();
    let expected = json!({"rule": null, "entries": {"ip": "203.0.113.0/24"}, "unblocked": true});
    assert_eq!(lifted, expected);
    assert!(from(&listener, "203.0.113.9"));
    for method in ["GET", "DELETE"] {
        let answer = listener.ask(method, NET, "");
        assert_eq!(answer.status, 404);
        assert!(
            answer
                .problem()
                .contains("no block with exactly these entries")
        );
    }
}

#[test]
fn a_part_of_a_key_is_blocked_in_one_rule() {
    let listener = TestListener::open();
    let path = "/v1/entry-blocks/path/%2Fa?rule=r";
    let put = listener.ask("PUT", path, r#"{"for": "forever"}"#).json();
    assert_eq!((&put["rule"], &put["until"]), (&json!("r"), &Value::Null));
    assert!(!from(&listener, "192.0.2.1"));
    assert!(
        listener.charge(&[("path", "/a")], 1),
        "rule r does not apply"
    );
    assert_eq!(listener.ask("DELETE", path, "").status, 200);
    let all = "/v1/entry-blocks/path/%2Fa/ip/192.0.2.1";
    let put = listener
        .ask("PUT", all, r#"{"until": "2023-11-15"}"#)
        .json();
    assert_eq!(
        put["until"], "2023-11-15T00:00:00Z",
        "a date is its first instant in UTC"
    );
    listener.ask("DELETE", all, "");
    let put = listener.ask("PUT", all, r#"{"until": "2023-11-14T22:14:00Z"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    assert!(!from(&listener, "192.0.2.1"));
    assert!(from(&listener, "192.0.2.2"));
    listener.at_secs(60);
    assert!(from(&listener, "192.0.2.1"), "the block has ended");
    assert_eq!(listener.ask("GET", all, "").status, 404);
}

#[test]
fn invalid_input_names_the_field_and_says_what_to_do() {
    let listener = TestListener::open();
    for (path, body, problem) in [
        (
            "nobody/x",
            r#"{"for": "1h"}"#,
            "entries.nobody: no rule uses this entry",
        ),
        (
            "ip/203.0.113.0%2F33",
            r#"{"for": "1h"}"#,
            "entries.ip: expected a network such as",
        ),
        (
            "ip/203.0.113.9%2F24",
            r#"{"for": "1h"}"#,
            "entries.ip: \"203.0.113.9/24\" is an address inside a network; write 203.0.113.0/24",
        ),
        (
            "ip/0.0.0.0%2F0",
            r#"{"for": "1h"}"#,
            "entries.ip: 0.0.0.0/0 contains every IPv4 client; write a prefix of /8 or longer; to \
             block it nevertheless, pass --wide",
        ),
        (
            "ip/::%2F0",
            r#"{"for": "1h"}"#,
            "entries.ip: ::/0 contains every IPv6 client",
        ),
        (
            "ip/x",
            r#"{"for": "1h"}"#,
            "entries.ip: \"x\" is not an IP address or a network",
        ),
        (
            "ip/2001:db8:1::5",
            r#"{"for": "1h"}"#,
            "entries.ip: the listeners count all clients in 2001:db8:1::/64 as one `ip`",
        ),
        (
            "path/%2Fa%2F..%2Fb",
            r#"{"for": "1h"}"#,
            "entries.path: the listeners",
        ),
        (
            "ip/203.0.113.9",
            "{}",
            "for: is missing; give a duration such as \"1h\"",
        ),
        ("ip/203.0.113.9", r#"{"for": "0s"}"#, "for: "),
        ("ip/203.0.113.9", r#"{"for": 5}"#, "for: expected a string"),
        (
            "ip/203.0.113.9",
            r#"{"for": "1h", "until": "2023-11-15T00:00:00Z"}"#,
            "until: cannot be combined",
        ),
        (
            "ip/203.0.113.9",
            r#"{"until": "2023-11-01T00:00:00Z"}"#,
            "until: is in the past",
        ),
        (
            "ip/203.0.113.9",
            r#"{"for": "1h", "wide": 1}"#,
            "wide: expected true or false",
        ),
        (
            "ip/203.0.113.9",
            r#"{"for": "1h", "raison": "x"}"#,
            "raison: unknown field",
        ),
        (
            "ip",
            r#"{"for": "1h"}"#,
            "path: expected /v1/entry-blocks/ENTRY/VALUE",
        ),
        (
            "ip/203.0.113.9/ip/203.0.113.8",
            r#"{"for": "1h"}"#,
            "entries.ip: is given twice",
        ),
    ] {
        let answer = listener.ask("PUT", &format!("/v1/entry-blocks/{path}"), body);
        assert_eq!(answer.status, 400, "{path} {body}: {answer:?}");
        let found = answer.problem();
        assert!(found.starts_with(problem), "{path} {body}: {found}");
    }
    let unknown = listener.ask("PUT", &format!("{NET}?rule=nobody"), r#"{"for": "1h"}"#);
    assert_eq!(unknown.status, 404);
    assert_eq!(listener.limiter.entry_blocks().len(), 0);
    for (path, body) in [
        ("ip/0.0.0.0%2F0", r#"{"for": "1h", "wide": true}"#),
        ("ip/2001:db8:1::5", r#"{"for": "1h", "raw": true}"#),
        ("ip/2001:db8:1::", r#"{"for": "1h"}"#),
        ("ip/2001:db8:1::%2F64", r#"{"for": "1h"}"#),
    ] {
        let answer = listener.ask("PUT", &format!("/v1/entry-blocks/{path}"), body);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
    }
    assert!(!from(&listener, "192.0.2.1"), "everybody is blocked");
}

#[test]
fn a_shorter_block_is_refused_unless_it_is_requested() {
    let listener = TestListener::open();
    let put = |body: &str| listener.ask("PUT", NET, body);
    assert_eq!(put(r#"{"for": "2h", "reason": "abuse"}"#).status, 200);
    let refused = put(r#"{"for": "1h"}"#);
    assert_eq!(refused.status, 409);
    assert!(refused.problem().contains("--shorten"), "{refused:?}");
    let shorter = put(r#"{"for": "1h", "shorten": true}"#).json();
    assert_eq!(shorter["reason"], "abuse");
    assert_eq!(shorter["replaced"]["left_ms"], 7_200_000);
    let longer = put(r#"{"for": "forever", "reason": "worse"}"#).json();
    assert_eq!(
        (&longer["until"], &longer["reason"]),
        (&Value::Null, &json!("worse"))
    );
}

#[test]
fn too_many_forms_are_refused() {
    let listener = TestListener::open();
    for length in 0..=MAX_ENTRY_BLOCK_FORMS {
        let path = format!("/v1/entry-blocks/ip/2001:db8::%2F{}", 32 + length);
        let answer = listener.ask("PUT", &path, r#"{"for": "1h", "raw": true}"#);
        let status = if length < MAX_ENTRY_BLOCK_FORMS {
            200
        } else {
            409
        };
        assert_eq!(answer.status, status, "{length}: {answer:?}");
    }
}

#[test]
fn the_list_has_pages() {
    let listener = TestListener::open();
    for number in 0..25 {
        let path = format!("/v1/entry-blocks/ip/203.0.113.{number}");
        assert_eq!(listener.ask("PUT", &path, r#"{"for": "1h"}"#).status, 200);
    }
    let (mut found, mut after) = (0, String::new());
    loop {
        let path = format!("/v1/entry-blocks?n=10{after}");
        let page = listener.ask("GET", &path, "").json();
        assert_eq!(page["count"], 25);
        found += page["blocks"].as_array().unwrap().len();
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(found, 25);
    let path = "/v1/entry-blocks?n=1&search=203.0.113.2";
    let searched = listener.ask("GET", path, "").json();
    assert_eq!(searched["count"], 6, "203.0.113.2 and 203.0.113.20 to 24");
    listener.at_secs(3_600);
    let ended = listener.ask("GET", "/v1/entry-blocks", "").json();
    assert_eq!(
        (&ended["count"], &ended["blocks"]),
        (&0.into(), &serde_json::json!([]))
    );
    let wrong = listener.ask("GET", "/v1/entry-blocks?after=x", "");
    assert_eq!(wrong.status, 400);
}

#[test]
fn explanations_keys_denials_and_metrics_say_that_a_request_is_blocked() {
    let listener = TestListener::open();
    assert!(from(&listener, "203.0.113.9"));
    assert_eq!(
        listener
            .ask("PUT", NET, r#"{"for": "1h", "reason": "abuse"}"#)
            .status,
        200
    );
    assert!(!from(&listener, "203.0.113.9"));
    let block = |document: &Value| {
        assert_eq!(
            document["block"]["entries"],
            json!({"ip": "203.0.113.0/24"})
        );
        assert_eq!(document["block"]["reason"], "abuse");
        assert_eq!(document["block"]["left_ms"], 3_600_000);
    };
    let body = r#"{"entries": {"path": "/a", "ip": "203.0.113.9"}}"#;
    let explained = listener.ask("POST", "/v1/explain", body).json();
    assert_eq!(explained["allowed"], false);
    assert_eq!(explained["reason"], "blocked");
    assert_eq!(explained["retry_after_ms"], 3_600_000);
    block(&explained);
    let rule = &explained["rules"][0];
    assert_eq!(
        (&rule["rule"], &rule["reason"]),
        (&json!("r"), &json!("blocked"))
    );
    block(rule);

    let key = listener
        .ask("GET", "/v1/keys/r/%2Fa/203.0.113.9", "")
        .json();
    block(&key);
    assert_eq!(key["limits"][0]["retry_after_ms"], 3_600_000);
    let other = listener
        .ask("GET", "/v1/keys/r/%2Fa/203.0.112.9", "")
        .json();
    assert_eq!(other["block"], Value::Null);

    let denials = listener.ask("GET", "/v1/denials", "").json();
    let denial = &denials["rows"][0];
    assert_eq!(
        (&denial["rule"], &denial["reason"], &denial["key"]),
        (
            &json!("r"),
            &json!("blocked"),
            &json!(["/a", "203.0.113.9"])
        )
    );
    let metrics = listener.ask("GET", "/metrics", "").body;
    assert!(metrics.contains("\ntidegate_entry_blocks 1\n"), "{metrics}");
}

#[test]
fn a_block_by_entries_precedes_a_block_of_the_key_in_every_view() {
    let listener = TestListener::open();
    assert!(from(&listener, "203.0.113.9"));
    let key = "r/%2Fa/203.0.113.9";
    let path = format!("/v1/blocks/{key}");
    let put = listener.ask("PUT", &path, r#"{"for": "5m", "reason": "key"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    let body = r#"{"entries": {"path": "/a", "ip": "203.0.113.9"}}"#;
    let views = || {
        let shown = listener.ask("GET", &format!("/v1/keys/{key}"), "").json();
        let listed = listener.ask("GET", "/v1/keys/r", "").json()["keys"][0].clone();
        let explained = listener.ask("POST", "/v1/explain", body).json()["rules"][0].clone();
        [shown, listed, explained]
    };
    for view in views() {
        assert_eq!(view["block"]["reason"], "key", "{view}");
        assert_eq!(view["limits"][0]["retry_after_ms"], 300_000, "{view}");
    }
    let put = listener.ask("PUT", NET, r#"{"for": "10m", "reason": "network"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    for view in views() {
        let block = &view["block"];
        assert_eq!(block["reason"], "network", "{view}");
        assert_eq!(block["until"], "2023-11-14T22:23:00Z", "{view}");
        assert_eq!(block["entries"], json!({"ip": "203.0.113.0/24"}), "{view}");
        assert_eq!(view["limits"][0]["retry_after_ms"], 600_000, "{view}");
    }
}

#[test]
fn a_blocked_request_without_rules_is_explained() {
    let listener = TestListener::open();
    let rules = "rules: [{name: login, when: {path: /login}, key: [ip], limits: 1/s}]";
    std::fs::write(listener.file.path(), rules).unwrap();
    assert_eq!(listener.ask("POST", "/v1/reload", "").status, 200);
    let put = listener.ask("PUT", NET, r#"{"for": "1h", "reason": "abuse"}"#);
    assert_eq!(put.status, 200, "{put:?}");
    let body = r#"{"entries": {"path": "/a", "ip": "203.0.113.9"}}"#;
    let explained = listener.ask("POST", "/v1/explain", body).json();
    assert_eq!(explained["reason"], "blocked");
    assert_eq!(explained["retry_after_ms"], 3_600_000);
    assert_eq!(explained["block"]["reason"], "abuse");
    let because = "path is /a, but the rule requires /login";
    let rule = json!({"rule": "login", "applies": false, "because": because});
    assert_eq!(explained["rules"], json!([rule]));
}

#[test]
fn a_reload_joins_the_hints_about_both_kinds_of_blocks() {
    let listener = TestListener::open();
    for path in [NET, "/v1/blocks/r/%2Fa/203.0.113.9"] {
        assert_eq!(listener.ask("PUT", path, r#"{"for": "1h"}"#).status, 200);
    }
    let rules = "rules: [{name: other, key: user, limits: 1/s}]";
    std::fs::write(listener.file.path(), rules).unwrap();
    let reloaded = listener.ask("POST", "/v1/reload", "").json();
    assert_eq!(reloaded["inactive_entry_blocks"], 1);
    assert_eq!(reloaded["inactive_blocks"][0]["rule"], "r");
    let hint = reloaded["hint"].as_str().unwrap();
    assert!(hint.starts_with("1 block by entries is inactive"), "{hint}");
    assert!(hint.contains(". 1 block is inactive, because"), "{hint}");
}

#[test]
fn a_reload_reports_blocks_that_no_request_can_match() {
    let listener = TestListener::open();
    assert_eq!(listener.ask("PUT", NET, r#"{"for": "1h"}"#).status, 200);
    let rules = "rules: [{name: other, key: user, limits: 1/s}]";
    std::fs::write(listener.file.path(), rules).unwrap();
    let reloaded = listener.ask("POST", "/v1/reload", "").json();
    assert_eq!(reloaded["inactive_entry_blocks"], 1);
    let hint = reloaded["hint"].as_str().unwrap();
    assert!(hint.starts_with("1 block by entries is inactive"), "{hint}");
    let listed = listener.ask("GET", "/v1/entry-blocks", "").json();
    assert_eq!(listed["blocks"][0]["inactive"], "no rule uses the entry");
}
