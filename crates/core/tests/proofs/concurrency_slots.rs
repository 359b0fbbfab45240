//! Tests concurrency slots, which are held for the duration of a lease, renewed, and released.

use std::sync::Arc;

use proptest::{prelude::*, sample::Index};
use tidegate_core::{
    Algorithm, AlgorithmName, Charge, Cost, Decision, Effect, Limit, LimitSpec, Limits,
    MemoryBounds, MemoryStore, Outcome, Receipt, Renewal, Settlement, Span, Timestamp, WhenFull,
};

use crate::{
    promises::ask,
    settlements::reserve,
    strategies::{self, Ask, Kind},
    world::{Rule, one_shard},
};

/// An action of a slot holder.
#[derive(Clone, Copy, Debug)]
enum HolderAction {
    Release,
    Renew,
}

/// A request, optionally followed by an action of a slot holder.
type Step = (Ask, Option<(Index, HolderAction)>);

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let action = prop::sample::select(vec![
        HolderAction::Release,
        HolderAction::Renew,
        HolderAction::Renew,
    ]);
    let action = prop::option::weighted(0.7, (any::<Index>(), action));
    prop::collection::vec((strategies::ask(), action), 1..=length)
}

/// A holder of `units` concurrency slots, acquired or renewed at `since`.
struct Holder {
    since: u64,
    units: u64,
    receipt: Receipt,
}

/// The reference model: all holders that have not released their slots.
struct Holders {
    lease: u64,
    all: Vec<Holder>,
}

impl Holders {
    fn held_slots(&self, now: u64) -> u64 {
        let live = self
            .all
            .iter()
            .filter(|holder| now - holder.since < self.lease);
        live.map(|holder| holder.units).sum()
    }

    fn held_without(&self, now: u64, excluded: usize) -> u64 {
        let holder = &self.all[excluded];
        let is_live = now - holder.since < self.lease;
        self.held_slots(now) - if is_live { holder.units } else { 0 }
    }
}

proptest! {
    #![proptest_config(strategies::cases(2_000))]

    /// The number of held slots never exceeds the limit, and a request is admitted if and only if
    /// enough slots are free. A slot is held if it was acquired or renewed less than a lease ago
    /// and has not been released. A late renewal acquires a slot again if one is free.
    #[test]
    fn concurrency_never_exceeds_the_limit(
        limit in strategies::plain_limit(Kind::Concurrency),
        start in strategies::start(),
        steps in steps(60),
    ) {
        let (quota, lease) = (limit.quota(), limit.window().as_micros());
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let (mut now, mut last): (u64, Option<Outcome>) = (start, None);
        let mut holders = Holders { lease, all: Vec::new() };
        for (step, action) in &steps {
            now = now.max(step.step.from(now, last.as_ref()));
            let at = Timestamp::from_micros(now);
            let units = step.price.units(last.as_ref());
            let fits = units <= quota && holders.held_slots(now) <= quota - units;
            let (receipt, outcome) = reserve(&store, &rule.charge(units), now);
            prop_assert_eq!(outcome.allowed, fits);
            if outcome.allowed {
                holders.all.push(Holder { since: now, units, receipt });
            }
            prop_assert_eq!(outcome.remaining, quota - holders.held_slots(now));
            last = Some(outcome);
            let Some((index, action)) = action.filter(|_| !holders.all.is_empty()) else {
                continue;
            };
            let which = index.index(holders.all.len());
            let (others, units) = (holders.held_without(now, which), holders.all[which].units);
            match action {
                HolderAction::Release => {
                    let receipt = holders.all.remove(which).receipt;
                    store.settle(&[rule.charge(units)], receipt, &[Settlement::default()], at);
                }
                HolderAction::Renew => {
                    let receipt = &mut holders.all[which].receipt;
                    let renewal = store.renew(&[rule.charge(units)], receipt, at);
                    let is_held = others <= quota - units;
                    prop_assert_eq!(renewal, if is_held { Renewal::Held } else { Renewal::Lost });
                    if is_held {
                        holders.all[which].since = now;
                    }
                }
            }
        }
    }

    /// If all holders renew in time, slots are never lost and the limit is never exceeded, however
    /// long the slots are held.
    #[test]
    fn a_renewed_lease_is_counted_until_it_is_released(
        limit in strategies::plain_limit(Kind::Concurrency),
        start in strategies::start(),
        steps in prop::collection::vec(
            (0..3_u64, 0..=2_u64, prop::option::of(any::<Index>())),
            1..60,
        ),
    ) {
        let (quota, lease) = (limit.quota(), limit.window().as_micros());
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let mut held: Vec<Receipt> = Vec::new();
        let mut now = start;
        for (arrivals, wait, departing) in steps {
            // At most two thirds of the lease elapse between two renewals.
            now += wait * (lease / 3);
            let at = Timestamp::from_micros(now);
            for receipt in &mut held {
                prop_assert_eq!(store.renew(&[rule.charge(1)], receipt, at), Renewal::Held);
            }
            for _ in 0..arrivals {
                let (receipt, outcome) = reserve(&store, &rule.charge(1), now);
                prop_assert_eq!(outcome.allowed, (held.len() as u64) < quota);
                held.extend(outcome.allowed.then_some(receipt));
            }
            if let Some(departing) = departing.filter(|_| !held.is_empty()) {
                let receipt = held.swap_remove(departing.index(held.len()));
                store.settle(&[rule.charge(1)], receipt, &[Settlement::default()], at);
            }
        }
    }
}

