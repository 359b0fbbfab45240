//! The limiter that every door asks: the rules of the moment, one store, one clock.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tidegate_core::{
    Charge, Decision, Effect, Limits, MemoryStore, Outcome, Request, RequestError, RuleSet, Scratch, Timestamp, Verdict,
};

use crate::clock::Clock;

/// What every door asks. One lives in a process, behind an [`Arc`].
#[derive(Debug)]
pub struct Limiter {
    rules: ArcSwap<RuleSet>,
    store: MemoryStore,
    clock: Clock,
}

impl Limiter {
    /// A limiter under `rules`.
    #[must_use]
    pub fn new(rules: RuleSet, store: MemoryStore, clock: Clock) -> Self {
        Self { rules: ArcSwap::from_pointee(rules), store, clock }
    }

    /// The time; a door reads it once a request.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The rules of the moment. A request is decided under one set from beginning to end.
    #[must_use]
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    /// Puts `rules` in the place of those of the moment.
    pub fn swap_rules(&self, rules: RuleSet) {
        self.rules.store(Arc::new(rules));
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// Decides `request` under `rules`, which the caller got from [`Self::rules`].
    ///
    /// # Errors
    ///
    /// What [`RuleSet::charges`] refuses.
    pub fn check<'a>(
        &self,
        rules: &'a RuleSet,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        effect: Effect,
    ) -> Result<Verdict<'a>, RequestError> {
        let charges = rules.charges(request, scratch)?;
        if charges.is_empty() {
            return Ok(Verdict::unlimited());
        }
        let mut outcomes = Vec::new();
        let decision = self.store.check(&charges, self.now(), effect, &mut outcomes);
        Ok(Verdict::of(&decision, &charges, &outcomes))
    }

    /// Decides a limit that came with the request. `outcomes` is the caller's to reuse.
    pub fn throttle(&self, charge: Charge<'_>, effect: Effect, outcomes: &mut Vec<Outcome>) -> Decision {
        self.store.check(&[charge], self.now(), effect, outcomes)
    }
}

/// The limits of a throttle request: one, without a rule.
///
/// # Errors
///
/// None that a valid limit could cause.
pub fn single(limit: tidegate_core::Limit) -> Result<Limits, tidegate_core::LimitError> {
    Limits::new(vec![limit])
}
