//! Tests limits that change after keys have spent units. Spent units still count, the new bound
//! holds from the change on, and raising a limit takes effect immediately.

use std::sync::Arc;

use proptest::prelude::*;
use tidegate_core::{
    Algorithm, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Rate,
    RefillMode, RetryAfter, Settlement, Span, Timestamp, bounds,
};

use crate::{
    promises::{ask, bound, copy_of, is_estimated, walk},
    strategies::{self, Kind, any_kind},
    world::{Rule, one_shard},
};

/// Generates two limits of the same kind, period and calendar, with different quotas.
fn two_quotas() -> impl Strategy<Value = (Limit, Limit)> {
    let counts = prop_oneof![(1..=20_u64, 1..=20_u64), (1..=90_000_u64, 1..=90_000_u64)];
    let period = prop_oneof![1..=100_u64, 1_000..=60_000_000_u64];
    (any_kind(), counts, period, 1..=6_u32).prop_filter_map(
        "numbers that a limit can have",
        |(kind, (before, after), period, buckets)| {
            let period = Span::from_micros(period);
            let limit =
                |count| Limit::new(kind.algorithm(count, Rate { count, period }, buckets)).ok();
            Some((limit(before)?, limit(after)?))
        },
    )
}

/// Generates two limits of the same kind, with any numbers.
fn two_limits() -> impl Strategy<Value = (Limit, Limit)> {
    any_kind().prop_flat_map(|kind| (strategies::plain_limit(kind), strategies::plain_limit(kind)))
}

/// Generates two limits of the same kind under which a key expires at the same time. Sliding window
/// logs and windows with a shorter period drop a key earlier. Therefore, arbitrary numbers are
/// generated only for kinds of limits that store a debt (spent units that drain over time).
fn two_limits_of_equal_memory() -> impl Strategy<Value = (Limit, Limit)> {
    use Kind::{Gcra, Interval, Meter, Queue, TokenBucket};
    let debt = prop::sample::select(vec![Gcra, Interval, Meter, Queue, TokenBucket]);
    let limits =
        debt.prop_flat_map(|kind| (strategies::plain_limit(kind), strategies::plain_limit(kind)));
    prop_oneof![two_quotas(), limits]
}

/// Generates two limits of the same kind, of one of `kinds`, with any numbers.
fn two_limits_of(kinds: Vec<Kind>) -> impl Strategy<Value = (Limit, Limit)> {
    let kind = prop::sample::select(kinds);
    kind.prop_flat_map(|kind| (strategies::plain_limit(kind), strategies::plain_limit(kind)))
}

pub(crate) fn rule(limit: &Limit) -> Rule {
    Rule::new(b"key", vec![limit.clone()], false)
}

pub(crate) fn successor(limit: &Limit, old: &Rule) -> Rule {
    let mut new = rule(limit);
    new.limits = new.limits.inheriting_from(&Arc::new(old.limits.clone()));
    new
}

