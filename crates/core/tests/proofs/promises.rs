//! Tests each algorithm's documented guarantees over all intervals of a trace (a sequence of
//! requests), and the guarantees of all limits about wait times, costs and expiry.

use proptest::prelude::*;
use tidegate_core::{
    Algorithm, Counting, Effect, Limit, MemoryStore, Outcome, Rate, RefillMode, RetryAfter,
    Timestamp, Window, bounds,
};

use crate::{
    strategies::{self, Ask, Kind, any_kind},
    world::{Rule, one_shard},
};

/// The instant and the cost of each admitted charge, in chronological order.
type Admitted = Vec<(u64, u64)>;

proptest! {
    #![proptest_config(strategies::cases(1_500))]

    /// No interval admits more than the limit's bound, even if the clock jumps back.
    #[test]
    fn no_interval_exceeds_its_bound(
        limit in any_kind().prop_flat_map(strategies::limit),
        start in strategies::start(),
        asks in strategies::asks(60),
    ) {
        let admitted = run(&limit, start, &asks);
        for first in 0..admitted.len() {
            let mut sum = 0_u128;
            for last in first..admitted.len() {
                sum += u128::from(admitted[last].1);
                let (from, to) = (admitted[first].0, admitted[last].0);
                let bound = bound(&limit, from, to);
                prop_assert!(
                    bound.is_none_or(|bound| sum <= bound),
                    "{sum} in [{from}, {to}] over {bound:?}: {admitted:?}"
                );
            }
        }
    }

    /// A denied request is still denied one microsecond before its wait time ends, and is then
    /// admitted.
    #[test]
    fn waits_are_tight(
        limit in any_kind().prop_flat_map(strategies::limit),
        start in strategies::start(),
        asks in strategies::asks(20),
    ) {
        let is_estimated = is_estimated(&limit);
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        walk(&rule, &store, start, &asks, |now, cost, outcome| {
            if let RetryAfter::After(wait) = outcome.retry_after
                && !outcome.allowed
            {
                let wait = wait.as_micros();
                prop_assert!(wait > 0, "denied with a wait of zero");
                if is_estimated {
                    prop_assert!(wait <= 10_000_000, "a slot may be released at any moment");
                    return Ok(());
                }
                // Use a copy, because a peek at a later instant moves the store's clock.
                let copy = copy_of(&store, now);
                let early = ask(&copy, &rule, now + wait - 1, cost, Effect::Peek);
                prop_assert!(!early.allowed, "admitted before the {wait} us were over");
                let then = ask(&copy, &rule, now + wait, cost, Effect::Charge);
                prop_assert!(then.allowed, "denied though the {wait} us are over");
            }
            Ok(())
        })?;
    }

    /// A request that would be admitted now would also be admitted later, if there are no other
    /// requests in between. If a cost is admitted, any lower cost is also admitted.
    #[test]
    fn waiting_or_a_lower_cost_never_hurts(
        limit in any_kind().prop_flat_map(strategies::limit),
        start in strategies::start(),
        asks in strategies::asks(20),
        mut waits in prop::collection::vec(prop_oneof![0..=200_u64, any::<u64>()], 8),
        mut costs in prop::collection::vec(1..=30_u64, 8),
    ) {
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let end = walk(&rule, &store, start, &asks, |_, _, _| Ok(()))?;
        let full = ask(&store, &rule, end, 1, Effect::Look).reset_after.as_micros() + 1;
        waits.iter_mut().for_each(|wait| *wait %= full);
        waits.sort_unstable();
        costs.sort_unstable();
        let mut admitted = 0;
        for wait in waits {
            let fits = |cost: &&u64| ask(&store, &rule, end + wait, **cost, Effect::Peek).allowed;
            let largest = costs.iter().filter(fits).count();
            let smallest_first = costs.iter().take_while(fits).count();
            prop_assert_eq!(largest, smallest_first, "a higher cost fits where a lower one does not");
            prop_assert!(largest >= admitted, "an admitted cost is no longer admitted");
            admitted = largest;
        }
    }

    /// In a queue, a request starts no earlier than the previous request's start plus the drain
    /// time of the previous request's cost, except for rounding. No wait is longer than the drain
    /// time of a full queue.
    #[test]
    fn a_queue_spaces_what_it_admits(
        limit in strategies::limit(Kind::Queue),
        start in strategies::start(),
        asks in strategies::asks(40),
    ) {
        let Algorithm::LeakyBucket { leak, .. } = *limit.algorithm() else { unreachable!() };
        let (count, period) = (u128::from(leak.count), u128::from(leak.period.as_micros()));
        let most = limit.quota() + limit.soft_allowance();
        let (rule, store) = (Rule::new(b"key", vec![limit], false), one_shard());
        let mut before: Option<(u64, u64)> = None;
        walk(&rule, &store, start, &asks, |now, cost, outcome| {
            if outcome.allowed {
                let delay = outcome.delay.as_micros();
                let longest = (u128::from(most - cost) * period).div_ceil(count);
                prop_assert!(u128::from(delay) <= longest, "{} us of {}", delay, longest);
                if let Some((begun, spent)) = before {
                    prop_assert!(now + delay >= begun, "overtaken");
                    let apart = u128::from(now + delay - begun);
                    prop_assert!((apart + 1) * count > u128::from(spent) * period, "{} us apart", apart);
                }
                before = Some((now + delay, cost));
            }
            Ok(())
        })?;
    }

    /// A cost that never fits is denied with `RetryAfter::Never` and changes nothing. Looks and
    /// peeks (read-only decisions) between two requests also change nothing.
    #[test]
    fn impossible_requests_and_looks_leave_no_trace(
        limit in any_kind().prop_flat_map(strategies::plain_limit),
        start in strategies::start(),
        asks in strategies::asks(30),
        splits in prop::collection::vec(any::<u8>(), 30),
    ) {
        let most = limit.quota();
        let (rule, quiet, noisy) = (Rule::new(b"key", vec![limit], false), one_shard(), one_shard());
        let (mut now, mut differences) = (start, Vec::new());
        let mut splits = splits.into_iter().cycle();
        walk(&rule, &quiet, start, &asks, |then, cost, outcome| {
            let between = now + (then - now) / 256 * u64::from(splits.next().unwrap_or(0));
            ask(&noisy, &rule, between, 1, Effect::Look);
            ask(&noisy, &rule, between, cost, Effect::Peek);
            if most < bounds::MAX_COUNT {
                for hopeless in [most + 1, bounds::MAX_COUNT] {
                    let denied = ask(&noisy, &rule, between, hopeless, Effect::Charge);
                    prop_assert_eq!(denied.retry_after, RetryAfter::Never);
                    prop_assert!(!denied.allowed);
                }
            }
            let same = ask(&noisy, &rule, then, cost, Effect::Charge);
            if same != *outcome {
                differences.push((then, cost, *outcome, same));
            }
            now = then;
            Ok(())
        })?;
        prop_assert!(differences.is_empty(), "{differences:?}");
    }

    /// After `reset_after` has elapsed, outcomes do not depend on whether the key was dropped. A
    /// new key has its whole limit available.
    #[test]
    fn forgetting_an_initial_state_is_unobservable(
        limit in any_kind().prop_flat_map(strategies::limit),
        start in strategies::start(),
        before in strategies::asks(20),
        after in strategies::asks(20),
    ) {
        let most = limit.quota() + limit.soft_allowance();
        let rule = Rule::new(b"key", vec![limit], false);
        let (kept, forgetful) = (one_shard(), one_shard());
        let new = ask(&kept, &rule, start, 1, Effect::Look);
        prop_assert_eq!((new.remaining, new.reset_after.as_micros()), (most, 0));
        let end = walk(&rule, &kept, start, &before, |_, _, _| Ok(()))?;
        let end = end + ask(&kept, &rule, end, 1, Effect::Look).reset_after.as_micros();
        let again = ask(&kept, &rule, end, 1, Effect::Look);
        prop_assert_eq!((again.remaining, again.reset_after.as_micros()), (most, 0));
        walk(&rule, &forgetful, end, &after, |now, cost, outcome| {
            let same = ask(&kept, &rule, now, cost, Effect::Charge);
            prop_assert_eq!(same, *outcome, "at {} for {}", now, cost);
            Ok(())
        })?;
    }
}

