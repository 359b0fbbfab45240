//! The limiter's backend, and [`Store`] for the limiter, which adds latency sampling.

use std::sync::Arc;

use tidegate::Gate;
use tidegate_core::{
    Charge, Decided, MemoryStore, Outcome, Question, Receipt, Renewal, RuleSet, Settlement, Store,
    Timestamp,
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

impl Gate for Limiter {
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

    fn decide_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        self.try_decide(question, outcomes)
    }

    async fn decide_later(
        &self,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        self.decide_remotely(question, outcomes).await
    }

    async fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<LimiterReceipt>) {
        match &self.backend {
            Backend::Memory(store) => {
                let (decided, receipt) = Store::reserve(store, question, outcomes).await;
                (decided, receipt.map(LimiterReceipt::Memory))
            }
            Backend::Redis(redis_store) => {
                let reserved = self.with_latency(redis_store.reserve(question, outcomes));
                let (decided, receipt) = reserved.await;
                (decided, receipt.map(LimiterReceipt::Redis))
            }
        }
    }

    fn reserve_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<LimiterReceipt>)> {
        match &self.backend {
            Backend::Memory(store) => {
                let began = self.sample_start();
                let reserved = store.reserve_now(question, outcomes);
                self.record_latency(began);
                reserved.map(|(decided, receipt)| (decided, receipt.map(LimiterReceipt::Memory)))
            }
            Backend::Redis(redis_store) => {
                let reserved = redis_store.reserve_now(question, outcomes);
                reserved.map(|(decided, receipt)| (decided, receipt.map(LimiterReceipt::Redis)))
            }
        }
    }

    async fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: LimiterReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        match (&self.backend, receipt) {
            (Backend::Memory(store), LimiterReceipt::Memory(receipt)) => {
                store.settle(charges, receipt, settlements, now);
            }
            (Backend::Redis(redis_store), LimiterReceipt::Redis(receipt)) => {
                redis_store.settle(charges, receipt, settlements, now).await;
            }
            // A receipt that another backend issued cannot be settled here.
            (Backend::Memory(_), LimiterReceipt::Redis(_))
            | (Backend::Redis(_), LimiterReceipt::Memory(_)) => {}
        }
    }

    async fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut LimiterReceipt,
        now: Timestamp,
    ) -> Renewal {
        let renewal = match (&self.backend, receipt) {
            (Backend::Memory(store), LimiterReceipt::Memory(receipt)) => {
                store.renew(charges, receipt, now)
            }
            (Backend::Redis(redis_store), LimiterReceipt::Redis(receipt)) => {
                redis_store.renew(charges, receipt, now).await
            }
            (Backend::Memory(_), LimiterReceipt::Redis(_))
            | (Backend::Redis(_), LimiterReceipt::Memory(_)) => Renewal::Unknown,
        };
        self.metrics.observe_renewal(renewal);
        renewal
    }

    fn settle_now(
        &self,
        charges: &[Charge<'_>],
        receipt: LimiterReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<(), LimiterReceipt> {
        match (&self.backend, receipt) {
            (Backend::Memory(store), LimiterReceipt::Memory(receipt)) => {
                store.settle(charges, receipt, settlements, now);
                Ok(())
            }
            (Backend::Redis(redis_store), LimiterReceipt::Redis(receipt)) => {
                let settled = redis_store.settle_now(charges, receipt, settlements, now);
                settled.map_err(LimiterReceipt::Redis)
            }
            (_, other) => Err(other),
        }
    }
}
