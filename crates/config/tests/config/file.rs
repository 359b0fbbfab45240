//! Tests of the rules file as a whole: valid files, and files with every kind of error.

use proptest::prelude::*;
use tidegate_config::{AdminToken, Config, LegacyHeaders, MAX_FILE_BYTES};
use tidegate_core::{Mode, WhenFull};

use crate::mistakes;

#[test]
fn the_quickstart_file_works_as_it_stands() {
    let config = Config::parse(include_str!("../../../../examples/quickstart.yaml")).unwrap();
    let names: Vec<&str> = config.rules.iter().map(|rule| rule.name()).collect();
    assert_eq!(
        names,
        [
            "api-per-customer",
            "login-brute-force",
            "uploads",
            "exports"
        ]
    );
    let policies: Vec<&str> = config
        .rules
        .rule("uploads")
        .unwrap()
        .limits()
        .iter()
        .map(|limit| &**limit.policy())
        .collect();
    assert_eq!(policies, ["100/s burst 5", "1000/d"]);
    assert_eq!(config.listen.grpc.unwrap().port(), 8081);
    assert_eq!(config.warnings, []);
}

#[test]
fn every_key_has_a_default() {
    for text in ["", "---\n", "# nothing\n", "rules: []\n", "{}"] {
        let config = Config::parse(text).unwrap();
        assert_eq!(config.listen.http.unwrap().port(), 8080);
        assert!(config.rules.is_empty());
    }
}

/// Regression test: a null value must not be treated as an empty list, because that would remove
/// every limit.
#[test]
fn null_rules_are_a_mistake() {
    for text in ["rules:\n", "rules: null\n", "rules: ~\n"] {
        let expected = "rules (line 1): has no value; write `rules: []` to limit nothing";
        assert_eq!(mistakes(text), [expected], "{text:?}");
    }
}

#[test]
fn a_renamed_key_is_reported_with_its_present_name() {
    let redis = "store:\n  redis: 'redis://a'\n  ";
    let eject = "proxy:\n  listen: '127.0.0.1:1'\n  upstreams:\n    - {name: app, urls: 'http://a', eject: ";
    let elastic = "rules:\n  - name: a\n    limits: [2/h]\n    elastic: ";
    for (file, expected) in [
        (
            format!("{redis}denials: 5s"),
            "store.denials (line 3): was renamed to `denial_cache_ttl`",
        ),
        (
            format!("{redis}share: 50%"),
            "store.share (line 3): was renamed to `fallback_share`",
        ),
        (
            format!("{eject}{{for: 5s}}}}"),
            "proxy.upstreams[0].eject.for (line 4): was renamed to `duration`",
        ),
        (
            "shutdown:\n  notice: 5s".to_owned(),
            "shutdown.notice (line 2): was renamed to `pre_stop_delay`",
        ),
        (
            format!("{elastic}{{by: 50%, when: {{headroom.app: 'yes'}}}}"),
            "rules[0].elastic.by (line 4): was renamed to `extra`",
        ),
        (
            format!("{elastic}{{extra: 50%, when: {{room.app: 'yes'}}}}"),
            "rules[0].elastic.when.room.app (line 4): was renamed to `headroom.app`",
        ),
    ] {
        let mistakes = mistakes(&file);
        assert!(
            mistakes.iter().any(|mistake| mistake == expected),
            "{mistakes:?}"
        );
    }
}

#[test]
fn the_old_name_of_a_renamed_key_is_unknown_where_the_new_one_is() {
    assert_eq!(
        mistakes("rules: [{name: a, limits: [2/h], share: 50%}]"),
        [mistakes("rules: [{name: a, limits: [2/h], shere: 50%}]")[0].replace("shere", "share")]
    );
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
    assert_eq!(
        (config.memory.max_keys, config.memory.max_bytes),
        (7, 3 << 20)
    );
    assert_eq!(config.memory.when_full, WhenFull::Deny);
    assert_eq!(config.snapshot.unwrap().every.to_string(), "5s");
    assert_eq!(
        (config.headers.ratelimit, config.headers.legacy),
        (false, LegacyHeaders::Epoch)
    );
    assert_eq!(config.admin_token, AdminToken::Env("TOKEN".to_owned()));
    let rule = config.rules.rule("everything").unwrap();
    assert_eq!(rule.mode(), Mode::Shadow);
    assert_eq!(rule.key().collect::<Vec<_>>(), ["customer", "ip"]);
    let policies: Vec<&str> = rule
        .limits()
        .iter()
        .map(|limit| &**limit.policy())
        .collect();
    assert_eq!(
        policies,
        [
            "10/s burst 0",
            "5/month Europe/Berlin from 15",
            "3/min capacity 9"
        ]
    );
}

