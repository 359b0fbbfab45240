//! Tests verdicts on several limits: the tightest limit, the wait time, and rules in shadow mode.

#![cfg(not(loom))]

use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Effect, Limit, LimitSpec, Limits, MemoryBounds,
    MemoryStore, Reason, RetryAfter, Span, Timestamp, Verdict, WhenFull, notation,
};

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn limits(name: &str, rates: &[&str]) -> Limits {
    let limit = |rate: &&str| {
        let rate = notation::rate(rate).expect("a rate");
        let spec = LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog);
        spec.build().expect("a valid limit")
    };
    let limits = Limits::new(rates.iter().map(limit).collect());
    limits.expect("a few limits").named(name)
}

fn store() -> MemoryStore {
    MemoryStore::new(MemoryBounds::default())
}

/// Charges `cost` to each rule, with the rule's name as the key, and returns the verdict.
fn verdict<'r>(store: &MemoryStore, rules: &[&'r Limits], cost: u64) -> Verdict<'r> {
    let charge = |rule: &&'r Limits| {
        let key = rule.name().expect("a rule with a name").as_bytes();
        Charge::new(key, rule, Cost::new(cost).expect("a small cost")).expect("a short key")
    };
    let charges: Vec<Charge<'r>> = rules.iter().map(charge).collect();
    let mut outcomes = Vec::new();
    let decision = store.check(&charges, NOW, Effect::Charge, &mut outcomes);
    Verdict::of(&decision, &charges, &outcomes)
}

fn policy_of_leader<'v>(verdict: &'v Verdict<'_>) -> Option<&'v str> {
    verdict.leading().map(|line| &**line.limit.policy())
}

fn seconds(seconds: u64) -> RetryAfter {
    RetryAfter::After(Span::from_secs(seconds))
}

#[test]
fn the_limit_with_the_least_remaining_leads_and_ties_go_to_the_slower() {
    let (store, loose, tight) = (
        store(),
        limits("loose", &["9/min"]),
        limits("tight", &["5/s", "5/h", "7/d"]),
    );
    let verdict = verdict(&store, &[&loose, &tight], 1);
    assert!(verdict.allowed);
    assert_eq!((verdict.rule, verdict.reason), (Some("tight"), None));
    assert_eq!(policy_of_leader(&verdict), Some("5/h"));
    assert_eq!(
        (verdict.retry_after, verdict.lines.len()),
        (RetryAfter::NOW, 4)
    );
}

#[test]
fn the_longest_denial_leads_and_never_is_the_longest() {
    let (store, short, long) = (
        store(),
        limits("short", &["2/min", "1000/h"]),
        limits("long", &["2/h", "3/d"]),
    );
    assert!(verdict(&store, &[&short, &long], 2).allowed);
    let denied = verdict(&store, &[&short, &long], 1);
    assert_eq!(
        (denied.allowed, denied.reason),
        (false, Some(Reason::Limit))
    );
    assert_eq!(policy_of_leader(&denied), Some("2/h"));
    assert_eq!(
        (denied.rule, denied.retry_after),
        (Some("long"), seconds(3_600))
    );
    let hopeless = verdict(&store, &[&short, &long], 3);
    assert_eq!(
        policy_of_leader(&hopeless),
        Some("2/min"),
        "the first of those"
    );
    assert_eq!(hopeless.retry_after, RetryAfter::Never);
}

#[test]
fn a_shadow_limit_neither_denies_nor_leads() {
    let (store, real) = (store(), limits("real", &["5/min"]));
    let shadow = limits("shadow", &["1/h"]).in_shadow(true);
    for remaining in [4, 3] {
        let verdict = verdict(&store, &[&shadow, &real], 1);
        assert!(verdict.allowed);
        assert_eq!(
            (verdict.rule, verdict.retry_after),
            (Some("real"), RetryAfter::NOW)
        );
        let leader = verdict.leading().expect("an enforced limit");
        assert_eq!(
            (leader.shadow, leader.outcome.remaining),
            (false, remaining)
        );
    }
    let verdict = verdict(&store, &[&shadow, &real], 1);
    assert!(
        !verdict.lines[0].outcome.allowed,
        "but it says what it would have done"
    );
}

#[test]
fn a_block_verdict_names_the_rule_of_its_key() {
    let (store, one, other) = (
        store(),
        limits("one", &["5/min"]),
        limits("other", &["5/min"]),
    );
    assert!(store.block(b"other", Some(Span::from_secs(9)), "", NOW));
    let blocked = verdict(&store, &[&one, &other], 1);
    assert_eq!(
        (blocked.rule, blocked.reason),
        (Some("other"), Some(Reason::Blocked))
    );
    assert_eq!((blocked.allowed, blocked.retry_after), (false, seconds(9)));
    assert!(blocked.lines.is_empty() && blocked.leading().is_none());
}

