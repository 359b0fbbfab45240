//! Tests decisions after a clock that was ahead has been set back (a clock jump). Units charged
//! while the clock was ahead count as if they had been charged when the jump was detected. A key
//! never has more spent units than a key that has just been exhausted, and a limit never admits
//! more than its bound.

use proptest::prelude::*;
use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, FallbackShare, Limit, Limits, MemoryBounds,
    MemoryStore, Outcome, Rate, Receipt, Renewal, Settlement, Span, Timestamp, bounds,
};

use crate::{
    promises::{ask, bound, is_estimated},
    strategies::{self, Ask, Kind, any_kind},
    world::{Rule, one_shard},
};

const NOW: u64 = 1_700_000_000_000_000;
const SECOND: u64 = 1_000_000;
const YEAR: u64 = 365 * 86_400 * SECOND;

/// Generates a clock jump. The jump is larger than the difference between the threads' clock
/// readings that a store tolerates.
fn jump() -> impl Strategy<Value = u64> {
    prop_oneof![11 * SECOND..700 * SECOND, Just(YEAR), 11 * SECOND..2 * YEAR,]
}

/// Charges the requests of a trace without moving the clock back. Returns the admitted charges and
/// the last instant.
fn charge_all(
    store: &MemoryStore,
    rule: &Rule,
    start: u64,
    asks: &[Ask],
) -> (Vec<(u64, u64)>, u64) {
    let (mut now, mut last, mut admitted) = (start, None, Vec::new());
    for Ask { step, price, .. } in asks {
        now = now.max(step.from(now, last.as_ref()));
        let cost = price.units(last.as_ref());
        let outcome = ask(store, rule, now, cost, Effect::Charge);
        if outcome.allowed {
            admitted.push((now, cost));
        }
        last = Some(outcome);
    }
    (admitted, now)
}

fn saved(store: &MemoryStore, now: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in 0..store.parts() {
        store.save(part, Timestamp::from_micros(now), &mut bytes);
    }
    bytes
}

/// Checks that no interval admits more units than the limit guarantees.
fn check_bound(limit: &Limit, admitted: &[(u64, u64)]) -> Result<(), TestCaseError> {
    for first in 0..admitted.len() {
        let mut sum = 0_u128;
        for last in first..admitted.len() {
            sum += u128::from(admitted[last].1);
            let (from, to) = (admitted[first].0, admitted[last].0);
            let bound = bound(limit, from, to);
            prop_assert!(
                bound.is_none_or(|bound| sum <= bound),
                "{sum} in [{from}, {to}] over {bound:?}: {admitted:?}"
            );
        }
    }
    Ok(())
}

/// Checks that, from `now` on, the store admits at least as many units for the key as for a key
/// exhausted at `now`.
fn check_no_fuller_than_exhausted(
    store: &MemoryStore,
    rule: &Rule,
    limit: &Limit,
    now: u64,
) -> Result<(), TestCaseError> {
    let most = limit.quota() + limit.soft_allowance();
    let exhausted = one_shard();
    if most > 0 {
        ask(&exhausted, rule, now, most, Effect::Charge);
    }
    for cost in [1, 2, most / 2, most.saturating_sub(1), most] {
        let cost = cost.clamp(1, most.max(1));
        let expected = ask(&exhausted, rule, now, cost, Effect::Peek);
        let found = ask(store, rule, now, cost, Effect::Peek);
        // The wait time for a concurrency slot is estimated from the ages of the held slots.
        prop_assert!(
            is_estimated(limit) || found.retry_after <= expected.retry_after,
            "{cost}: {found:?} is denied for longer than {expected:?}"
        );
        prop_assert!(found.reset_after <= expected.reset_after);
    }
    Ok(())
}

