//! The limiter's implementation of [`Store`], which passes calls to the backend and samples their
//! latency.

use std::sync::Arc;

use smallvec::SmallVec;
use tidegate::{RateLimiter, Waiters};
use tidegate_core::{
    Accounting, CacheSearch, Charge, DecisionAndReceipt, Effect, MaybeReady, Outcome, Renewal,
    RuleSet, Settlement, Store, StoreDecision, StoreRequest, Timestamp,
};

use crate::{
    ServerLimiter,
    backend::{Backend, LimiterReceipt},
};

impl RateLimiter for ServerLimiter {
    type Store = Self;

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    fn store(&self) -> &Self {
        self
    }

    fn wait_queues(&self) -> &Waiters {
        &self.waiters
    }
}

/// Reborrows `request` for a further call.
fn reborrow<'q, 'c>(
    request: &'q mut StoreRequest<'_, 'c>,
    cache_search: CacheSearch,
) -> StoreRequest<'q, 'c> {
    StoreRequest {
        charges: &mut *request.charges,
        now: request.now,
        effect: request.effect,
        within: request.within,
        cache_search,
        accounting: request.accounting,
    }
}

impl ServerLimiter {
    /// Returns a copy of `charges` if their keys must be recorded after Redis has made the
    /// decision, and an empty list otherwise. The copy is needed because the decision may remove
    /// some of the charges from the request; see [`StoreRequest::charges`].
    fn charges_to_record<'c>(
        &self,
        charges: &[Charge<'c>],
        effect: Effect,
    ) -> SmallVec<[Charge<'c>; 2]> {
        match &self.observers.top {
            Some(_) if effect == Effect::Charge => charges.into(),
            _ => SmallVec::new(),
        }
    }

