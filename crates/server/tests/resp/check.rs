//! Tests of `TIDEGATE.CHECK`, which evaluates the rules for a request.

use tidegate_core::{
    AlgorithmName, Condition, CostSource, Limit, LimitSpec, Pattern, Rule, RuleSet, Span, When,
    notation,
};
use tidegate_server::listener::resp;

use crate::listener::TestListener;

fn limit(text: &str) -> Limit {
    LimitSpec::shorthand(notation::rate(text).unwrap(), AlgorithmName::TokenBucket)
        .build()
        .unwrap()
}

/// Opens a listener with two limits: per customer for paths under `/api`, and per address for
/// `/login`.
fn listener() -> TestListener {
    let path = |glob: &str| {
        When::all(vec![
            Condition::new("path", Pattern::text(glob).unwrap()).unwrap(),
        ])
    };
    let api = Rule::new("api", vec![limit("5/min"), limit("100/d")]).unwrap();
    let api = api.when(path("/api/**")).keyed_by(&["customer"]).unwrap();
    let login = Rule::new("login", vec![limit("2/h")]).unwrap();
    let login = login.when(path("/login")).keyed_by(&["ip"]).unwrap();
    let bulk = Rule::new("bulk", vec![limit("10/s")]).unwrap();
    let bulk = bulk
        .when(path("/bulk"))
        .costing(CostSource::Entry("size".into()))
        .unwrap();
    TestListener::with(
        RuleSet::build(vec![api, login, bulk], Vec::new()).unwrap(),
        resp::default_bounds(),
    )
}

#[test]
fn a_request_is_checked_against_the_rules() {
    let listener = listener();
    let mut client = listener.connect();
    let check = "TIDEGATE.CHECK path /login ip 127.0.0.1";
    assert_eq!(
        client.command(check).to_string(),
        r#"[1, "login", 2, 1, 1800000, 0]"#
    );
    assert_eq!(
        client.command(check).to_string(),
        r#"[1, "login", 2, 0, 3600000, 0]"#
    );
    assert_eq!(
        client.command(check).to_string(),
        r#"[0, "login", 2, 0, 3600000, 1800000]"#
    );
    listener.at_millis(1_799_999);
    assert_eq!(
        client.command(check).to_string(),
        r#"[0, "login", 2, 0, 1800001, 1]"#
    );
    listener.at_millis(1_800_000);
    assert_eq!(
        client.command(check).to_string(),
        r#"[1, "login", 2, 0, 3600000, 0]"#
    );
    let another = "tidegate.check path /login ip 127.0.0.2";
    assert_eq!(
        client.command(another).to_string(),
        r#"[1, "login", 2, 1, 1800000, 0]"#
    );
}

