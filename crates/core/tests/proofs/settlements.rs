//! Tests refunds with a receipt. A refund returns at most the units that are still counted.
//! Therefore, in every interval, the units that were actually used stay within the limit's bound.

use proptest::{prelude::*, sample::Index};
use tidegate_core::{
    AlgorithmName, Charge, Decision, Effect, Limit, LimitSpec, MemoryStore, Outcome, Rate, Receipt,
    Settlement, Span, Timestamp,
};

use crate::{
    promises::{ask, bound},
    strategies::{self, Ask, Kind, any_kind},
    succession,
    world::{Rule, one_shard},
};

/// A charge, with its receipt until the charge is settled. After the settlement, `units` is the
/// number of units that were actually used.
struct Used {
    at: u64,
    units: u64,
    open: Option<Receipt>,
}

/// A request, optionally followed by the settlement of an earlier charge. A settlement contains the
/// charge's index among the unsettled charges, and the number of unused units.
type Step = (Ask, Option<(Index, u64)>);

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let unused = prop_oneof![3 => Just(u64::MAX), 2 => 0..=4_u64, 1 => any::<u64>()];
    let settled = prop::option::weighted(0.7, (any::<Index>(), unused));
    prop::collection::vec((strategies::ask(), settled), 1..=length)
}

proptest! {
    #![proptest_config(strategies::cases(2_000))]

    /// Regardless of the refunds, the units that were actually used in an interval stay within the
    /// limit's bound.
    #[test]
    fn a_refund_never_mints_units(
        // Concurrency limits are excluded, because a settlement releases all slots, including used
        // slots.
        limit in any_kind().prop_filter("units", |kind| *kind != Kind::Concurrency).prop_flat_map(strategies::limit),
        start in strategies::start(),
        steps in steps(60),
    ) {
        let used = run(&limit, start, &steps);
        for first in 0..used.len() {
            let mut sum = 0_u128;
            for last in first..used.len() {
                sum += u128::from(used[last].units);
                let (from, to) = (used[first].at, used[last].at);
                let bound = bound(&limit, from, to);
                prop_assert!(bound.is_none_or(|bound| sum <= bound), "{sum} in [{from}, {to}] over {bound:?}");
            }
        }
    }

    /// The limits change while charges are outstanding. Regardless of the refunds, the units that
    /// were actually used after the change stay within the new limit's bound. A settlement never
    /// takes units away, and refunds at most the unused units.
    #[test]
    fn a_refund_after_a_change_never_mints_units(
        (before, after) in any_kind()
            .prop_filter("units", |kind| *kind != Kind::Concurrency)
            .prop_flat_map(|kind| (strategies::plain_limit(kind), strategies::plain_limit(kind))),
        start in strategies::start(),
        steps in steps(50),
        change in 0..50_usize,
        known in any::<bool>(),
        // A server settles a reservation in Redis with the limits of its own rules.
        settles_with_new_limits in any::<bool>(),
    ) {
        let (old, store) = (succession::rule(&before), one_shard());
        let new = if known {
            succession::successor(&after, &old)
        } else {
            succession::rule(&after)
        };
        let (mut now, mut latest, mut last): (u64, u64, Option<Outcome>) = (start, 0, None);
        let mut used: Vec<Used> = Vec::new();
        let mut charged_before = 0;
        for (at, (step, settled)) in steps.iter().enumerate() {
            let rule = if at < change { &old } else { &new };
            now = step.step.from(now, last.as_ref());
            latest = latest.max(now);
            let units = step.price.units(last.as_ref());
            let (receipt, outcome) = reserve(&store, &rule.charge(units), now);
            if outcome.allowed {
                used.push(Used { at: latest, units, open: Some(receipt) });
                charged_before += usize::from(at < change);
            }
            last = Some(outcome);
            let open: Vec<usize> = (0..used.len()).filter(|at| used[*at].open.is_some()).collect();
            if let Some((index, unused)) = settled && !open.is_empty() {
                let chosen = open[index.index(open.len())];
                let charged_under = if chosen < charged_before && !settles_with_new_limits {
                    &old
                } else {
                    rule
                };
                let settled = &mut used[chosen];
                let unused = (*unused).min(settled.units);
                let charge = charged_under.charge(settled.units);
                let receipt = settled.open.take().expect("the charge is open");
                let left = ask(&store, rule, latest, 1, Effect::Look).remaining;
                let settlement = Settlement { unused };
                store.settle(&[charge], receipt, &[settlement], Timestamp::from_micros(latest));
                settled.units -= unused;
                let left_after = ask(&store, rule, latest, 1, Effect::Look).remaining;
                prop_assert!((left..=left + unused).contains(&left_after), "{left}, {left_after}");
            }
        }
        let after_change = &used[charged_before..];
        for first in 0..after_change.len() {
            let mut sum = 0_u128;
            for last in &after_change[first..] {
                sum += u128::from(last.units);
                let bound = bound(&after, after_change[first].at, last.at);
                prop_assert!(bound.is_none_or(|bound| sum <= bound), "{sum} over {bound:?}");
            }
        }
    }

    /// A charge settled immediately, before any other request, leaves no trace.
    #[test]
    fn an_immediate_refund_undoes_the_charge(
        limit in any_kind().prop_flat_map(strategies::plain_limit),
        start in strategies::start(),
        asks in strategies::asks(20),
        cost in 1..=5_u64,
    ) {
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let (mut now, mut last): (u64, Option<Outcome>) = (start, None);
        for step in &asks {
            now = now.max(step.step.from(now, last.as_ref()));
            last = Some(ask(&store, &rule, now, step.price.units(last.as_ref()), Effect::Charge));
        }
        let before = ask(&store, &rule, now, cost, Effect::Peek);
        let (receipt, _) = reserve(&store, &rule.charge(cost), now);
        let settlement = Settlement { unused: cost };
        store.settle(&[rule.charge(cost)], receipt, &[settlement], Timestamp::from_micros(now));
        let after = ask(&store, &rule, now, cost, Effect::Peek);
        prop_assert_eq!(after, before);
    }

    /// In a queue, only the last request is refunded, so a later request never starts before a
    /// request that is still in the queue.
    #[test]
    fn a_refund_in_a_queue_moves_no_other(
        limit in strategies::plain_limit(Kind::Queue),
        start in strategies::start(),
        steps in steps(40),
    ) {
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let (mut now, mut last): (u64, Option<Outcome>) = (start, None);
        // The start time, cost and receipt of each request still in the queue.
        let mut line: Vec<(u64, u64, Option<Receipt>)> = Vec::new();
        for (step, settled) in &steps {
            now = now.max(step.step.from(now, last.as_ref()));
            let cost = step.price.units(last.as_ref());
            let (receipt, outcome) = reserve(&store, &rule.charge(cost), now);
            if outcome.allowed {
                let begins = now + outcome.delay.as_micros();
                prop_assert!(line.iter().all(|(other, ..)| *other <= begins), "overtaken");
                line.push((begins, cost, Some(receipt)));
            }
            last = Some(outcome);
            let waiting = line
                .iter()
                .position(|(begins, _, receipt)| *begins > now && receipt.is_some());
            if let (Some((index, _)), Some(first)) = (settled, waiting) {
                let left = first + index.index(line.len() - first);
                if let (_, cost, Some(receipt)) = line.remove(left) {
                    let settlement = Settlement { unused: cost };
                    let now = Timestamp::from_micros(now);
                    store.settle(&[rule.charge(cost)], receipt, &[settlement], now);
                }
            }
        }
    }
}

