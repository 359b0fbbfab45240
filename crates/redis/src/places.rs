//! Places that are held for longer than a lease.

use futures_util::future::join_all;
use tidegate_core::{Charge, Effect, Renewal, remote::Replay};

use crate::{
    RedisReceipt, RedisStore, StoreError,
    call::{Call, Reply},
    decode, encode,
    exec::ExecError,
    scripts,
};

impl RedisStore {
    /// Renews the places of `charges`, for which [`reserve`](Self::reserve) wrote `receipt`: they are held from now on. It is to be
    /// done before their leases are over.
    ///
    /// A place that is not held any more is taken again if one is free, by the numbers of `charges`.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when not all were renewed, or nobody knows. They are held as long as they were; where one was renewed all the
    /// same, the receipt does not know it: it takes a second place at the next renewal, if one is free, and the first ends with its lease.
    /// Where none is free that may be for its own sake, and the answer is [`Renewal::Unknown`] until one is.
    pub async fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut RedisReceipt,
    ) -> Result<Renewal, StoreError> {
        let holding: Vec<usize> = (0..charges.len().min(receipt.of_charges.len()))
            .filter(|at| charges[*at].limits.holds_places() && !receipt.of_charges[*at].is_empty())
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
            // Those who have it may be himself, by a renewal that he has not heard of.
            (None, false) if receipt.is_doubtful => Ok(Renewal::Unknown),
            (None, false) => Ok(Renewal::Lost),
        }
    }

    /// Whether the places of each charge of `call` are held, and its receipt: asked about one by one where the keys lie on two nodes,
    /// because their slot is moving.
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

    /// The call that renews charges of one slot.
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
                encode::value(charge, &unspent.held().0),
            ]);
        }
        Call {
            script: &scripts::RENEW,
            keys,
            args,
            unheard: None,
        }
    }
}

fn renewed(reply: Reply, call: &Call) -> Result<Vec<(bool, Vec<u8>)>, StoreError> {
    decode::renewed(reply, call.keys.len()).ok_or_else(StoreError::unreadable)
}