#[test]
fn a_full_store_verdict_names_no_rule() {
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 1,
        when_full: WhenFull::Deny,
        ..MemoryBounds::default()
    });
    let (first, second) = (limits("first", &["5/min"]), limits("second", &["5/min"]));
    assert!(verdict(&store, &[&first], 1).allowed);
    let full = verdict(&store, &[&second], 1);
    assert_eq!((full.rule, full.reason), (None, Some(Reason::Store)));
    assert_eq!((full.allowed, full.retry_after), (false, seconds(60)));
    assert!(full.lines.is_empty());
}

#[test]
fn a_request_without_rules_passes() {
    let verdict = Verdict::of(&Decision::Admitted, &[], &[]);
    assert!(verdict.allowed && verdict.lines.is_empty() && verdict.leading().is_none());
    assert_eq!((verdict.rule, verdict.retry_after), (None, RetryAfter::NOW));
}

/// The memory store's verdict on one charge equals the verdict computed from the charge's outcomes,
/// with and without the fast path.
#[test]
fn the_verdict_on_one_charge_equals_that_of_its_outcomes() {
    let parse = |text: &str| text.parse::<Limit>().expect("a limit");
    let queue = LimitSpec {
        algorithm: Some(AlgorithmName::LeakyBucket),
        queue: Some(true),
        ..LimitSpec::shorthand(
            notation::rate("2/s").expect("a rate"),
            AlgorithmName::LeakyBucket,
        )
    };
    let plain = Limits::from(parse("2/s burst 3"));
    let all = [
        plain.clone().named("gcra"),
        plain.clone().in_shadow(true),
        plain,
        Limits::from(parse("3/s")),
        Limits::from(queue.build().expect("a valid limit")),
        Limits::new(vec![parse("2/s burst 3"), parse("4/min")]).expect("two limits"),
    ];
    let effects = [Effect::Charge, Effect::Peek, Effect::Look, Effect::Refund];
    let (mut denied, mut delayed) = (0, 0);
    for limits in &all {
        let (one, other) = (store(), store());
        let mut outcomes = Vec::new();
        for step in 0..200_u64 {
            let effect = effects[usize::from(step % 7 == 3) * usize::try_from(step % 4).unwrap()];
            let cost = Cost::new(step % 3 + 1).unwrap();
            let charge = Charge::new(b"k", limits, cost).unwrap();
            let now = NOW.after(Span::from_millis(step * 97));
            if step == 150 {
                for store in [&one, &other] {
                    assert!(store.block(b"k", Some(Span::from_secs(1)), "test", now));
                }
            }
            let decision = one.check(&[charge], now, effect, &mut outcomes);
            let expected = Verdict::of(&decision, &[charge], &outcomes);
            let verdict = other.verdict(b"k", limits, cost, now, effect).unwrap();
            assert_eq!(format!("{verdict:?}"), format!("{expected:?}"), "{step}");
            let leading = expected.leading().map(|line| line.outcome);
            assert_eq!(
                verdict.remaining(),
                leading.map(|outcome| outcome.remaining)
            );
            assert_eq!(
                verdict.reset_after(),
                leading.map(|outcome| outcome.reset_after)
            );
            denied += usize::from(!verdict.allowed);
            delayed += usize::from(verdict.delay > Span::ZERO);
        }
    }
    assert!(
        denied > 100 && delayed > 10,
        "{denied} denied, {delayed} delayed"
    );
}

/// Only a concurrency limit of a rule without a key represents the capacity of the whole service.
#[test]
fn a_denial_by_the_slots_of_the_service_is_a_lack_of_capacity() {
    let slots = || {
        let spec = LimitSpec {
            algorithm: Some(AlgorithmName::Concurrency),
            limit: Some(1),
            ..LimitSpec::default()
        };
        Limits::new(vec![spec.build().expect("a valid limit")]).expect("one limit")
    };
    let all = slots().named("all").service_wide(true);
    let each = slots().named("each");
    let quota = limits("quota", &["1/h"]).service_wide(true);
    let shadow = slots().named("shadow").in_shadow(true);
    for (rules, waits, at_capacity) in [
        (vec![&all], true, true),
        (vec![&all, &shadow], true, true),
        (vec![&all, &each], true, false),
        (vec![&each], true, false),
        (vec![&all, &quota], false, false),
        (vec![&quota], false, false),
        (vec![&shadow], false, false),
    ] {
        let store = store();
        for _ in 0..2 {
            let verdict = verdict(&store, &rules, 1);
            let is_denied = !verdict.allowed;
            assert_eq!(verdict.waits_for_slots(), is_denied && waits, "{verdict:?}");
            assert_eq!(verdict.is_at_capacity(), is_denied && at_capacity);
        }
    }
    // A cost above the limit is never admitted.
    let verdict = verdict(&store(), &[&all], 2);
    assert_eq!(verdict.retry_after, RetryAfter::Never);
    assert!(!verdict.waits_for_slots() && !verdict.is_at_capacity());
}
