//! Two stores, one of which takes over the state of the other, together decide like a single store.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore,
    Outcome, Receipt, Settlement, Timestamp, notation,
};

use crate::{
    promises::walk,
    strategies::{self, Ask, any_kind},
    world::{Rule, one_shard},
};

const LIMIT: u64 = 20_000;

fn limits() -> Limits {
    let rate = notation::rate(&format!("{LIMIT}/d")).expect("a valid rate");
    let limit = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow).build();
    let limit = limit.expect("a valid limit");
    Limits::new(vec![limit]).expect("one limit")
}

/// Threads charge two keys in one request while the state moves from one store to another, part by
/// part. Each thread uses the new store as soon as the old one decides nothing. All charges
/// together are exactly the limit.
#[test]
fn no_charge_is_lost_or_made_twice_while_the_state_moves() {
    let (limits, now) = (limits(), Timestamp::from_micros(1_000_000));
    let [old, new] = [(); 2].map(|()| MemoryStore::new(MemoryBounds::default()));
    let keys: Vec<Vec<u8>> = (0..64_u8).map(|key| vec![b'k', key]).collect();
    let (admitted, sealed) = (AtomicU64::new(0), AtomicU64::new(0));
    let has_moved = std::sync::Barrier::new(5);
    let ask = |store: &MemoryStore, first: usize| {
        let pair = [&keys[first % 64], &keys[(first * 7 + 1) % 64]];
        let charges = pair.map(|key| Charge::new(key, &limits, Cost::ONE).unwrap());
        store.check(&charges, now, Effect::Charge, &mut Vec::new())
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (ask, old, new) = (&ask, &old, &new);
            let (admitted, sealed, has_moved) = (&admitted, &sealed, &has_moved);
            scope.spawn(move || {
                let mut at = thread;
                loop {
                    at += 4;
                    match ask(old, at) {
                        Decision::Admitted => drop(admitted.fetch_add(1, Ordering::Relaxed)),
                        Decision::Limited => {}
                        decision => {
                            assert_eq!(decision, Decision::SEALED);
                            sealed.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                    }
                }
                has_moved.wait();
                let mut denied = 0;
                while denied < 1_000 {
                    at += 4;
                    match ask(new, at) {
                        Decision::Admitted => drop(admitted.fetch_add(1, Ordering::Relaxed)),
                        decision => {
                            assert_eq!(decision, Decision::Limited);
                            denied += 1;
                        }
                    }
                }
            });
        }
        while admitted.load(Ordering::Relaxed) < 50_000 {
            std::thread::yield_now();
        }
        let mut part = Vec::new();
        for number in 0..old.parts() {
            part.clear();
            old.save_and_seal(number, now, &mut part);
            new.restore(&part, now).unwrap();
        }
        has_moved.wait();
    });
    assert!(sealed.load(Ordering::Relaxed) >= 4);
    // Each request charges two of the keys, and each key admits `LIMIT` units. A key that is still
    // below its limit is always paired with a key at its limit.
    let used = |key: &Vec<u8>| {
        let charge = Charge::new(key, &limits, Cost::ONE).unwrap();
        let mut outcomes = Vec::new();
        new.check(&[charge], now, Effect::Peek, &mut outcomes);
        // The remaining units are those after the cost of the peek.
        LIMIT - outcomes[0].remaining - u64::from(outcomes[0].allowed)
    };
    let total: u64 = keys.iter().map(used).sum();
    assert_eq!(total, 2 * admitted.load(Ordering::Relaxed));
}

#[test]
fn a_store_decides_again_after_it_was_unsealed() {
    let (limits, now) = (limits(), Timestamp::from_micros(1_000_000));
    let store = one_shard();
    let charge = Charge::new(b"key", &limits, Cost::ONE).unwrap();
    let check = |store: &MemoryStore, charges: &[Charge<'_>]| {
        store.check(charges, now, Effect::Charge, &mut Vec::new())
    };
    assert_eq!(check(&store, &[charge]), Decision::Admitted);
    store.save_and_seal(0, now, &mut Vec::new());
    let other = Charge::new(b"other", &limits, Cost::ONE).unwrap();
    assert_eq!(check(&store, &[charge]), Decision::SEALED);
    assert_eq!(check(&store, &[charge, other]), Decision::SEALED);
    let verdict = store.verdict(b"key", &limits, Cost::ONE, now, Effect::Charge);
    assert!(!verdict.unwrap().allowed);
    assert!(!store.block(b"key", None, "", now), "a block would be lost");
    assert!(!store.reset(b"key"), "a reset would be lost");
    store.unseal();
    assert_eq!(check(&store, &[charge]), Decision::Admitted);
    assert!(store.block(b"key", None, "", now));
}

fn outcomes(store: &MemoryStore, rule: &Rule, now: Timestamp) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    store.check(&[rule.charge(1)], now, Effect::Peek, &mut outcomes);
    outcomes
}