#[test]
fn a_peek_charges_nothing_and_a_cost_is_charged() {
    let listener = listener();
    let mut client = listener.connect();
    let entries = "path /api/x customer 7";
    for _ in 0..3 {
        let peek = client.command(&format!("TIDEGATE.CHECK PEEK COST 5 {entries}"));
        assert_eq!(peek.to_string(), r#"[1, "api", 5, 0, 60000, 0]"#);
    }
    let check = client.command(&format!("TIDEGATE.CHECK cost 4 {entries}"));
    assert_eq!(check.to_string(), r#"[1, "api", 5, 1, 48000, 0]"#);
    let denied = client.command(&format!("TIDEGATE.CHECK COST 2 {entries}"));
    assert_eq!(denied.to_string(), r#"[0, "api", 5, 1, 48000, 12000]"#);
    let never = client.command(&format!("TIDEGATE.CHECK COST 6 {entries}"));
    assert_eq!(never.items()[5].to_string(), "-1");
}

#[test]
fn without_a_rule_there_is_no_limit() {
    let listener = listener();
    let mut client = listener.connect();
    assert_eq!(
        client.command("TIDEGATE.CHECK path /").to_string(),
        "[1, nil, -1, -1, 0, 0]"
    );
    client.command("HELLO 3");
    assert_eq!(
        client.command("TIDEGATE.CHECK path /").to_string(),
        "[1, nil, -1, -1, 0, 0]"
    );
}

/// A rule uses entries whose names are those of options.
#[test]
fn an_entry_that_a_rule_uses_may_have_the_name_of_an_option() {
    let rule = Rule::new("jobs", vec![limit("9/h")]).unwrap();
    let rule = rule.keyed_by(&["peek"]).unwrap();
    let rule = rule.costing(CostSource::Entry("cost".into())).unwrap();
    let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
    let listener = TestListener::with(rules, resp::default_bounds());
    let mut client = listener.connect();
    let answer = client.command("TIDEGATE.CHECK PEEK COST 1 peek 1 cost 4");
    assert_eq!(answer.to_string(), r#"[1, "jobs", 9, 5, 1600000, 0]"#);
    let answer = client.command("TIDEGATE.CHECK PEEK COST 1 peek 1 cost 4 RAW 1");
    let expected = "-ERR raw: is an option: give it only once, and before the entries";
    assert!(answer.to_string().starts_with(expected), "{answer}");
}

/// An option after the entries would be an entry, so the request would be charged another cost than
/// the client has given.
#[test]
fn an_option_that_is_misplaced_or_repeated_is_an_error() {
    let listener = listener();
    let mut client = listener.connect();
    let advice = "is an option: give it only once, and before the entries; an entry can have this \
        name only if a rule uses the entry";
    for (command, option) in [
        ("CHECK path /login ip ::1 COST 2", "cost"),
        ("CHECK path /login cost 2 ip ::1", "cost"),
        ("CHECK COST 1 COST 2 path /login ip ::1", "cost"),
        ("CHECK path /login ip ::1 PEEK", "peek"),
        ("CHECK path /login Peek ip ::1", "peek"),
        ("CHECK PEEK RAW PEEK RAW path /login ip ::1", "peek"),
        ("CHECK path /login ip ::1 RAW COST 5", "raw"),
        ("CHECK WAIT 5 path /login ip ::1 WAIT 5", "wait"),
        ("RESERVE path /login ip ::1 COST 2", "cost"),
        ("RESERVE path /login ip ::1 TTL 500", "ttl"),
        ("RESERVE TTL 500 TTL 500 path /login ip ::1", "ttl"),
    ] {
        let answer = client.command(&format!("TIDEGATE.{command}")).to_string();
        assert_eq!(answer, format!("-ERR {option}: {advice}"), "{command}");
    }
    let answer = client.command("TIDEGATE.CHECK TTL 500 path /login ip ::1");
    let expected =
        "-ERR ttl: is not an option of a check, which reserves nothing; use TIDEGATE.RESERVE";
    assert_eq!(answer.to_string(), expected);
    let stats = listener.limiter.local_store().stats();
    assert_eq!(stats.keys, 0, "a rejected command is counted nowhere");
}

#[test]
fn invalid_entries_are_rejected_by_name() {
    let refused = [
        (
            "TIDEGATE.CHECK",
            "-ERR wrong number of arguments for 'tidegate.check' command",
        ),
        (
            "TIDEGATE.CHECK path",
            "-ERR wrong number of arguments for 'tidegate.check' command",
        ),
        (
            "TIDEGATE.CHECK path /login ip",
            "-ERR wrong number of arguments for 'tidegate.check' command",
        ),
        (
            "TIDEGATE.CHECK PEEK COST 1",
            "-ERR wrong number of arguments for 'tidegate.check' command",
        ),
        (
            "TIDEGATE.CHECK COST x path /",
            "-ERR cost: must be an integer from 1 to 999999999999999, got 'x'",
        ),
        (
            "TIDEGATE.CHECK COST -1 path /",
            "-ERR cost: must be an integer from 1 to 999999999999999, got '-1'",
        ),
        (
            "TIDEGATE.CHECK COST 0 path /",
            "-ERR cost: must be an integer from 1 to 999999999999999, got '0'",
        ),
        (
            "TIDEGATE.CHECK COST 1e3 path /",
            "-ERR cost: must be an integer from 1 to 999999999999999, got '1e3'; write 1000",
        ),
        (
            "TIDEGATE.CHECK COST 99999999999999999999 path /",
            "-ERR cost: must be an integer from 1 to 999999999999999, got '99999999999999999999'",
        ),
    ];
    let listener = listener();
    let mut client = listener.connect();
    for (command, expected) in refused {
        assert_eq!(client.command(command).to_string(), expected, "{command}");
    }
    let not_text = client
        .command_of(&[b"TIDEGATE.CHECK", b"ip", b"\xff"])
        .to_string();
    assert_eq!(not_text, "-ERR entries.ip: is not UTF-8");
    let empty_key = client.command("TIDEGATE.CHECK path /login ip ").to_string();
    assert!(empty_key.starts_with("-ERR "), "{empty_key}");
    let twice = client
        .command("TIDEGATE.CHECK path /login path /api/x")
        .to_string();
    assert!(twice.starts_with("-ERR entries"), "{twice}");
    let no_cost = client
        .command("TIDEGATE.CHECK path /bulk size big")
        .to_string();
    assert!(no_cost.starts_with("-ERR "), "{no_cost}");
    let many: Vec<String> = (0..65)
        .flat_map(|n| [format!("name{n}"), n.to_string()])
        .collect();
    let many = client
        .command(&format!("TIDEGATE.CHECK {}", many.join(" ")))
        .to_string();
    assert_eq!(many, "-ERR entries: 65 entries exceed the maximum of 64");
    assert_eq!(
        listener.limiter.local_store().stats().keys,
        0,
        "a rejected command is counted nowhere"
    );
}

#[test]
fn entries_are_normalised_unless_they_are_raw() {
    let listener = listener();
    let mut client = listener.connect();
    let mut check = |words: &str| {
        client
            .command(&format!("TIDEGATE.CHECK {words}"))
            .to_string()
    };
    let first = check("path //login ip 2001:db8::1");
    assert_eq!(first, r#"[1, "login", 2, 1, 1800000, 0]"#);
    let second = check("path /%6Cogin?x ip 2001:DB8::2");
    assert_eq!(second, r#"[1, "login", 2, 0, 3600000, 0]"#);
    assert_eq!(
        check("RAW path //login ip 2001:db8::1"),
        "[1, nil, -1, -1, 0, 0]"
    );
    let raw = check("cost 2 raw peek path /login ip 2001:db8::1");
    assert_eq!(raw, r#"[1, "login", 2, 0, 3600000, 0]"#);
    let refused = check("path /x/../login ip 2001:db8::1");
    assert!(
        refused.starts_with("-ERR entries.path: has segments"),
        "{refused}"
    );
    let refused = check("path /login ip unknown");
    assert!(
        refused.starts_with("-ERR entries.ip: is not an IP"),
        "{refused}"
    );
}

#[test]
fn a_block_says_when_it_ends() {
    let listener = listener();
    let (rules, now) = (listener.limiter.rules(), listener.limiter.now());
    let key = rules.rule("login").unwrap().encode_key(&["127.0.0.1"]);
    let key = key.unwrap();
    let store = listener.limiter.local_store();
    let mut client = listener.connect();
    let check = "TIDEGATE.CHECK path /login ip 127.0.0.1";
    for (span, expected) in [
        (
            Some(Span::from_secs(90)),
            r#"[0, "login", -1, -1, 90000, 90000]"#,
        ),
        (None, r#"[0, "login", -1, -1, -1, -1]"#),
    ] {
        assert!(store.block(&key, span, "", now));
        assert_eq!(client.command(check).to_string(), expected);
    }
}
