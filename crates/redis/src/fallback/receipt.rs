//! Makes charges with a receipt, and settles them, whether Redis is reachable or not.
//!
//! If Redis decides, this node's share is charged and settled as well. If Redis is unreachable,
//! only this node's share is charged. Such a charge is also settled on the share, even if Redis is
//! reachable again by then.

use tidegate_core::{
    Charge, Decided, Decision, Effect, Outcome, Question, Receipt, Renewal, Settlement, Timestamp,
};
use tokio::time::Instant;

use super::{FallbackStore, add_elapsed, denial_cache::InvalidationGuard};
use crate::{RedisReceipt, StoreError};

/// The charges of a decision, in Redis and to this node's share.
#[derive(Debug)]
pub struct FallbackReceipt(Charged);

#[derive(Debug)]
enum Charged {
    /// Charged in Redis, with a receipt per charge for this node's share.
    There(RedisReceipt, Vec<Receipt>),
    /// Charged to this node's share only.
    Here(Receipt),
}

impl FallbackStore {
    pub(super) async fn reserve_anywhere(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<FallbackReceipt>) {
        if let Some(answer) = self.reserve_here(question, outcomes) {
            return answer;
        }
        let began = Instant::now();
        match self.reserve_there(question, outcomes).await {
            Ok(answer) => answer,
            Err(_) => {
                question.now = add_elapsed(question.now, began);
                self.reserve_share(question, outcomes)
            }
        }
    }

    /// Decides without Redis if a cached denial is valid, or if Redis is down.
    pub(super) fn reserve_here(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<FallbackReceipt>)> {
        question.effect = Effect::Charge;
        if let Some(decided) = self.cached_denial(question, outcomes) {
            return Some((decided, None));
        }
        let is_down = self.is_unavailable();
        is_down.then(|| self.reserve_share(question, outcomes))
    }

    fn reserve_share(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<FallbackReceipt>) {
        let mut receipt = Receipt::default();
        let decided = self.fall_back(question, outcomes, Some(&mut receipt));
        let receipt = (!receipt.is_empty()).then_some(FallbackReceipt(Charged::Here(receipt)));
        (decided, receipt)
    }

    async fn reserve_there(
        &self,
        question: &Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<(Decided, Option<FallbackReceipt>), StoreError> {
        let epoch = self.denial_cache.epoch(question.charges);
        let began = Instant::now();
        let asked = self.store.reserve(question.charges, outcomes);
        let asked = self.with_timeout(asked, question.within, question.now);
        let (decision, there) = asked.await?;
        self.cache_result(question, &decision, outcomes, epoch, began);
        let now = add_elapsed(question.now, began);
        let receipt = (decision == Decision::Admitted).then(|| {
            let warm = question.charges.iter().map(|charge| {
                let mut receipt = Receipt::default();
                self.apply_to_share(charge, now, |shared| {
                    let mut outcomes = Vec::new();
                    let kept = self.local.reserve(&[*shared], now, &mut outcomes);
                    receipt = kept.1;
                    kept.0
                });
                receipt
            });
            FallbackReceipt(Charged::There(there, warm.collect()))
        });
        Ok((self.record_decision(decision, question.now), receipt))
    }

    pub(super) async fn settle_everywhere(
        &self,
        charges: &[Charge<'_>],
        receipt: FallbackReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        let left = self.settle_here(charges, receipt, settlements, now);
        let Err(FallbackReceipt(Charged::There(there, warm))) = left else {
            return;
        };
        let _invalidation = self.forgetting(charges, settlements);
        let settled = charges.iter().zip(warm).zip(settlements);
        for ((charge, receipt), settlement) in settled {
            self.with_share(std::slice::from_ref(charge), |shared| {
                self.local.settle(shared, receipt, &[*settlement], now);
            });
        }
        let asked = self.store.settle(charges, there, settlements);
        if let Err(trouble) = self.with_timeout(asked, None, now).await {
            tracing::debug!("refund failed, and unused units stay charged: {trouble}");
        }
    }

    pub(super) async fn renew_anywhere(
        &self,
        charges: &[Charge<'_>],
        FallbackReceipt(charged): &mut FallbackReceipt,
        now: Timestamp,
    ) -> Renewal {
        let (there, warm) = match charged {
            Charged::Here(receipt) => return self.renew_share(charges, receipt, now),
            Charged::There(there, warm) => (there, warm),
        };
        for (charge, receipt) in charges.iter().zip(warm) {
            self.renew_share(std::slice::from_ref(charge), receipt, now);
        }
        // No request waits for a renewal, so only the timeout of each call bounds it.
        let renewed = self.store.renew(charges, there).await;
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

    /// Settles a receipt that was charged to this node's share only; returns any other receipt as
    /// an error.
    pub(super) fn settle_here(
        &self,
        charges: &[Charge<'_>],
        FallbackReceipt(charged): FallbackReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<(), FallbackReceipt> {
        let receipt = match charged {
            Charged::Here(receipt) => receipt,
            there @ Charged::There(..) => return Err(FallbackReceipt(there)),
        };
        let _invalidation = self.forgetting(charges, settlements);
        self.with_share(charges, |shared| {
            self.local.settle(shared, receipt, settlements, now);
        });
        Ok(())
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
