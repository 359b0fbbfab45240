//! Tests of the section `rules`: limits, conditions and elastic limits.

use tidegate::{Clock, Limiter, RateLimiter as _};
use tidegate_config::Config;
use tidegate_core::{
    Charge, Cost, Decision, Effect, MemoryBounds, MemoryStore, Request, Scratch, Timestamp,
};

use crate::mistakes;

#[test]
fn a_limit_inherits_from_its_rule_then_the_file_then_the_default() {
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
  - {name: b, algorithm: leaky_bucket, limits: [5/s, {capacity: 3, leak: 1/s}]}
  - {name: c, algorithm: fixed_window, limits: [5000/s]}
";
    let bare = [
        "SlidingWindowLog",
        "FixedWindow",
        "LeakyBucket",
        "LeakyBucket",
        "FixedWindow",
    ];
    assert_eq!(algorithms(rules), bare);
    let with_default = [
        "Gcra",
        "FixedWindow",
        "LeakyBucket",
        "LeakyBucket",
        "FixedWindow",
    ];
    assert_eq!(
        algorithms(&format!("defaults: {{algorithm: gcra}}{rules}")),
        with_default
    );
}

#[test]
fn a_shorthand_without_an_algorithm_never_exceeds_its_count() {
    // The test sends a request at each of 300 instants in 3 s. With 6/3s, a token bucket would
    // admit 11 requests in the first 3 s.
    for (limits, most) in [
        ("6/3s", 6),
        ("{limit: 6, window: 3s}", 6),
        ("1200/3s", 1_200),
    ] {
        let rules = format!("rules: [{{name: a, limits: [{limits}]}}]");
        let config = Config::parse(&rules).unwrap();
        let limits = config.rules.rule("a").unwrap().limits();
        let store = MemoryStore::new(MemoryBounds::default());
        let mut admitted = 0;
        for instant in 0..300 {
            let now = Timestamp::from_micros(1_700_000_000_000_000 + instant * 10_000);
            for _ in 0..=most {
                let charge = Charge::new(b"k", limits, Cost::ONE).unwrap();
                let decision = store.check(&[charge], now, Effect::Charge, &mut Vec::new());
                admitted += usize::from(decision == Decision::Admitted);
            }
        }
        assert_eq!(admitted, most, "{rules}");
    }
}

#[test]
fn a_wrong_inherited_algorithm_is_the_only_mistake() {
    let text =
        "rules:\n  - {name: a, algorithm: token, limits: [5/s, {capacity: 3, refill: 1/s}]}\n";
    assert_eq!(mistakes(text).len(), 1, "{:?}", mistakes(text));
    let text =
        "defaults: {algoritm: gcra}\nrules: [{name: a, limits: [{capacity: 3, leak: 1/s}]}]\n";
    assert_eq!(mistakes(text).len(), 1, "{:?}", mistakes(text));
}