/// A file with one error of every kind.
const MISTAKEN: &str = "\
lisen: {}
listen: {http: localhost, resp: 127.0.0.1:99999, admin: 192.0.2.1:9090}
store: {memory: {max_keys: -1, max_bytes: 1 gallon, when_full: evcit, snapshot: {every: 1ms}}}
headers: {legacy: yes, legacy: off}
admin: {token: 'to ken'}
allow: [{}]
rules:
  - name: one
    limits: [{algorithm: token_bucket, capcity: 10, refill: 1/fortnight}]
  - limits: [1/s]
    mode: shadwo
    soft: 10
  - name: three
    limits:
      - {algorithm: gcra, rate: 0/s}
      - {algorithm: fixed_window, limit: 1.5, window: 0s}
      - {algorithm: fixed_window, limit: 5, anchor: {calendar: year, zone: Mars/Olympus, day: 32}}
      - {algorithm: sliding_window_counter, limit: 5, window: 10s, buckets: 5, burst: 99999999999999999999}
    when:
      ip: {cidr: [10.0.0.1/8, ten]}
      path: {regex: '('}
      method: []
      agent:
  - name: one
    cost: 0
    key: [ip, ip]
    limits: []
  - just text
";

/// The exact report for [`MISTAKEN`].
const REPORT: &str = "\
lisen (line 1): unknown key `lisen`; did you mean `listen`?
listen.http (line 2): expected an address and port such as 127.0.0.1:8080, or off, got \"localhost\"
listen.resp (line 2): expected an address and port such as 127.0.0.1:8080, or off, got \"127.0.0.1:99999\"
store.memory.max_keys (line 3): expected a non-negative integer, got the number -1
store.memory.max_bytes (line 3): expected a size such as 512MiB or 1GiB, got \"1 gallon\"
store.memory.when_full (line 3): expected one of evict, deny, allow, got \"evcit\"; did you mean `evict`?
store.memory.snapshot.every (line 3): must be at least 1s, got 1ms
store.memory.snapshot.path (line 3): is missing; name the snapshot file
headers.legacy (line 4): duplicate key `legacy`; remove one of the two
headers.legacy (line 4): expected one of off, delta, epoch, got \"yes\"
admin.token (line 5): must be 1 to 4096 printable ASCII characters without spaces
allow[0] (line 6): has no conditions, so it would match every request; add at least one condition
rules[0].limits[0].capcity (line 9): unknown key `capcity`; did you mean `capacity`?
rules[0].limits[0].refill (line 9): expected a rate such as 20/min or 5/10s, got \"1/fortnight\"; unknown unit \"fortnight\": use us, ms, s, min, h, d or w
rules[1].name (line 10): is missing; give each rule its own name
rules[1].mode (line 11): expected one of enforce, shadow, got \"shadwo\"; did you mean `shadow`?
rules[1].soft (line 12): expected a percentage such as 10%, got the number 10
rules[2].limits[0].rate (line 15): a rate must be at least 1, got 0; to deny everything, set `algorithm` to fixed_window, `limit` to 0 and `window` to 1min: {algorithm: fixed_window, limit: 0, window: 1min}
rules[2].limits[1].limit (line 16): expected a non-negative integer, got the number 1.5
rules[2].limits[1].window (line 16): a duration must be longer than zero, got \"0s\"
rules[2].limits[2].anchor.calendar (line 17): expected one of day, week, month, got \"year\"
rules[2].limits[2].anchor.zone (line 17): \"Mars/Olympus\" is not an IANA time zone such as UTC or Europe/Berlin
rules[2].limits[2].anchor.day (line 17): must be from 1 to 31 for this calendar, got 32
rules[2].limits[3].burst (line 18): 99999999999999999999 is too large a number
rules[2].when.ip.cidr[0] (line 20): \"10.0.0.1/8\" is an address inside a network; write 10.0.0.0/8
rules[2].when.ip.cidr[1] (line 20): expected a network such as 10.0.0.0/8 or 2001:db8::/32, got \"ten\"
rules[2].when.path.regex (line 21): is not a valid regular expression: unclosed group
rules[2].when.method (line 22): an empty list matches nothing; name at least one value
rules[2].when.agent (line 23): expected a value, a list of values, or a map such as {not: …}, got nothing
rules[3].name (line 24): is already the name of rules[0]; give each rule its own name
rules[3].cost (line 25): must be from 1 to 999999999999999, got 0
rules[3].key (line 26): \"ip\" is listed twice; remove one of the two
rules[3].limits (line 27): must name at least one limit, such as 20/min
rules[4] (line 28): expected a rule with a name and limits, got \"just text\"";

#[test]
fn every_mistake_is_reported_at_once_with_its_path_and_line() {
    assert_eq!(mistakes(MISTAKEN).join("\n"), REPORT);
}