proptest! {
    #![proptest_config(strategies::cases(1_500))]

    /// After the clock is set back, no interval admits more than its bound.
    #[test]
    fn no_interval_exceeds_its_bound_after_a_jump(
        limit in any_kind().prop_flat_map(strategies::limit),
        start in strategies::start(),
        (before, during, after) in (
            strategies::asks(10),
            strategies::asks(10),
            strategies::asks(40),
        ),
        jump in jump(),
        through_a_snapshot in any::<bool>(),
    ) {
        let (rule, mut store) = (Rule::new(b"key", vec![limit.clone()], false), one_shard());
        let (_, now) = charge_all(&store, &rule, start, &before);
        let (_, ahead) = charge_all(&store, &rule, now + jump, &during);
        if through_a_snapshot {
            let restored = one_shard();
            let bytes = saved(&store, ahead);
            restored.restore(&bytes, Timestamp::from_micros(now)).expect("a valid snapshot");
            store = restored;
        }
        let (admitted, _) = charge_all(&store, &rule, now, &after);
        check_bound(&limit, &admitted)?;
    }

    /// No key is denied for longer than a key that was exhausted when the clock was set back.
    #[test]
    fn no_key_is_fuller_than_an_exhausted_key_after_a_jump(
        limit in any_kind().prop_flat_map(strategies::plain_limit),
        start in strategies::start(),
        during in strategies::asks(20),
        jump in jump(),
        through_a_snapshot in any::<bool>(),
    ) {
        let (rule, mut store) = (Rule::new(b"key", vec![limit.clone()], false), one_shard());
        let (_, ahead) = charge_all(&store, &rule, start + jump, &during);
        if through_a_snapshot {
            let restored = one_shard();
            let bytes = saved(&store, ahead);
            restored.restore(&bytes, Timestamp::from_micros(start)).expect("a valid snapshot");
            store = restored;
        }
        check_no_fuller_than_exhausted(&store, &rule, &limit, start)?;
    }

    /// A key charged only before the jump has the same outcomes as if the clock had never been
    /// ahead.
    #[test]
    fn a_key_without_future_charges_is_unchanged_by_a_jump(
        limit in any_kind()
            .prop_flat_map(strategies::plain_limit)
            .prop_filter("a window over 30 s", |limit| limit.window() > Span::from_secs(30)),
        start in strategies::start(),
        (before, after) in (strategies::asks(20), strategies::asks(20)),
        jump in 11 * SECOND..700 * SECOND,
    ) {
        let rule = Rule::new(b"key", vec![limit.clone()], false);
        let other = Rule::new(b"other", vec![limit], false);
        let (store, right) = (one_shard(), one_shard());
        let (_, now) = charge_all(&store, &rule, start, &before);
        charge_all(&right, &rule, start, &before);
        // While the clock is ahead, the store can drop a key that has expired according to that
        // clock. Skip this case.
        let rest = ask(&right, &rule, now, 1, Effect::Look).reset_after.as_micros();
        if rest <= jump {
            return Ok(());
        }
        ask(&store, &other, now + jump, 1, Effect::Charge);
        // Make the store detect the jump now. The store ignores a difference of at most 10 s.
        // Without this call, the difference could shrink to 10 s before the first charge, because
        // `now` advances.
        ask(&store, &other, now, 1, Effect::Look);
        let (expected, _) = charge_all(&right, &rule, now, &after);
        let (admitted, _) = charge_all(&store, &rule, now, &after);
        prop_assert_eq!(admitted, expected);
    }

    /// After restoring a snapshot that was written while the clock was ahead, keys have the same
    /// spent units as when it was written.
    #[test]
    fn a_snapshot_from_the_future_keeps_the_remaining_units(
        limit in prop::sample::select(vec![
            Kind::Gcra, Kind::TokenBucket, Kind::Interval, Kind::Meter, Kind::Queue,
            Kind::FirstRequestWindow, Kind::Log, Kind::Concurrency,
        ]).prop_flat_map(strategies::plain_limit),
        start in 1_000_000_000_000_000..1_800_000_000_000_000_u64,
        during in strategies::asks(20),
        jump in jump(),
    ) {
        let (rule, store, restored) = (Rule::new(b"key", vec![limit], false), one_shard(), one_shard());
        let (_, ahead) = charge_all(&store, &rule, start, &during);
        let now = ahead - jump.min(ahead);
        restored.restore(&saved(&store, ahead), Timestamp::from_micros(now)).expect("a valid snapshot");
        let left = ask(&store, &rule, ahead, 1, Effect::Look);
        prop_assert_eq!(ask(&restored, &rule, now, 1, Effect::Look), left);
    }
}

fn five_a_minute(kind: Kind) -> Limit {
    let rate = Rate {
        count: 5,
        period: Span::from_secs(60),
    };
    Limit::new(kind.algorithm(5, rate, 6)).expect("numbers that a limit can have")
}

