//! The rules file: what works, and every mistake at once.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use proptest::prelude::*;
use tidegate_core::{
    Cost, Effect, MemoryBounds, MemoryStore, Mode, Request, Scratch, Timestamp, WhenFull,
};
use tidegate_http::{Clock, Gate as _};
use tidegate_server::{
    config::{AdminToken, Config, Grpc, LegacyHeaders, MAX_FILE_BYTES},
    limiter::Limiter,
};

fn mistakes(text: &str) -> Vec<String> {
    Config::parse(text)
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn the_quickstart_file_works_as_it_stands() {
    let config = Config::parse(include_str!("../../../examples/quickstart.yaml")).unwrap();
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
        ["10/s", "5/month Europe/Berlin from 15", "3/min capacity 9"]
    );
}

/// Every kind of mistake once.
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
      - {algorithm: fixed_window, limit: 5, anchor: {calendar: month, zone: Mars/Olympus}}
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

/// What is said of [`MISTAKEN`], to the letter.
const REPORT: &str = "\
lisen (line 1): unknown key `lisen`; did you mean `listen`?
listen.http (line 2): expected an address and port such as 127.0.0.1:8080, or off, got \"localhost\"
listen.resp (line 2): expected an address and port such as 127.0.0.1:8080, or off, got \"127.0.0.1:99999\"
store.memory.max_keys (line 3): expected a whole number, got the number -1
store.memory.max_bytes (line 3): expected a size such as 512MiB or 1GiB, got \"1 gallon\"
store.memory.when_full (line 3): expected one of evict, deny, allow, got \"evcit\"; did you mean `evict`?
store.memory.snapshot.every (line 3): must be at least 1s, got 1ms
store.memory.snapshot.path (line 3): is missing; name the file to keep counters in
headers.legacy (line 4): key `legacy` stands twice
headers.legacy (line 4): expected one of off, delta, epoch, got \"yes\"
admin.token (line 5): must be 1 to 4096 printable ASCII characters without spaces
allow[0] (line 6): without a condition everything would pass; name at least one
rules[0].limits[0].capcity (line 9): unknown key `capcity`; did you mean `capacity`?
rules[0].limits[0].refill (line 9): expected a rate such as 20/min or 5/10s, got \"1/fortnight\"
rules[1].name (line 10): is missing; give the rule a name of its own
rules[1].mode (line 11): expected one of enforce, shadow, got \"shadwo\"; did you mean `shadow`?
rules[1].soft (line 12): expected a percentage such as 10%, got the number 10
rules[2].limits[0].rate (line 15): must be at least 1, got 0
rules[2].limits[1].limit (line 16): expected a whole number, got the number 1.5
rules[2].limits[1].window (line 16): a duration must be longer than zero, got \"0s\"
rules[2].limits[2].anchor.zone (line 17): \"Mars/Olympus\" is not an IANA time zone such as UTC or Europe/Berlin
rules[2].limits[3].burst (line 18): 99999999999999999999 is too large a number
rules[2].when.ip.cidr[0] (line 20): \"10.0.0.1/8\" is an address inside a network; write 10.0.0.0/8
rules[2].when.ip.cidr[1] (line 20): expected a network such as 10.0.0.0/8 or 2001:db8::/32, got \"ten\"
rules[2].when.path.regex (line 21): is no regular expression: unclosed group
rules[2].when.method (line 22): an empty list matches nothing; name at least one value
rules[2].when.agent (line 23): expected a value, a list of values, or a map such as {not: …}, got nothing
rules[3].name (line 24): is the name of rules[0] already; give every rule its own
rules[3].cost (line 25): must be from 1 to 999999999999999, got 0
rules[3].key (line 26): \"ip\" stands twice
rules[3].limits (line 27): must name at least one limit, such as 20/min
rules[4] (line 28): expected a rule with a name and limits, got \"just text\"";

#[test]
fn every_mistake_is_reported_at_once_with_its_path_and_line() {
    assert_eq!(mistakes(MISTAKEN).join("\n"), REPORT);
}

