//! Tests [`Limit::implies`]: in a rule with two limits, an implied limit never decides.

use proptest::{prelude::*, sample::Index};
use tidegate_core::{
    Algorithm, Effect, Limit, Outcome, Rate, Receipt, Settlement, Span, Timestamp, Window,
};

use crate::{
    strategies::{self, Ask, any_kind},
    world::{Rule, one_shard},
};

/// A request, optionally followed by the settlement of an earlier charge. A settlement contains the
/// charge's index among the unsettled charges, and the number of unused units.
type Step = (Ask, Option<(Index, u64)>);

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let unused = prop_oneof![3 => Just(u64::MAX), 2 => 0..=4_u64];
    let settled = prop::option::weighted(0.4, (any::<Index>(), unused));
    prop::collection::vec((strategies::ask(), settled), 1..=length)
}

/// Returns a limit of the same kind with other numbers: its count is `times` the count of `limit`
/// plus `more`, and its period is `longer` halves of the period of `limit`.
fn variant(limit: &Limit, times: u64, more: u64, longer: u64) -> Option<Limit> {
    let count = |count: u64| count.saturating_mul(times).saturating_add(more);
    let span = |span: Span| Span::from_micros(span.as_micros().saturating_mul(longer) / 2);
    let rate = |rate: Rate| match longer {
        2 => rate,
        _ => Rate {
            count: count(rate.count),
            period: span(rate.period),
        },
    };
    let algorithm = match limit.algorithm().clone() {
        Algorithm::Gcra { rate: own, burst } => Algorithm::Gcra {
            rate: rate(own),
            burst: count(burst),
        },
        Algorithm::TokenBucket {
            capacity,
            refill,
            mode,
        } => Algorithm::TokenBucket {
            capacity: count(capacity),
            refill: rate(refill),
            mode,
        },
        Algorithm::LeakyBucket {
            capacity,
            leak,
            queue,
        } => Algorithm::LeakyBucket {
            capacity: count(capacity),
            leak: rate(leak),
            queue,
        },
        Algorithm::FixedWindow { limit, window } => Algorithm::FixedWindow {
            limit: count(limit),
            window: match window {
                Window::Epoch(window) => Window::Epoch(span(window)),
                Window::FirstRequest(window) => Window::FirstRequest(span(window)),
                calendar @ Window::Calendar(_) => calendar,
            },
        },
        Algorithm::SlidingWindowLog { limit, window } => Algorithm::SlidingWindowLog {
            limit: count(limit),
            window: span(window),
        },
        Algorithm::Concurrency { limit, lease } => Algorithm::Concurrency {
            limit: count(limit),
            lease: span(lease),
        },
        Algorithm::SlidingWindowCounter {
            limit,
            window,
            counting,
        } => Algorithm::SlidingWindowCounter {
            limit: count(limit),
            window: span(window),
            counting,
        },
    };
    Limit::new(algorithm).ok()
}

/// Generates two limits, of which the first implies the second.
fn implied_pair() -> impl Strategy<Value = (Limit, Limit)> {
    let numbers = (
        1..=8_u64,
        prop_oneof![Just(0), 0..=12_u64],
        prop_oneof![Just(2), 1..=8_u64],
    );
    let limit = any_kind().prop_flat_map(strategies::limit);
    (limit, numbers, prop_oneof![Just(0_u32), 0..=100_u32]).prop_filter_map(
        "an implied limit",
        |(limit, (times, more, longer), soft)| {
            let other = variant(&limit, times, more, longer)?;
            let other = other.with_soft_percent(soft).ok()?;
            limit.implies(&other).then_some((limit, other))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { max_local_rejects: 10_000_000, ..strategies::cases(4_000) })]

    /// An implied limit admits every request that the other limit admits, at once, without marking
    /// it, and at every cost. The costs include refunds and settlements.
    #[test]
    fn an_implied_limit_never_decides(
        (limit, implied) in implied_pair(),
        is_first in any::<bool>(),
        start in strategies::start(),
        steps in steps(60),
    ) {
        let limits = if is_first { vec![implied, limit] } else { vec![limit, implied] };
        let (own, other) = if is_first { (1, 0) } else { (0, 1) };
        let (rule, store) = (Rule::new(b"key", limits, false), one_shard());
        let (mut now, mut last): (u64, Option<Outcome>) = (start, None);
        let mut open: Vec<(u64, Receipt)> = Vec::new();
        for (step, settled) in &steps {
            now = step.step.from(now, last.as_ref());
            let at = Timestamp::from_micros(now);
            let cost = step.price.units(last.as_ref());
            let mut outcomes = Vec::new();
            let receipt = if step.effect == Effect::Charge {
                Some(store.reserve(&[rule.charge(cost)], at, &mut outcomes).1)
            } else {
                store.check(&[rule.charge(cost)], at, step.effect, &mut outcomes);
                None
            };
            let (own, other) = (outcomes[own], outcomes[other]);
            prop_assert!(other.allowed || !own.allowed, "{other:?} denies what {own:?} admits");
            prop_assert!(!other.over_limit, "{other:?}");
            prop_assert!(other.delay <= own.delay, "{other:?} delays, {own:?}");
            prop_assert!(other.retry_after <= own.retry_after, "{other:?} waits, {own:?}");
            if own.allowed {
                open.extend(receipt.map(|receipt| (cost, receipt)));
            }
            last = Some(own);
            if let Some((index, unused)) = settled && !open.is_empty() {
                let (cost, receipt) = open.remove(index.index(open.len()));
                let settlement = Settlement { unused: (*unused).min(cost) };
                store.settle(&[rule.charge(cost)], receipt, &[settlement], at);
            }
        }
    }
}
