//! Tests which overrides and plans apply to a request, and that spent units are kept when the
//! limits change.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, sync::Arc, thread};

use proptest::prelude::*;
use tidegate_core::{
    AlgorithmName, Cost, Decision, Effect, Limit, LimitSpec, Limits, MemoryBounds, MemoryStore,
    Outcome, Override, OverrideError, OverrideTarget, Overrides, Replacement, Request, Rule,
    RuleSet, Scratch, Span, Timestamp, bounds, notation,
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn limits(texts: &[&str]) -> Vec<Limit> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn replacement(texts: &[&str]) -> Replacement {
    Replacement::Limits(texts.iter().map(|text| Box::from(*text)).collect())
}

fn lasting(replacement: Replacement) -> Override {
    Override {
        replacement,
        until: None,
        reason: "a test".into(),
    }
}

fn api() -> Rule {
    let rule = Rule::new("api", limits(&["10/min"])).unwrap();
    rule.keyed_by(&["customer"]).unwrap()
}

/// Rules with overrides, and a store.
struct Fixture {
    rules: RuleSet,
    overrides: Overrides,
    store: MemoryStore,
    now: Timestamp,
}

impl Fixture {
    fn new(rules: Vec<Rule>) -> Self {
        let overrides = Overrides::default();
        let rules = RuleSet::build(rules, Vec::new()).unwrap();
        Self {
            rules: rules.with_overrides(&overrides),
            overrides,
            store: MemoryStore::new(MemoryBounds::default()),
            now: START,
        }
    }

    fn set(&self, target: &[&str], replacement: Replacement) {
        let rule = self.rules.rule("api").unwrap();
        let target = OverrideTarget::of(target);
        Overrides::check(rule, &target, &replacement).unwrap();
        let set = self
            .overrides
            .set("api", &target, lasting(replacement), self.now);
        set.unwrap();
    }

    fn ask(&self, entries: &[(&str, &str)], cost: u64, effect: Effect) -> (Decision, Vec<Outcome>) {
        let request = Request::new(entries, Cost::new(cost).unwrap()).unwrap();
        let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
        let charges = self
            .rules
            .charges(&request, self.now, &mut scratch)
            .unwrap();
        let decision = self.store.check(&charges, self.now, effect, &mut outcomes);
        (decision, outcomes)
    }

    /// Returns the limit of `customer`, and its remaining units.
    fn look(&self, customer: &str) -> (u64, u64) {
        let (_, outcomes) = self.ask(&[("customer", customer)], 1, Effect::Look);
        (outcomes[0].limit, outcomes[0].remaining)
    }

    fn spend(&self, customer: &str, cost: u64) -> bool {
        let (decision, _) = self.ask(&[("customer", customer)], cost, Effect::Charge);
        decision == Decision::Admitted
    }
}

#[test]
fn the_key_wins_over_the_longest_pattern_and_the_rule() {
    let fixture = Fixture::new(vec![api()]);
    assert_eq!(fixture.look("acme-7"), (10, 10));
    fixture.set(&["*"], replacement(&["20/min"]));
    assert_eq!(fixture.look("acme-7"), (20, 20));
    fixture.set(&["acme-*"], replacement(&["30/min"]));
    fixture.set(&["ac*"], replacement(&["25/min"]));
    assert_eq!(fixture.look("acme-7"), (30, 30));
    fixture.set(&["acme-7"], Replacement::Factor("4x".parse().unwrap()));
    assert_eq!(fixture.look("acme-7"), (40, 40));
    assert_eq!(
        (
            fixture.look("acme-8").0,
            fixture.look("acorn").0,
            fixture.look("zoo").0
        ),
        (30, 25, 20)
    );
    for (target, left) in [("acme-7", 30), ("acme-*", 25), ("ac*", 20), ("*", 10)] {
        let removed = fixture
            .overrides
            .remove("api", &OverrideTarget::of(&[target]));
        assert!(removed.is_some(), "{target}");
        assert_eq!(fixture.look("acme-7").0, left, "{target}");
    }
    assert!(fixture.overrides.is_empty());
}

#[test]
fn an_override_ends_by_itself() {
    let mut fixture = Fixture::new(vec![api()]);
    for target in ["alice", "al*"] {
        let until = Some(START.after(Span::from_secs(60)));
        let new = Override {
            until,
            ..lasting(replacement(&["20/min"]))
        };
        let target = OverrideTarget::of(&[target]);
        fixture.overrides.set("api", &target, new, START).unwrap();
    }
    assert_eq!(fixture.look("alice").0, 20);
    fixture.now = START.after(Span::from_micros(59_999_999));
    assert_eq!(fixture.look("alice").0, 20);
    fixture.now = START.after(Span::from_secs(60));
    assert_eq!(fixture.look("alice").0, 10);
    assert_eq!(fixture.overrides.len(), 2);
    fixture.overrides.remove_ended(fixture.now);
    assert!(fixture.overrides.is_empty());
}

#[test]
fn spent_units_stay_spent_when_an_override_begins_and_ends() {
    let fixture = Fixture::new(vec![api()]);
    assert!(fixture.spend("alice", 10));
    assert!(!fixture.spend("alice", 1));
    fixture.set(&["alice"], replacement(&["15/min"]));
    assert_eq!(fixture.look("alice"), (15, 5));
    assert!(fixture.spend("alice", 5));
    fixture
        .overrides
        .remove("api", &OverrideTarget::of(&["alice"]));
    assert_eq!(fixture.look("alice"), (10, 0));
    fixture.set(&["alice"], replacement(&["20/min"]));
    assert_eq!(fixture.look("alice"), (20, 5));
}

/// A bucket's limits are raised, lowered, and then reset to the rule's limits. Each change also
/// changes the rate, but no unit can be spent twice.
#[test]
fn a_bucket_that_is_raised_lowered_and_ended_admits_no_more_than_the_largest_limit() {
    let bucket = |rate: &str| limits(&[&format!("{rate} capacity 10")]);
    let rule = Rule::new("api", bucket("10/min")).unwrap();
    let fixture = Fixture::new(vec![rule.keyed_by(&["customer"]).unwrap()]);
    let mut admitted = 0;
    let mut spend_all = || {
        while fixture.spend("alice", 1) {
            admitted += 1;
        }
    };
    spend_all();
    for change in [
        "25/min capacity 25",
        "2/h capacity 2",
        "25/min capacity 25",
        "1/s capacity 1",
    ] {
        fixture.set(&["alice"], replacement(&[change]));
        spend_all();
    }
    fixture.overrides.clear();
    spend_all();
    assert_eq!(admitted, 25);
}

#[test]
fn overrides_outlive_a_reload() {
    let mut fixture = Fixture::new(vec![api()]);
    fixture.set(&["alice"], Replacement::Factor("2x".parse().unwrap()));
    assert!(fixture.spend("alice", 20));
    let rule = Rule::new("api", limits(&["12/min"]))
        .unwrap()
        .keyed_by(&["customer"]);
    let rules = RuleSet::build(vec![rule.unwrap()], Vec::new()).unwrap();
    let rules = rules.inheriting_from(&fixture.rules);
    fixture.rules = rules.with_overrides(&fixture.overrides);
    assert_eq!(fixture.look("alice"), (24, 4));
    // The limits of the override no longer fit the rule, so the rule's own limits apply.
    fixture.set(&["alice"], replacement(&["30/min"]));
    let slots = Limit::parse_like("3", &"1/s".parse::<Limit>().unwrap());
    assert!(slots.is_err());
}

/// While the table of a rule is split into shards, each override stays in effect.
#[test]
fn overrides_apply_while_many_more_are_set() {
    let fixture = Fixture::new(vec![api()]);
    for number in 0..100 {
        fixture.set(&[&format!("early-{number}")], replacement(&["20/min"]));
    }
    thread::scope(|scope| {
        let setter = scope.spawn(|| {
            for number in 0..3_000 {
                fixture.set(&[&format!("late-{number}")], replacement(&["30/min"]));
            }
        });
        while !setter.is_finished() {
            for number in 0..100 {
                assert_eq!(fixture.look(&format!("early-{number}")).0, 20);
            }
        }
    });
    for number in 0..3_000 {
        assert_eq!(fixture.look(&format!("late-{number}")).0, 30);
    }
    assert_eq!(fixture.overrides.len(), 3_100);
    for number in 0..3_000 {
        let target = OverrideTarget::of(&[&format!("late-{number}")]);
        assert!(fixture.overrides.remove("api", &target).is_some());
    }
    assert_eq!(fixture.overrides.len(), 100);
    assert_eq!(fixture.look("early-7").0, 20);
}

/// The bytes of a key with two values are also those of a key with a single value.
#[test]
fn an_override_has_no_effect_on_a_key_with_another_number_of_entries() {
    let two = Rule::new("api", limits(&["10/min"])).unwrap();
    let fixture = Fixture::new(vec![two.keyed_by(&["customer", "path"]).unwrap()]);
    fixture.set(&["a", "b"], replacement(&["20/min"]));
    let one = RuleSet::build(vec![api()], Vec::new()).unwrap();
    let fixture = Fixture {
        rules: one.with_overrides(&fixture.overrides),
        ..fixture
    };
    for customer in ["a", "b", "\0\u{1}ab"] {
        assert_eq!(fixture.look(customer).0, 10, "{customer:?}");
    }
}

#[test]
fn plans_follow_the_request_and_overrides_win() {
    let plans = || vec![("free", limits(&["5/min"])), ("pro", limits(&["100/min"]))];
    let rule = api().with_plans(Some("tier"), plans()).unwrap();
    let fixture = Fixture::new(vec![rule]);
    let quota = |tier: &str| {
        let entries = [("customer", "alice"), ("tier", tier)];
        let (_, outcomes) = fixture.ask(&entries, 1, Effect::Look);
        outcomes
            .iter()
            .map(|outcome| (outcome.limit, outcome.remaining))
            .collect::<Vec<_>>()
    };
    assert_eq!(quota("free"), [(5, 5)]);
    assert_eq!(quota("pro"), [(100, 100)]);
    assert_eq!(quota("unknown"), [(10, 10)]);
    // When the plan changes, spent units are kept.
    let pro = [("customer", "alice"), ("tier", "pro")];
    assert_eq!(fixture.ask(&pro, 7, Effect::Charge).0, Decision::Admitted);
    assert_eq!(quota("free"), [(5, 0)]);
    assert_eq!(quota("unknown"), [(10, 3)]);
    assert_eq!(quota("pro"), [(100, 93)]);
    fixture.set(&["alice"], Replacement::Plan("free".into()));
    assert_eq!(quota("pro"), [(5, 0)]);
    let rule = fixture.rules.rule("api").unwrap();
    let wrong = Overrides::check(
        rule,
        &OverrideTarget::of(&["a"]),
        &Replacement::Plan("gold".into()),
    );
    let wrong = wrong.unwrap_err();
    assert_eq!(
        (&*wrong.field, wrong.problem.contains("free, pro")),
        ("plan", true)
    );
}

/// Returns the rule with the plans `free` and `pro`, which the entry `tier` names.
fn api_with_plans(free: &str, pro: &str) -> Rule {
    let plans = vec![("free", limits(&[free])), ("pro", limits(&[pro]))];
    api().with_plans(Some("tier"), plans).unwrap()
}

#[test]
fn a_factor_multiplies_the_limits_of_the_plan() {
    let fixture = Fixture::new(vec![api_with_plans("5/min", "100/min")]);
    let quota = |customer: &str, tier: &str| {
        let entries = [("customer", customer), ("tier", tier)];
        let (_, outcomes) = fixture.ask(&entries, 1, Effect::Look);
        (outcomes[0].limit, outcomes[0].remaining)
    };
    let pro = [("customer", "alice"), ("tier", "pro")];
    assert_eq!(fixture.ask(&pro, 7, Effect::Charge).0, Decision::Admitted);
    fixture.set(&["alice"], Replacement::Factor("2x".parse().unwrap()));
    fixture.set(&["b*"], Replacement::Factor("0.5x".parse().unwrap()));
    assert_eq!(quota("alice", "pro"), (200, 193));
    assert_eq!(quota("alice", "free"), (10, 3));
    assert_eq!(quota("alice", "unknown"), (20, 13));
    assert_eq!(quota("bob", "pro"), (50, 50));
    assert_eq!(quota("bob", "free"), (2, 2));
    assert_eq!(quota("carol", "pro"), (100, 100));
    // Units beyond the plan stay spent when the override ends.
    assert_eq!(fixture.ask(&pro, 143, Effect::Charge).0, Decision::Admitted);
    fixture.overrides.clear();
    assert_eq!(quota("alice", "pro"), (100, 0));
}

#[test]
fn a_factor_multiplies_the_new_limits_of_a_plan_after_a_reload() {
    let mut fixture = Fixture::new(vec![api_with_plans("5/min", "100/min")]);
    fixture.set(&["alice"], Replacement::Factor("2x".parse().unwrap()));
    let entries = |tier| [("customer", "alice"), ("tier", tier)];
    let spent = fixture.ask(&entries("pro"), 150, Effect::Charge);
    assert_eq!(spent.0, Decision::Admitted);
    // The rule's own limits stay the same.
    let rules = RuleSet::build(vec![api_with_plans("6/min", "90/min")], Vec::new()).unwrap();
    let rules = rules.inheriting_from(&fixture.rules);
    fixture.rules = rules.with_overrides(&fixture.overrides);
    for (tier, expected) in [("pro", (180, 30)), ("free", (12, 0)), ("", (20, 0))] {
        let (_, outcomes) = fixture.ask(&entries(tier), 1, Effect::Look);
        assert_eq!(
            (outcomes[0].limit, outcomes[0].remaining),
            expected,
            "{tier}"
        );
    }
}

/// Returns the limits for a request of `alice` that names the plan `tier`.
fn chosen_limits(rules: &RuleSet, tier: &str) -> Arc<Limits> {
    let entries = [("customer", "alice"), ("tier", tier)];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let mut scratch = Scratch::default();
    let charges = rules.charges(&request, START, &mut scratch);
    let [charge] = charges.unwrap()[..] else {
        panic!("one rule applies");
    };
    let limits = rules.limits_of(&charge);
    assert!(std::ptr::eq(&*limits, charge.limits), "{tier}");
    limits
}

/// The limits of a factor are compiled once for each plan, even if a rule has many plans.
#[test]
fn the_multiplied_limits_of_each_plan_are_compiled_once() {
    let quotas: Vec<u64> = (1..=200).collect();
    let names: Vec<String> = quotas.iter().map(|quota| format!("plan-{quota}")).collect();
    let plan = |(name, quota)| (name, limits(&[&format!("{quota}/min")]));
    let plans = names.iter().map(String::as_str).zip(&quotas).map(plan);
    let rule = api().with_plans(Some("tier"), plans.collect()).unwrap();
    let fixture = Fixture::new(vec![rule]);
    fixture.set(&["*"], Replacement::Factor("2x".parse().unwrap()));
    let chosen = |name: &str| chosen_limits(&fixture.rules, name);
    let first: Vec<_> = names.iter().map(|name| chosen(name)).collect();
    for ((name, quota), limits) in names.iter().zip(&quotas).zip(&first) {
        let quotas: Vec<u64> = limits.iter().map(Limit::quota).collect();
        assert_eq!(quotas, [2 * quota], "{name}");
        assert!(std::ptr::eq(&**limits, &*chosen(name)), "{name}");
    }
}

/// Candidate rules decide the same requests as the active rules, and may have fewer plans.
/// A charge that may outlive its request refers to the compiled limits of its pattern, and has no
/// copy of them, although an override of its key has ended and is still stored.
#[test]
fn a_charge_refers_to_the_limits_of_its_pattern_after_an_override_of_its_key() {
    let mut fixture = Fixture::new(vec![api()]);
    fixture.set(&["*"], replacement(&["20/min"]));
    let mut brief = lasting(replacement(&["30/min"]));
    brief.until = Some(START.after(Span::from_secs(10)));
    let target = OverrideTarget::of(&["acme"]);
    let set = fixture.overrides.set("api", &target, brief, START);
    set.unwrap();
    fixture.now = START.after(Span::from_secs(20));
    let limits = || {
        let request = Request::new(&[("customer", "acme")], Cost::ONE).unwrap();
        let mut scratch = Scratch::default();
        let rules = &fixture.rules;
        let charges = rules.charges(&request, fixture.now, &mut scratch).unwrap();
        rules.limits_of(&charges[0])
    };
    assert!(Arc::ptr_eq(&limits(), &limits()));
}

#[test]
fn candidate_rules_with_fewer_plans_keep_the_multiplied_limits_of_the_active_rules() {
    let names: Vec<String> = (1..=10).map(|at| format!("plan-{at}")).collect();
    let plans = names
        .iter()
        .map(|name| (name.as_str(), limits(&["5/min"])))
        .collect();
    let fixture = Fixture::new(vec![api().with_plans(Some("tier"), plans).unwrap()]);
    fixture.set(&["*"], Replacement::Factor("2x".parse().unwrap()));
    let active = || -> Vec<_> {
        let chosen = names.iter().map(|name| chosen_limits(&fixture.rules, name));
        chosen.collect()
    };
    let before = active();
    let candidate = RuleSet::build(vec![api()], Vec::new()).unwrap();
    let candidate = candidate.with_overrides(&fixture.overrides);
    let of_candidate = chosen_limits(&candidate, "");
    for ((before, after), name) in before.iter().zip(active()).zip(&names) {
        assert!(Arc::ptr_eq(before, &after), "{name}");
    }
    assert!(Arc::ptr_eq(&of_candidate, &chosen_limits(&candidate, "")));
}

#[test]
fn a_factor_must_be_valid_for_each_plan() {
    let most = format!("{}/min", bounds::MAX_COUNT);
    let window = |text: &str| {
        let rate = notation::rate(text).unwrap();
        let spec = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow);
        vec![spec.build().unwrap()]
    };
    let rule = Rule::new("api", window("10/min")).unwrap();
    let rule = rule.keyed_by(&["customer"]).unwrap();
    let plans = vec![("pro", window("100/min")), ("huge", window(&most))];
    let rule = rule.with_plans(Some("tier"), plans).unwrap();
    let double = Replacement::Factor("2x".parse().unwrap());
    let target = OverrideTarget::of(&["alice"]);
    let error = Overrides::check(&rule, &target, &double).unwrap_err();
    let expected = format!("limits: plan huge: 2x of {most}: ");
    assert!(error.to_string().starts_with(&expected), "{error}");

    // An override that was set before the plan existed applies to the other plans.
    let fixture = Fixture::new(vec![rule]);
    let set = fixture
        .overrides
        .set("api", &target, lasting(double), START);
    set.unwrap();
    let quota = |tier| {
        let (_, outcomes) = fixture.ask(&[("customer", "alice"), ("tier", tier)], 1, Effect::Look);
        outcomes[0].limit
    };
    assert_eq!(
        [quota("pro"), quota("huge"), quota("")],
        [200, bounds::MAX_COUNT, 20]
    );
    let rule = fixture.rules.rule("api").unwrap();
    let overrides = fixture.rules.overrides(rule).unwrap();
    assert_eq!(overrides.count_inactive(rule), 1);
}