fn concurrency(limit: u64) -> Limits {
    let spec = LimitSpec {
        algorithm: Some(AlgorithmName::Concurrency),
        limit: Some(limit),
        ..LimitSpec::default()
    };
    Limits::new(vec![spec.build().expect("a limit")]).expect("a limit")
}

fn charge(limits: &Limits) -> Charge<'_> {
    Charge::new(b"key", limits, Cost::ONE).expect("a key")
}

/// A slot is released by its receipt, even if the limit has since changed.
#[test]
fn leases_are_released_after_the_limit_changed() {
    let old = Arc::new(concurrency(3));
    for limit in [2, 5] {
        let new = concurrency(limit).inheriting_from(&old);
        let store = one_shard();
        let at = Timestamp::from_micros;
        let mut outcomes = Vec::new();
        let mut receipts = Vec::new();
        for now in 1..=3 {
            let (decision, receipt) = store.reserve(&[charge(&old)], at(now), &mut outcomes);
            assert_eq!(decision, Decision::Admitted);
            receipts.push(receipt);
        }
        // A charge converts the state to the new limits.
        store.check(&[charge(&new)], at(4), Effect::Charge, &mut outcomes);
        assert_eq!(outcomes[0].allowed, limit > 3);
        for receipt in receipts {
            store.settle(&[charge(&old)], receipt, &[Settlement::default()], at(5));
        }
        store.check(&[charge(&new)], at(6), Effect::Look, &mut outcomes);
        assert_eq!(outcomes[0].remaining, limit.min(4), "{limit}");
    }
}

/// A server with the old limits can renew a lease after other servers have changed to new limits. A
/// lower limit does not revoke slots.
#[test]
fn leases_are_renewed_after_the_limit_changed() {
    let old = Arc::new(concurrency(3));
    let new = concurrency(2).inheriting_from(&old);
    let (store, mut outcomes) = (one_shard(), Vec::new());
    let seconds = |number: u64| Timestamp::from_micros(number * 1_000_000);
    let mut receipts: Vec<Receipt> = (1..=3)
        .map(|second| {
            store
                .reserve(&[charge(&old)], seconds(second), &mut outcomes)
                .1
        })
        .collect();
    for second in [40, 80, 120] {
        store.check(
            &[charge(&new)],
            seconds(second),
            Effect::Charge,
            &mut outcomes,
        );
        assert!(!outcomes[0].allowed, "at {second} s");
        for receipt in &mut receipts {
            let renewal = store.renew(&[charge(&old)], receipt, seconds(second));
            assert_eq!(renewal, Renewal::Held, "at {second} s");
        }
    }
    for receipt in receipts {
        store.settle(
            &[charge(&old)],
            receipt,
            &[Settlement::default()],
            seconds(130),
        );
    }
    store.check(&[charge(&new)], seconds(130), Effect::Look, &mut outcomes);
    assert_eq!(outcomes[0].remaining, 2);
}