/// Returns the time at which all units of [`five_a_minute`] are available again if they were all
/// spent at [`NOW`].
fn full_again(kind: Kind) -> u64 {
    let seconds = match kind {
        Kind::CalendarWindow => 32 * 86_400,
        // Five requests are waiting in the queue, and one is being served.
        Kind::Queue => 72,
        _ => 120,
    };
    NOW + seconds * SECOND
}

fn spend_all(store: &MemoryStore, rule: &Rule, now: u64) -> u64 {
    (0..10)
        .filter(|_| ask(store, rule, now, 1, Effect::Charge).allowed)
        .count() as u64
}

/// Regression test: after a burst with a clock that was 600 s ahead, no key of the shard recovered
/// for 600 s.
#[test]
fn a_burst_from_the_future_does_not_block_a_key() {
    for kind in Kind::ALL {
        let limits = || vec![five_a_minute(kind)];
        let (burst, quiet) = (
            Rule::new(b"burst", limits(), false),
            Rule::new(b"quiet", limits(), false),
        );
        let store = one_shard();
        let quota = spend_all(&store, &burst, NOW + 600 * SECOND);
        assert_eq!(spend_all(&store, &burst, NOW), 0, "{kind:?}");
        assert_eq!(spend_all(&store, &quiet, NOW), quota, "{kind:?}");
        let later = full_again(kind);
        assert_eq!(spend_all(&store, &burst, later), quota, "{kind:?}");
        assert_eq!(spend_all(&store, &quiet, later), quota, "{kind:?}");
    }
}

/// A thread may read the clock slightly before another thread's decision. Therefore, a small step
/// back is treated as normal, and the store uses the latest instant.
#[test]
fn a_small_step_back_counts_as_the_latest_instant() {
    let rule = Rule::new(b"key", vec![five_a_minute(Kind::Gcra)], false);
    let store = one_shard();
    assert_eq!(spend_all(&store, &rule, NOW), 5);
    ask(&store, &rule, NOW + 10 * SECOND, 1, Effect::Look);
    let look = ask(&store, &rule, NOW, 1, Effect::Look);
    assert_eq!(look.reset_after, Span::from_secs(50), "as of 10 s later");
}

/// If a decision charges keys in several shards, all of these shards use the same instant, even if
/// some shards have seen later instants.
#[test]
fn shards_locked_together_step_back_together() {
    let limits = Limits::new(vec![five_a_minute(Kind::Log)]).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let keys: Vec<[u8; 8]> = (0..40_u64).map(u64::to_le_bytes).collect();
    let check = |keys: &[[u8; 8]], now: u64| -> (Decision, Vec<Outcome>) {
        let charges: Vec<Charge<'_>> = keys
            .iter()
            .map(|key| Charge::new(key, &limits, Cost::ONE).unwrap())
            .collect();
        let (now, mut outcomes) = (Timestamp::from_micros(now), Vec::new());
        let decision = store.check(&charges, now, Effect::Charge, &mut outcomes);
        (decision, outcomes)
    };
    for _ in 0..5 {
        assert_eq!(check(&keys[..20], NOW + YEAR).0, Decision::Admitted);
    }
    let (denied, outcomes) = check(&keys, NOW);
    assert_eq!(denied, Decision::Limited);
    assert_eq!(outcomes[0].reset_after, Span::from_secs(60));
    assert_eq!(outcomes[30].remaining, 5);
    assert_eq!(check(&keys, NOW + 60 * SECOND).0, Decision::Admitted);
}

fn two_at_once() -> Limits {
    let lease = Span::from_secs(60);
    let limit = Limit::new(Algorithm::Concurrency { limit: 2, lease });
    Limits::new(vec![limit.expect("a valid limit")]).expect("one limit")
}

fn reserve(store: &MemoryStore, limits: &Limits, now: u64) -> (Decision, Receipt) {
    let charge = Charge::new(b"k", limits, Cost::ONE).expect("a short key");
    store.reserve(&[charge], Timestamp::from_micros(now), &mut Vec::new())
}