/// A client can alternate between plans, so their limits share one state. Therefore, all plans must
/// have the same algorithm and the same windows.
#[test]
fn a_plan_with_other_windows_is_rejected() {
    for (given, problem) in [
        (
            &["5/min", "50/h"][..],
            "has 2 limits, but rule \"api\" has 1",
        ),
        (
            &["5/h"],
            "5/h (sliding_window_log) must have the algorithm and the window of the limit 10/min",
        ),
        (
            &["5000/min"],
            "5000/min (sliding_window_counter) must have the algorithm",
        ),
        (
            &["5/min burst 3"],
            "5/min burst 3 (gcra) must have the algorithm",
        ),
    ] {
        let error = api()
            .with_plans(None, vec![("pro", limits(given))])
            .unwrap_err();
        assert_eq!(error.field, "plans.pro");
        assert!(error.problem.starts_with(problem), "{error}");
    }
}

#[test]
fn the_mode_and_the_policy_of_a_rule_apply_to_its_plans_and_overrides() {
    let plans = vec![("free", limits(&["5/min"]))];
    let rule = api().with_plans(Some("tier"), plans).unwrap();
    let fixture = Fixture::new(vec![rule.in_mode(tidegate_core::Mode::Shadow)]);
    fixture.set(&["bob"], replacement(&["1/min"]));
    for entries in [
        [("customer", "alice"), ("tier", "free")],
        [("customer", "bob"), ("tier", "")],
    ] {
        let (decision, outcomes) = fixture.ask(&entries, 6, Effect::Charge);
        assert_eq!((decision, outcomes[0].allowed), (Decision::Admitted, false));
    }
}

