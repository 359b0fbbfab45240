//! Reserves charges and settles them (refunds their unused units), whether or not Redis is
//! reachable.
//!
//! A charge in Redis is also made to this node's share of the limits, and is settled in both
//! stores. While Redis is slow or unreachable, only this node's share is charged. A charge that was
//! made only in the share is settled only in the share, even if Redis is reachable again.

use std::cell::RefCell;

use smallvec::SmallVec;
use tidegate_core::{
    Charge, Decision, DecisionAndReceipt, Effect, MaybeReady, Outcome, Receipt, Refund, Renewal,
    Settlement, StoreRequest, Timestamp,
};
use tokio::time::Instant;

use super::{FallbackStore, add_elapsed, denial_cache::InvalidationGuard};
use crate::{RedisReceipt, RedisReservation, ReservationEnd, ReservationStatus, StoreError};

/// The receipts of a decision's charges, in Redis and in this node's share.
#[derive(Debug)]
pub struct FallbackReceipt(ReceiptKind);

#[derive(Debug)]
enum ReceiptKind {
    /// The charges were made both in Redis and in this node's share.
    Redis(ReceiptPair),
    /// The charges were made only in this node's share.
    Local(Receipt),
}

/// The receipts of charges made in Redis.
#[derive(Debug)]
struct ReceiptPair {
    redis: RedisReceipt,
    /// For each charge, the receipt for this node's share.
    local: Vec<Receipt>,
}

impl FallbackReceipt {
    /// Creates the receipt of charges that another node has made in Redis. This node's share is not
    /// charged.
    #[must_use]
    pub fn in_redis(redis: RedisReceipt) -> Self {
        Self(ReceiptKind::Redis(ReceiptPair {
            redis,
            local: Vec::new(),
        }))
    }

    /// Returns the receipt for the charges in Redis; `None` if only this node's share was charged.
    #[must_use]
    pub fn redis(&self) -> Option<&RedisReceipt> {
        match &self.0 {
            ReceiptKind::Redis(pair) => Some(&pair.redis),
            ReceiptKind::Local(_) => None,
        }
    }

    /// Returns whether the charge at this position was made, in Redis or, if Redis was unreachable,
    /// in this node's share.
    #[must_use]
    pub fn is_charged(&self, at: usize) -> bool {
        match &self.0 {
            ReceiptKind::Redis(pair) => pair.redis.is_charged(at),
            ReceiptKind::Local(receipt) => receipt.is_charged(at),
        }
    }

    /// Replaces the receipt for the charges in Redis after their leases have been renewed.
    pub fn set_redis(&mut self, renewed: RedisReceipt) {
        if let ReceiptKind::Redis(pair) = &mut self.0 {
            pair.redis = renewed;
        }
    }
}

impl FallbackStore {
    /// Decides without Redis if a cached denial is valid, or if Redis is down.
    pub(super) fn reserve_with_fallback(
        &self,
        mut request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<FallbackReceipt>,
        impl Future<Output = DecisionAndReceipt<FallbackReceipt>> + Send,
    > {
        request.effect = Effect::Charge;
        if let Some(decided) = self.block_by_entries(&request, outcomes) {
            return MaybeReady::Ready(DecisionAndReceipt::without_receipt(decided));
        }
        if let Some(decided) = self.cached_denial(&request, outcomes) {
            return MaybeReady::Ready(DecisionAndReceipt::without_receipt(decided));
        }
        if self.is_unavailable() {
            return MaybeReady::Ready(self.reserve_share(&mut request, outcomes));
        }
        MaybeReady::Pending(async move { Box::pin(self.reserve_remotely(request, outcomes)).await })
    }

    /// Decides in Redis. If Redis fails, decides with this node's share of the limits.
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
        let receipt = (!receipt.is_empty()).then_some(FallbackReceipt(ReceiptKind::Local(receipt)));
        DecisionAndReceipt {
            decision: decided,
            receipt,
        }
    }