/// Returns whether a limit's wait times are estimates. The wait times for concurrency slots are
/// estimates, because it is unknown when a slot will be released.
pub(crate) fn is_estimated(limit: &Limit) -> bool {
    matches!(limit.algorithm(), Algorithm::Concurrency { .. })
}

/// Charges the requests of a trace without moving the clock back. Passes every outcome to `seen`.
/// Returns the instant of the last charge.
pub(crate) fn walk(
    rule: &Rule,
    store: &MemoryStore,
    start: u64,
    asks: &[Ask],
    mut seen: impl FnMut(u64, u64, &Outcome) -> Result<(), TestCaseError>,
) -> Result<u64, TestCaseError> {
    let (mut now, mut last) = (start, None);
    for Ask { step, price, .. } in asks {
        now = step.from(now, last.as_ref()).max(now);
        let cost = price.units(last.as_ref());
        let outcome = ask(store, rule, now, cost, Effect::Charge);
        seen(now, cost, &outcome)?;
        last = Some(outcome);
    }
    Ok(now)
}

/// Charges the requests of a trace. Returns the admitted charges. If the trace moves the clock
/// back, the store uses the latest instant that it has seen, and the returned charge contains this
/// instant.
fn run(limit: &Limit, start: u64, asks: &[Ask]) -> Admitted {
    let (rule, store) = (Rule::new(b"key", vec![limit.clone()], false), one_shard());
    let (mut now, mut latest, mut last) = (start, 0, None);
    let mut admitted = Vec::new();
    for Ask { step, price, .. } in asks {
        now = step.from(now, last.as_ref());
        latest = latest.max(now);
        let cost = price.units(last.as_ref());
        let outcome = ask(&store, &rule, now, cost, Effect::Charge);
        if outcome.allowed {
            admitted.push((latest, cost));
        }
        last = Some(outcome);
    }
    admitted
}

