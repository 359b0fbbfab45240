//! Tests of entries that a service sends. Entries are normalised unless they are sent as raw, and
//! entries that no rule uses are counted.

use serde_json::{Value, json};

use crate::listener::TestListener;

const RULES: &str = "
clients: {ipv6_prefix: 56}
rules:
  - name: login
    when: {path: /login}
    key: [ip]
    limits: [{algorithm: fixed_window, limit: 2, window: 1h}]
  - {name: shop, when: {host: shop.example}, limits: [{algorithm: fixed_window, limit: 2, window: 1h}]}
allow: [{ip.exact: 192.0.2.1}]
";

fn ask(listener: &TestListener, entries: &Value, raw: bool) -> (u16, Value) {
    let body = json!({"entries": entries, "raw": raw});
    listener.verdict("/v1/check", &body.to_string())
}

#[test]
fn a_check_counts_what_forward_auth_would_count() {
    let listener = TestListener::open(RULES);
    for (path, ip) in [
        ("//login", "2001:db8:1:1::1"),
        ("/%6Cogin?next=/", "[2001:DB8:1:22::2]:4711"),
    ] {
        let (status, verdict) = ask(&listener, &json!({"path": path, "ip": ip}), false);
        assert_eq!((status, &verdict["rule"]), (200, &json!("login")), "{path}");
    }
    let last = json!({"path": "/login#x", "ip": "2001:db8:1:ff::3"});
    assert_eq!(ask(&listener, &last, false).0, 429);
    let mapped = json!({"path": "/login", "ip": "::ffff:203.0.113.9"});
    assert_eq!(ask(&listener, &mapped, false).1["remaining"], 1);
    let plain = json!({"path": "/login", "ip": "203.0.113.9"});
    assert_eq!(ask(&listener, &plain, false).1["remaining"], 0);
    let host = json!({"host": "SHOP.example:8443"});
    assert_eq!(ask(&listener, &host, false).1["rule"], "shop");
    let peek = json!({"entries": {"path": "//login", "ip": "203.0.113.9"}});
    assert_eq!(listener.verdict("/v1/peek", &peek.to_string()).0, 429);
}

/// A rule may use a header name in upper case. A request with the same header name must match.
#[test]
fn header_names_are_compared_without_regard_to_case() {
    let listener = TestListener::open(
        "rules: [{name: key, key: [header.X-Api-Key], limits: [{algorithm: fixed_window, limit: 2, window: 1h}]}]",
    );
    for (name, raw, status) in [
        ("header.X-Api-Key", false, 200),
        ("header.x-api-key", true, 200),
        ("header.X-API-KEY", true, 429),
    ] {
        let mut entries = json!({});
        entries[name] = json!("abc");
        assert_eq!(ask(&listener, &entries, raw).0, status, "{name}");
    }
    let twice = json!({"header.X-Api-Key": "abc", "header.x-api-key": "def"});
    assert_eq!(ask(&listener, &twice, false).0, 400);
}

/// Frameworks that split a route from its prefix return paths such as `login`. Rules expect paths
/// that start with a slash, so no rule would apply to `login` if no slash were added.
#[test]
fn a_path_without_a_leading_slash_gets_one() {
    let listener = TestListener::open(RULES);
    for path in ["login", "login?next=/", "%6Cogin#x"] {
        let entries = json!({"path": path, "ip": format!("203.0.113.{}", path.len())});
        assert_eq!(ask(&listener, &entries, false).1["rule"], "login", "{path}");
        let raw = ask(&listener, &entries, true).1;
        assert_eq!(raw["rule"], Value::Null, "{path} raw");
    }
    // A host without a scheme looks the same as the first segment of a path.
    let entries = json!({"path": "shop.example/login", "ip": "203.0.113.9"});
    assert_eq!(ask(&listener, &entries, false).1["rule"], Value::Null);
    let dots = json!({"path": "../login"});
    assert_eq!(ask(&listener, &dots, false).0, 400);
}

#[test]
fn raw_entries_are_used_unchanged() {
    let listener = TestListener::open(RULES);
    let odd = json!({"path": "//login", "ip": "2001:db8:1::1"});
    assert_eq!(ask(&listener, &odd, true).1["rule"], Value::Null);
    for _ in 0..2 {
        for ip in ["2001:db8:1::1", "2001:db8:1::2", "unix"] {
            let entries = json!({"path": "/login", "ip": ip});
            assert_eq!(ask(&listener, &entries, true).0, 200, "{ip}");
        }
    }
}

#[test]
fn ambiguous_entries_are_rejected_if_a_rule_uses_them() {
    let listener = TestListener::open(RULES);
    for (entries, field, word) in [
        (json!({"path": "/x/../login"}), "entries.path", "segments"),
        (json!({"ip": "unknown"}), "entries.ip", "not an IP address"),
        (
            json!({"ip": "203.0.113.9, 10.0.0.1"}),
            "entries.ip",
            "one address",
        ),
    ] {
        let (status, problem) = ask(&listener, &entries, false);
        assert_eq!(
            (status, &problem["field"]),
            (400, &json!(field)),
            "{problem}"
        );
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.contains(word) && detail.contains("`raw`"),
            "{detail}"
        );
        assert_eq!(ask(&listener, &entries, true).0, 200);
    }
    let blind = TestListener::open("rules: [{name: all, limits: [9/s]}]");
    assert_eq!(
        ask(&blind, &json!({"path": "/a/../b", "ip": "?"}), false).0,
        200
    );
}

fn sample(listener: &TestListener, name: &str) -> String {
    let text = listener.limiter.exposition();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {text}"))
        .trim()
        .to_owned()
}

#[test]
fn unmatched_requests_and_unknown_entries_are_counted() {
    let listener = TestListener::open(RULES);
    let (unmatched, unknown, missing) = (
        r#"tidegate_unmatched_requests_total{listener="http"}"#,
        r#"tidegate_unknown_entries_total{listener="http"}"#,
        "\ntidegate_missing_key_entries".trim_start(),
    );
    let missing = format!("{missing} ");
    assert_eq!(sample(&listener, &missing), "1");
    ask(
        &listener,
        &json!({"Path": "/login", "IP": "203.0.113.9"}),
        false,
    );
    assert_eq!(sample(&listener, unmatched), "1");
    assert_eq!(sample(&listener, unknown), "2");
    assert_eq!(sample(&listener, &missing), "1");
    // A request that matches a rule or the allow list does not count as unmatched.
    ask(
        &listener,
        &json!({"path": "/login", "ip": "203.0.113.9"}),
        false,
    );
    ask(&listener, &json!({"ip.exact": "192.0.2.1"}), false);
    assert_eq!(sample(&listener, unmatched), "1");
    assert_eq!(sample(&listener, unknown), "2");
    assert_eq!(sample(&listener, &missing), "0");
    // Peeks are not counted. Forward-auth derives only the entries that rules use.
    let peek = json!({"entries": {"Path": "/"}}).to_string();
    assert_eq!(listener.verdict("/v1/peek", &peek).0, 200);
    listener.authorize(
        "",
        &[("x-original-uri", "/about"), ("x-real-ip", "203.0.113.9")],
    );
    assert_eq!(sample(&listener, unmatched), "2");
    assert_eq!(sample(&listener, unknown), "2");
}
