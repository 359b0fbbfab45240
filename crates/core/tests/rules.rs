//! Tests which rules apply to a request, and which keys they charge.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use tidegate_core::{
    AlgorithmName, Condition, Cost, CostSource, Headroom, Limit, LimitSpec, Mode, Pattern, Request,
    RequestError, Rule, RuleSet, Scratch, Timestamp, UnusedShare, When, bounds, notation,
};

fn limit(text: &str) -> Limit {
    let rate = notation::rate(text).unwrap();
    LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)
        .build()
        .unwrap()
}

fn rule(name: &str) -> Rule {
    Rule::new(name, vec![limit("10/s")]).unwrap()
}

fn when(conditions: &[(&str, &str)]) -> When {
    let condition =
        |(entry, text): &(&str, &str)| Condition::new(entry, Pattern::text(text).unwrap());
    When::all(
        conditions
            .iter()
            .map(condition)
            .collect::<Result<_, _>>()
            .unwrap(),
    )
}

fn set(rules: Vec<Rule>) -> RuleSet {
    RuleSet::build(rules, Vec::new()).unwrap()
}

/// Returns the name of each rule that applies, with its key values and cost.
fn charged(rules: &RuleSet, entries: &[(&str, &str)]) -> Vec<(String, Vec<String>, u64)> {
    try_charged(rules, entries).unwrap()
}

fn try_charged(
    rules: &RuleSet,
    entries: &[(&str, &str)],
) -> Result<Vec<(String, Vec<String>, u64)>, RequestError> {
    let mut scratch = Scratch::default();
    let request = Request::new(entries, Cost::new(2).unwrap())?;
    let charges = rules.charges(&request, Timestamp::default(), &mut scratch)?;
    let describe = charges.iter().map(|charge| {
        let (rule, values) = rules.decode_key(charge.key).unwrap();
        assert_eq!(charge.limits.name(), Some(rule.name()));
        let values = values.into_iter().map(String::from).collect();
        (rule.name().to_owned(), values, charge.cost.units())
    });
    Ok(describe.collect())
}

fn names(rules: &RuleSet, entries: &[(&str, &str)]) -> Vec<String> {
    charged(rules, entries)
        .into_iter()
        .map(|(name, _, _)| name)
        .collect()
}

#[test]
fn an_elastic_rule_uses_the_unused_share_of_an_existing_rule() {
    let elastic = |name, parent| {
        let unused = Headroom::Unused(UnusedShare::new(parent, 30).unwrap());
        rule(name).elastic(50, unused).unwrap()
    };
    let rules = vec![elastic("a", "b"), elastic("b", "b"), elastic("c", "nobody")];
    let errors = RuleSet::build(rules, Vec::new()).unwrap_err();
    let fields: Vec<&str> = errors.iter().map(|error| &*error.field).collect();
    assert_eq!(
        fields,
        [
            "rules[1].elastic.unused.rule",
            "rules[2].elastic.unused.rule"
        ]
    );
    for share in [0, 101] {
        let error = UnusedShare::new("a", share).unwrap_err();
        assert_eq!(error.field, "elastic.unused.share");
    }
}

#[test]
fn every_matching_rule_applies_in_the_order_of_the_file() {
    let rules = set(vec![
        rule("z-always"),
        rule("login").when(when(&[("path", "/login"), ("method", "POST")])),
        rule("api").when(when(&[("path", "/api/**")])),
        rule("a-posts").when(when(&[("method", "POST")])),
    ]);
    let login = [("path", "/login"), ("method", "POST")];
    assert_eq!(names(&rules, &login), ["z-always", "login", "a-posts"]);
    assert_eq!(names(&rules, &[("path", "/login")]), ["z-always"]);
    assert_eq!(names(&rules, &[("path", "/api")]), ["z-always", "api"]);
    assert_eq!(names(&rules, &[]), ["z-always"]);
}

#[test]
fn conditions_list_each_entry_once() {
    let twice = when(&[("path", "/a"), ("method", "GET"), ("path", "/b")]);
    let names: Vec<&str> = twice.entry_names().collect();
    assert_eq!(names, ["path", "method"]);
}