/// If a refill has already returned tokens since the charge, a refund does not return them again.
#[test]
fn interval_tokens_are_refunded_once() {
    let rate = Rate {
        count: 2,
        period: Span::from_secs(1),
    };
    let limit = Limit::new(Kind::Interval.algorithm(2, rate, 1)).expect("a valid limit");
    let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
    let (first, _) = reserve(&store, &rule.charge(2), 0);
    assert!(ask(&store, &rule, 1_000_000, 2, Effect::Charge).allowed);
    let now = Timestamp::from_micros(1_000_000);
    store.settle(&[rule.charge(2)], first, &[Settlement { unused: 2 }], now);
    assert_eq!(ask(&store, &rule, 1_000_000, 1, Effect::Look).remaining, 0);
}

/// A late settlement refunds only the unused tokens that refills have not returned since the
/// charge.
#[test]
fn interval_tokens_that_no_refill_has_returned_are_refunded() {
    let rate = Rate {
        count: 1,
        period: Span::from_secs(1),
    };
    let limit = Limit::new(Kind::Interval.algorithm(10, rate, 1)).expect("a valid limit");
    let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
    let (receipt, _) = reserve(&store, &rule.charge(5), 0);
    assert!(ask(&store, &rule, 0, 5, Effect::Charge).allowed);
    // Two refills have returned two tokens, so eight are missing. Of the five unused tokens, three
    // are left to refund.
    let now = Timestamp::from_micros(2_500_000);
    store.settle(&[rule.charge(5)], receipt, &[Settlement { unused: 5 }], now);
    assert_eq!(ask(&store, &rule, 2_500_000, 1, Effect::Look).remaining, 5);
}