/// Regression tests: if the algorithm changed and the clock had been ahead, a renewal returned
/// `Held`, although the lease was dropped. Later, a renewal held the lease, and erased the units of
/// the other algorithm. The lease is lost, as it is without a clock that was ahead.
#[test]
fn a_lease_is_lost_if_another_algorithm_has_replaced_it() {
    let (limits, store) = (two_at_once(), one_shard());
    let charges = [Charge::new(b"k", &limits, Cost::ONE).unwrap()];
    let (_, mut receipt) = reserve(&store, &limits, NOW + 60 * SECOND);
    // The new limits replace the concurrency limit, and therefore its leases, with a count per
    // hour.
    let rate = Rate {
        count: 10,
        period: Span::from_secs(3_600),
    };
    let counted = Limits::new(vec![Limit::new(Kind::Log.algorithm(10, rate, 1)).unwrap()]).unwrap();
    assert_eq!(
        reserve(&store, &counted, NOW + 61 * SECOND).0,
        Decision::Admitted
    );
    let at = Timestamp::from_micros(NOW);
    assert_eq!(store.renew(&charges, &mut receipt, at), Renewal::Lost);
    let remaining = |limits: &Limits| {
        let (charge, mut outcomes) = (Charge::new(b"k", limits, Cost::ONE), Vec::new());
        store.check(&[charge.unwrap()], at, Effect::Look, &mut outcomes);
        outcomes[0].remaining
    };
    assert_eq!(
        remaining(&counted),
        9,
        "the unit of the other algorithm counts"
    );
    assert_eq!(remaining(&limits), 2, "no slot is held");
}

/// A concurrency slot that was acquired while the clock was ahead can be renewed and released with
/// its receipt.
#[test]
fn leases_from_the_future_are_still_held() {
    for renews in [true, false] {
        let (limits, store) = (two_at_once(), one_shard());
        let charges = [Charge::new(b"k", &limits, Cost::ONE).unwrap()];
        let (_, first) = reserve(&store, &limits, NOW);
        let (_, mut second) = reserve(&store, &limits, NOW + 59 * SECOND);
        assert_eq!(reserve(&store, &limits, NOW + SECOND).0, Decision::Limited);
        let at = Timestamp::from_micros(NOW + 2 * SECOND);
        if renews {
            assert_eq!(store.renew(&charges, &mut second, at), Renewal::Held);
        }
        assert_eq!(
            reserve(&store, &limits, NOW + 3 * SECOND).0,
            Decision::Limited
        );
        store.settle(&charges, second, &[Settlement::default()], at);
        assert_eq!(
            reserve(&store, &limits, NOW + 3 * SECOND).0,
            Decision::Admitted
        );
        assert_eq!(
            reserve(&store, &limits, NOW + 3 * SECOND).0,
            Decision::Limited
        );
        store.settle(&charges, first, &[Settlement::default()], at);
        assert_eq!(
            reserve(&store, &limits, NOW + 3 * SECOND).0,
            Decision::Admitted
        );
    }
}

/// A client that acquired a slot while the clock was ahead has crashed. The slot becomes free one
/// lease after the jump was detected, not one lease after the future instant.
#[test]
fn a_lease_from_the_future_expires_in_time() {
    let (limits, store) = (two_at_once(), one_shard());
    let _crashed = [600, 601].map(|second| reserve(&store, &limits, NOW + second * SECOND));
    assert_eq!(reserve(&store, &limits, NOW).0, Decision::Limited);
    let later = NOW + 60 * SECOND;
    assert_eq!(reserve(&store, &limits, later).0, Decision::Admitted);
}

/// Units charged while the clock was ahead are not refunded, because it is unknown how many of them
/// have already become available again.
#[test]
fn a_receipt_from_the_future_refunds_nothing() {
    for kind in [Kind::Gcra, Kind::Interval, Kind::Log, Kind::StrictBuckets] {
        let limits = Limits::new(vec![five_a_minute(kind)]).unwrap();
        let (store, rule) = (
            one_shard(),
            Rule::new(b"k", vec![five_a_minute(kind)], false),
        );
        let charges = [Charge::new(b"k", &limits, Cost::new(5).unwrap()).unwrap()];
        let ahead = Timestamp::from_micros(NOW + 600 * SECOND);
        let (_, receipt) = store.reserve(&charges, ahead, &mut Vec::new());
        let now = Timestamp::from_micros(NOW);
        store.settle(&charges, receipt, &[Settlement { unused: 5 }], now);
        assert_eq!(
            ask(&store, &rule, NOW, 1, Effect::Look).remaining,
            0,
            "{kind:?}"
        );
    }
}