pub(crate) fn ask(
    store: &MemoryStore,
    rule: &Rule,
    now: u64,
    cost: u64,
    effect: Effect,
) -> Outcome {
    let mut outcomes = Vec::new();
    store.check(
        &[rule.charge(cost)],
        Timestamp::from_micros(now),
        effect,
        &mut outcomes,
    );
    outcomes[0]
}

pub(crate) fn copy_of(store: &MemoryStore, now: u64) -> MemoryStore {
    let (copy, now, mut bytes) = (one_shard(), Timestamp::from_micros(now), Vec::new());
    store.save(0, now, &mut bytes);
    copy.restore(&bytes, now)
        .expect("a saved snapshot can be restored");
    copy
}

/// Returns the maximum number of units that a limit admits in the closed interval from `from` to
/// `to`. Returns `None` if the limit does not guarantee a maximum.
pub(crate) fn bound(limit: &Limit, from: u64, to: u64) -> Option<u128> {
    let most = u128::from(limit.quota() + limit.soft_allowance());
    let ticks = u128::from(to - from);
    let steady = |rate: &Rate| ticks * u128::from(rate.count) / u128::from(rate.period.as_micros());
    match limit.algorithm() {
        Algorithm::Gcra { rate, .. }
        | Algorithm::LeakyBucket { leak: rate, .. }
        | Algorithm::TokenBucket {
            refill: rate,
            mode: RefillMode::Continuous,
            ..
        } => Some(most + steady(rate)),
        Algorithm::TokenBucket { refill, .. } => {
            let intervals = (ticks + 1).div_ceil(u128::from(refill.period.as_micros()));
            Some(most + u128::from(refill.count) * intervals)
        }
        Algorithm::FixedWindow { window, .. } => Some(most * windows(window, from, to)),
        Algorithm::SlidingWindowLog { window, .. }
        | Algorithm::Concurrency { lease: window, .. } => {
            (to - from < window.as_micros()).then_some(most)
        }
        Algorithm::SlidingWindowCounter {
            window, counting, ..
        } => counter_bound(most, window.as_micros(), *counting, from, to),
    }
}

/// Returns the number of windows that overlap the interval from `from` to `to`.
fn windows(window: &Window, from: u64, to: u64) -> u128 {
    match window {
        Window::Epoch(span) => u128::from(to / span.as_micros() - from / span.as_micros() + 1),
        Window::FirstRequest(span) => u128::from((to - from) / span.as_micros() + 2),
        Window::Calendar(calendar) => {
            let (mut count, mut at) = (1, Timestamp::from_micros(from));
            while calendar.window(at).1.as_micros() <= to {
                at = calendar.window(at).1;
                count += 1;
            }
            count
        }
    }
}

fn counter_bound(most: u128, window: u64, counting: Counting, from: u64, to: u64) -> Option<u128> {
    let inside = to - from < window;
    match counting {
        Counting::Buckets { strict: true, .. } => inside.then_some(most),
        Counting::Buckets { buckets, .. } => {
            let width = window / u64::from(buckets);
            let within = to / width - from / width < u64::from(buckets);
            if within {
                Some(most)
            } else {
                inside.then_some(2 * most)
            }
        }
        Counting::Weighted if from / window == to / window => Some(most),
        Counting::Weighted => inside.then_some((2 * most).saturating_sub(1)),
    }
}