    async fn reserve_in_redis(
        &self,
        request: &StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<DecisionAndReceipt<FallbackReceipt>, StoreError> {
        let epoch = self.denial_cache.epoch(request.charges);
        let began = Instant::now();
        let invalidation = self.denial_cache.invalidate_on_drop(request.charges.iter());
        let mut redis = RedisReceipt::default();
        let receipt = Some(&mut redis);
        let call = self
            .store
            .decide(request.charges, Effect::Charge, outcomes, receipt);
        let call = self.with_timeout(call, request.within, request.now);
        let decision = call.await?;
        if decision != Decision::Admitted {
            invalidation.disarm();
        }
        self.cache_result(request, &decision, outcomes, epoch, began);
        let now = add_elapsed(request.now, began);
        let receipt = (decision == Decision::Admitted).then(|| {
            let local_receipts = request.charges.iter().map(|charge| {
                let mut receipt = Receipt::default();
                self.apply_to_share(charge, now, |shared| {
                    let mut outcomes = Vec::new();
                    let (decision, local_receipt) =
                        self.local.reserve(&[*shared], now, &mut outcomes);
                    receipt = local_receipt;
                    decision
                });
                receipt
            });
            FallbackReceipt(ReceiptKind::Redis(ReceiptPair {
                redis,
                local: local_receipts.collect(),
            }))
        });
        let decided = self.record_decision(decision, request.now, request.accounting);
        Ok(DecisionAndReceipt {
            decision: decided,
            receipt,
        })
    }

    /// Settles charges. Charges made without Redis are settled immediately, without a call.
    pub(super) fn settle_with_fallback(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<FallbackReceipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        match receipt.take() {
            None => MaybeReady::Ready(()),
            Some(FallbackReceipt(ReceiptKind::Local(receipt))) => {
                self.settle_share(charges, receipt, settlements, now);
                MaybeReady::Ready(())
            }
            in_redis => {
                // The receipt is moved into the future only when the future is polled, so a dropped
                // future does not lose it.
                *receipt = in_redis;
                MaybeReady::Pending(async move {
                    if let Some(FallbackReceipt(ReceiptKind::Redis(pair))) = receipt.take() {
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
        let _invalidation = self.invalidate_refunded(charges, settlements);
        self.settle_shares(charges, local, settlements, now);
        let call = self.store.settle(charges, redis, settlements);
        if let Err(error) = self.with_timeout(call, None, now).await {
            tracing::debug!("refund failed, so the unused units stay charged: {error}");
        }
    }

    /// Settles those charges in this node's share that correspond to charges in Redis.
    fn settle_shares(
        &self,
        charges: &[Charge<'_>],
        receipts: Vec<Receipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        let settled = charges.iter().zip(receipts).zip(settlements);
        for ((charge, receipt), settlement) in settled {
            self.with_share(std::slice::from_ref(charge), |shared| {
                self.local.settle(shared, receipt, &[*settlement], now);
            });
        }
    }

    /// Ends a reservation in Redis, as
    /// [`RedisStore::end_reservation`](crate::RedisStore::end_reservation) does.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis did not settle everything, or if the outcome is unknown.
    pub async fn end_reservation(
        &self,
        reservation: RedisReservation<'_>,
        settlements: impl Fn(ReservationEnd) -> Vec<Settlement>,
        end: ReservationEnd,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        // The call may complete another end than `end`. So the guards are created for the
        // settlements that the store applies. The store drops the closure, and thus the guards,
        // when the call ends or is canceled.
        let invalidations = RefCell::new(SmallVec::<[InvalidationGuard<'_>; 2]>::new());
        let invalidating = move |end| {
            let applied = settlements(end);
            let invalidation = self.invalidate_refunded(reservation.charges, &applied);
            invalidations.borrow_mut().push(invalidation);
            applied
        };
        let call = self
            .store
            .end_reservation(reservation, invalidating, end, now);
        self.with_timeout(call, None, now).await
    }

    /// Settles the charges that a reservation of `charges` made in this node's share. Call this
    /// method after Redis has ended the reservation. Returns whether all unused units of charges
    /// that were made only in the share were refunded.
    pub fn settle_own_share(
        &self,
        charges: &[Charge<'_>],
        FallbackReceipt(receipt): FallbackReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Refund {
        match receipt {
            ReceiptKind::Redis(pair) => {
                self.settle_shares(charges, pair.local, settlements, now);
                Refund::Complete
            }
            ReceiptKind::Local(receipt) => self.settle_share(charges, receipt, settlements, now),
        }
    }

    /// Renews a reservation in Redis, as
    /// [`RedisStore::renew_reservation`](crate::RedisStore::renew_reservation) does.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the reservation was not renewed, or if the outcome is unknown.
    pub async fn renew_reservation(
        &self,
        reservation: RedisReservation<'_>,
        until: Timestamp,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let call = self.store.renew_reservation(reservation, until, now);
        self.with_timeout(call, None, now).await
    }

    /// Renews leases. Leases acquired without Redis are renewed immediately, without a call.
    pub(super) fn renew_with_fallback(
        &self,
        charges: &[Charge<'_>],
        FallbackReceipt(charged): &mut FallbackReceipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        match charged {
            ReceiptKind::Local(receipt) => {
                MaybeReady::Ready(self.renew_share(charges, receipt, now))
            }
            ReceiptKind::Redis(pair) => MaybeReady::Pending(async move {
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
        // No request waits for a renewal, so the renewal as a whole has no timeout. Each call of
        // the renewal has a timeout.
        let renewed = self.store.renew(charges, redis).await;
        let renewed = renewed.inspect_err(|error| {
            self.counters.count_failure(error);
            self.server_errors.record(error, now);
            tracing::debug!("lease renewal failed: {error}");
        });
        renewed.unwrap_or(Renewal::Unknown)
    }

    /// Renews the leases in this node's share.
    fn renew_share(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> Renewal {
        self.with_share(charges, |shared| self.local.renew(shared, receipt, now))
    }

    /// Settles charges in this node's share, given their receipt.
    fn settle_share(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Refund {
        let _invalidation = self.invalidate_refunded(charges, settlements);
        self.with_share(charges, |shared| {
            self.local.settle(shared, receipt, settlements, now)
        })
    }

    /// Returns a guard that, when dropped after the refund, invalidates the cached denials that the
    /// refund can affect.
    fn invalidate_refunded(
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