/// The refund ledger never exceeds its maximum size, and the store reports its size.
#[test]
fn the_refund_ledger_is_bounded() {
    let rate = Rate {
        count: 2,
        period: Span::from_secs(1),
    };
    let limit = Limit::new(Kind::TokenBucket.algorithm(10, rate, 1)).expect("a valid limit");
    let store = one_shard();
    let mut most = 0;
    // Charge more keys than fit in the ledger, but fewer than fit in the store.
    for number in 0..950_u32 {
        let rule = Rule::new(&number.to_be_bytes(), vec![limit.clone()], false);
        let (receipt, outcome) = reserve(&store, &rule.charge(8), 0);
        assert!(outcome.allowed, "key {number} finds room");
        // The ledger does not record the refund of a key's last charge, so make another charge
        // after this one.
        reserve(&store, &rule.charge(1), 0);
        let now = Timestamp::from_micros(0);
        store.settle(&[rule.charge(8)], receipt, &[Settlement { unused: 7 }], now);
        most = most.max(store.stats().ledger_bytes);
    }
    assert!((10_000..=64 << 10).contains(&most), "{most}");
}

fn run(limit: &Limit, start: u64, steps: &[Step]) -> Vec<Used> {
    let (rule, store) = (Rule::new(b"key", vec![limit.clone()], false), one_shard());
    let (mut now, mut latest, mut last): (u64, u64, Option<Outcome>) = (start, 0, None);
    let mut used: Vec<Used> = Vec::new();
    for (step, settled) in steps {
        now = step.step.from(now, last.as_ref());
        latest = latest.max(now);
        let units = step.price.units(last.as_ref());
        let (receipt, outcome) = reserve(&store, &rule.charge(units), now);
        if outcome.allowed {
            used.push(Used {
                at: latest,
                units,
                open: Some(receipt),
            });
        }
        last = Some(outcome);
        let mut open: Vec<&mut Used> = used.iter_mut().filter(|used| used.open.is_some()).collect();
        if let Some((index, unused)) = settled
            && !open.is_empty()
        {
            let chosen = index.index(open.len());
            let settled = &mut open[chosen];
            let unused = (*unused).min(settled.units);
            let (charge, settlement) = (rule.charge(settled.units), Settlement { unused });
            let receipt = settled.open.take().expect("the charge is open");
            store.settle(
                &[charge],
                receipt,
                &[settlement],
                Timestamp::from_micros(now),
            );
            settled.units -= unused;
        }
    }
    used
}

pub(crate) fn reserve(store: &MemoryStore, charge: &Charge<'_>, now: u64) -> (Receipt, Outcome) {
    let mut outcomes = Vec::new();
    let now = Timestamp::from_micros(now);
    let (decision, receipt) = store.reserve(&[*charge], now, &mut outcomes);
    assert_eq!(decision == Decision::Admitted, outcomes[0].allowed);
    (receipt, outcomes[0])
}

/// The refund of a key's last charge does not move earlier charges, so they can still be refunded
/// in full.
#[test]
fn a_refund_of_the_last_charge_moves_no_other() {
    let rate = Rate {
        count: 1,
        period: Span::from_secs(10),
    };
    let limit = LimitSpec {
        capacity: Some(10),
        ..LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)
    };
    let (rule, store) = (
        Rule::new(b"key", vec![limit.build().unwrap()], false),
        one_shard(),
    );
    let start = 1_000_000_000_000_000;
    let refund = |cost: u64, receipt: Receipt, now: u64| {
        let (charge, settlement) = (rule.charge(cost), Settlement { unused: cost });
        store.settle(
            &[charge],
            receipt,
            &[settlement],
            Timestamp::from_micros(now),
        );
    };
    reserve(&store, &rule.charge(3), start);
    let (first, _) = reserve(&store, &rule.charge(1), start);
    let (last, _) = reserve(&store, &rule.charge(3), start);
    refund(3, last, start);
    let later = start + 5_000_000;
    refund(1, first, later);
    let outcome = ask(&store, &rule, later, 1, Effect::Look);
    assert_eq!(outcome.reset_after, Span::from_secs(25));
}