#[test]
fn a_rule_applies_only_if_all_its_key_entries_are_present() {
    let missing = Condition::new("customer", Pattern::absent()).unwrap();
    let rules = set(vec![
        rule("per-customer").keyed_by(&["customer"]).unwrap(),
        rule("anonymous")
            .when(When::all(vec![missing]))
            .keyed_by(&["ip"])
            .unwrap(),
    ]);
    let known = charged(&rules, &[("customer", "c1"), ("ip", "192.0.2.1")]);
    assert_eq!(known, [("per-customer".into(), vec!["c1".into()], 2)]);
    let anonymous = charged(&rules, &[("ip", "192.0.2.1")]);
    assert_eq!(
        anonymous,
        [("anonymous".into(), vec!["192.0.2.1".into()], 2)]
    );
}

#[test]
fn an_empty_or_too_long_key_value_is_refused() {
    let rules = set(vec![
        rule("per-customer")
            .keyed_by(&["tenant", "customer"])
            .unwrap(),
    ]);
    let empty = try_charged(&rules, &[("tenant", "t"), ("customer", "")]).unwrap_err();
    assert_eq!(
        empty.to_string(),
        "entries.customer: must not be empty; this entry is part of the key of rule \"per-customer\""
    );
    // A key has at most 1,024 bytes. The rule's scope takes 8 bytes, the tenant's length 2, and the
    // tenant itself 1, so 1,013 bytes are left for the last value.
    let fits = "c".repeat(1_013);
    assert_eq!(
        charged(&rules, &[("tenant", "t"), ("customer", &fits)]).len(),
        1
    );
    let long = format!("{fits}c");
    let long = try_charged(&rules, &[("tenant", "t"), ("customer", &long)]).unwrap_err();
    assert_eq!(long.field, "entries.customer");
    assert!(
        long.problem
            .contains("makes a key of 1025 bytes, which exceeds the maximum of 1024"),
        "{long}"
    );
}

#[test]
fn values_with_the_same_concatenation_are_different_keys() {
    let rule = rule("pair").keyed_by(&["a", "b"]).unwrap();
    let key = |values: &[&str]| rule.encode_key(values).unwrap();
    assert_ne!(key(&["a:b", "c"]), key(&["a", "b:c"]));
    assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
    let rules = set(vec![rule.clone()]);
    let bytes = key(&["a:b", "ç"]);
    let (found, values) = rules.decode_key(&bytes).unwrap();
    assert_eq!((found.name(), values), ("pair", vec!["a:b", "ç"]));
    assert!(rules.decode_key(&bytes[..9]).is_none());
    assert!(rules.decode_key(b"user:1").is_none());
}

#[test]
fn the_admin_key_encoding_equals_that_of_a_request() {
    let rules = set(vec![
        rule("all"),
        rule("pair").keyed_by(&["a", "b"]).unwrap(),
    ]);
    let mut scratch = Scratch::default();
    let entries = [("b", "2"), ("a", "1")];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let charges = rules
        .charges(&request, Timestamp::default(), &mut scratch)
        .unwrap();
    assert_eq!(
        charges[0].key,
        rules.rule("all").unwrap().encode_key(&[]).unwrap()
    );
    let pair = rules.rule("pair").unwrap();
    assert_eq!(charges[1].key, pair.encode_key(&["1", "2"]).unwrap());
    let refused = pair.encode_key(&["1"]).unwrap_err().to_string();
    assert_eq!(
        refused,
        "key: rule \"pair\" has a key of 2 values (a, b), got 1"
    );
    assert!(rules.rule("nobody").is_none());
}

#[test]
fn the_cost_comes_from_the_request_the_rule_or_an_entry() {
    let costing = |name: &str, cost| rule(name).costing(cost).unwrap();
    let rules = set(vec![
        rule("plain"),
        costing("fixed", CostSource::Fixed(Cost::new(5).unwrap())),
        costing("tokens", CostSource::Entry("tokens".into())),
    ]);
    let costs: Vec<u64> = charged(&rules, &[("tokens", "700")])
        .iter()
        .map(|charge| charge.2)
        .collect();
    assert_eq!(costs, [2, 5, 700]);
    for wrong in [
        "",
        "0",
        "-1",
        "+1",
        "1.5",
        " 1",
        "1000000000000000",
        "99999999999999999999",
    ] {
        let refused = try_charged(&rules, &[("tokens", wrong)]).unwrap_err();
        assert_eq!(refused.field, "entries.tokens", "{wrong}");
        assert!(
            refused.problem.contains("from 1 to 999999999999999"),
            "{refused}"
        );
    }
    let refused = try_charged(&rules, &[("tokens", "1e3")]).unwrap_err();
    assert!(refused.problem.ends_with("; write 1000"), "{refused}");
    let missing = try_charged(&rules, &[]).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "entries.tokens: is missing; rule \"tokens\" takes its cost from this entry"
    );
}

