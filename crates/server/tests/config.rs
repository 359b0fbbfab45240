//! The rules file: what works, and every mistake at once.

use proptest::prelude::*;
use tidegate_core::{Mode, WhenFull};
use tidegate_server::config::{AdminToken, Config, LegacyHeaders};

fn mistakes(text: &str) -> Vec<String> {
    Config::parse(text).unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn the_quickstart_file_works_as_it_stands() {
    let config = Config::parse(include_str!("../../../examples/quickstart.yaml")).unwrap();
    let names: Vec<&str> = config.rules.iter().map(|rule| rule.name()).collect();
    assert_eq!(names, ["api-per-customer", "login-brute-force", "uploads", "exports"]);
    let policies: Vec<&str> = config.rules.rule("uploads").unwrap().limits().iter().map(|limit| &**limit.policy()).collect();
    assert_eq!(policies, ["100/s burst 5", "1000/d"]);
    assert_eq!(config.warnings.len(), 1, "the gRPC door is not there yet");
    assert_eq!(config.warnings[0].path, "listen.grpc");
}

#[test]
fn every_key_has_a_default() {
    for text in ["", "---\n", "# nothing\n", "rules:\n", "{}"] {
        let config = Config::parse(text).unwrap();
        assert_eq!(config.listen.http.unwrap().port(), 8080);
        assert!(config.rules.is_empty());
    }
}

#[test]
fn every_key_is_read() {
    let config = Config::parse(
        "
listen: {http: 127.0.0.1:1, resp: off, admin: '[::1]:3'}
store:
  memory: {max_keys: 7, max_bytes: 3MiB, when_full: deny, snapshot: {path: counters, every: 5s}}
defaults: {algorithm: gcra}
headers: {ratelimit: false, legacy: epoch}
admin: {token_env: TOKEN}
allow: [{ip: {cidr: [10.0.0.0/8, '::1']}}]
rules:
  - name: everything
    when: {path: {not: /health}, method: [GET, POST], agent: {present: true}, id: {regex: '[a-z]+'}}
    key: [customer, ip]
    mode: shadow
    cost: bytes
    allow: {customer: us}
    limits:
      - 10/s
      - {algorithm: fixed_window, limit: 5, anchor: {calendar: month, zone: Europe/Berlin, day: 15}, soft: 10%}
      - {algorithm: token_bucket, capacity: 9, refill: 3/min, refill_mode: interval, count_denied: true}
",
    )
    .unwrap();
    assert_eq!(config.listen.http.unwrap().port(), 1);
    assert_eq!(config.listen.resp, None);
    assert!(config.listen.admin.unwrap().is_ipv6());
    assert_eq!((config.memory.max_keys, config.memory.max_bytes), (7, 3 << 20));
    assert_eq!(config.memory.when_full, WhenFull::Deny);
    assert_eq!(config.snapshot.unwrap().every.to_string(), "5s");
    assert_eq!((config.headers.ratelimit, config.headers.legacy), (false, LegacyHeaders::Epoch));
    assert_eq!(config.admin_token, AdminToken::Env("TOKEN".to_owned()));
    let rule = config.rules.rule("everything").unwrap();
    assert_eq!(rule.mode(), Mode::Shadow);
    assert_eq!(rule.key().collect::<Vec<_>>(), ["customer", "ip"]);
    let policies: Vec<&str> = rule.limits().iter().map(|limit| &**limit.policy()).collect();
    assert_eq!(policies, ["10/s", "5/month Europe/Berlin from 15", "3/min capacity 9"]);
}

#[test]
fn every_mistake_is_reported_at_once_with_its_path_and_line() {
    let text = "\
lisen: {}
listen: {http: localhost, resp: 127.0.0.1:99999}
store: disk
headers: {legacy: yes}
rules:
  - name: one
    limits: [{algorithm: token_bucket, capcity: 10, refill: 1/fortnight}]
  - limits: [1/s]
    key: []
    mode: shadwo
  - name: three
    limits: [{algorithm: gcra, rate: 0/s}, {algorithm: fixed_window, limit: 5, window: 0s}]
    when: {ip: {cidr: 10.0.0.0/99}, path: {regex: '('}}
  - name: four
    cost: 0
    limits: [{limit: 5, window: 10s, algorithm: sliding_window_counter, buckets: 3, burst: 1}]
  - just text
";
    let found = mistakes(text);
    let expected = [
        "lisen (line 1): unknown key `lisen`; did you mean `listen`?",
        "listen.http (line 2): expected an address and port such as 127.0.0.1:8080, or off, got \"localhost\"",
        "listen.resp (line 2): expected an address and port such as 127.0.0.1:8080, or off, got \"127.0.0.1:99999\"",
        "store (line 3): unknown word `disk`; known here: memory",
        "headers.legacy (line 4): unknown word `yes`; known here: off, false, delta, epoch",
        "rules[0].limits[0].capcity (line 7): unknown key `capcity`; did you mean `capacity`?",
        "rules[0].limits[0].refill (line 7): expected a rate such as 20/min or 5/10s, got \"1/fortnight\"",
        "rules[1].name (line 8): is missing",
        "rules[1].mode (line 10): unknown word `shadwo`; did you mean `shadow`?",
        "rules[2].limits[0].rate (line 12): must be at least 1, got 0",
        "rules[2].limits[1].window (line 12): a duration must be longer than zero, got \"0s\"",
    ];
    for line in expected {
        assert!(found.iter().any(|mistake| mistake == line), "missing: {line}\nfound: {found:#?}");
    }
    for path in ["rules[2].when.ip", "rules[2].when.path", "rules[3].cost", "rules[3].limits[0].burst", "rules[4]"] {
        assert!(found.iter().any(|mistake| mistake.starts_with(path)), "missing: {path}\nfound: {found:#?}");
    }
}

#[test]
fn what_is_no_rules_file_is_refused_with_its_line() {
    let cases = [
        ("a: [1", "no YAML"),
        ("a: 1\na: 2\n", "stands twice"),
        ("x: &a 1\ny: *a\n", "aliases"),
        ("rules: []\n---\nrules: []\n", "second document"),
        ("- 1\n", "expected a map"),
        ("store: {redis: 'redis://localhost'}", "not in this version"),
    ];
    for (text, expected) in cases {
        let found = mistakes(text);
        assert!(found.iter().any(|mistake| mistake.contains(expected) && mistake.contains("line")), "{text}: {found:?}");
    }
    let deep = "[".repeat(100_000);
    assert!(mistakes(&deep)[0].contains("line"), "depth is bounded");
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "(?s).{0,200}", keys in prop::collection::vec("[a-z_]{1,12}: ?[\\[{\"'&*!0-9a-z/%.,:-]{0,20}\n {0,6}", 0..20)) {
        let _ = Config::parse(&text);
        let _ = Config::parse(&keys.concat());
        let _ = Config::parse(&format!("rules:\n  - name: x\n    {}", keys.concat().replace('\n', "\n    ")));
    }
}
