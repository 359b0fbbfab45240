//! Charging with a receipt, and settling, while Redis is there or not.
//!
//! Where Redis decides, this node's share is charged and settled beside it. Where it is away it is this node's share alone, and
//! what was charged there is settled there, whether Redis is back by then or not.

use tidegate_core::{
    Charge, Decided, Decision, Effect, Limits, Outcome, Question, Receipt, Settlement, Timestamp,
};

use super::Fleet;
use crate::{RedisReceipt, StoreError};

/// What a decision charged, in Redis and in this node's own count.
#[derive(Debug)]
pub struct FleetReceipt(Charged);

#[derive(Debug)]
enum Charged {
    /// In Redis; and of each charge what was charged to this node's share.
    There(RedisReceipt, Vec<Receipt>),
    /// To this node's share.
    Here(Receipt),
}

impl Fleet {
    pub(super) async fn reserve_anywhere(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<FleetReceipt>) {
        question.effect = Effect::Charge;
        if let Some(decided) = self.recall(question, outcomes) {
            return (decided, None);
        }
        if !self.redis.is_down()
            && let Ok(answer) = self.reserve_there(question, outcomes).await
        {
            return answer;
        }
        let mut receipt = Receipt::default();
        let decided = self.fall_back(question, outcomes, Some(&mut receipt));
        let receipt = (!receipt.is_empty()).then_some(FleetReceipt(Charged::Here(receipt)));
        (decided, receipt)
    }

    async fn reserve_there(
        &self,
        question: &Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<(Decided, Option<FleetReceipt>), StoreError> {
        let epoch = self.denials.epoch();
        let asked = self.store.reserve(question.charges, outcomes);
        let asked = self.in_time(asked, question.within, question.now);
        let (decision, there) = asked.await?;
        self.learn(question, &decision, (outcomes, epoch));
        let receipt = (decision == Decision::Admitted).then(|| {
            let warm = question.charges.iter().map(|charge| {
                let mut receipt = Receipt::default();
                self.warm(charge, question.now, |shared| {
                    let mut outcomes = Vec::new();
                    let kept = self.local.reserve(&[*shared], question.now, &mut outcomes);
                    receipt = kept.1;
                    kept.0
                });
                receipt
            });
            FleetReceipt(Charged::There(there, warm.collect()))
        });
        Ok((self.decided(decision), receipt))
    }

    pub(super) async fn settle_everywhere(
        &self,
        charges: &[Charge<'_>],
        FleetReceipt(charged): FleetReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        let share = |charge: &Charge<'_>| charge.limits.share(self.settings.share);
        let gives_back = settlements.iter().any(|settlement| settlement.unused > 0);
        let _forgotten = gives_back.then(|| self.denials.forgetting());
        match charged {
            Charged::Here(receipt) => {
                let shares: Vec<_> = charges.iter().map(share).collect();
                let shared: Vec<Charge<'_>> = charges
                    .iter()
                    .zip(&shares)
                    .map(|(charge, limits)| of_share(charge, limits))
                    .collect();
                self.local.settle(&shared, receipt, settlements, now);
            }
            Charged::There(there, warm) => {
                let settled = charges.iter().zip(warm).zip(settlements);
                for ((charge, receipt), settlement) in settled {
                    let limits = share(charge);
                    let shared = [of_share(charge, &limits)];
                    self.local.settle(&shared, receipt, &[*settlement], now);
                }
                let asked = self.store.settle(charges, there, settlements);
                if let Err(trouble) = self.in_time(asked, None, now).await {
                    tracing::debug!("what was not needed stays charged: {trouble}");
                }
            }
        }
    }
}

/// `charge` under this node's share of its limits.
fn of_share<'a>(charge: &Charge<'a>, limits: &'a Limits) -> Charge<'a> {
    Charge { limits, ..*charge }
}
