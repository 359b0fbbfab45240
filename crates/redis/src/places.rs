//! Renewal of concurrency leases, for requests that last longer than a lease.

use futures_util::future::join_all;
use tidegate_core::{Charge, Effect, Renewal, remote_eval::Replay};

use crate::{
    RedisReceipt, RedisStore, StoreError,
    call::{Call, Reply},
    decode, encode,
    exec::ExecError,
    scripts,
};

impl RedisStore {
    /// Renews the concurrency leases of `charges`, for which [`reserve`](Self::reserve) issued
    /// `receipt`: each lease restarts now. Call this method before the leases expire.
    ///
    /// A lease that has expired is acquired again if the limits of `charges` have a free slot.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not all leases were renewed, or if that is unknown. A lease that was not
    /// renewed keeps its old end. If a lease was renewed but the reply was lost, the receipt does
    /// not identify the renewed lease. The next renewal then acquires a second lease if a slot is
    /// free, and the first lease expires by itself. If no slot is free, our own unknown lease may
    /// occupy it, so the result is [`Renewal::Unknown`] until a slot is free.
    pub async fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut RedisReceipt,
    ) -> Result<Renewal, StoreError> {
        let holding: Vec<usize> = (0..charges.len().min(receipt.of_charges.len()))
            .filter(|at| charges[*at].limits.has_slots() && !receipt.of_charges[*at].is_empty())
            .collect();
        if holding.is_empty() {
            return Ok(Renewal::Held);
        }
        let held: Vec<Charge<'_>> = holding.iter().map(|at| charges[*at]).collect();
        let slots = self.slots(&held);
        let calls: Vec<Call> = slots
            .iter()
            .map(|slot| self.renewing(slot.iter().map(|at| holding[*at]), (charges, receipt)))
            .collect();
        let replies = join_all(calls.iter().map(|call| self.run_renewal(call))).await;
        let (mut are_held, mut trouble) = (true, None);
        for (slot, reply) in slots.iter().zip(replies) {
            match reply {
                Ok(renewed) => {
                    for (at, (is_held, of_charge)) in slot.iter().zip(renewed) {
                        are_held &= is_held;
                        receipt.of_charges[holding[*at]] = of_charge;
                    }
                }
                Err(error) => trouble = Some(error),
            }
        }
        receipt.is_doubtful |= matches!(trouble, Some(StoreError::Unknown(_)));
        match (trouble, are_held) {
            (Some(trouble), _) => Err(trouble),
            (None, true) => {
                receipt.is_doubtful = false;
                Ok(Renewal::Held)
            }
            // Our own lease, from a renewal whose reply was lost, may occupy the missing slot.
            (None, false) if receipt.is_doubtful => Ok(Renewal::Unknown),
            (None, false) => Ok(Renewal::Lost),
        }
    }

    /// Returns whether the leases of each charge of `call` are held, and its new receipt. If the
    /// keys are on two nodes because their slot is migrating, each key is renewed in a separate
    /// call.
    async fn run_renewal(&self, call: &Call) -> Result<Vec<(bool, Vec<u8>)>, StoreError> {
        let calls = match self.run_once(call).await {
            Err(ExecError::Split(_)) if call.keys.len() > 1 => call.each(2),
            reply => return renewed(reply.map_err(|error| error.of(call))?, call),
        };
        let mut answers = Vec::with_capacity(calls.len());
        for call in calls {
            answers.extend(renewed(self.run(&call).await?, &call)?);
        }
        Ok(answers)
    }

    /// Builds the call that renews charges of one slot.
    fn renewing(
        &self,
        numbers: impl Iterator<Item = usize>,
        (charges, receipt): (&[Charge<'_>], &RedisReceipt),
    ) -> Call {
        let slack = self.slack_ms().to_string().into_bytes();
        let (mut keys, mut args) = (Vec::new(), vec![self.instant(), slack]);
        for number in numbers {
            let charge = &charges[number];
            let unspent = Replay::open(charge, None, self.around(), Effect::Look);
            keys.push(self.key(charge.key));
            args.extend([
                encode::program(charge, self.around()),
                receipt.of_charges[number].clone(),
                encode::value(charge, &unspent.states().0, self.around()),
            ]);
        }
        Call {
            script: &scripts::RENEW,
            keys,
            args,
            on_late_reply: None,
        }
    }
}

fn renewed(reply: Reply, call: &Call) -> Result<Vec<(bool, Vec<u8>)>, StoreError> {
    decode::renewed(reply, call.keys.len()).ok_or_else(StoreError::unreadable)
}