#[test]
fn wrong_overrides_are_rejected() {
    let rule = api();
    let check = |values: &[&str], replacement: Replacement| {
        let error = Overrides::check(&rule, &OverrideTarget::of(values), &replacement);
        error.unwrap_err().to_string()
    };
    for (values, given, problem) in [
        (
            &["a", "b"][..],
            "20/min",
            "key: rule \"api\" has a key of 1 value (customer), got 2",
        ),
        (
            &["a*", "b"],
            "20/min",
            "key: rule \"api\" has a key of 1 value (customer), but the pattern has 2",
        ),
        (&[""], "20/min", "key: must not be empty"),
        (
            &["a"],
            "20/min burst 3",
            "limits: \"20/min burst 3\": the limit 10/min has the algorithm sliding_window_log, which \
             has no burst; write 20/min",
        ),
        (
            &["a"],
            "2 at once",
            "limits: \"2 at once\": the limit 10/min has the \
             algorithm sliding_window_log, and only a concurrency limit",
        ),
        (
            &["a"],
            "often",
            "limits: \"often\": expected a rate such as 20/min",
        ),
        (&["a"], "0/min burst 3", "limits: \"0/min burst 3\": "),
        (&["*a*b*c*d*e*f*g*h*i*j*k*l*m*n*o*p*q*"], "20/min", "key: "),
    ] {
        let error = check(values, replacement(&[given]));
        assert!(error.starts_with(problem), "{error}");
    }
    let keyless = Rule::new("all", limits(&["10/min"])).unwrap();
    for (value, problem) in [("a", "got 1"), ("a*", "but the pattern has 1")] {
        let target = OverrideTarget::of(&[value]);
        let error = Overrides::check(&keyless, &target, &replacement(&["20/min"])).unwrap_err();
        let expected = format!(
            "key: rule \"all\" has no key (one count for all requests), so it takes no values, {problem}"
        );
        assert_eq!(error.to_string(), expected);
    }
    let huge = Replacement::Factor("1000x".parse().unwrap());
    let most = format!("{}/h", bounds::MAX_COUNT);
    let rule = Rule::new("api", limits(&[&most])).unwrap();
    let error = Overrides::check(&rule, &OverrideTarget::of(&[]), &huge).unwrap_err();
    assert_eq!(error.field, "limits");
    assert!(error.problem.contains("1000x of"), "{error}");
    assert_eq!(
        check(&["a"], replacement(&[])),
        "limits: must name at least one limit"
    );
}