#[test]
fn allowed_requests_are_not_charged() {
    let rules = RuleSet::build(
        vec![
            rule("per-ip")
                .keyed_by(&["ip"])
                .unwrap()
                .allowing(vec![when(&[("plan", "gold")])]),
            rule("all"),
        ],
        vec![
            when(&[("ip", "192.0.2.1"), ("path", "/health")]),
            when(&[("agent", "*probe*")]),
        ],
    )
    .unwrap();
    let ip = ("ip", "192.0.2.1");
    assert_eq!(names(&rules, &[ip]), ["per-ip", "all"]);
    assert_eq!(names(&rules, &[ip, ("plan", "gold")]), ["all"]);
    assert!(names(&rules, &[ip, ("path", "/health")]).is_empty());
    assert!(names(&rules, &[("agent", "x probe/1")]).is_empty());
    // An allow-listed request passes even if charging it would be an error.
    assert!(names(&rules, &[("ip", ""), ("agent", "probe")]).is_empty());
}

#[test]
fn names_are_unique_and_printable() {
    let twice = RuleSet::build(vec![rule("a"), rule("b"), rule("a"), rule("b")], Vec::new());
    let errors: Vec<String> = twice.unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(
        errors,
        [
            "rules[2].name: \"a\" is already the name of rules[0]; give every rule its own name",
            "rules[3].name: \"b\" is already the name of rules[1]; give every rule its own name",
        ]
    );
    for wrong in ["", "naïve", "a\nb", &"n".repeat(129)] {
        assert_eq!(
            Rule::new(wrong, vec![limit("1/s")]).unwrap_err().field,
            "name"
        );
    }
    assert_eq!(Rule::new("a", Vec::new()).unwrap_err().field, "limits");
    assert_eq!(rule("a").keyed_by(&["ip", "ip"]).unwrap_err().field, "key");
    assert_eq!(rule("a").keyed_by(&[""]).unwrap_err().field, "key");
}

#[test]
fn too_many_matching_rules_are_an_error() {
    let many = |count: usize| set((0..count).map(|n| rule(&format!("r{n}"))).collect());
    assert_eq!(
        names(&many(bounds::MAX_CHARGES), &[]).len(),
        bounds::MAX_CHARGES
    );
    let refused = try_charged(&many(bounds::MAX_CHARGES + 1), &[]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "entries: 65 rules apply to this request, which exceeds the maximum of 64"
    );
}

#[test]
fn successors_keep_the_limits_that_did_not_change() {
    let first = |name: &str, limits: &str, mode| {
        Rule::new(name, vec![limit(limits)]).unwrap().in_mode(mode)
    };
    let old = set(vec![
        first("same", "10/s", Mode::Enforce),
        first("raised", "10/s", Mode::Enforce),
        first("shadowed", "10/s", Mode::Enforce),
    ]);
    let new = set(vec![
        first("added", "10/s", Mode::Enforce),
        first("raised", "20/s", Mode::Enforce),
        first("shadowed", "10/s", Mode::Shadow),
        first("same", "10/s", Mode::Enforce),
    ])
    .inheriting_from(&old);
    let limits = |set: &RuleSet, name: &str| Arc::clone(set.rule(name).unwrap().limits());
    assert!(Arc::ptr_eq(&limits(&new, "same"), &limits(&old, "same")));
    assert_eq!(limits(&new, "raised").iter().next().unwrap().quota(), 20);
    assert_eq!(new.rule("shadowed").unwrap().mode(), Mode::Shadow);
    assert_eq!(old.rule("shadowed").unwrap().mode(), Mode::Enforce);
}