proptest! {
    #![proptest_config(strategies::cases(1_000))]

    /// If only the quota is raised, the whole difference is available immediately.
    #[test]
    fn a_raise_helps_at_once(
        (before, after) in two_quotas(),
        start in strategies::start(),
        asks in strategies::asks(20),
    ) {
        let (old, store) = (rule(&before), one_shard());
        let new = successor(&after, &old);
        let now = walk(&old, &store, start, &asks, |_, _, _| Ok(()))?;
        let left = ask(&store, &old, now, 1, Effect::Look).remaining;
        let expected = (left + after.quota()).saturating_sub(before.quota());
        let looked = ask(&store, &new, now, 1, Effect::Look);
        prop_assert_eq!(looked.remaining, expected, "{} left of {}", left, before.quota());
        prop_assert_eq!(looked.limit, after.quota());
    }

    /// After the change, no interval admits more than the new limit's bound, even if the old limit
    /// is unknown. The new limit's wait times are exact.
    #[test]
    fn the_new_bound_holds_from_the_change_on(
        (before, after) in two_limits(),
        start in strategies::start(),
        first in strategies::asks(20),
        second in strategies::asks(20),
        known in any::<bool>(),
    ) {
        let (old, store) = (rule(&before), one_shard());
        let new = if known { successor(&after, &old) } else { rule(&after) };
        let change = walk(&old, &store, start, &first, |_, _, _| Ok(()))?;
        let mut admitted = Vec::new();
        walk(&new, &store, change, &second, |now, cost, outcome| {
            if outcome.allowed {
                admitted.push((now, cost));
            } else {
                assert_tight(&store, &new, now, cost, outcome)?;
            }
            Ok(())
        })?;
        for (index, (from, _)) in admitted.iter().enumerate() {
            let mut sum = 0_u128;
            for (to, cost) in &admitted[index..] {
                sum += u128::from(*cost);
                let bound = bound(&after, *from, *to);
                prop_assert!(
                    bound.is_none_or(|bound| sum <= bound),
                    "{sum} in [{from}, {to}] over {bound:?}: {admitted:?}"
                );
            }
        }
    }

    /// A rule has a bucket and a window. While one of them is exceeded, the states of both keep
    /// their former terms, and the wait times are exact.
    #[test]
    fn the_waits_of_two_changed_limits_are_exact(
        (bucket_before, bucket_after) in two_limits_of(vec![Kind::Gcra, Kind::Interval]),
        (window_before, window_after) in
            two_limits_of(vec![Kind::EpochWindow, Kind::FirstRequestWindow]),
        start in strategies::start(),
        first in strategies::asks(20),
        second in strategies::asks(20),
    ) {
        let rule_of = |limits: [&Limit; 2]| Rule::new(b"key", limits.map(Limit::clone).into(), false);
        let (old, store) = (rule_of([&bucket_before, &window_before]), one_shard());
        let mut new = rule_of([&bucket_after, &window_after]);
        new.limits = new.limits.inheriting_from(&Arc::new(old.limits.clone()));
        let change = walk(&old, &store, start, &first, |_, _, _| Ok(()))?;
        walk(&new, &store, change, &second, |now, cost, _| {
            let mut outcomes = Vec::new();
            let at = Timestamp::from_micros;
            let charges = [new.charge(cost)];
            // The new limits apply from the first check, even if it is denied.
            let copy = copy_of(&store, now);
            copy.check(&charges, at(now), Effect::Charge, &mut outcomes);
            let denied = outcomes.iter().filter(|outcome| !outcome.allowed);
            let waits = denied.map(|outcome| outcome.retry_after.span());
            let waits = waits.collect::<Option<Vec<Span>>>().unwrap_or_default();
            let Some(wait) = waits.into_iter().max() else {
                return Ok(());
            };
            let wait = wait.as_micros();
            let then = copy.check(&charges, at(now + wait), Effect::Charge, &mut outcomes);
            prop_assert_eq!(then, Decision::Admitted, "{:?} after {} us", outcomes, wait);
            Ok(())
        })?;
    }

    /// Two servers with different limits share a store. A denial by the first server does not
    /// reduce the counts of the second server, even if the second server's limits are unknown to
    /// the first server.
    #[test]
    fn a_denial_after_a_change_refunds_nothing(
        (before, after) in two_limits_of_equal_memory(),
        start in strategies::start(),
        asks in strategies::asks(20),
        cost in 1..=100_000_u64,
        known in any::<bool>(),
    ) {
        let (old, store) = (rule(&before), one_shard());
        // If the first server knows the second server's limits, it keeps the number of spent units.
        // If the first server does not know these limits, it keeps the time that the spent units
        // take to drain.
        let new = if known { successor(&after, &old) } else { rule(&after) };
        let now = walk(&old, &store, start, &asks, |_, _, _| Ok(()))?;
        let left = ask(&store, &old, now, 1, Effect::Look);
        let denied = ask(&store, &new, now, cost, Effect::Charge);
        if denied.allowed {
            return Ok(());
        }
        let seen = ask(&store, &old, now, 1, Effect::Look);
        prop_assert!(seen.remaining <= left.remaining, "{} left, and {} then", left.remaining, seen.remaining);
    }

    /// Units spent before the change still count afterwards, even if the period changes.
    #[test]
    fn a_changed_limit_refunds_nothing(
        (before, after) in two_limits(),
        start in strategies::start(),
        known in any::<bool>(),
    ) {
        prop_assume!(before.quota() > 0 && after.quota() > 0);
        let (old, store) = (rule(&before), one_shard());
        let new = if known { successor(&after, &old) } else { rule(&after) };
        ask(&store, &old, start, before.quota(), Effect::Charge);
        let looked = ask(&store, &new, start, 1, Effect::Look);
        let expected = after.quota().saturating_sub(before.quota());
        if known {
            prop_assert_eq!(looked.remaining, expected);
        } else {
            prop_assert!(looked.remaining < after.quota() || looked.reset_after > Span::ZERO);
        }
    }
}

