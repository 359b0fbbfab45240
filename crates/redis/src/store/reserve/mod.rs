//! Charges with a receipt, and refunds with that receipt. A refund is needed if another hash
//! slot denies the request, or if the final cost of the request is less than the charged cost.

use std::sync::Arc;

use futures_util::future::join_all;
use tidegate_core::{Charge, Cost, Decision, Effect, Outcome, Refund, Settlement};
use tokio::sync::oneshot;

use crate::{
    RedisStore, StoreError,
    call::{Call, OnLateReply, Reply},
    decode::{self, CheckReply},
    encode,
    exec::{self, ExecError, Executor, SentCall},
    scripts,
    store::guard_reply::{ReservationStatus, guard_reply},
};

/// A record of a decision's charges. A receipt can be used once, for the charges for which it was
/// issued.
///
/// Dropping a receipt refunds nothing, which is safe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisReceipt {
    /// One receipt per charge; empty if nothing was charged.
    pub(crate) charges: Vec<Vec<u8>>,
    /// Whether a renewal since the last reply has an unknown outcome. After such a renewal, the
    /// current leases may have a start instant that this receipt does not contain.
    pub(crate) has_unknown_renewal: bool,
}

impl RedisReceipt {
    /// Returns true if nothing was charged, so that there is nothing to refund.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.charges.iter().all(Vec::is_empty)
    }

    /// Returns whether the charge at this position was made. If a rule in shadow mode would have
    /// denied the request, the rule's charge is not made.
    #[must_use]
    pub fn is_charged(&self, at: usize) -> bool {
        self.charges.get(at).is_some_and(|part| !part.is_empty())
    }

    /// Returns the receipt of each charge, as bytes that another process can use to settle the
    /// charge.
    #[must_use]
    pub fn parts(&self) -> &[Vec<u8>] {
        &self.charges
    }

    /// Creates a receipt from its [`parts`](Self::parts).
    #[must_use]
    pub fn from_parts(parts: Vec<Vec<u8>>) -> Self {
        Self {
            charges: parts,
            has_unknown_renewal: false,
        }
    }
}

/// A charge to settle, with its receipt and its settlement.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeToSettle<'s> {
    pub(super) charge: &'s Charge<'s>,
    pub(super) receipt: &'s [u8],
    pub(super) settlement: Settlement,
}

/// The number of arguments of `refund.lua` before the arguments of each charge.
pub(super) const SHARED_ARGS: usize = 3;

/// The argument that makes `refund.lua` release only the leases.
const LEASES: &[u8] = b"leases";

/// A call of the script `check`, and the number of charges in the call.
#[derive(Debug)]
pub(crate) struct CheckCall {
    pub(crate) call: Call,
    pub(crate) charges: usize,
}