#[test]
fn patterns_are_bounded() {
    let overrides = Overrides::default();
    let set = |number: usize| {
        let target = OverrideTarget::of(&[&format!("customer-{number}-*")]);
        overrides.set("api", &target, lasting(replacement(&["20/min"])), START)
    };
    for number in 0..bounds::MAX_OVERRIDE_PATTERNS {
        set(number).unwrap();
    }
    assert_eq!(
        set(bounds::MAX_OVERRIDE_PATTERNS),
        Err(OverrideError::TooManyPatterns)
    );
    assert!(
        set(7).unwrap().is_some(),
        "an existing pattern can be replaced"
    );
    assert_eq!(overrides.len(), bounds::MAX_OVERRIDE_PATTERNS);
}

#[test]
fn overrides_that_have_ended_make_room_for_new_ones() {
    let overrides = Overrides::default();
    let end = START.after(Span::from_secs(60));
    let new = Override {
        until: Some(end),
        ..lasting(replacement(&["20/min"]))
    };
    for number in 0..bounds::MAX_OVERRIDES {
        let target = OverrideTarget::of(&[&number.to_string()]);
        overrides.set("api", &target, new.clone(), START).unwrap();
    }
    let target = OverrideTarget::of(&["one more"]);
    let too_many = Err(OverrideError::TooMany);
    assert_eq!(overrides.check_room("api", &target, START), too_many);
    let existing = OverrideTarget::of(&["7"]);
    assert_eq!(overrides.check_room("api", &existing, START), Ok(()));
    assert_eq!(overrides.len(), bounds::MAX_OVERRIDES);
    assert_eq!(overrides.check_room("api", &target, end), Ok(()));
    assert_eq!(overrides.len(), 0);
}