/// Asserts that a denied request is still denied one microsecond before its wait time ends, and is
/// then admitted.
fn assert_tight(
    store: &MemoryStore,
    rule: &Rule,
    now: u64,
    cost: u64,
    outcome: &Outcome,
) -> Result<(), TestCaseError> {
    let RetryAfter::After(wait) = outcome.retry_after else {
        prop_assert!(cost > outcome.limit, "never, although it fits");
        return Ok(());
    };
    let (wait, copy) = (wait.as_micros(), copy_of(store, now));
    prop_assert!(wait > 0, "denied with a wait of zero");
    if rule.limits.iter().any(is_estimated) {
        return Ok(());
    }
    let early = ask(&copy, rule, now + wait - 1, cost, Effect::Peek);
    prop_assert!(!early.allowed, "admitted before the {} us were over", wait);
    let then = ask(&copy, rule, now + wait, cost, Effect::Charge);
    prop_assert!(then.allowed, "denied though the {} us are over", wait);
    Ok(())
}

/// A limit of 5 per minute is exhausted, and is then raised to 10 per minute. Five units are
/// available immediately.
#[test]
fn a_raise_from_five_to_ten_leaves_five() {
    let start = 1_700_000_000_000_000;
    let period = Span::from_secs(60);
    for kind in Kind::ALL {
        let limit = |count| {
            let count = if kind == Kind::Queue {
                count - 1
            } else {
                count
            };
            Limit::new(kind.algorithm(count, Rate { count, period }, 6)).unwrap()
        };
        let (old, store) = (rule(&limit(5)), one_shard());
        assert!(
            ask(&store, &old, start, 5, Effect::Charge).allowed,
            "{kind:?}"
        );
        assert!(
            !ask(&store, &old, start, 1, Effect::Charge).allowed,
            "{kind:?}"
        );
        let new = successor(&limit(10), &old);
        assert_eq!(
            ask(&store, &new, start, 5, Effect::Charge).remaining,
            0,
            "{kind:?}"
        );
        let lowered = successor(&limit(2), &new);
        let denied = ask(&store, &lowered, start, 1, Effect::Charge);
        assert!(
            matches!(denied.retry_after, RetryAfter::After(wait) if wait > Span::ZERO),
            "{kind:?}"
        );
    }
}

/// Two servers share a store. The second server has lower limits, and does not know the first
/// server's limits.
#[test]
fn a_server_with_a_lower_limit_takes_nothing_from_others() {
    let start = 1_700_000_000_000_000;
    for kind in Kind::ALL {
        let rule_of = |count| {
            let rate = Rate {
                count: 1,
                period: Span::from_secs(3_600),
            };
            rule(&Limit::new(kind.algorithm(count, rate, 6)).unwrap())
        };
        let (more, less, store) = (rule_of(10), rule_of(5), one_shard());
        let quota = ask(&store, &more, start, 1, Effect::Look).limit;
        let mut admitted = 0;
        for _ in 0..3 {
            while ask(&store, &more, start, 1, Effect::Charge).allowed {
                admitted += 1;
            }
            assert!(!ask(&store, &less, start, 1, Effect::Charge).allowed);
        }
        assert_eq!(admitted, quota, "{kind:?}");
        // If the limit is lowered and raised again and the old limits are known, spent units still
        // count.
        let lowered = successor(less.limits.iter().next().unwrap(), &more);
        assert!(!ask(&store, &lowered, start, 1, Effect::Charge).allowed);
        let raised = successor(more.limits.iter().next().unwrap(), &lowered);
        assert_eq!(
            ask(&store, &raised, start, 1, Effect::Look).remaining,
            0,
            "{kind:?}"
        );
    }
}

/// A limit with another algorithm cannot use a key's old state, so it starts a new state. As long
/// as the new limit only denies requests, the old state is kept, because another server may still
/// use the old limit.
#[test]
fn a_denial_by_another_algorithm_keeps_the_state() {
    let start = 1_700_000_000_000_000;
    let rule_of = |kind: Kind| {
        let rate = Rate {
            count: 5,
            period: Span::from_secs(3_600),
        };
        rule(&Limit::new(kind.algorithm(5, rate, 6)).unwrap())
    };
    for before in Kind::ALL {
        for after in Kind::ALL {
            let (old, new, store) = (rule_of(before), rule_of(after), one_shard());
            ask(&store, &old, start, 5, Effect::Charge);
            let spent = ask(&store, &old, start, 1, Effect::Look);
            let denied = ask(&store, &new, start, 7, Effect::Charge);
            assert!(!denied.allowed, "{before:?} {after:?}");
            let seen = ask(&store, &old, start, 1, Effect::Look);
            assert!(seen.remaining <= spent.remaining, "{before:?} {after:?}");
        }
    }
}

