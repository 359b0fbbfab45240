//! Charges with a receipt, and refunds with that receipt. A refund is needed if another slot of a
//! cluster denies the request, or if the request used less than it was charged.

use std::sync::Arc;

use futures_util::future::join_all;
use tidegate_core::{Charge, Cost, Decision, Effect, Outcome, Settlement};
use tokio::sync::oneshot;

use crate::{
    RedisStore, StoreError,
    call::{Call, OnLateReply},
    decode::{self, Checked},
    encode,
    exec::{self, ExecError},
    scripts,
};

/// A record of the charges of a decision. A receipt can be used once, for the charges for which it
/// was issued.
///
/// A receipt that is dropped refunds nothing, which is safe.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RedisReceipt {
    /// One per charge; empty if nothing was charged.
    pub(crate) of_charges: Vec<Vec<u8>>,
    /// Whether the outcome of a renewal since the last reply is unknown. The leases may then have
    /// been renewed at an instant that is not in this receipt.
    pub(crate) is_doubtful: bool,
}

impl RedisReceipt {
    /// Returns whether nothing was charged, which leaves nothing to refund.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of_charges.iter().all(Vec::is_empty)
    }
}

/// A charge, its receipt, and what to refund of it.
type Settled<'s> = (&'s Charge<'s>, &'s [u8], Settlement);

/// The argument that makes `give_back.lua` release only the leases.
const LEASES: &[u8] = b"leases";

/// A query to one slot, and the number of its charges.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) call: Call,
    pub(crate) charges: usize,
}

impl RedisStore {
    /// Decides like [`check`](Self::check) with [`Effect::Charge`], and returns a receipt with
    /// which the charges can be [settled](Self::settle).
    ///
    /// # Errors
    ///
    /// [`StoreError`] if no decision was made, or if it is unknown whether one was made.
    pub async fn reserve(
        &self,
        charges: &[Charge<'_>],
        outcomes: &mut Vec<Outcome>,
    ) -> Result<(Decision, RedisReceipt), StoreError> {
        let mut receipt = RedisReceipt::default();
        let asked = (charges, Effect::Charge);
        let decision = self.decide(asked, outcomes, Some(&mut receipt)).await?;
        Ok((decision, receipt))
    }

    /// Settles `charges`, for which [`reserve`](Self::reserve) issued `receipt`: refunds the unused
    /// units in `settlements`, as far as they are still charged, and releases the leases.
    ///
    /// Some refunds are limited:
    ///
    /// - Limits that count denied requests refund nothing.
    /// - If the state was converted to other parameters after the charge, only leases are released.
    /// - After a reset of the key there is nothing to refund. However, a later charge of another
    ///   client at the same instant, or in the same window, cannot be distinguished from the
    ///   original and is refunded instead.
    /// - More than a minute after the charge, a schedule refunds only units that cannot have
    ///   drained in the elapsed time.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not everything was refunded, or if the outcome is unknown. The rest stays
    /// charged, and leases expire by themselves.
    pub async fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: RedisReceipt,
        settlements: &[Settlement],
    ) -> Result<(), StoreError> {
        let settled = charges.iter().zip(&receipt.of_charges).zip(settlements);
        let settled: Vec<Settled<'_>> = settled
            .filter(|((charge, receipt), settlement)| {
                let is_due = settlement.unused > 0 || charge.limits.has_slots();
                is_due && !receipt.is_empty()
            })
            .map(|((charge, receipt), settlement)| (charge, receipt.as_slice(), *settlement))
            .collect();
        if settled.is_empty() {
            return Ok(());
        }
        let charges: Vec<Charge<'_>> = settled.iter().map(|(charge, ..)| **charge).collect();
        let slots = self.slots(&charges);
        let calls: Vec<Call> = slots
            .iter()
            .map(|slot| self.settling(slot.iter().map(|number| settled[*number])))
            .collect();
        for answer in join_all(calls.iter().map(|call| self.run_whole(call))).await {
            answer?;
        }
        Ok(())
    }