/// A Bloom filter speeds up override lookups. After many removals, the filter is rebuilt, and must
/// then contain the keys of all rules.
#[test]
fn the_overrides_of_all_rules_apply_after_many_removals() {
    let tenants = Rule::new("tenants", limits(&["10/min"])).unwrap();
    let tenants = tenants.keyed_by(&["tenant"]).unwrap();
    let fixture = Fixture::new(vec![api(), tenants]);
    let overrides = &fixture.overrides;
    let set = |rule: &str, key: &str| {
        let new = lasting(replacement(&["20/min"]));
        overrides.set(rule, &OverrideTarget::of(&[key]), new, START)
    };
    set("api", "acme").unwrap();
    set("tenants", "umbrella").unwrap();
    for number in 0..bounds::MAX_OVERRIDES / 3 {
        let key = number.to_string();
        set("api", &key).unwrap();
        overrides.remove("api", &OverrideTarget::of(&[&key]));
    }
    set("tenants", "initech").unwrap();
    assert_eq!(overrides.len(), 3);
    let limit = |name: &str, value: &str| {
        let (_, outcomes) = fixture.ask(&[(name, value)], 1, Effect::Look);
        outcomes[0].limit
    };
    for (name, value, expected) in [
        ("customer", "acme", 20),
        ("customer", "7", 10),
        ("tenant", "umbrella", 20),
        ("tenant", "initech", 20),
        ("tenant", "acme", 10),
    ] {
        assert_eq!(limit(name, value), expected, "{name} {value}");
    }
}