#[test]
fn limits_inherit_settings_from_their_rule() {
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

/// Returns the names of the rules in `text` that apply to `entries`.
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
fn conditions_match_as_documented() {
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

#[test]
fn an_elastic_rule_expands_while_its_condition_holds() {
    let file = "rules:
  - {name: api, key: [user], limits: [2/h], elastic: {extra: 50%, when: {headroom.app: 'yes'}}}
";
    let rules = Config::parse(file).unwrap().rules;
    assert!(rules.uses_entry("headroom.app") && !rules.uses_entry("headroom.other"));
    let store = MemoryStore::new(MemoryBounds::default());
    let admitted = |room: &'static str| {
        let entries = [("user", "u"), ("headroom.app", room)];
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
fn an_elastic_rule_expands_while_another_has_a_share_unused() {
    let file = "rules:
  - {name: each, key: [user], limits: [2/h], elastic: {extra: 100%, unused: {rule: team, share: 50%}}}
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
        let verdict = limiter.check(&rules, &mut scratch, &request, Effect::Charge);
        verdict.ready().unwrap().unwrap().allowed
    };
    // The team's limit is eight requests. Before the fifth request, half of this limit remains.
    for user in ["a", "a", "a", "a"] {
        assert!(admitted(user, Some("t")));
    }
    assert!(
        !admitted("a", Some("t")),
        "twice its limit of two is the maximum"
    );
    assert!(admitted("b", Some("t")));
    // Three of the team's requests remain, which is less than half.
    assert!(admitted("b", Some("t")));
    assert!(!admitted("b", Some("t")));
    // The limit of the other team is unused. The limits of a customer without a team are not
    // raised.
    assert!(admitted("b", Some("u")));
    assert!(!admitted("b", None));
}

#[test]
fn mistakes_in_elastic_rules_are_reported() {
    let file = "rules:
  - {name: a, limits: [2/h], elastic: {extra: 2000%, when: {room: 'yes'}}}
  - {name: b, limits: [2/h], elastic: {when: {}, wen: 1}}
  - {name: c, limits: [2/h], elastic: {extra: 50%}}
  - {name: d, limits: [2/h], count_denied: true, elastic: {extra: 50%, when: {room: 'yes'}}}
  - {name: e, limits: [2/h], elastic: {extra: 50%, unused: {rule: e, share: 30%}}}
  - {name: f, limits: [2/h], elastic: {extra: 50%, unused: {rule: nobody, share: 130%}}}
  - {name: g, limits: [2/h], elastic: {extra: 50%, unused: {}, when: {room: 'yes'}}}
  - {name: h, limits: [2/h], elastic: {extra: 50%, unused: {}}}
";
    assert_eq!(
        mistakes(file),
        [
            "rules[0].elastic (line 2): 2000% exceeds the maximum of 1000%",
            "rules[1].elastic.wen (line 3): unknown key `wen`; did you mean `when`?",
            "rules[1].elastic.extra (line 3): is missing; set how far the limits may be exceeded, such as 50%",
            "rules[2].elastic.when (line 4): is missing; set `when` or `unused`, or replace `elastic` with `soft`, which needs no condition",
            "rules[3].elastic (line 5): cannot be combined with count_denied; remove one of the two",
            "rules[4].elastic.unused.rule (line 6): must name a different rule",
            "rules[5].elastic.unused.share (line 7): must be 1% to 100%, not 130%",
            "rules[5].elastic.unused.rule (line 7): there is no rule \"nobody\"",
            "rules[6].elastic.unused (line 8): conflicts with `when`; remove one of the two",
            "rules[7].elastic.unused.rule (line 9): is missing; name the rule whose limits must be partly unused",
            "rules[7].elastic.unused.share (line 9): is missing; set the share that must be unused, such as 30%",
        ]
    );
}

#[test]
fn an_unknown_algorithm_of_a_limit_is_one_mistake() {
    let file = "rules: [{name: a, limits: [{algorithm: concurency, limit: 5, lease: 10s}]}]";
    let messages = mistakes(file);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(
        messages[0].ends_with("did you mean `concurrency`?"),
        "{messages:?}"
    );
}

#[test]
fn a_wrong_period_of_a_limit_is_one_mistake() {
    for field in [
        "limit: 100, window: 60",
        "limit: 100, window: 1month",
        "rate: 5rpm",
    ] {
        let messages = mistakes(&format!("rules: [{{name: a, limits: [{{{field}}}]}}]"));
        assert_eq!(messages.len(), 1, "{messages:?}");
    }
}

#[test]
fn a_wrong_limit_is_one_mistake_that_names_the_accepted_form() {
    for (limit, at, expected) in [
        (
            "{limit: 1_000, window: 30s}",
            ".limit",
            "expected a non-negative integer, got \"1_000\"; write 1000",
        ),
        (
            "{limit: 1e3, window: 30s}",
            ".limit",
            "expected a non-negative integer, got the number 1e3; write 1000",
        ),
        (
            "{limit: 10, leas: 30s}",
            ".leas",
            "unknown key `leas`; did you mean `lease`?",
        ),
        (
            "{algorithm: leaky_bucket, capacity: 10, leek: 1/s}",
            ".leek",
            "unknown key `leek`; did you mean `leak`?",
        ),
        (
            "10 concurrent",
            "",
            "expected a rate such as 20/min or 5/10s, got \"10 concurrent\"; to limit concurrent requests, set \
             `algorithm` to concurrency and `limit` to 10: {algorithm: concurrency, limit: 10}",
        ),
        (
            "5 parallel requests",
            "",
            "expected a rate such as 20/min or 5/10s, got \"5 parallel requests\"; to limit concurrent requests, \
             set `algorithm` to concurrency and `limit` to 5: {algorithm: concurrency, limit: 5}",
        ),
        (
            "{limit: 10, anchor: week}",
            ".anchor",
            "expected epoch, first_request, or a calendar such as {calendar: week}, got \"week\"",
        ),
        (
            "{algorithm: fixed_window, limit: 10, anchor: monthly}",
            ".anchor",
            "expected epoch, first_request, or a calendar such as {calendar: month}, got \"monthly\"",
        ),
        (
            "{algorithm: concurrency, limit: 10, queue: 5}",
            ".queue",
            "applies only with `wait`; set `wait`, such as `wait: 2s`, or remove `queue`",
        ),
        (
            "{algorithm: concurrency, limit: 10, wait: 2s, queue: true}",
            ".queue",
            "must be the maximum number of waiting requests, such as 100",
        ),
        (
            "{limit: 10, wait: 2s, queue: 10001}",
            ".queue",
            "10001 exceeds the maximum of 10000",
        ),
        (
            "{limit: 10, wait: 2s, queue: 0}",
            ".queue",
            "must be at least 1, got 0",
        ),
        (
            "{limit: 10, wait: 2min}",
            ".wait",
            "2min exceeds the maximum of 1min",
        ),
        (
            "{limit: 10, wait: 0s}",
            ".wait",
            "a duration must be longer than zero, got \"0s\"",
        ),
        (
            "{algorithm: leaky_bucket, capacity: 10, leak: 1/s, queue: 5}",
            ".queue",
            "must be true or false; a number is the queue of a limit with `algorithm: concurrency`",
        ),
        (
            "{algorithm: fixed_window, limit: 10, window: 1h, wait: 2s}",
            ".wait",
            "is not a field of fixed_window, which takes limit, window, anchor; it applies only to \
             `algorithm: concurrency`, whose requests can wait for a slot",
        ),
        (
            "{limit: 10, window: 1h, wait: 2s}",
            ".wait",
            "applies only to `algorithm: concurrency`, whose requests can wait for a slot, which \
             takes limit, lease, wait, queue; remove `wait`, or the fields of other algorithms",
        ),
    ] {
        let messages = mistakes(&format!("rules: [{{name: a, limits: [{limit}]}}]"));
        assert_eq!(
            messages,
            [format!("rules[0].limits[0]{at} (line 1): {expected}")]
        );
    }
    // The misspelt field cannot determine the algorithm, so a missing algorithm is reported as
    // well.
    let messages = mistakes("rules: [{name: a, limits: [{limit: 10, lmit: 30s}]}]");
    assert_eq!(messages.len(), 2, "{messages:?}");
}

#[test]
fn a_concurrency_limit_can_let_requests_wait() {
    let slot_wait = |limit: &str| {
        let config = Config::parse(&format!("rules: [{{name: a, limits: [{limit}]}}]")).unwrap();
        let rule = config.rules.rule("a").unwrap();
        let slot_wait = rule.limits().iter().next().unwrap().slot_wait();
        slot_wait.map(|wait| (wait.longest.to_string(), wait.queue))
    };
    assert_eq!(
        slot_wait("{limit: 20, wait: 2s, queue: 5}"),
        Some(("2s".into(), 5))
    );
    let default = Some(("500ms".into(), 100));
    let limit = "{algorithm: concurrency, limit: 20, wait: 500ms}";
    assert_eq!(slot_wait(limit), default);
    assert_eq!(slot_wait("{algorithm: concurrency, limit: 20}"), None);
}

#[test]
fn a_shorthand_may_have_a_burst_or_a_capacity() {
    let limits = "limits: ['100/s burst 20', 5/min capacity 10]";
    let config = Config::parse(&format!("rules: [{{name: a, {limits}}}]")).unwrap();
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    let rule = config.rules.rule("a").unwrap();
    let policies: Vec<&str> = rule
        .limits()
        .iter()
        .map(|limit| &**limit.policy())
        .collect();
    assert_eq!(policies, ["100/s burst 20", "5/min capacity 10"]);
    for (fields, expected) in [
        (
            "limits: [100/s burst 20], algorithm: fixed_window",
            "`burst` is not a field of fixed_window; set `algorithm` to gcra, `rate` to 100/s and `burst` to 20: \
             {algorithm: gcra, rate: 100/s, burst: 20}",
        ),
        (
            "limits: [100/s burst few]",
            "expected an integer after `burst`, got \"few\"",
        ),
        (
            "limits: [100/s bursts 20]",
            "expected a limit such as 20/min, 100/s burst 20 or 100/s capacity 20, got \"100/s bursts 20\"",
        ),
        (
            "limits: [100 per second burst 20]",
            "expected a rate such as 20/min or 5/10s, got \"100 per second\"; a slash separates the number of \
             requests and the period: write 100/s",
        ),
    ] {
        let messages = mistakes(&format!("rules: [{{name: a, {fields}}}]"));
        assert_eq!(
            messages,
            [format!("rules[0].limits[0] (line 1): {expected}")]
        );
    }
}