#[test]
fn what_is_no_rules_file_is_refused_with_its_line() {
    let cases = [
        (
            "a: [1",
            "line 2: not YAML: while parsing a flow sequence, expected ',' or ']'",
        ),
        (
            "rules: []\nrules: []\n",
            "rules (line 2): key `rules` stands twice",
        ),
        (
            "x: &a 1\ny: *a\n",
            "line 2: aliases are not taken; write out what it stands for",
        ),
        (
            "x: *bot*\n",
            "line 1: not YAML: while parsing node, found unknown anchor; put a text that begins with * in quotes",
        ),
        (
            "x: !!str 1\n",
            "line 1: tags such as !!str are not taken; remove it",
        ),
        (
            "rules: []\n---\nrules: []\n",
            "line 2: a second document begins here; a rules file is one document",
        ),
        ("- 1\n", "line 1: expected a map of settings, got a list"),
        (
            "? [a]\n: 1\n",
            "line 1: expected a key, got a list, a map or nothing",
        ),
        (
            "store: redis",
            "store (line 1): say where Redis is: {redis: \"redis://127.0.0.1:6379\"}",
        ),
        (
            "store: disk",
            "store (line 1): expected `memory`, or a map such as {redis: \"redis://127.0.0.1:6379\"}, got \"disk\"",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(mistakes(text), [expected], "{text}");
    }
}

#[test]
fn a_file_without_end_is_refused_before_it_is_read() {
    let huge = "#".repeat(MAX_FILE_BYTES + 1);
    assert_eq!(
        mistakes(&huge),
        ["16777217 bytes are over the maximum of 16777216"]
    );
    for open in ["[", "- ", "{a: ", "? "] {
        let deep = mistakes(&open.repeat(100_000));
        assert_eq!(
            deep,
            ["line 1: nested deeper than the maximum of 64"],
            "{open}"
        );
    }
    let many = mistakes(&format!("rules: [{}]", "1, ".repeat(2_000)));
    assert_eq!(many.len(), 1_001);
    assert_eq!(many[1_000], "and 1000 mistakes more");
}

#[test]
fn an_admin_door_that_others_can_reach_needs_a_token() {
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
        ["admin.token_env (line 2): the token stands in the file already; remove one of the two"]
    );
}

#[test]
fn two_doors_cannot_share_an_address() {
    let shared = "listen: {http: 127.0.0.1:9090}";
    assert_eq!(
        mistakes(shared),
        ["listen.http (line 1): 127.0.0.1:9090 is the address of listen.admin too"]
    );
    assert!(Config::parse("listen: {http: 127.0.0.1:0, resp: 127.0.0.1:0}").is_ok());
}

#[test]
fn a_secret_is_never_shown() {
    let config = Config::parse("admin: {token: hunter2}").unwrap();
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(!mistakes("admin: {token: 'hunter 2'}")[0].contains("hunter"));
}

#[test]
fn a_limit_falls_back_on_its_rule_then_the_file_then_a_token_bucket() {
    let algorithms = |text: &str| -> Vec<String> {
        let config = Config::parse(text).unwrap();
        let limits = config.rules.iter().flat_map(|rule| rule.limits().iter());
        limits
            .map(|limit| {
                format!("{:?}", limit.algorithm())
                    .split(' ')
                    .next()
                    .unwrap()
                    .to_owned()
            })
            .collect()
    };
    let rules = "
rules:
  - {name: a, limits: [5/s, {limit: 3, window: 1s, algorithm: fixed_window}]}
  - {name: b, algorithm: sliding_window_log, limits: [5/s, {limit: 3, window: 1s}]}
";
    let bare = [
        "TokenBucket",
        "FixedWindow",
        "SlidingWindowLog",
        "SlidingWindowLog",
    ];
    assert_eq!(algorithms(rules), bare);
    let with_default = [
        "Gcra",
        "FixedWindow",
        "SlidingWindowLog",
        "SlidingWindowLog",
    ];
    assert_eq!(
        algorithms(&format!("defaults: {{algorithm: gcra}}{rules}")),
        with_default
    );
}