#[test]
fn a_listing_is_sorted_and_complete() {
    let fixture = Fixture::new(vec![api()]);
    let mut expected: Vec<String> = (0..250).map(|number| format!("c{number:03}")).collect();
    for key in &expected {
        fixture.set(&[key], replacement(&["20/min"]));
    }
    fixture.set(&["c*"], replacement(&["30/min"]));
    expected.push("c*".to_owned());
    let rule = fixture.rules.rule("api").unwrap();
    let overrides = fixture.rules.overrides(rule).unwrap();
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = overrides.page(after.as_ref(), 100, fixture.now, |_, _| true);
        listed.extend(
            page.iter()
                .flat_map(|(target, _)| target.values().map(str::to_owned).collect::<Vec<_>>()),
        );
        match page.last() {
            Some((last, _)) => after = Some(last.clone()),
            None => break,
        }
    }
    assert_eq!(listed, expected);
    let page = overrides.page(None, 100, fixture.now, |target, _| target.is_pattern());
    assert_eq!(page.len(), 1);
}

/// A step of a random trace, such as setting or removing an override.
#[derive(Clone, Debug)]
enum Step {
    Set {
        target: usize,
        quota: u64,
        until: Option<u64>,
    },
    Remove {
        target: usize,
    },
    Look {
        key: usize,
    },
    Wait {
        secs: u64,
    },
}

