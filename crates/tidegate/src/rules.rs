//! The rate limiter of an application: rules, a store and a clock.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tidegate_core::{RuleSet, Store, Timestamp};

use crate::{Clock, Gate};

/// The rate limiter of an application: the current rules, a store and a clock.
///
/// A process uses one for each set of rules, behind an [`Arc`]. `S` is any [`Store`], such as the
/// memory store. With `tidegate_redis::Fleet`, all processes that use the same rules share their
/// counts.
///
/// # Examples
///
/// ```
/// use tidegate_core::{
///     AlgorithmName, Cost, Effect, Limit, MemoryBounds, MemoryStore, Request, Rule, RuleSet, Scratch,
/// };
/// use tidegate::{Clock, Gate, RuleLimiter as Limiter};
///
/// let limit = Limit::shorthand(AlgorithmName::TokenBucket, "2/min").unwrap();
/// let rule = Rule::new("per-customer", vec![limit]).unwrap().keyed_by(&["customer"]).unwrap();
/// let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
/// let limiter = Limiter::new(rules, MemoryStore::new(MemoryBounds::default()), Clock::real());
///
/// let entries = [("customer", "acme")];
/// let request = Request::new(&entries, Cost::new(2).unwrap()).unwrap();
/// let (rules, mut scratch) = (limiter.rules(), Scratch::default());
/// let verdict = limiter.check_now(&rules, &mut scratch, &request, Effect::Charge).unwrap();
/// assert!(verdict.unwrap().allowed);
/// let verdict = limiter.check_now(&rules, &mut scratch, &request, Effect::Charge).unwrap();
/// assert!(!verdict.unwrap().allowed);
/// ```
#[derive(Debug)]
pub struct Limiter<S> {
    rules: ArcSwap<RuleSet>,
    store: S,
    clock: Clock,
}

impl<S: Store> Limiter<S> {
    /// Creates a limiter with `rules` that counts in `store`.
    ///
    /// If an application with a [real clock](Clock::real) runs for days, it should
    /// [correct](Clock::follow) the clock regularly.
    #[must_use]
    pub fn new(rules: RuleSet, store: S, clock: Clock) -> Self {
        Self {
            rules: ArcSwap::from_pointee(rules),
            store,
            clock,
        }
    }

    /// Replaces the current rules. Counts under a rule of the same name and key are kept. Requests
    /// in progress are decided under the rules with which they started.
    pub fn swap_rules(&self, rules: RuleSet) {
        let rules = rules.inheriting_from(&self.rules.load());
        self.rules.store(Arc::new(rules));
        self.store.forget_denials();
    }

    /// Returns the clock of the limiter.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }
}

impl<S: Store> Gate for Limiter<S> {
    type Store = S;

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    fn store(&self) -> &S {
        &self.store
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tidegate_core::{
        AlgorithmName, Cost, Effect, Headroom, LimitSpec, MemoryBounds, MemoryStore, Request, Rule,
        Scratch, Span, UnusedShare, notation,
    };

    use super::*;

    fn rules(rate: &str) -> RuleSet {
        let rate = notation::rate(rate).unwrap();
        let spec = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow);
        let rule = Rule::new("all", vec![spec.build().unwrap()]).unwrap();
        RuleSet::build(vec![rule], Vec::new()).unwrap()
    }

    fn passes(limiter: &Limiter<MemoryStore>, effect: Effect) -> bool {
        let request = Request::new(&[], Cost::ONE).unwrap();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let verdict = limiter.check(&rules, &mut scratch, &request, effect);
        let verdict = verdict
            .now_or_never()
            .expect("a decision in memory never suspends");
        verdict.unwrap().allowed
    }

    #[test]
    fn an_elastic_rule_stretches_while_another_share_is_unused() {
        let limit = |text| {
            let rate = notation::rate(text).unwrap();
            let spec = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow);
            vec![spec.build().unwrap()]
        };
        let unused = Headroom::Unused(UnusedShare::new("all", 50).unwrap());
        let each = Rule::new("each", limit("1/h")).unwrap();
        let each = each.elastic(200, unused).unwrap();
        let all = Rule::new("all", limit("4/h")).unwrap();
        let rules = RuleSet::build(vec![each, all], Vec::new()).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(1));
        let limiter = Limiter::new(rules, MemoryStore::new(MemoryBounds::default()), clock);
        for expected in [true, true, true, false] {
            assert_eq!(passes(&limiter, Effect::Peek), expected);
            assert_eq!(passes(&limiter, Effect::Charge), expected);
        }
    }

    #[test]
    fn swapping_rules_keeps_counts() {
        let clock = Clock::manual(Timestamp::from_micros(7_200_000_000));
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Limiter::new(rules("2/h"), store, clock);
        let passed = |effect, expected: &[bool]| {
            for expected in expected {
                assert_eq!(passes(&limiter, effect), *expected);
            }
        };
        passed(Effect::Charge, &[true, true, false]);
        limiter.swap_rules(rules("3/h"));
        passed(Effect::Peek, &[true, true]);
        passed(Effect::Charge, &[true, false]);
        let later = limiter.now().after(Span::from_secs(3_600));
        limiter.clock().set(later);
        passed(Effect::Charge, &[true]);
    }
}