/// Creates a rule with a token bucket refilled with `count` tokens per `period`, at once or
/// continuously, depending on `mode`.
fn bucket(mode: RefillMode, capacity: u64, count: u64, period: Span) -> Rule {
    let refill = Rate { count, period };
    let limit = Limit::new(Algorithm::TokenBucket {
        capacity,
        refill,
        mode,
    });
    rule(&limit.expect("numbers that a bucket can have"))
}

/// A debt consists of spent units that drain over time. If a debt keeps its duration while the rate
/// becomes faster, it corresponds to more units. The debt must survive the conversion back to the
/// slow rate.
#[test]
fn a_debt_of_a_century_survives_a_change_of_limits() {
    for mode in [RefillMode::Continuous, RefillMode::Interval] {
        let slow = bucket(mode, 10, 1, bounds::MAX_PERIOD);
        let fast = bucket(mode, 10, bounds::MAX_COUNT, Span::from_secs(1));
        let (store, start) = (one_shard(), 1_700_000_000_000_000);
        assert!(ask(&store, &slow, start, 10, Effect::Charge).allowed);
        assert!(!ask(&store, &fast, start, 1, Effect::Charge).allowed);
        let back = successor(slow.limits.iter().next().unwrap(), &fast);
        let looked = ask(&store, &back, start, 1, Effect::Charge);
        assert_eq!((looked.allowed, looked.remaining), (false, 0), "{mode:?}");
        assert!(looked.reset_after <= bounds::MAX_DRAIN, "{mode:?}");
    }
}

/// A refund does not make any wait longer, even if the former limits are unknown.
#[test]
fn a_refund_after_a_change_lengthens_no_wait() {
    let (day, minute) = (Span::from_secs(86_400), Span::from_secs(60));
    let start = 1_700_000_000_000_000;
    for spent in [50, 99, 998] {
        let wide = bucket(RefillMode::Interval, 1_000, 1_000, day);
        let slow = bucket(RefillMode::Interval, 100, 1, minute);
        let (store, mut outcomes) = (one_shard(), Vec::new());
        let now = Timestamp::from_micros(start);
        let (_, receipt) = store.reserve(&[slow.charge(2)], now, &mut outcomes);
        ask(&store, &wide, start, spent, Effect::Charge);
        let before = ask(&store, &slow, start, 1, Effect::Look);
        ask(&store, &slow, start, 1, Effect::Refund);
        let refunded = ask(&store, &slow, start, 1, Effect::Look);
        assert!(
            refunded.reset_after <= before.reset_after,
            "{spent}: {refunded:?}"
        );
        let settlement = [Settlement { unused: 1 }];
        store.settle(&[slow.charge(2)], receipt, &settlement, now);
        let settled = ask(&store, &slow, start, 1, Effect::Look);
        assert!(
            settled.reset_after <= refunded.reset_after,
            "{spent}: {settled:?}"
        );
    }
}

/// A sliding window log that counts denied requests keeps at most as many units as its limit. A
/// refund under a lower limit first drops the units that exceed the lower limit. The dropped units
/// can be in several entries of the log.
#[test]
fn a_refund_after_a_log_was_lowered_frees_one_unit() {
    let rate = |count| Rate {
        count,
        period: Span::from_secs(60),
    };
    let limit = |count| {
        let limit = Limit::new(Kind::Log.algorithm(count, rate(count), 1)).unwrap();
        limit.counting_denied(true)
    };
    let (old, store) = (rule(&limit(5)), one_shard());
    for now in 1..=5 {
        assert!(ask(&store, &old, now, 1, Effect::Charge).allowed);
    }
    let new = successor(&limit(2), &old);
    assert_eq!(ask(&store, &new, 6, 1, Effect::Refund).remaining, 1);
}

