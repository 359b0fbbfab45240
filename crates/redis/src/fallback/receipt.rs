//! Makes charges with a receipt, and settles them, whether Redis is reachable or not.
//!
//! If Redis decides, this node's share is charged and settled as well. If Redis is unreachable,
//! only this node's share is charged. Such a charge is also settled on the share, even if Redis is
//! reachable again by then.

use tidegate_core::{
    Charge, Decision, DecisionAndReceipt, Effect, MaybeReady, Outcome, Receipt, Renewal,
    Settlement, StoreRequest, Timestamp,
};
use tokio::time::Instant;

use super::{FallbackStore, add_elapsed, denial_cache::InvalidationGuard};
use crate::{RedisReceipt, StoreError};

/// The charges of a decision, in Redis and to this node's share.
#[derive(Debug)]
pub struct FallbackReceipt(Charged);

#[derive(Debug)]
enum Charged {
    /// Charged in Redis, and to this node's share.
    There(ReceiptPair),
    /// Charged to this node's share only.
    Here(Receipt),
}

/// The receipts of charges in Redis.
#[derive(Debug)]
struct ReceiptPair {
    redis: RedisReceipt,
    /// For each charge, the receipt for this node's share.
    local: Vec<Receipt>,
}

impl FallbackStore {
    /// Decides without Redis if a cached denial is valid, or if Redis is down.
    pub(super) fn reserve_anywhere(
        &self,
        mut request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<FallbackReceipt>,
        impl Future<Output = DecisionAndReceipt<FallbackReceipt>> + Send,
    > {
        request.effect = Effect::Charge;
        if let Some(decided) = self.cached_denial(&request, outcomes) {
            return MaybeReady::Ready((decided, None));
        }
        if self.is_unavailable() {
            return MaybeReady::Ready(self.reserve_share(&mut request, outcomes));
        }
        MaybeReady::Pending(async move { Box::pin(self.reserve_remotely(request, outcomes)).await })
    }

    /// Decides in Redis, or on this node's share if that fails.
    async fn reserve_remotely(
        &self,
        mut request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> DecisionAndReceipt<FallbackReceipt> {
        let began = Instant::now();
        match self.reserve_in_redis(&request, outcomes).await {
            Ok(reserved) => reserved,
            Err(_) => {
                request.now = add_elapsed(request.now, began);
                self.reserve_share(&mut request, outcomes)
            }
        }
    }

    fn reserve_share(
        &self,
        request: &mut StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> DecisionAndReceipt<FallbackReceipt> {
        let mut receipt = Receipt::default();
        let decided = self.fall_back(request, outcomes, Some(&mut receipt));
        let receipt = (!receipt.is_empty()).then_some(FallbackReceipt(Charged::Here(receipt)));
        (decided, receipt)
    }

    async fn reserve_in_redis(
        &self,
        request: &StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<DecisionAndReceipt<FallbackReceipt>, StoreError> {
        let epoch = self.denial_cache.epoch(request.charges);
        let began = Instant::now();
        let asked = self.store.reserve(request.charges, outcomes);
        let asked = self.with_timeout(asked, request.within, request.now);
        let (decision, redis) = asked.await?;
        self.cache_result(request, &decision, outcomes, epoch, began);
        let now = add_elapsed(request.now, began);
        let receipt = (decision == Decision::Admitted).then(|| {
            let warm = request.charges.iter().map(|charge| {
                let mut receipt = Receipt::default();
                self.apply_to_share(charge, now, |shared| {
                    let mut outcomes = Vec::new();
                    let kept = self.local.reserve(&[*shared], now, &mut outcomes);
                    receipt = kept.1;
                    kept.0
                });
                receipt
            });
            FallbackReceipt(Charged::There(ReceiptPair {
                redis,
                local: warm.collect(),
            }))
        });
        Ok((self.record_decision(decision, request.now), receipt))
    }

    /// Settles without Redis what was charged without it.
    pub(super) fn settle_anywhere(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<FallbackReceipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        match receipt.take() {
            None => MaybeReady::Ready(()),
            Some(FallbackReceipt(Charged::Here(receipt))) => {
                self.settle_share(charges, receipt, settlements, now);
                MaybeReady::Ready(())
            }
            in_redis => {
                // The caller keeps the receipt unless the future is polled.
                *receipt = in_redis;
                MaybeReady::Pending(async move {
                    if let Some(FallbackReceipt(Charged::There(pair))) = receipt.take() {
                        Box::pin(self.settle_remotely(charges, pair, settlements, now)).await;
                    }
                })
            }
        }
    }

    async fn settle_remotely(
        &self,
        charges: &[Charge<'_>],
        ReceiptPair { redis, local }: ReceiptPair,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        let _invalidation = self.forgetting(charges, settlements);
        let settled = charges.iter().zip(local).zip(settlements);
        for ((charge, receipt), settlement) in settled {
            self.with_share(std::slice::from_ref(charge), |shared| {
                self.local.settle(shared, receipt, &[*settlement], now);
            });
        }
        let asked = self.store.settle(charges, redis, settlements);
        if let Err(trouble) = self.with_timeout(asked, None, now).await {
            tracing::debug!("refund failed, and unused units stay charged: {trouble}");
        }
    }

    /// Renews without Redis what was charged without it.
    pub(super) fn renew_anywhere(
        &self,
        charges: &[Charge<'_>],
        FallbackReceipt(charged): &mut FallbackReceipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        match charged {
            Charged::Here(receipt) => MaybeReady::Ready(self.renew_share(charges, receipt, now)),
            Charged::There(pair) => MaybeReady::Pending(async move {
                Box::pin(self.renew_remotely(charges, pair, now)).await
            }),
        }
    }

    async fn renew_remotely(
        &self,
        charges: &[Charge<'_>],
        ReceiptPair { redis, local }: &mut ReceiptPair,
        now: Timestamp,
    ) -> Renewal {
        for (charge, receipt) in charges.iter().zip(local) {
            self.renew_share(std::slice::from_ref(charge), receipt, now);
        }
        // No request waits for a renewal, so only the timeout of each call bounds it.
        let renewed = self.store.renew(charges, redis).await;
        let renewed = renewed.inspect_err(|trouble| {
            self.counters.count_failure(trouble);
            self.server_errors.record(trouble, now);
            tracing::debug!("lease renewal failed: {trouble}");
        });
        renewed.unwrap_or(Renewal::Unknown)
    }

    /// Renews the leases that were charged to this node's share.
    fn renew_share(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> Renewal {
        self.with_share(charges, |shared| self.local.renew(shared, receipt, now))
    }

    /// Settles a receipt that was charged to this node's share only.
    fn settle_share(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        let _invalidation = self.forgetting(charges, settlements);
        self.with_share(charges, |shared| {
            self.local.settle(shared, receipt, settlements, now);
        });
    }

    /// Returns the guard that invalidates, after the refund, the denials that the refund can lift.
    fn forgetting(
        &self,
        charges: &[Charge<'_>],
        settlements: &[Settlement],
    ) -> InvalidationGuard<'_> {
        let settled = charges.iter().zip(settlements);
        let given_back = settled.filter(|(_, settlement)| settlement.unused > 0);
        self.denial_cache
            .invalidate_on_drop(given_back.map(|(charge, _)| charge))
    }
}
