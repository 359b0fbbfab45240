//! Decisions with the backend.

use std::time::Duration;

use tidegate_core::{
    Accounting, CacheSearch, Charge, Effect, MaybeReady, MemoryStore, Outcome, Store,
    StoreDecision, StoreRequest, Timestamp,
};
use tidegate_redis::StoreError;
use tracing::Instrument as _;

use crate::{ServerLimiter, backend::Backend, metrics::Metrics, trace};

/// A request for a decision. The request does not depend on the backend that makes the decision.
#[derive(Clone, Copy, Debug)]
pub struct DecisionRequest<'a> {
    /// The charges of the request. Either all charges are made, or none.
    pub charges: &'a [Charge<'a>],
    /// The current time, read by the caller.
    pub now: Timestamp,
    /// The effect of the decision, for example whether to charge or only to peek.
    pub effect: Effect,
    /// The Redis timeout for this decision, if it is shorter than the configured timeout.
    pub within: Option<Duration>,
}

impl<'a> DecisionRequest<'a> {
    /// Returns the request for a store. `charges` is a copy of [`Self::charges`].
    fn in_store<'q>(
        &self,
        charges: &'q mut Vec<Charge<'a>>,
        cache_search: CacheSearch,
    ) -> StoreRequest<'q, 'a> {
        StoreRequest {
            charges,
            now: self.now,
            effect: self.effect,
            within: self.within,
            cache_search,
            accounting: Accounting::Request,
        }
    }
}

impl ServerLimiter {
    /// Prefetches the memory of keys that are about to be decided in sequence; see
    /// [`MemoryStore::prefetch`]. Has no effect with Redis.
    pub fn prefetch<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Backend::Memory(store) = &self.backend {
            store.prefetch(keys);
        }
    }

    /// Prefetches the overrides of requests that are about to be decided in sequence; see
    /// [`RuleSet::prefetch_overrides`](tidegate_core::RuleSet::prefetch_overrides).
    pub fn prefetch_overrides<'p>(&self, pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8])>) {
        self.rules.load().prefetch_overrides(pairs);
    }

    /// Decides `request`. The result is ready if the decision needs no call to Redis. Clears
    /// `outcomes`, a buffer that the caller can reuse, and fills it with the outcomes. `outcomes`
    /// stays empty if the fallback policy `open` or `closed` is applied.
    pub fn decide(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        if let Backend::Memory(store) = &self.backend {
            return MaybeReady::Ready(self.decide_request_in_memory(store, request, outcomes));
        }
        let mut charges = request.charges.to_vec();
        let store_request = request.in_store(&mut charges, CacheSearch::Due);
        if let Some(decided) = Store::decide(self, store_request, outcomes).ready() {
            return MaybeReady::Ready(decided);
        }
        MaybeReady::Pending(self.decide_after_pending(request, outcomes))
    }

    /// Decides `request` after [`Self::decide`] has just returned a pending result. Works like that
    /// method, but does not search the denial cache again.
    pub async fn decide_after_pending(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let mut charges = request.charges.to_vec();
        let store_request = request.in_store(&mut charges, CacheSearch::Skip);
        Store::decide(self, store_request, outcomes).await
    }

    /// Works like [`Self::decide`], but returns a Redis error instead of applying the fallback
    /// policy.
    ///
    /// # Errors
    ///
    /// Returns the Redis error. If Redis returns an error, no decision was made.
    pub async fn decide_or_fail(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<StoreDecision, StoreError> {
        let redis_store = match &self.backend {
            Backend::Memory(store) => {
                return Ok(self.decide_request_in_memory(store, request, outcomes));
            }
            Backend::Redis(redis_store) => redis_store,
        };
        let mut charges = request.charges.to_vec();
        let store_request = request.in_store(&mut charges, CacheSearch::Due);
        let decided = match redis_store.cached_denial(&store_request, outcomes) {
            Some(decided) => decided,
            None => {
                let decision = redis_store.decide_in_redis(&store_request, &mut *outcomes);
                let (decided, latency) = self.timed(Box::pin(decision)).await;
                let decided = decided?;
                self.record_sample(latency, &charges, outcomes);
                decided
            }
        };
        if request.effect == Effect::Charge {
            self.record_keys(request.now, request.charges, &decided, outcomes);
        }
        Ok(decided)
    }

    /// Awaits `decided`. If the decision is sampled, also returns its latency in nanoseconds.
    pub(crate) async fn timed<T>(&self, decided: impl IntoFuture<Output = T>) -> (T, Option<u64>) {
        let began = self.sample_start();
        let decided = decided.into_future().instrument(trace::redis_span()).await;
        (decided, self.latency_since(began))
    }

    fn decide_request_in_memory(
        &self,
        store: &MemoryStore,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let (now, effect) = (request.now, request.effect);
        self.decide_in_memory(store, request.charges, now, effect, outcomes)
    }

    /// Decides with the memory store, and counts the decision for the lists of top talkers.
    pub(crate) fn decide_in_memory(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let decided = self.check_in_memory(store, charges, now, effect, outcomes);
        if effect == Effect::Charge {
            self.record_keys(now, charges, &decided, outcomes);
        }
        decided
    }

    /// Decides with the memory store. If the decision is sampled, measures its latency.
    pub(crate) fn check_in_memory(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let began = self.sample_start();
        let decision = store.check(charges, now, effect, outcomes);
        self.record_sample(self.latency_since(began), charges, outcomes);
        StoreDecision::in_memory(decision)
    }

    /// Returns the start time in nanoseconds if this decision is sampled for the latency metric.
    pub(crate) fn sample_start(&self) -> Option<u64> {
        Metrics::take_sample().then(|| self.clock.nanos())
    }

    /// Returns the latency in nanoseconds of a decision that began at `began`; `None` if the
    /// decision is not sampled.
    pub(crate) fn latency_since(&self, began: Option<u64>) -> Option<u64> {
        began.map(|began| self.clock.nanos().saturating_sub(began))
    }
}