#[test]
fn a_rule_lends_its_limits_what_they_do_not_say() {
    let config = Config::parse(
        "rules: [{name: a, soft: 10%, count_denied: true, limits: [1/s, {capacity: 5, refill: 1/s, soft: 0%, count_denied: false}]}]",
    )
    .unwrap();
    let limits = config.rules.rule("a").unwrap().limits();
    let options: Vec<(u32, bool)> = limits
        .iter()
        .map(|limit| (limit.soft_percent(), limit.count_denied()))
        .collect();
    assert_eq!(options, [(10, true), (0, false)]);
}

/// The rules of `text` that apply to `entries`.
fn applied(text: &str, entries: &[(&str, &str)]) -> Vec<String> {
    let config = Config::parse(text).unwrap();
    let request = Request::new(entries, Cost::ONE).unwrap();
    let mut scratch = Scratch::default();
    let charges = config
        .rules
        .charges(&request, Timestamp::default(), &mut scratch)
        .unwrap();
    charges
        .iter()
        .map(|charge| charge.limits.name().unwrap().to_owned())
        .collect()
}

#[test]
fn conditions_mean_what_they_say() {
    let text = "
allow: {ip: 192.0.2.1}
rules:
  - {name: exact, limits: 1/s, when: {status: 429, version: 1.0, quoted: 'true'}}
  - {name: star, limits: 1/s, when: {agent: '*bot*'}}
  - {name: literal, limits: 1/s, when: {agent: {is: '*bot*'}}}
  - {name: either, limits: 1/s, when: {method: [POST, PUT, 'P*H']}}
  - {name: both, limits: 1/s, when: {agent: {not: [curl, {regex: 'wget.*'}], present: true}}}
  - {name: missing, limits: 1/s, when: {customer: {present: false}}, allow: [{method: GET}, {agent: curl}]}
";
    let customer = ("customer", "c1");
    assert_eq!(
        applied(
            text,
            &[
                ("status", "429"),
                ("version", "1.0"),
                ("quoted", "true"),
                customer
            ]
        ),
        ["exact"]
    );
    assert_eq!(
        applied(text, &[("agent", "a bot"), customer]),
        ["star", "both"]
    );
    assert_eq!(
        applied(text, &[("agent", "*bot*"), customer]),
        ["star", "literal", "both"]
    );
    assert_eq!(applied(text, &[("method", "PATCH"), customer]), ["either"]);
    assert!(applied(text, &[("agent", "wget/1"), customer]).is_empty());
    assert_eq!(applied(text, &[("method", "PUT")]), ["either", "missing"]);
    assert!(applied(text, &[("method", "GET")]).is_empty());
    assert!(applied(text, &[("ip", "192.0.2.1"), ("method", "PUT")]).is_empty());
}

#[test]
fn ten_thousand_rules_are_read() {
    let mut text = String::from("rules:\n");
    for at in 0..10_000 {
        text.push_str(&format!(
            "  - {{name: r{at}, when: {{path: '/t{at}/**'}}, key: ip, limits: [1/s, 20/min]}}\n"
        ));
    }
    assert_eq!(Config::parse(&text).unwrap().rules.len(), 10_000);
    assert_eq!(
        applied(&text, &[("path", "/t777/x"), ("ip", "192.0.2.1")]),
        ["r777"]
    );
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "(?s).{0,200}", keys in prop::collection::vec("[a-z_]{1,12}: ?[\\[{\"'&*!0-9a-z/%.,:-]{0,20}\n {0,6}", 0..20)) {
        let _ = Config::parse(&text);
        let _ = Config::parse(&keys.concat());
        let _ = Config::parse(&format!("rules:\n  - name: x\n    {}", keys.concat().replace('\n', "\n    ")));
    }
}