    /// Builds the call that settles charges of one slot.
    fn settling<'s>(&self, settled: impl Iterator<Item = Settled<'s>>) -> Call {
        let (mut charges, mut args) = (Vec::new(), vec![self.instant()]);
        for (charge, receipt, settlement) in settled {
            let unused = settlement.unused.min(charge.cost.units());
            let part = match Cost::new(unused) {
                Ok(cost) if cost == charge.cost => Vec::new(),
                Ok(cost) => encode::program(&Charge { cost, ..*charge }, self.around()),
                Err(_) => LEASES.to_vec(),
            };
            let program = encode::program(charge, self.around());
            args.extend([program, receipt.to_vec(), part]);
            charges.push(*charge);
        }
        Call {
            script: &scripts::GIVE_BACK,
            keys: self.keys(&charges),
            args,
            on_late_reply: None,
        }
    }

    /// Runs a call of `give_back.lua`, split into one call per key if the keys are on two nodes
    /// because their slot is migrating.
    async fn run_whole(&self, call: &Call) -> Result<(), StoreError> {
        match self.run_once(call).await {
            Err(ExecError::Split(_)) if call.keys.len() > 1 => {
                for call in call.each(1) {
                    self.run(&call).await?;
                }
                Ok(())
            }
            answer => answer.map(drop).map_err(|error| error.of(call)),
        }
    }

    /// Returns the callback for a reservation whose reply arrives after the caller has stopped
    /// waiting: it refunds the reservation. `keys` and `args` are those of the reservation.
    pub(crate) fn giving_back(&self, keys: &[Vec<u8>], args: &[Vec<u8>]) -> OnLateReply {
        let (store, keys, args) = (self.clone(), keys.to_vec(), args.to_vec());
        OnLateReply(Arc::new(move |late| {
            let charges = keys.len();
            let checked = exec::parse_reply(late).ok();
            let checked = checked.and_then(|reply| decode::checked(reply, charges));
            if let Some(Checked::Decided {
                admitted: true,
                receipts,
                ..
            }) = checked
            {
                let (store, call) = (store.clone(), give_back(&keys, &args, &receipts));
                // The number of replies in flight bounds the number of these tasks.
                tokio::spawn(async move {
                    if let Err(trouble) = store.run_whole(&call).await {
                        tracing::debug!(
                            "refund of an abandoned request failed, and it stays charged: {trouble}"
                        );
                    }
                });
            }
        }))
    }

    /// Charges every slot or none: if one slot denies the request, the other slots are refunded.
    pub(crate) async fn reserve_all(
        &self,
        questions: Vec<Asked>,
    ) -> Result<Vec<Checked>, StoreError> {
        let (caller, answer) = oneshot::channel();
        // A task of its own, so that the refunds are sent even if the caller stops waiting.
        tokio::spawn(all_or_none(self.clone(), questions, caller));
        let ended = |_| StoreError::Unknown("the runtime was shut down".to_owned());
        answer.await.map_err(ended)?.into_iter().collect()
    }
}

impl Asked {
    pub(crate) async fn put(&self, store: &RedisStore) -> Result<Checked, StoreError> {
        store.put(&self.call, self.charges).await
    }
}

/// Builds the call that refunds `receipts` of a reservation with these keys and arguments.
fn give_back(keys: &[Vec<u8>], args: &[Vec<u8>], receipts: &[Vec<u8>]) -> Call {
    // The programs come first. Conversions may follow; they are not needed here.
    let [instant, _, _, programs @ ..] = args else {
        unreachable!("the arguments begin with an instant, an intent and a slack");
    };
    let mut args = vec![instant.clone()];
    for (program, receipt) in programs.iter().zip(receipts) {
        args.extend([program.clone(), receipt.clone(), Vec::new()]);
    }
    Call {
        script: &scripts::GIVE_BACK,
        keys: keys.to_vec(),
        args,
        on_late_reply: None,
    }
}

/// Charges every slot, and refunds those that admit if another denies or if `caller` has stopped
/// waiting.
async fn all_or_none(
    store: RedisStore,
    questions: Vec<Asked>,
    caller: oneshot::Sender<Vec<Result<Checked, StoreError>>>,
) {
    let replies = join_all(questions.iter().map(|asked| asked.put(&store))).await;
    let asked_and_replied = questions.iter().zip(&replies);
    let reserved: Vec<Call> = asked_and_replied
        .filter_map(|(asked, reply)| match reply {
            Ok(Checked::Decided {
                admitted: true,
                receipts,
                ..
            }) => Some(give_back(&asked.call.keys, &asked.call.args, receipts)),
            _ => None,
        })
        .collect();
    if reserved.len() < replies.len() {
        give_all_back(&store, &reserved).await;
        // A caller that has stopped waiting does not need the reply.
        let _ = caller.send(replies);
    } else if caller.send(replies).is_err() {
        give_all_back(&store, &reserved).await;
    }
}

async fn give_all_back(store: &RedisStore, reserved: &[Call]) {
    for answer in join_all(reserved.iter().map(|call| store.run_whole(call))).await {
        if let Err(trouble) = answer {
            tracing::debug!(
                "refund of a denied request failed, and it may stay charged: {trouble}"
            );
        }
    }
}

#[cfg(test)]
mod tests;