/// Returns the remaining units of each limit before the cost of the peek. The outcomes of a denied
/// peek do not include its cost.
fn remaining_before_cost(outcomes: &[Outcome]) -> Vec<u64> {
    let cost = u64::from(outcomes.iter().all(|outcome| outcome.allowed));
    let remaining = outcomes.iter().map(|outcome| outcome.remaining + cost);
    remaining.collect()
}

/// Regression test: a restored log has no sums before the first decision.
#[test]
fn a_moved_reservation_is_settled_before_the_first_decision() {
    let rate = notation::rate("4/h").expect("a valid rate");
    let limit = LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog).build();
    let rule = Rule::new(b"key", vec![limit.expect("a valid limit")], false);
    let (old, new) = (one_shard(), one_shard());
    let now = Timestamp::from_micros(1_000_000);
    let charges = [rule.charge(3)];
    let (_, receipt) = old.reserve(&charges, now, &mut Vec::new());
    let mut part = Vec::new();
    old.save(0, now, &mut part);
    new.restore(&part, now).unwrap();
    new.forget_refunds(now);
    let records = old.move_receipt(&charges, &receipt, now);
    let moved = Receipt::from_moved(&records).unwrap();
    new.settle(&charges, moved, &[Settlement { unused: 3 }], now);
    assert_eq!(
        outcomes(&new, &rule, now)[0].remaining,
        3,
        "after the cost of the peek"
    );
}

/// A reservation between other requests.
#[derive(Debug)]
struct MovedReservation {
    start: u64,
    before: Vec<Ask>,
    after: Vec<Ask>,
    cost: u64,
    unused: u64,
}

fn moved_reservation() -> impl Strategy<Value = MovedReservation> {
    let asks = (strategies::asks(10), strategies::asks(10));
    let costs = (1..5_u64, 0..5_u64);
    (strategies::start(), asks, costs).prop_map(|(start, (before, after), (cost, unused))| {
        MovedReservation {
            start,
            before,
            after,
            cost,
            unused: unused.min(cost),
        }
    })
}

/// Makes `reservation` in a store, moves the state to a new store, and settles the reservation in
/// both stores. Returns the outcomes of the next request in the old store and in the new one.
/// `before_settling` changes the old store after the move.
fn settle_in_both(
    rule: &Rule,
    reservation: &MovedReservation,
    before_settling: impl Fn(&MemoryStore, Timestamp),
) -> Result<[Vec<Outcome>; 2], TestCaseError> {
    let MovedReservation {
        start,
        before,
        after,
        cost,
        unused,
    } = reservation;
    let (old, new) = (one_shard(), one_shard());
    let reserved = walk(rule, &old, *start, before, |_, _, _| Ok(()))?;
    let charges = [rule.charge(*cost)];
    let at = Timestamp::from_micros(reserved);
    let (_, receipt) = old.reserve(&charges, at, &mut Vec::new());
    let moved = walk(rule, &old, reserved, after, |_, _, _| Ok(()))?;
    let now = Timestamp::from_micros(moved);
    let mut part = Vec::new();
    old.save(0, now, &mut part);
    new.restore(&part, now).expect("a valid snapshot");
    prop_assert_eq!(outcomes(&new, rule, now), outcomes(&old, rule, now));
    new.forget_refunds(now);
    let records = old.move_receipt(&charges, &receipt, now);
    let moved_receipt = Receipt::from_moved(&records).expect("valid records");
    before_settling(&old, now);
    let settlements = [Settlement { unused: *unused }];
    old.settle(&charges, receipt, &settlements, now);
    new.settle(&charges, moved_receipt, &settlements, now);
    Ok([&old, &new].map(|store| outcomes(store, rule, now)))
}

proptest! {
    #![proptest_config(strategies::cases(1_000))]

    /// Settling a moved reservation has the same effect as settling it in the old store, if the old
    /// store has also forgotten its earlier refunds.
    #[test]
    fn a_moved_receipt_refunds_the_same(
        limits in prop::collection::vec(any_kind().prop_flat_map(strategies::limit), 1..=4),
        reservation in moved_reservation(),
    ) {
        let rule = Rule::new(b"key", limits, false);
        let [old, new] = settle_in_both(&rule, &reservation, |old, now| old.forget_refunds(now))?;
        prop_assert_eq!(new, old);
    }

    /// A reservation that moves refunds at most as much as it would have refunded in the old store.
    #[test]
    fn a_moved_receipt_never_refunds_too_much(
        limits in prop::collection::vec(any_kind().prop_flat_map(strategies::limit), 1..=4),
        reservation in moved_reservation(),
    ) {
        let rule = Rule::new(b"key", limits, false);
        let [old, new] = settle_in_both(&rule, &reservation, |_, _| ())?;
        let (of_new, of_old) = (remaining_before_cost(&new), remaining_before_cost(&old));
        let is_at_most = of_new.iter().zip(&of_old).all(|(new, old)| new <= old);
        prop_assert!(is_at_most, "{:?} {:?}", of_new, of_old);
    }

    #[test]
    fn no_bytes_are_an_invalid_receipt_that_panics(
        records in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..4),
    ) {
        drop(Receipt::from_moved(&records));
    }
}