/// After all leases have expired under other limits, a slot that is acquired again has the lease of
/// the limits under which it is acquired.
#[test]
fn a_reacquired_slot_has_the_lease_of_its_own_limit() {
    let lasting = |lease| {
        let algorithm = Algorithm::Concurrency { limit: 3, lease };
        Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap()
    };
    let old = Arc::new(lasting(Span::from_secs(1)));
    let new = lasting(Span::from_secs(60)).inheriting_from(&old);
    let (store, mut outcomes) = (one_shard(), Vec::new());
    let seconds = |number: u64| Timestamp::from_micros(number * 1_000_000);
    let mut receipt = store.reserve(&[charge(&old)], seconds(1), &mut outcomes).1;
    store.check(&[charge(&new)], seconds(2), Effect::Charge, &mut outcomes);
    let renewal = store.renew(&[charge(&old)], &mut receipt, seconds(100));
    assert_eq!(renewal, Renewal::Held);
    for (second, remaining) in [(100, 2), (102, 3)] {
        store.check(
            &[charge(&new)],
            seconds(second),
            Effect::Look,
            &mut outcomes,
        );
        assert_eq!(outcomes[0].remaining, remaining, "at {second} s");
    }
}

/// If the store has lost the key's state, for example after a reset, renewals acquire the slots
/// again, up to the limit.
#[test]
fn a_renewal_after_a_reset_counts_the_holder_again() {
    let (limits, store, mut outcomes) = (concurrency(2), one_shard(), Vec::new());
    let at = Timestamp::from_micros;
    let mut receipts: Vec<Receipt> = (1..=2)
        .map(|now| store.reserve(&[charge(&limits)], at(now), &mut outcomes).1)
        .collect();
    store.reset(b"key");
    store.check(&[charge(&limits)], at(3), Effect::Charge, &mut outcomes);
    assert!(outcomes[0].allowed);
    let renewals: Vec<Renewal> = receipts
        .iter_mut()
        .map(|receipt| store.renew(&[charge(&limits)], receipt, at(4)))
        .collect();
    assert_eq!(renewals, [Renewal::Held, Renewal::Lost]);
    for receipt in receipts {
        store.settle(&[charge(&limits)], receipt, &[Settlement::default()], at(5));
    }
    store.check(&[charge(&limits)], at(6), Effect::Look, &mut outcomes);
    assert_eq!(outcomes[0].remaining, 1, "the new holder keeps its slot");
}

/// Creates a store of 64 KiB.
fn small(when_full: WhenFull) -> MemoryStore {
    MemoryStore::new(MemoryBounds {
        max_bytes: 1,
        when_full,
        ..MemoryBounds::default()
    })
}

/// Acquires four concurrency slots, each at a different instant.
fn taken(store: &MemoryStore, limits: &Limits) -> Vec<Receipt> {
    let take = |now| {
        let now = Timestamp::from_micros(now);
        store.reserve(&[charge(limits)], now, &mut Vec::new()).1
    };
    (1..=4).map(take).collect()
}

/// Fills the store with the sliding window logs of other keys until no log can grow: charges each
/// key four times, and then until the store has no room for its log.
fn fill(store: &MemoryStore) {
    let log = Algorithm::SlidingWindowLog {
        limit: 100_000,
        window: Span::from_secs(3_600),
    };
    let log = Limits::new(vec![Limit::new(log).expect("a limit")]).expect("a limit");
    let mut now = 10;
    let mut grow = |key: u8, times: usize| {
        let key = [key];
        let other = Charge::new(&key, &log, Cost::ONE).expect("a key");
        let refused = || store.stats().denied_when_full + store.stats().admitted_when_full;
        let before = refused();
        for _ in 0..times {
            now += 1;
            let now = Timestamp::from_micros(now);
            store.check(&[other], now, Effect::Charge, &mut Vec::new());
            if refused() > before {
                break;
            }
        }
    };
    for key in 0..60 {
        grow(key, 4);
    }
    for key in 0..60 {
        grow(key, usize::MAX);
    }
}