impl RedisStore {
    /// Decides like [`check`](Self::check) with [`Effect::Charge`], and returns a receipt that is
    /// needed to [settle](Self::settle) the charges.
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
        let decision = self
            .decide(charges, Effect::Charge, outcomes, Some(&mut receipt))
            .await?;
        Ok((decision, receipt))
    }

    /// Settles `charges`: refunds the unused units in `settlements` if these units are still
    /// charged, and releases the leases. `receipt` is the receipt that [`reserve`](Self::reserve)
    /// issued for `charges`.
    ///
    /// Some refunds are limited:
    ///
    /// - Limits that count denied requests refund nothing.
    /// - If the state was converted to other parameters after the charge, only leases are released.
    /// - If `charges` have another number of limits, or other algorithms, than when the charge was
    ///   made, nothing is refunded or released.
    /// - After a reset of the key, the charge can no longer be refunded. However, if another client
    ///   charges the same key at the same instant or in the same window, the store cannot
    ///   distinguish the two charges, and refunds the charge of the other client.
    /// - More than a minute after the charge, a GCRA limit refunds only units that cannot have
    ///   drained in the elapsed time.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not everything was refunded, or if the outcome is unknown. Units that were
    /// not refunded stay charged, and leases expire by themselves.
    pub async fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: RedisReceipt,
        settlements: &[Settlement],
    ) -> Result<(), StoreError> {
        let due = charges.iter().zip(&receipt.charges).zip(settlements);
        let due: Vec<ChargeToSettle<'_>> = due
            .filter(|((charge, receipt), settlement)| {
                let is_due = settlement.unused > 0 || charge.limits.has_slots();
                is_due && !receipt.is_empty()
            })
            .map(|((charge, receipt), settlement)| ChargeToSettle {
                charge,
                receipt,
                settlement: *settlement,
            })
            .collect();
        if due.is_empty() {
            return Ok(());
        }
        let charges: Vec<Charge<'_>> = due.iter().map(|due| *due.charge).collect();
        let slots = self.group_by_hash_slot(&charges);
        let calls: Vec<Call> = slots
            .iter()
            .map(|slot| self.settle_call(slot.iter().map(|index| due[*index])))
            .collect();
        for result in join_all(calls.iter().map(|call| self.run_refund(call))).await {
            result?;
        }
        Ok(())
    }

    /// Builds the call that settles charges of one slot.
    pub(super) fn settle_call<'s>(&self, due: impl Iterator<Item = ChargeToSettle<'s>>) -> Call {
        // One more key for the guard of a reservation.
        let count = due.size_hint().1.unwrap_or_default();
        let mut keys = Vec::with_capacity(count + 1);
        let mut args = Vec::with_capacity(SHARED_ARGS + 3 * count);
        args.extend([self.instant(), Vec::new(), Vec::new()]);
        for ChargeToSettle {
            charge,
            receipt,
            settlement,
        } in due
        {
            let unused = settlement.unused.min(charge.cost.units());
            let part = match Cost::new(unused) {
                Ok(cost) if cost == charge.cost => Vec::new(),
                Ok(cost) => encode::program(&Charge { cost, ..*charge }, self.latest_time()),
                Err(_) => LEASES.to_vec(),
            };
            let program = encode::program(charge, self.latest_time());
            args.extend([program, receipt.to_vec(), part]);
            keys.push(self.key(charge.key));
        }
        Call {
            script: &scripts::REFUND,
            keys,
            args,
            on_late_reply: None,
        }
    }

    /// Runs a call of `refund.lua`, split into one call per key if the keys are on two nodes
    /// because their slot is migrating. Returns whether all units were refunded.
    pub(super) async fn run_refund(&self, call: &Call) -> Result<Refund, StoreError> {
        run_refund(&*self.executor, call).await
    }

    /// Charges every slot or none: if one slot denies the request, the other slots are refunded.
    pub(crate) async fn reserve_all(
        &self,
        calls: Vec<CheckCall>,
    ) -> Result<Vec<CheckReply>, StoreError> {
        let (caller, replies) = oneshot::channel();
        // The reservation runs as a separate task, so that refunds are sent even if the caller
        // stops waiting.
        tokio::spawn(reserve_all_or_refund(self.clone(), calls, caller));
        let ended = |_| StoreError::Unknown("the runtime was shut down".to_owned());
        replies.await.map_err(ended)?.into_iter().collect()
    }
}

impl CheckCall {
    pub(crate) async fn run(&self, store: &RedisStore) -> Result<CheckReply, StoreError> {
        store.run_check(&self.call, self.charges).await
    }
}

/// Returns the refund in the reply of `refund.lua` without a guard.
fn refund_of(reply: Reply) -> Result<Refund, StoreError> {
    match guard_reply(reply)?.status {
        ReservationStatus::Ended(refund) => Ok(refund),
        _ => Err(StoreError::unexpected_reply()),
    }
}

