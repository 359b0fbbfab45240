//! The limiter's backend, and [`Store`] for the limiter, which adds latency sampling.

use std::sync::Arc;

use tidegate::RateLimiter;
use tidegate_core::{
    Charge, DecisionAndReceipt, MaybeReady, MemoryStore, Outcome, Receipt, Renewal, RuleSet,
    Settlement, Store, StoreDecision, StoreRequest, Timestamp,
};
use tidegate_redis::{FallbackReceipt, FallbackStore};

use super::Limiter;

/// The backend that decides: this process's memory, or Redis shared by all servers.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a process has only one, and a box would cost every decision a pointer"
)]
pub enum Backend {
    /// The memory store of this process.
    Memory(MemoryStore),
    /// Redis, with this node's memory store as the fallback while Redis is unreachable.
    Redis(FallbackStore),
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self::Memory(store)
    }
}

impl From<FallbackStore> for Backend {
    fn from(redis_store: FallbackStore) -> Self {
        Self::Redis(redis_store)
    }
}

/// A receipt for a charge, to be settled by the backend that issued it.
#[derive(Debug)]
pub enum LimiterReceipt {
    /// Issued by the memory store.
    Memory(Receipt),
    /// Issued by the Redis-backed store.
    Redis(FallbackReceipt),
}

impl RateLimiter for Limiter {
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
}

impl Store for Limiter {
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
                    ..
                } = request;
                let decided = self.decide_in_memory(store, charges, now, effect, outcomes);
                MaybeReady::Ready(decided)
            }
            Backend::Redis(redis_store) => redis_store
                .decide(request, outcomes)
                .map_pending(|decided| self.with_latency(decided)),
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
                let began = self.sample_start();
                let (decided, receipt) = Store::reserve(store, request, outcomes).into_inner();
                self.record_latency(began);
                MaybeReady::Ready((decided, receipt.map(LimiterReceipt::Memory)))
            }
            Backend::Redis(redis_store) => redis_store
                .reserve(request, outcomes)
                .map_pending(|reserved| self.with_latency(reserved))
                .map(|(decided, receipt)| (decided, receipt.map(LimiterReceipt::Redis))),
        }
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
                    // The caller keeps the receipt unless the future is polled.
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
            // A receipt that another backend issued cannot be settled here.
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
            self.metrics.observe_renewal(renewal);
            renewal
        };
        match (&self.backend, receipt) {
            (Backend::Memory(store), LimiterReceipt::Memory(receipt)) => {
                MaybeReady::Ready(observed(store.renew(charges, receipt, now)))
            }
            (Backend::Redis(redis_store), LimiterReceipt::Redis(receipt)) => {
                redis_store.renew(charges, receipt, now).map(observed)
            }
            // A receipt that another backend issued cannot be renewed here.
            (Backend::Memory(_), LimiterReceipt::Redis(_))
            | (Backend::Redis(_), LimiterReceipt::Memory(_)) => {
                MaybeReady::Ready(observed(Renewal::Unknown))
            }
        }
    }
}