/// The keys of the test.
const KEYS: [&str; 6] = ["a", "ab", "abc", "abd", "b", "bc"];
/// Patterns that each match some of the keys, longest pattern first.
const PATTERNS: [&str; 5] = ["ab*d", "ab*", "a*", "*b*", "*"];

fn step() -> impl Strategy<Value = Step> {
    let targets = KEYS.len() + PATTERNS.len();
    prop_oneof![
        3 => (0..targets, 1..50_u64, prop::option::of(0..100_u64))
            .prop_map(|(target, quota, until)| Step::Set { target, quota, until }),
        1 => (0..targets).prop_map(|target| Step::Remove { target }),
        4 => (0..KEYS.len()).prop_map(|key| Step::Look { key }),
        1 => (1..60_u64).prop_map(|secs| Step::Wait { secs }),
    ]
}

fn matches(pattern: &str, key: &str) -> bool {
    match pattern {
        "*" => true,
        "a*" => key.starts_with('a'),
        "*b*" => key.contains('b'),
        "ab*" => key.starts_with("ab"),
        "ab*d" => key.starts_with("ab") && key.len() > 2 && key.ends_with('d'),
        other => unreachable!("{other}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// A client that alternates between two plans never gets more than a client of a single plan
    /// with the larger of the two buckets and the faster of the two refill rates.
    #[test]
    fn alternating_between_plans_gains_nothing(
        capacities in (1..50_u64, 1..50_u64),
        rates in (1..50_u64, 1..50_u64),
        asks in prop::collection::vec((any::<bool>(), 0..4_000_000_u64, 1..8_u64), 1..80),
    ) {
        let bucket = |rate: u64, capacity: u64| limits(&[&format!("{rate}/5s capacity {capacity}")]);
        let rule = Rule::new("api", bucket(rates.0, capacities.0)).unwrap();
        let plans = vec![("other", bucket(rates.1, capacities.1))];
        let rule = rule.keyed_by(&["customer"]).unwrap().with_plans(Some("tier"), plans).unwrap();
        let mut fixture = Fixture::new(vec![rule]);
        let (rate, capacity) = (rates.0.max(rates.1), capacities.0.max(capacities.1));
        let mut admitted: Vec<(Timestamp, u64)> = Vec::new();
        for (is_other, wait, cost) in asks {
            fixture.now = fixture.now.after(Span::from_micros(wait));
            let tier = if is_other { "other" } else { "" };
            let entries = [("customer", "a"), ("tier", tier)];
            let (decision, outcomes) = fixture.ask(&entries, cost, Effect::Charge);
            if decision == Decision::Admitted {
                admitted.push((fixture.now, cost));
            } else if let Some(wait) = outcomes[0].retry_after.span() {
                // The wait time is exact, regardless of the key's previous plan.
                let now = fixture.now;
                fixture.now = now.after(Span::from_micros(wait.as_micros() - 1));
                let (early, _) = fixture.ask(&entries, cost, Effect::Peek);
                prop_assert_eq!(early, Decision::Limited, "before {}", wait);
                fixture.now = now.after(wait);
                let (then, _) = fixture.ask(&entries, cost, Effect::Peek);
                prop_assert_eq!(then, Decision::Admitted, "after {}", wait);
            }
        }
        for (first, (from, _)) in admitted.iter().enumerate() {
            let mut sum = 0;
            for (to, cost) in &admitted[first..] {
                sum += cost;
                let refilled = to.since(*from).as_micros() * rate / 5_000_000;
                prop_assert!(sum <= capacity + refilled, "{} in {:?} to {:?}", sum, from, to);
            }
        }
    }

    /// Each key has the same limits as in a simple reference model, which checks all overrides in
    /// order.
    #[test]
    fn the_first_override_that_applies_is_used(steps in prop::collection::vec(step(), 1..60)) {
        let mut fixture = Fixture::new(vec![api()]);
        let name = |target: usize| *KEYS.iter().chain(&PATTERNS).nth(target).unwrap();
        let mut model: BTreeMap<usize, (u64, Option<Timestamp>)> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Set { target, quota, until } => {
                    let until = until.map(|secs| fixture.now.after(Span::from_secs(secs)));
                    let new = Override { until, ..lasting(replacement(&[&format!("{quota}/min")])) };
                    let target_of = OverrideTarget::of(&[name(target)]);
                    let replaced = fixture.overrides.set("api", &target_of, new, fixture.now);
                    let expected = model.insert(target, (quota, until));
                    prop_assert_eq!(replaced.unwrap().is_some(), expected.is_some());
                }
                Step::Remove { target } => {
                    let removed = fixture.overrides.remove("api", &OverrideTarget::of(&[name(target)]));
                    prop_assert_eq!(removed.is_some(), model.remove(&target).is_some());
                }
                Step::Look { key } => {
                    let applies = |target: &usize| match target.checked_sub(KEYS.len()) {
                        Some(pattern) => matches(PATTERNS[pattern], KEYS[key]),
                        None => *target == key,
                    };
                    let is_active = |until: Option<Timestamp>| {
                        until.is_none_or(|until| until > fixture.now)
                    };
                    let mut active = model.iter().filter(|(_, (_, until))| is_active(*until));
                    let expected = active.find(|(target, _)| applies(target));
                    let expected = expected.map_or(10, |(_, (quota, _))| *quota);
                    // Prefetching changes no decision.
                    fixture.rules.prefetch_overrides([(&b"customer"[..], KEYS[key].as_bytes())]);
                    prop_assert_eq!(fixture.look(KEYS[key]).0, expected, "{} {:?}", KEYS[key], model);
                }
                Step::Wait { secs } => fixture.now = fixture.now.after(Span::from_secs(secs)),
            }
            prop_assert_eq!(fixture.overrides.len(), model.len());
        }
    }
}
