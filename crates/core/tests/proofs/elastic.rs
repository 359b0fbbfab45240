//! Tests elastic limits, which are raised as long as a condition (the headroom) holds. The original
//! and the raised (stretched) limits share one state.

use std::sync::Arc;

use proptest::prelude::*;
use tidegate_core::{
    Charge, Cost, Effect, FallbackShare, Limit, Limits, MemoryStore, Outcome, Rate, Span, Timestamp,
};

use crate::{
    promises::{copy_of, is_estimated},
    strategies::{self, Kind, any_kind},
    world::one_shard,
};

/// Generates pairs of limits: elastic limits, and the same limits with the larger soft allowance at
/// all times.
fn limits(kind: Kind, stretch: u32) -> impl Strategy<Value = (Limits, Limits)> {
    let limits = strategies::plain_limit(kind);
    limits.prop_filter_map("limits that can stretch", move |limit| {
        let wide = limit.clone().with_soft_percent(stretch).ok()?;
        let stretching = Limits::new(vec![limit]).ok()?.stretching(stretch).ok()?;
        Some((stretching, Limits::new(vec![wide]).ok()?))
    })
}

fn ask(store: &MemoryStore, limits: &Limits, (now, cost): (u64, u64), effect: Effect) -> Outcome {
    let (cost, mut outcomes) = (Cost::new(cost).expect("a cost"), Vec::new());
    let charge = Charge::new(b"key", limits, cost).expect("a key");
    store.check(
        &[charge],
        Timestamp::from_micros(now),
        effect,
        &mut outcomes,
    );
    outcomes[0]
}

proptest! {
    #![proptest_config(strategies::cases(800))]

    /// With headroom, outcomes equal those of limits that always have the larger soft allowance.
    /// Without headroom, the original limits apply, and units that were admitted beyond the
    /// original limits still count. Wait times are exact: a denied request is admitted after its
    /// wait time, and not earlier.
    #[test]
    fn elastic_charges_count_against_the_normal_limit(
        (limits, wide_limits) in any_kind().prop_flat_map(|kind| limits(kind, 50)),
        start in strategies::start(),
        asks in strategies::asks(40),
        room in prop::collection::vec(any::<bool>(), 40),
    ) {
        let stretched = limits.stretched().expect("they stretch");
        let is_estimated = limits.iter().any(is_estimated);
        let (store, mut last): (_, Option<Outcome>) = (one_shard(), None);
        // The twin receives the same requests under limits that always have the larger allowance.
        let twin = one_shard();
        let mut now = start;
        for (step, has_room) in asks.iter().zip(room) {
            now = now.max(step.step.from(now, last.as_ref()));
            let cost = step.price.units(last.as_ref());
            let (used, other) = if has_room { (stretched, &limits) } else { (&limits, stretched) };
            let other = ask(&store, other, (now, cost), Effect::Peek);
            let outcome = ask(&store, used, (now, cost), Effect::Charge);
            let (narrow, wide) = if has_room { (other, outcome) } else { (outcome, other) };
            prop_assert!(wide.allowed || !narrow.allowed, "denied only where there is room");
            prop_assert_eq!(narrow.limit, wide.limit);
            let effect = if outcome.allowed { Effect::Charge } else { Effect::Peek };
            let expected = ask(&twin, &wide_limits, (now, cost), effect);
            if has_room {
                prop_assert_eq!(wide, expected);
            }
            if !outcome.allowed && !is_estimated && let Some(wait) = outcome.retry_after.span() {
                // Use a copy, because a peek at a later instant moves the store's clock.
                let copy = copy_of(&store, now);
                let at = |micros: u64| ask(&copy, used, (now + micros, cost), Effect::Peek).allowed;
                prop_assert!(!at(wait.as_micros() - 1) && at(wait.as_micros()), "{wait:?} is not tight");
            }
            last = Some(outcome);
        }
    }
}

#[test]
fn a_stretched_log_refunds_at_most_its_charge() {
    let rate = Rate {
        count: 10,
        period: Span::from_secs(60),
    };
    for kind in Kind::ALL {
        let limit = Limit::new(kind.algorithm(10, rate, 1)).expect("a valid limit");
        let limits = Limits::new(vec![limit]).expect("a limit");
        let limits = limits.stretching(50).expect("it counts nothing it denies");
        let stretched = limits.stretched().expect("it stretches");
        let store = one_shard();
        let spent = (0..1_000)
            .take_while(|_| ask(&store, stretched, (0, 1), Effect::Charge).allowed)
            .count();
        assert!(spent > 10, "{kind:?}");
        // A unit is refunded under the original limits. For every kind of limit, the refund must
        // free exactly one unit of the stretched limits.
        ask(&store, &limits, (0, 1), Effect::Refund);
        assert!(
            ask(&store, stretched, (0, 1), Effect::Charge).allowed,
            "{kind:?}"
        );
        assert!(
            !ask(&store, stretched, (0, 1), Effect::Charge).allowed,
            "{kind:?}"
        );
    }
}

#[test]
fn a_limit_stretches_and_returns_to_normal() {
    let second = Span::from_secs(1);
    let rate = Rate {
        count: 4,
        period: second,
    };
    for kind in Kind::ALL {
        let limit = Limit::new(kind.algorithm(4, rate, 1)).expect("a valid limit");
        let limits = Limits::new(vec![limit]).expect("a limit");
        let quota = limits.iter().map(Limit::quota).sum::<u64>();
        let limits = limits.stretching(50).expect("it counts nothing it denies");
        let stretched = limits.stretched().expect("it stretches");
        let store = one_shard();
        let admitted = |limits: &Limits| {
            let mut asked = std::iter::repeat_with(|| ask(&store, limits, (0, 1), Effect::Charge));
            asked.by_ref().take_while(|outcome| outcome.allowed).count() as u64
        };
        assert_eq!(admitted(&limits), quota, "{kind:?}");
        assert_eq!(admitted(stretched), quota / 2, "{kind:?}");
        assert_eq!(admitted(&limits), 0, "{kind:?}");
        let share = FallbackShare::percent(50).expect("a share");
        let half = (limits.share(share), stretched.share(share));
        assert!(half.1.is_stretched() && !half.0.is_stretched());
    }
}

/// A state that was written before a reload can be converted to the stretched limits, just as it
/// can be converted to the original limits. Therefore, units spent before the limits changed still
/// count, and drain at the rate of the new limits.
#[test]
fn stretched_limits_convert_the_state_of_former_limits() {
    let limit = |count| {
        let period = Span::from_secs(60);
        let limit = Kind::TokenBucket.algorithm(count, Rate { count, period }, 1);
        vec![Limit::new(limit).expect("a valid limit")]
    };
    let old = Limits::new(limit(10)).expect("a limit");
    let new = Limits::new(limit(20)).expect("a limit").stretching(50);
    let new = new.expect("it counts nothing it denies");
    let new = new.inheriting_from(&Arc::new(old.clone()));
    let store = one_shard();
    assert!(ask(&store, &old, (0, 10), Effect::Charge).allowed);
    let stretched = new.stretched().expect("it stretches");
    assert_eq!(ask(&store, stretched, (0, 1), Effect::Look).remaining, 20);
}