#[test]
fn the_settings_of_the_grpc_door_are_read() {
    let config = Config::parse("").unwrap();
    assert_eq!(config.listen.grpc.unwrap().port(), 8081);
    assert_eq!(config.grpc, Grpc::default());
    let config = Config::parse(
        "grpc:
  tls: {certificate: server.pem, key: server.key, client_ca: clients.pem}
  keep_alive: 5s
  keep_alive_timeout: 500ms
  max_connection_age: 1h
  max_connection_age_grace: 1min
  max_streams: 8
",
    );
    let grpc = config.unwrap().grpc;
    let tls = grpc.tls.unwrap();
    assert_eq!(tls.certificate.to_str(), Some("server.pem"));
    assert_eq!(tls.key.to_str(), Some("server.key"));
    assert_eq!(tls.client_ca.unwrap().to_str(), Some("clients.pem"));
    let times = [
        grpc.keep_alive,
        grpc.keep_alive_timeout,
        grpc.max_connection_age,
        grpc.max_connection_age_grace,
    ];
    assert_eq!(
        times.map(|time| time.as_millis()),
        [5_000, 500, 3_600_000, 60_000]
    );
    assert_eq!(grpc.max_streams, 8);
}

#[test]
fn mistakes_in_the_settings_of_the_grpc_door_are_named() {
    let file = "grpc: {keep_alive: 400d, max_connection_age: never, max_streams: 0, tls: {key: a, client: b}}";
    assert_eq!(
        mistakes(file),
        [
            "grpc.keep_alive (line 1): must be 1ms to 366d",
            "grpc.max_connection_age (line 1): expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"never\"",
            "grpc.max_streams (line 1): must be 1 to 100000",
            "grpc.tls.client (line 1): unknown key `client`; did you mean `client_ca`?",
            "grpc.tls.certificate (line 1): is missing; name a PEM file",
        ]
    );
}

#[test]
fn a_rule_stretches_where_there_is_room() {
    let file = "rules:
  - {name: api, key: [user], limits: [2/h], elastic: {by: 50%, when: {room.app: 'yes'}}}
";
    let rules = Config::parse(file).unwrap().rules;
    assert!(rules.entry_names().any(|name| name == "room.app"));
    let store = MemoryStore::new(MemoryBounds::default());
    let admitted = |room: &'static str| {
        let entries = [("user", "u"), ("room.app", room)];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let mut scratch = Scratch::default();
        let now = Timestamp::from_micros(1);
        let charges = rules.charges(&request, now, &mut scratch).unwrap();
        let mut outcomes = Vec::new();
        store.check(&charges, now, Effect::Charge, &mut outcomes);
        (outcomes[0].allowed, outcomes[0].over_limit)
    };
    assert_eq!(admitted("no"), (true, false));
    assert_eq!(admitted("yes"), (true, false));
    assert_eq!(admitted("no"), (false, false));
    assert_eq!(admitted("yes"), (true, true));
    assert_eq!(admitted("yes"), (false, false));
}

#[test]
fn a_rule_stretches_while_another_has_a_share_unused() {
    let file = "rules:
  - {name: each, key: [user], limits: [2/h], elastic: {by: 100%, unused: {rule: team, share: 50%}}}
  - {name: team, key: [team], limits: [8/h]}
";
    let rules = Config::parse(file).unwrap().rules;
    let clock = Clock::manual(Timestamp::from_micros(1));
    let limiter = Limiter::new(rules, MemoryStore::new(MemoryBounds::default()), clock);
    let admitted = |user: &'static str, team: Option<&'static str>| {
        let mut entries = vec![("user", user)];
        entries.extend(team.map(|team| ("team", team)));
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let verdict = limiter.check_now(&rules, &mut scratch, &request, Effect::Charge);
        verdict.unwrap().unwrap().allowed
    };
    // Four of the team's eight are left before the fifth request.
    for user in ["a", "a", "a", "a"] {
        assert!(admitted(user, Some("t")));
    }
    assert!(
        !admitted("a", Some("t")),
        "twice its two is all that it has"
    );
    assert!(admitted("b", Some("t")));
    // Three are left, which is under half.
    assert!(admitted("b", Some("t")));
    assert!(!admitted("b", Some("t")));
    // Another team has all of its own, and who is in none has no room.
    assert!(admitted("b", Some("u")));
    assert!(!admitted("b", None));
}