/// A block set while the clock was ahead lasts for its original duration.
#[test]
fn a_block_from_the_future_expires_in_time() {
    let (store, minute) = (one_shard(), Span::from_secs(60));
    let at = |second: u64| Timestamp::from_micros(NOW + second * SECOND);
    store.block(b"early", Some(Span::from_secs(90)), "", at(0));
    store.block(b"ahead", Some(minute), "", at(600));
    store.block(b"for good", None, "", at(600));
    let until = |key: &[u8], second| store.block_on(key, at(second)).map(|block| block.until);
    assert_eq!(until(b"ahead", 1), Some(Some(at(61))));
    assert_eq!(until(b"early", 1), Some(Some(at(90))));
    assert_eq!(until(b"for good", 1), Some(None));
    assert_eq!(until(b"ahead", 61), None);
}

/// Regression test: with a snapshot written while the clock was a year ahead, a limit of `5/min`
/// denied requests for a year.
#[test]
fn a_snapshot_from_the_future_denies_no_longer_than_its_limits() {
    for kind in Kind::ALL {
        let rule = Rule::new(b"key", vec![five_a_minute(kind)], false);
        let (store, restored) = (one_shard(), MemoryStore::new(MemoryBounds::default()));
        let quota = spend_all(&store, &rule, NOW + YEAR);
        let blocked = b"blocked".as_slice();
        let span = Some(Span::from_secs(30));
        store.block(blocked, span, "why", Timestamp::from_micros(NOW + YEAR));
        let now = Timestamp::from_micros(NOW);
        let keys = restored.restore(&saved(&store, NOW + YEAR), now).unwrap();
        assert_eq!(keys, 1, "{kind:?}");
        assert_eq!(spend_all(&restored, &rule, NOW), 0, "{kind:?}");
        let block = restored.block_on(blocked, now).unwrap();
        assert_eq!(block.until, Some(now.after(Span::from_secs(30))));
        let later = full_again(kind);
        assert_eq!(spend_all(&restored, &rule, later), quota, "{kind:?}");
    }
}

/// After a clock jump, units that elastic limits admitted beyond the original limits stay charged.
/// The store does not treat them as charges from the future.
#[test]
fn elastic_charges_survive_a_clock_jump() {
    for kind in [Kind::Gcra, Kind::Interval] {
        let limits = Limits::new(vec![five_a_minute(kind)]).unwrap();
        let limits = limits.stretching(100).unwrap();
        let stretched = limits.stretched().unwrap();
        let (store, mut outcomes) = (one_shard(), Vec::new());
        let at = |second: u64| Timestamp::from_micros(NOW + second * SECOND);
        let wide = Charge::new(b"k", stretched, Cost::new(10).unwrap()).unwrap();
        let decision = store.check(&[wide], at(0), Effect::Charge, &mut outcomes);
        assert_eq!(decision, Decision::Admitted);
        let narrow = Charge::new(b"k", &limits, Cost::ONE).unwrap();
        let before = {
            store.check(&[narrow], at(0), Effect::Look, &mut outcomes);
            outcomes.clone()
        };
        let share = limits.share(FallbackShare::default());
        let other = Charge::new(b"other", &share, Cost::ONE).unwrap();
        store.check(&[other], at(60), Effect::Charge, &mut outcomes);
        store.check(&[narrow], at(0), Effect::Look, &mut outcomes);
        assert_eq!(outcomes, before, "{kind:?}");
    }
}

/// A decision at the last representable instant does not panic for any kind of limit.
#[test]
fn the_last_instant_does_not_panic() {
    for kind in Kind::ALL {
        let rule = Rule::new(b"key", vec![five_a_minute(kind)], false);
        let store = one_shard();
        for now in [u64::MAX, 0, u64::MAX, NOW, 1, 0] {
            ask(&store, &rule, now, 1, Effect::Charge);
            ask(&store, &rule, now, bounds::MAX_COUNT, Effect::Refund);
            ask(&store, &rule, now, 3, Effect::Charge);
        }
        let again = one_shard();
        let bytes = saved(&store, 0);
        again.restore(&bytes, Timestamp::default()).unwrap();
        ask(&again, &rule, 0, 1, Effect::Charge);
    }
}