/// An error in a key is reported on the key's line, even if the value is in block style and starts
/// on a later line.
#[test]
fn a_mistake_in_a_key_has_the_line_of_the_key() {
    let file = "\
lisen:
  http: 127.0.0.1:1
rules:
  - name: a
    limitz:

      - 5/s
    limits:
      - algorithm: gcra
        rat:
          # the rate
          5/s
        rate: 5/s
    when:
      until:
        - '06:00'
";
    let expected = [
        "lisen (line 1): unknown key `lisen`; did you mean `listen`?",
        "rules[0].limitz (line 5): unknown key `limitz`; did you mean `limits`?",
        "rules[0].limits[0].rat (line 10): unknown key `rat`; did you mean `rate`?",
        "rules[0].when.until (line 15): is not part of a schedule, which has only `time`, `days` and `zone`; to \
         match an entry of this name, write {is: …}",
    ];
    assert_eq!(mistakes(file), expected);
}

#[test]
fn invalid_yaml_is_reported_with_its_line() {
    let cases = [
        (
            "a: [1",
            "line 2: invalid YAML: while parsing a flow sequence, expected ',' or ']'",
        ),
        (
            "rules: []\nrules: []\n",
            "rules (line 2): duplicate key `rules`; remove one of the two",
        ),
        (
            "x: &a 1\ny: *a\n",
            "line 2: aliases are not supported; write out the value",
        ),
        (
            "x: *bot*\n",
            "line 1: invalid YAML: while parsing node, found unknown anchor; quote a string that begins with *",
        ),
        (
            "a:\n\tb: 1\n",
            "line 2: invalid YAML: tabs disallowed within this context (block indentation); indent with spaces",
        ),
        (
            "x: !!str 1\n",
            "line 1: tags such as !!str are not supported; remove the tag",
        ),
        (
            "rules: []\n---\nrules: []\n",
            "line 2: a second YAML document begins here; a rules file must be a single document",
        ),
        ("- 1\n", "line 1: expected a map of settings, got a list"),
        (
            "? [a]\n: 1\n",
            "line 1: expected a key, got a list, a map or nothing",
        ),
        (
            "store: redis",
            "store (line 1): the address of Redis is missing; write {redis: \"redis://127.0.0.1:6379\"}",
        ),
        (
            "store: disk",
            "store (line 1): expected `memory`, or a map such as {redis: \"redis://127.0.0.1:6379\"}, got (not shown: it could contain a secret)",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(mistakes(text), [expected], "{text}");
    }
}

#[test]
fn an_oversized_file_is_rejected() {
    let huge = "#".repeat(MAX_FILE_BYTES + 1);
    assert_eq!(
        mistakes(&huge),
        ["the file has 16777217 bytes, which exceeds the maximum of 16777216"]
    );
    for open in ["[", "- ", "{a: ", "? "] {
        let deep = mistakes(&open.repeat(100_000));
        assert_eq!(
            deep,
            ["line 1: values are nested deeper than the maximum of 64"],
            "{open}"
        );
    }
    let many = mistakes(&format!("rules: [{}]", "1, ".repeat(2_000)));
    assert_eq!(many.len(), 1_001);
    assert_eq!(many[1_000], "and 1000 more errors");
}

#[test]
fn a_public_admin_listener_requires_a_token() {
    let open = "listen: {admin: '0.0.0.0:9090'}";
    let refused = mistakes(open);
    assert_eq!(refused.len(), 1);
    assert!(
        refused[0].starts_with("listen.admin (line 1): other machines can reach this address;")
    );
    for token in ["{token: secret}", "{token_env: TIDEGATE_TOKEN}"] {
        assert!(
            Config::parse(&format!("{open}\nadmin: {token}")).is_ok(),
            "{token}"
        );
    }
    let both = mistakes(&format!("{open}\nadmin: {{token: a, token_env: B}}"));
    assert_eq!(
        both,
        ["admin.token_env (line 2): conflicts with `token`; remove one of the two"]
    );
}

#[test]
fn two_listeners_cannot_share_an_address() {
    let shared = "listen: {http: 127.0.0.1:8082}";
    assert_eq!(
        mistakes(shared),
        [
            "listen.http (line 1): 127.0.0.1:8082 is also the address of listen.admin; give each listener its own address"
        ]
    );
    assert!(Config::parse("listen: {http: 127.0.0.1:0, resp: 127.0.0.1:0}").is_ok());
}

#[test]
fn a_secret_is_never_shown() {
    let config = Config::parse("admin: {token: hunter2}").unwrap();
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(!mistakes("admin: {token: 'hunter 2'}")[0].contains("hunter"));
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "(?s).{0,200}", keys in prop::collection::vec("[a-z_]{1,12}: ?[\\[{\"'&*!0-9a-z/%.,:-]{0,20}\n {0,6}", 0..20)) {
        let _ = Config::parse(&text);
        let _ = Config::parse(&keys.concat());
        let _ = Config::parse(&format!("rules:\n  - name: x\n    {}", keys.concat().replace('\n', "\n    ")));
    }
}