    /// Counts a decision of the Redis-backed store for the lists of top talkers. `original`
    /// contains all charges of the request, and `evaluated` the charges whose limits were
    /// evaluated.
    fn record_remote(
        &self,
        original: &[Charge<'_>],
        now: Timestamp,
        evaluated: &[Charge<'_>],
        decided: &StoreDecision,
        outcomes: &[Outcome],
    ) {
        if original.is_empty() {
            return;
        }
        if original.len() == evaluated.len() {
            return self.record_keys(now, original, decided, outcomes);
        }
        // A fallback policy (`on_failure`) decided all other charges. The charges without outcomes
        // follow the evaluated charges.
        let is_evaluated = |charge: &&Charge<'_>| evaluated.iter().any(|one| one.key == charge.key);
        let others = original.iter().filter(|charge| !is_evaluated(charge));
        let ordered: SmallVec<[Charge<'_>; 4]> = evaluated.iter().chain(others).copied().collect();
        self.record_keys(now, &ordered, decided, outcomes);
    }
}

impl Store for ServerLimiter {
    type Receipt = LimiterReceipt;

    fn decide(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        match &self.backend {
            Backend::Memory(store) => {
                let StoreRequest {
                    charges,
                    now,
                    effect,
                    accounting,
                    ..
                } = request;
                let decided = match accounting {
                    Accounting::Request => {
                        self.decide_in_memory(store, charges, now, effect, outcomes)
                    }
                    Accounting::Excess | Accounting::Attempt => {
                        self.check_in_memory(store, charges, now, effect, outcomes)
                    }
                    Accounting::Inspection => {
                        StoreDecision::in_memory(store.check(charges, now, effect, outcomes))
                    }
                };
                MaybeReady::Ready(decided)
            }
            Backend::Redis(redis_store) => {
                let mut request = request;
                let accounting = request.accounting;
                let original = match accounting {
                    Accounting::Request => self.charges_to_record(request.charges, request.effect),
                    Accounting::Excess | Accounting::Attempt | Accounting::Inspection => {
                        SmallVec::new()
                    }
                };
                let search = request.cache_search;
                let first = reborrow(&mut request, search);
                if let Some(decided) = redis_store.decide(first, outcomes).ready() {
                    let now = request.now;
                    let charges = &*request.charges;
                    self.record_remote(&original, now, charges, &decided, outcomes);
                    return MaybeReady::Ready(decided);
                }
                MaybeReady::Pending(async move {
                    let again = reborrow(&mut request, CacheSearch::Skip);
                    let decided = redis_store.decide(again, &mut *outcomes);
                    if accounting == Accounting::Inspection {
                        return decided.await;
                    }
                    let (decided, latency) = self.timed(decided).await;
                    let now = request.now;
                    let charges = &*request.charges;
                    self.record_sample(latency, charges, outcomes);
                    self.record_remote(&original, now, charges, &decided, outcomes);
                    decided
                })
            }
        }
    }

    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<LimiterReceipt>,
        impl Future<Output = DecisionAndReceipt<LimiterReceipt>> + Send,
    > {
        match &self.backend {
            Backend::Memory(store) => {
                let mut request = request;
                let began = self.sample_start();
                let search = request.cache_search;
                let reserved = Store::reserve(store, reborrow(&mut request, search), outcomes);
                let reserved = reserved.into_inner();
                self.record_sample(self.latency_since(began), request.charges, outcomes);
                if request.accounting != Accounting::Attempt {
                    self.record_keys(request.now, request.charges, &reserved.decision, outcomes);
                }
                MaybeReady::Ready(reserved.map_receipt(LimiterReceipt::Memory))
            }
            Backend::Redis(redis_store) => {
                let mut request = request;
                let original = match request.accounting {
                    Accounting::Attempt => SmallVec::new(),
                    _ => self.charges_to_record(request.charges, Effect::Charge),
                };
                let search = request.cache_search;
                let first = reborrow(&mut request, search);
                if let Some(reserved) = redis_store.reserve(first, outcomes).ready() {
                    let now = request.now;
                    let charges = &*request.charges;
                    self.record_remote(&original, now, charges, &reserved.decision, outcomes);
                    return MaybeReady::Ready(reserved.map_receipt(LimiterReceipt::Redis));
                }
                MaybeReady::Pending(async move {
                    let again = reborrow(&mut request, CacheSearch::Skip);
                    let reserved = redis_store.reserve(again, &mut *outcomes);
                    let (reserved, latency) = self.timed(reserved).await;
                    let now = request.now;
                    let charges = &*request.charges;
                    self.record_sample(latency, charges, outcomes);
                    self.record_remote(&original, now, charges, &reserved.decision, outcomes);
                    reserved.map_receipt(LimiterReceipt::Redis)
                })
            }
        }
    }

    fn count(
        &self,
        now: Timestamp,
        charges: &[Charge<'_>],
        evaluated: &[Charge<'_>],
        decided: &StoreDecision,
        outcomes: &[Outcome],
    ) {
        if let Some(redis_store) = self.redis_store() {
            redis_store.count(now, charges, evaluated, decided, outcomes);
        }
        self.record_remote(charges, now, evaluated, decided, outcomes);
    }

    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<LimiterReceipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        match (&self.backend, receipt.take()) {
            (Backend::Memory(store), Some(LimiterReceipt::Memory(receipt))) => {
                store.settle(charges, receipt, settlements, now);
            }
            (Backend::Redis(redis_store), Some(LimiterReceipt::Redis(shared))) => {
                let mut shared = Some(shared);
                let is_settled = redis_store
                    .settle(charges, &mut shared, settlements, now)
                    .is_ready();
                if !is_settled {
                    // The future takes the receipt only when it is polled. If the future is dropped
                    // before that, the caller still has the receipt.
                    *receipt = shared.map(LimiterReceipt::Redis);
                    return MaybeReady::Pending(async move {
                        if let Some(LimiterReceipt::Redis(shared)) = receipt.take() {
                            let mut shared = Some(shared);
                            redis_store
                                .settle(charges, &mut shared, settlements, now)
                                .await;
                        }
                    });
                }
            }
            // This backend cannot settle a receipt from another backend.
            (Backend::Memory(_), Some(LimiterReceipt::Redis(_)))
            | (Backend::Redis(_), Some(LimiterReceipt::Memory(_)))
            | (_, None) => {}
        }
        MaybeReady::Ready(())
    }

    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut LimiterReceipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        let observed = |renewal| {
            self.observers.metrics.observe_renewal(renewal);
            renewal
        };
        match (&self.backend, receipt) {
            (Backend::Memory(store), LimiterReceipt::Memory(receipt)) => {
                MaybeReady::Ready(observed(store.renew(charges, receipt, now)))
            }
            (Backend::Redis(redis_store), LimiterReceipt::Redis(receipt)) => {
                redis_store.renew(charges, receipt, now).map(observed)
            }
            // This backend cannot renew a receipt from another backend.
            (Backend::Memory(_), LimiterReceipt::Redis(_))
            | (Backend::Redis(_), LimiterReceipt::Memory(_)) => {
                MaybeReady::Ready(observed(Renewal::Unknown))
            }
        }
    }
}
