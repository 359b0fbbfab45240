//! The limiter that every door asks: the rules of the moment, one store, one clock.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tidegate_core::{
    Charge, Decision, Effect, Limits, MemoryStore, Outcome, Request, RequestError, Rule, RuleSet,
    Scratch, Timestamp, Verdict, free_key,
};

use crate::{
    clock::Clock,
    metrics::{Door, Metrics},
    quota::Quotas,
};

/// What every door asks. One lives in a process, behind an [`Arc`].
#[derive(Debug)]
pub struct Limiter {
    rules: ArcSwap<RuleSet>,
    store: MemoryStore,
    clock: Clock,
    metrics: Metrics,
    quotas: Quotas,
}

impl Limiter {
    /// A limiter under `rules`.
    #[must_use]
    pub fn new(rules: RuleSet, store: MemoryStore, clock: Clock) -> Self {
        let metrics = Metrics::new(clock.now());
        metrics.name_rules(rules.iter().map(Rule::name));
        Self {
            rules: ArcSwap::from_pointee(rules),
            store,
            clock,
            metrics,
            quotas: Quotas::default(),
        }
    }

    /// The time; a door reads it once a request.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The clock by which requests are decided.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The rules of the moment. A request is decided under one set from beginning to end.
    #[must_use]
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    /// Puts `rules` in the place of those of the moment.
    pub fn swap_rules(&self, rules: RuleSet) {
        self.metrics.name_rules(rules.iter().map(Rule::name));
        self.rules.store(Arc::new(rules));
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// The limits that are divided among those who enforce them; none until there are rules for them.
    #[must_use]
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// What was counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Everything that was counted, in the Prometheus text format.
    #[must_use]
    pub fn exposition(&self) -> String {
        self.metrics
            .exposition(&self.store.stats(), self.quotas.counts(), self.now())
    }

    /// Counts the verdict that `door` is about to give.
    pub fn observe(&self, door: Door, verdict: &Verdict<'_>) {
        self.metrics.observe(door, verdict);
    }

    /// Counts the decision on a limit that came with the request, which `door` is about to give.
    pub fn observe_throttle(&self, door: Door, decision: &Decision) {
        self.metrics.observe_throttle(door, decision);
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
        let decision = self.decide(&charges, self.now(), effect, &mut outcomes);
        Ok(Verdict::of(&decision, &charges, &outcomes))
    }

    /// Decides a limit that came with the request. `outcomes` is the caller's to reuse.
    pub fn throttle(
        &self,
        charge: Charge<'_>,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        self.throttle_at(charge, self.now(), effect, outcomes)
    }

    /// [`Self::throttle`] at an instant that the caller read, for requests that arrived together.
    pub fn throttle_at(
        &self,
        charge: Charge<'_>,
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        self.decide(&[charge], now, effect, outcomes)
    }

    /// Asks the store, and times it now and then. `outcomes` is the caller's to reuse.
    pub(crate) fn decide(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        if !Metrics::is_sampled() {
            return self.store.check(charges, now, effect, outcomes);
        }
        let began = self.clock.nanos();
        let decision = self.store.check(charges, now, effect, outcomes);
        let took = self.clock.nanos().saturating_sub(began);
        self.metrics.observe_latency(took);
        decision
    }

    /// The key under which a limit that came with the request counts for `key`: [`free_key`], which no
    /// caller can make that of a rule. `buffer` is the caller's to reuse.
    ///
    /// # Errors
    ///
    /// Refuses an empty key and one over [`MAX_THROTTLE_KEY_BYTES`].
    pub fn throttle_key<'b>(
        key: &'b [u8],
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], RequestError> {
        if key.is_empty() {
            return Err(RequestError::new("key", "must not be empty"));
        }
        if key.len() > MAX_THROTTLE_KEY_BYTES {
            let problem = format!(
                "{} bytes is over the maximum of {MAX_THROTTLE_KEY_BYTES}",
                key.len()
            );
            return Err(RequestError::new("key", problem));
        }
        Ok(free_key(key, buffer))
    }
}

/// The longest key of a limit that comes with the request: [`free_key`] may add a byte.
pub const MAX_THROTTLE_KEY_BYTES: usize = tidegate_core::bounds::MAX_KEY_BYTES - 1;

/// The limits of a throttle request: one, without a rule.
///
/// # Errors
///
/// None that a valid limit could cause.
pub fn single(limit: tidegate_core::Limit) -> Result<Limits, tidegate_core::LimitError> {
    Limits::new(vec![limit])
}