/// When a bucket is replaced by a smaller bucket with a slower rate, its debt first drains at the
/// former rate. Until the debt fits into the smaller bucket, requests are denied. If the old limits
/// become active again, no spent unit has been lost.
#[test]
fn down_and_up_again_loses_no_spent_unit() {
    let day = Span::from_secs(86_400);
    let start = 1_700_000_000_000_000;
    let more = bucket(RefillMode::Continuous, 1_000, 1_000, day);
    let store = one_shard();
    assert!(ask(&store, &more, start, 1_000, Effect::Charge).allowed);
    let less = bucket(RefillMode::Continuous, 10, 10, day);
    let lowered = successor(less.limits.iter().next().unwrap(), &more);
    let denied = ask(&store, &lowered, start, 1, Effect::Charge);
    // First, 991 of the 1,000 spent units drain at the former rate. The remaining 9 units fit into
    // the new capacity of 10.
    let wait = RetryAfter::After(Span::from_micros(86_400_000_000 / 1_000 * 991));
    assert_eq!((denied.allowed, denied.retry_after), (false, wait));
    assert_eq!(denied.reset_after, day, "and not a hundred days");
    assert_eq!(ask(&store, &more, start, 1, Effect::Look).remaining, 0);
    let raised = successor(more.limits.iter().next().unwrap(), &lowered);
    assert_eq!(ask(&store, &raised, start, 1, Effect::Look).remaining, 0);
    let RetryAfter::After(wait) = wait else {
        unreachable!("the wait has an end");
    };
    let then = ask(
        &store,
        &lowered,
        start + wait.as_micros(),
        1,
        Effect::Charge,
    );
    assert_eq!((then.allowed, then.remaining), (true, 0));
}

/// The state of a key that is idle during several changes is still converted exactly.
#[test]
fn several_changes_while_a_key_is_idle() {
    let rate = |count| Rate {
        count,
        period: Span::from_secs(60),
    };
    let limit = |count| Limit::new(Kind::TokenBucket.algorithm(count, rate(count), 1)).unwrap();
    let (mut rule, store) = (rule(&limit(5)), one_shard());
    ask(&store, &rule, 0, 5, Effect::Charge);
    for count in [6, 7, 8, 9] {
        rule = successor(&limit(count), &rule);
    }
    assert_eq!(ask(&store, &rule, 0, 1, Effect::Look).remaining, 4);
}

/// Old and new limits are matched by algorithm and order, so that a limit can be added to or
/// removed from a rule.
#[test]
fn a_limit_is_added_to_a_rule_and_removed() {
    let limit = |kind: Kind, count| {
        Limit::new(kind.algorithm(
            count,
            Rate {
                count,
                period: Span::from_secs(60),
            },
            6,
        ))
        .unwrap()
    };
    let old =
        Arc::new(Limits::new(vec![limit(Kind::Log, 5), limit(Kind::EpochWindow, 7)]).unwrap());
    let more = vec![
        limit(Kind::Gcra, 9),
        limit(Kind::EpochWindow, 17),
        limit(Kind::Log, 15),
        limit(Kind::EpochWindow, 27),
    ];
    let more = Arc::new(Limits::new(more).unwrap().inheriting_from(&old));
    let less = Limits::new(vec![limit(Kind::Log, 25)])
        .unwrap()
        .inheriting_from(&more);
    let store = one_shard();
    let remaining = |limits: &Limits| {
        let rule = Rule {
            key: b"key".to_vec(),
            limits: limits.clone(),
        };
        let mut outcomes = Vec::new();
        store.check(
            &[rule.charge(1)],
            Timestamp::from_micros(0),
            Effect::Charge,
            &mut outcomes,
        );
        outcomes
            .iter()
            .map(|outcome| outcome.remaining)
            .collect::<Vec<_>>()
    };
    assert_eq!(remaining(&old), [4, 6]);
    assert_eq!(remaining(&more), [8, 15, 13, 26]);
    assert_eq!(remaining(&less), [22]);
}

/// Limits with the maximum numbers are converted without an overflow.
#[test]
fn the_largest_limits_change() {
    let largest = Rate {
        count: bounds::MAX_COUNT,
        period: bounds::MAX_PERIOD,
    };
    let smallest = Rate {
        count: 1,
        period: bounds::MAX_PERIOD,
    };
    for kind in Kind::ALL {
        let limit = |count, rate| Limit::new(kind.algorithm(count, rate, 1_000)).unwrap();
        let most = bounds::MAX_COUNT - u64::from(kind == Kind::Queue);
        let old = rule(&limit(most, largest));
        let (new, store) = (successor(&limit(9, smallest), &old), one_shard());
        let start = 1_700_000_000_000_000;
        let most = ask(&store, &old, start, 1, Effect::Look).limit;
        assert!(
            ask(&store, &old, start, most, Effect::Charge).allowed,
            "{kind:?}"
        );
        assert!(
            !ask(&store, &new, start, 1, Effect::Charge).allowed,
            "{kind:?}"
        );
        assert!(
            ask(&store, &old, start, 1, Effect::Look).remaining < most,
            "{kind:?}"
        );
    }
}