/// A renewal does not need additional memory, so it succeeds in a full store and does not affect
/// other keys.
#[test]
fn leases_are_renewed_in_a_full_store() {
    let limits = concurrency(4);
    for when_full in [WhenFull::Deny, WhenFull::Allow] {
        let store = small(when_full);
        let mut receipts = taken(&store, &limits);
        fill(&store);
        let before = store.stats();
        for second in [30, 60, 90, 120] {
            let now = Timestamp::from_micros(second * 1_000_000);
            for receipt in &mut receipts {
                let renewal = store.renew(&[charge(&limits)], receipt, now);
                assert_eq!(renewal, Renewal::Held, "{when_full:?} at {second} s");
            }
        }
        assert_eq!(store.stats(), before, "{when_full:?}");
    }
}

/// If the store has no memory to acquire a slot again, the slot is not reported as lost, because no
/// other request holds it.
#[test]
fn a_renewal_without_room_is_not_reported_as_lost() {
    let limits = concurrency(4);
    let store = small(WhenFull::Deny);
    let mut receipts = taken(&store, &limits);
    store.reset(b"key");
    fill(&store);
    let now = Timestamp::from_micros(30_000_000);
    let renewal = store.renew(&[charge(&limits)], &mut receipts[0], now);
    assert_eq!(renewal, Renewal::Unknown);
}

/// Slots acquired at the same instant share an entry in the state. When the slots are renewed at
/// different instants, each slot needs a separate entry.
#[test]
fn leases_of_the_same_instant_are_renewed_one_by_one() {
    let (limits, store) = (concurrency(6), one_shard());
    let at = |seconds: u64| Timestamp::from_micros(seconds * 1_000_000);
    let mut receipts: Vec<Receipt> = (0..6)
        .map(|_| store.reserve(&[charge(&limits)], at(1), &mut Vec::new()).1)
        .collect();
    for (receipt, second) in receipts.iter_mut().zip(30..) {
        let renewal = store.renew(&[charge(&limits)], receipt, at(second));
        assert_eq!(renewal, Renewal::Held);
    }
    let mut outcomes = Vec::new();
    store.check(&[charge(&limits)], at(80), Effect::Charge, &mut outcomes);
    assert!(!outcomes[0].allowed);
    for receipt in receipts {
        store.settle(
            &[charge(&limits)],
            receipt,
            &[Settlement::default()],
            at(81),
        );
    }
    store.check(&[charge(&limits)], at(82), Effect::Look, &mut outcomes);
    assert_eq!(outcomes[0].remaining, 6);
}

/// Regression test: the reported wait time was the time until the first lease expires, for example
/// a minute for a slot that became free after half a second.
#[test]
fn the_wait_for_a_slot_follows_the_ages_of_its_holders() {
    const SECOND: u64 = 1_000_000;
    let limit = |limit, lease| Limit::new(Algorithm::Concurrency { limit, lease });
    let minute = limit(5, Span::from_secs(60)).expect("a valid limit");
    let (rule, store) = (Rule::new(b"key", vec![minute], false), one_shard());
    let now = 1_700_000_000 * SECOND;
    for at in 0..5 {
        ask(&store, &rule, now + at * SECOND / 10, 1, Effect::Charge);
    }
    let wait = |after: u64, cost: u64| {
        let denied = ask(&store, &rule, now + after, cost, Effect::Peek);
        assert!(!denied.allowed);
        denied.retry_after.span().map(Span::as_micros)
    };
    // Five slots are held, and the oldest has been held for half a second.
    assert_eq!(wait(SECOND / 2, 1), Some(SECOND / 10));
    assert_eq!(wait(SECOND / 2, 3), Some(3 * SECOND / 10));
    assert_eq!(wait(10 * SECOND, 1), Some(2 * SECOND));
    assert_eq!(wait(10 * SECOND, 5), Some(10 * SECOND), "the longest hint");
    assert_eq!(
        wait(55 * SECOND, 1),
        Some(5 * SECOND),
        "a lease ends before"
    );
    assert_eq!(wait(SECOND, 6), None, "never");
    let short = limit(1, Span::from_millis(50)).expect("a valid limit");
    let (rule, store) = (Rule::new(b"short", vec![short], false), one_shard());
    ask(&store, &rule, now, 1, Effect::Charge);
    let denied = ask(&store, &rule, now, 1, Effect::Peek);
    assert_eq!(denied.retry_after.span(), Some(Span::from_millis(50)));
}