#[test]
fn mistakes_in_what_stretches_are_named() {
    let file = "rules:
  - {name: a, limits: [2/h], elastic: {by: 2000%, when: {room: 'yes'}}}
  - {name: b, limits: [2/h], elastic: {when: {}, wen: 1}}
  - {name: c, limits: [2/h], elastic: {by: 50%}}
  - {name: d, limits: [2/h], count_denied: true, elastic: {by: 50%, when: {room: 'yes'}}}
  - {name: e, limits: [2/h], elastic: {by: 50%, unused: {rule: e, share: 30%}}}
  - {name: f, limits: [2/h], elastic: {by: 50%, unused: {rule: nobody, share: 130%}}}
  - {name: g, limits: [2/h], elastic: {by: 50%, unused: {}, when: {room: 'yes'}}}
  - {name: h, limits: [2/h], elastic: {by: 50%, unused: {}}}
";
    assert_eq!(
        mistakes(file),
        [
            "rules[0].elastic (line 2): 2000% is over the maximum of 1000%",
            "rules[1].elastic.wen (line 3): unknown key `wen`; did you mean `when`?",
            "rules[1].elastic.by (line 3): is missing; say how much more, such as 50%",
            "rules[2].elastic.when (line 4): is missing; say when there is room, or unused, or use soft, which is always",
            "rules[3].elastic (line 5): does not go with count_denied; remove one of the two",
            "rules[4].elastic.unused.rule (line 6): must be another rule than this one",
            "rules[5].elastic.unused.share (line 7): must be 1% to 100%, not 130%",
            "rules[5].elastic.unused.rule (line 7): there is no rule \"nobody\"",
            "rules[6].elastic.unused (line 8): does not go with when; remove one of the two",
            "rules[7].elastic.unused.rule (line 9): is missing; name the rule to go by",
            "rules[7].elastic.unused.share (line 9): is missing; say how much must be left, such as 30%",
        ]
    );
}

#[test]
fn quotas_are_read() {
    let config = Config::parse(
        "quotas:
  - {name: keys, domain: shop, bucket: {service: shop, api_key: '*'}, limit: 100/s}
  - {name: all, domain: shop, limit: 5/10min}
",
    );
    let quotas = config.unwrap().quotas;
    assert_eq!((&*quotas[0].name, &*quotas[0].domain), ("keys", "shop"));
    assert_eq!(quotas[0].limit.requests, 100);
    assert_eq!(quotas[1].limit.period.to_string(), "10min");
    let id = |pairs: &[(&str, &str)]| {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    };
    let alice = id(&[("service", "shop"), ("api_key", "alice"), ("zone", "eu")]);
    assert!(quotas[0].applies("shop", &alice));
    assert!(!quotas[0].applies("blog", &alice));
    assert!(!quotas[0].applies("shop", &id(&[("service", "shop")])));
    assert!(quotas[1].applies("shop", &id(&[])));
}

#[test]
fn mistakes_in_quotas_are_named() {
    let file = "quotas:
  - {name: a, domain: '', limit: 5000000000/s}
  - {name: a, domain: shop, limit: 1/500ms, bucket: [service]}
  - {limit: 1/400d, bucket: {service: {cidr: x}}}
  - {name: b, domain: shop, limt: 1/s}
";
    assert_eq!(
        mistakes(file),
        [
            "quotas[0].domain (line 2): must not be empty",
            "quotas[0].limit (line 2): a quota is 4294967295 requests a period at most",
            "quotas[1].name (line 3): is the name of an earlier quota already; give every quota its own",
            "quotas[1].bucket (line 3): expected a map such as {service: shop, api_key: \"*\"}, got a list",
            "quotas[1].limit (line 3): the period of a quota is whole seconds",
            "quotas[2].name (line 4): is missing; every quota has a name, a domain and a limit",
            "quotas[2].domain (line 4): is missing; every quota has a name, a domain and a limit",
            "quotas[2].bucket.service.cidr (line 4): expected a network such as 10.0.0.0/8 or 2001:db8::/32, got \"x\"",
            "quotas[2].limit (line 4): the period of a quota is 366 days at most",
            "quotas[3].limt (line 5): unknown key `limt`; did you mean `limit`?",
        ]
    );
    let config = Config::parse("{listen: {grpc: off}, quotas: [{name: a, domain: b, limit: 1/s}]}");
    assert_eq!(config.unwrap().warnings[0].path, "quotas");
}