/// A shard's refund ledger can record a few hundred conversions of keys to other limits. If a key
/// has no spent units, its conversion is not recorded. Therefore, the key cannot fill the ledger,
/// and the refund of another key still succeeds.
#[test]
fn conversions_of_keys_without_spent_units_cancel_no_refund() {
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 2_000,
        ..MemoryBounds::default()
    });
    let with_slots = |number: u64, period| {
        let slots = Algorithm::Concurrency {
            limit: 5,
            lease: Span::from_secs(3_600),
        };
        let bucket = bucket(RefillMode::Continuous, 5, 5, period);
        let limits = vec![
            Limit::new(slots).unwrap(),
            bucket.limits.iter().next().unwrap().clone(),
        ];
        Rule::new(&number.to_le_bytes(), limits, false)
    };
    let (start, mut outcomes) = (1_700_000_000_000_000, Vec::new());
    let later = start + 10_000_000;
    let day = Span::from_secs(86_400);
    let rule = bucket(RefillMode::Continuous, 1_000, 1_000, day);
    let mut reserve = |rule: &Rule, cost, micros| {
        let now = Timestamp::from_micros(micros);
        store.reserve(&[rule.charge(cost)], now, &mut outcomes).1
    };
    let receipt = reserve(&rule, 10, start);
    for (period, micros) in [(1, start), (60, later)] {
        for number in 0..1_900 {
            let rule = with_slots(number, Span::from_secs(period));
            drop(reserve(&rule, 1, micros));
        }
    }
    assert_eq!(ask(&store, &rule, later, 1, Effect::Look).remaining, 990);
    let (now, unused) = (Timestamp::from_micros(later), Settlement { unused: 10 });
    store.settle(&[rule.charge(10)], receipt, &[unused], now);
    let settled = ask(&store, &rule, later, 1, Effect::Look);
    assert!(settled.remaining >= 999, "{settled:?}");
}

/// Redis stores digests of limits, and servers of different versions share them. If a value in
/// this test changes, increment the version in `digest.rs`.
#[test]
fn the_digests_of_limits_are_the_same_as_in_stored_values() {
    let rate = Rate {
        count: 7,
        period: Span::from_secs(60),
    };
    let digest = |kind: &Kind| {
        let limit = Limit::new(kind.algorithm(7, rate, 6)).unwrap();
        tidegate_core::remote_eval::parameters_digest(&Limits::new(vec![limit]).unwrap())
    };
    let digests: Vec<u32> = Kind::ALL.iter().map(digest).collect();
    let stored = [
        259_499_772,
        211_298_948,
        198_887_273,
        121_769_267,
        128_017_862,
        109_418_875,
        265_995_655,
        96_637_613,
        69_747_615,
        201_349_406,
        240_562_097,
        14_145_577,
        131_293_954,
    ];
    assert_eq!(digests, stored, "{:?}", Kind::ALL);
}

/// A concurrency slot is released even if the limits have changed since it was acquired.
#[test]
fn a_slot_is_released_after_a_change_of_limits() {
    let rate = Rate {
        count: 1,
        period: Span::from_secs(60),
    };
    let limit = |slots| Limit::new(Kind::Concurrency.algorithm(slots, rate, 1)).unwrap();
    let (old, store, mut outcomes) = (rule(&limit(2)), one_shard(), Vec::new());
    let now = Timestamp::from_micros(1_000_000);
    let (_, receipt) = store.reserve(&[old.charge(2)], now, &mut outcomes);
    let lease = Rate {
        period: Span::from_secs(90),
        ..rate
    };
    let longer = Limit::new(Kind::Concurrency.algorithm(5, lease, 1)).unwrap();
    let new = successor(&longer, &old);
    assert_eq!(ask(&store, &new, 1_000_000, 1, Effect::Charge).remaining, 2);
    store.settle(&[old.charge(2)], receipt, &[Settlement { unused: 2 }], now);
    assert_eq!(ask(&store, &new, 1_000_000, 1, Effect::Look).remaining, 4);
}