/// Returns the callback that refunds a reservation if its reply arrives after the caller has
/// stopped waiting.
///
/// A late reply is rare, so a reservation does not copy its keys and arguments for the callback.
/// The callback reads them from the command that was sent.
pub(super) fn refund_on_late_reply(executor: Arc<dyn Executor>) -> OnLateReply {
    OnLateReply(Arc::new(move |sent, late| {
        let Some(SentCall { keys, args }) = SentCall::read(sent) else {
            return;
        };
        let reply = exec::parse_reply(late).ok();
        let reply = reply.and_then(|reply| decode::check_reply(reply, keys.len()));
        if let Some(CheckReply::Decided {
            admitted: true,
            receipts,
            ..
        }) = reply
        {
            let (executor, call) = (Arc::clone(&executor), refund_call(&keys, &args, &receipts));
            // The number of reply tasks is bounded, because the number of replies in flight is
            // bounded.
            tokio::spawn(async move {
                if let Err(error) = run_refund(&*executor, &call).await {
                    tracing::debug!(
                        "refund of an abandoned request failed, so the request stays charged: {error}"
                    );
                }
            });
        }
    }))
}

/// Runs a call of `refund.lua`, as [`RedisStore::run_refund`] does.
async fn run_refund(executor: &dyn Executor, call: &Call) -> Result<Refund, StoreError> {
    match exec::run_once(executor, call).await {
        Err(ExecError::SplitHashSlot(_)) if call.keys.len() > 1 => {
            let mut refund = Refund::Complete;
            for call in call.split_by_key(SHARED_ARGS) {
                let reply = exec::run_once(executor, &call).await;
                let reply = reply.map_err(|error| error.into_store_error(&call))?;
                refund = refund.and(refund_of(reply)?);
            }
            Ok(refund)
        }
        reply => refund_of(reply.map_err(|error| error.into_store_error(call))?),
    }
}

/// Builds the call that refunds `receipts` of a reservation with these keys and arguments.
fn refund_call<B: AsRef<[u8]>>(keys: &[B], args: &[B], receipts: &[Vec<u8>]) -> Call {
    // The charges' programs (encoded limits) directly follow the first three arguments. The
    // conversions after the programs are not needed for a refund.
    let [instant, _, _, programs @ ..] = args else {
        unreachable!("the arguments begin with the time, the effect and the expiry slack");
    };
    let mut args = vec![instant.as_ref().to_vec(), Vec::new(), Vec::new()];
    for (program, receipt) in programs.iter().zip(receipts) {
        args.extend([program.as_ref().to_vec(), receipt.clone(), Vec::new()]);
    }
    Call {
        script: &scripts::REFUND,
        keys: keys.iter().map(|key| key.as_ref().to_vec()).collect(),
        args,
        on_late_reply: None,
    }
}

/// Charges every slot. If a slot denies, or if `caller` has stopped waiting, refunds the slots that
/// admitted the request.
async fn reserve_all_or_refund(
    store: RedisStore,
    calls: Vec<CheckCall>,
    caller: oneshot::Sender<Vec<Result<CheckReply, StoreError>>>,
) {
    let replies = join_all(calls.iter().map(|call| call.run(&store))).await;
    let calls_and_replies = calls.iter().zip(&replies);
    let refunds: Vec<Call> = calls_and_replies
        .filter_map(|(check, reply)| match reply {
            Ok(CheckReply::Decided {
                admitted: true,
                receipts,
                ..
            }) => Some(refund_call(&check.call.keys, &check.call.args, receipts)),
            _ => None,
        })
        .collect();
    if refunds.len() < replies.len() {
        run_refunds(&store, &refunds).await;
        // A caller that has stopped waiting does not need the replies.
        let _ = caller.send(replies);
    } else if caller.send(replies).is_err() {
        run_refunds(&store, &refunds).await;
    }
}

async fn run_refunds(store: &RedisStore, refunds: &[Call]) {
    for result in join_all(refunds.iter().map(|call| store.run_refund(call))).await {
        if let Err(error) = result {
            tracing::debug!(
                "refund of a denied request failed, so the request can stay charged: {error}"
            );
        }
    }
}

#[cfg(test)]
mod tests;
