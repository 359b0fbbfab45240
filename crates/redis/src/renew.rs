//! Renewal of concurrency leases, for requests that last longer than a lease.

use futures_util::future::join_all;
use tidegate_core::{Charge, Effect, Renewal, Timestamp, remote_eval::Replay};

use crate::{
    RedisReceipt, RedisReservation, RedisStore, StoreError,
    call::{Call, Reply},
    decode::{self, ChargeRenewal},
    encode,
    exec::ExecError,
    scripts,
    store::RenewalGuard,
};

/// The number of arguments of `renew.lua` before the arguments of each charge.
const SHARED_ARGS: usize = 4;

impl RedisStore {
    /// Renews the concurrency leases of `charges`, so that each lease restarts now. `receipt` is
    /// the receipt that [`reserve`](Self::reserve) issued for `charges`. Call this method before
    /// the leases expire.
    ///
    /// An expired lease is acquired again if the limits of `charges` have a free slot.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not all leases were renewed, or if the outcome is unknown. A lease that
    /// was not renewed keeps its old expiry. If a lease was renewed but the reply was lost, the
    /// receipt does not identify the renewed lease. The next renewal then acquires a second lease
    /// if a slot is free, and the first lease expires by itself. If no slot is free, the caller's
    /// own unidentified lease may occupy one of the slots, so the result is [`Renewal::Unknown`]
    /// until a slot is free.
    pub async fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut RedisReceipt,
    ) -> Result<Renewal, StoreError> {
        self.renew_guarded(charges, receipt, |_| None).await
    }

    /// Renews the leases of a reservation until `until`, like [`renew`](Self::renew), unless the
    /// reservation has ended. The guards record the new leases, so that every token of the
    /// reservation releases them. Call this method after
    /// [`renew_reservation`](Self::renew_reservation).
    ///
    /// If a hash slot is migrating, its leases are renewed without the guard.
    ///
    /// # Errors
    ///
    /// Like [`renew`](Self::renew).
    pub async fn renew_leases_of_reservation(
        &self,
        reservation: RedisReservation<'_>,
        until: Timestamp,
        now: Timestamp,
        receipt: &mut RedisReceipt,
    ) -> Result<Renewal, StoreError> {
        let guard_at = |key: &[u8]| Some(self.renewal_guard(&reservation, key, until, now));
        self.renew_guarded(reservation.charges, receipt, guard_at)
            .await
    }

    /// Renews leases. `guard_at` returns the guard in the hash slot of a key.
    async fn renew_guarded(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut RedisReceipt,
        guard_at: impl Fn(&[u8]) -> Option<RenewalGuard>,
    ) -> Result<Renewal, StoreError> {
        let leased: Vec<usize> = (0..charges.len().min(receipt.charges.len()))
            .filter(|at| charges[*at].limits.has_slots() && !receipt.charges[*at].is_empty())
            .collect();
        if leased.is_empty() {
            return Ok(Renewal::Held);
        }
        let with_leases: Vec<Charge<'_>> = leased.iter().map(|at| charges[*at]).collect();
        let slots = self.group_by_hash_slot(&with_leases);
        let calls: Vec<Call> = slots
            .iter()
            .map(|slot| {
                let key = slot.first().map(|at| with_leases[*at].key);
                let guard = key.and_then(&guard_at);
                let indices = slot.iter().map(|at| leased[*at]);
                self.renewal_call(indices, charges, receipt, guard)
            })
            .collect();
        let replies = join_all(calls.iter().map(|call| self.run_renewal(call))).await;
        let (mut are_held, mut failure) = (true, None);
        for (slot, reply) in slots.iter().zip(replies) {
            match reply {
                Ok(renewals) => {
                    for (at, renewal) in slot.iter().zip(renewals) {
                        are_held &= renewal.is_held;
                        receipt.charges[leased[*at]] = renewal.receipt;
                    }
                }
                Err(error) => failure = Some(error),
            }
        }
        receipt.has_unknown_renewal |= matches!(failure, Some(StoreError::Unknown(_)));
        match (failure, are_held) {
            (Some(failure), _) => Err(failure),
            (None, true) => {
                receipt.has_unknown_renewal = false;
                Ok(Renewal::Held)
            }
            // If the reply to an earlier renewal was lost, the lease from that renewal may occupy
            // the slot that is needed now.
            (None, false) if receipt.has_unknown_renewal => Ok(Renewal::Unknown),
            (None, false) => Ok(Renewal::Lost),
        }
    }

    /// Runs `call`, and returns the result of the renewal for each charge. If the keys are on two
    /// nodes because their slot is migrating, each key is renewed in a separate call.
    async fn run_renewal(&self, call: &Call) -> Result<Vec<ChargeRenewal>, StoreError> {
        let calls = match self.run_once(call).await {
            Err(ExecError::SplitHashSlot(_)) if call.keys.len() > 1 => {
                call.split_by_key(SHARED_ARGS)
            }
            reply => return renewals(reply.map_err(|error| error.into_store_error(call))?, call),
        };
        let mut all = Vec::with_capacity(calls.len());
        for call in calls {
            all.extend(renewals(self.run(&call).await?, &call)?);
        }
        Ok(all)
    }

    /// Builds the call that renews charges of one slot.
    fn renewal_call(
        &self,
        indices: impl Iterator<Item = usize>,
        charges: &[Charge<'_>],
        receipt: &RedisReceipt,
        guard: Option<RenewalGuard>,
    ) -> Call {
        let slack = self.slack_ms().to_string().into_bytes();
        let new_guard = guard.as_ref().map(|guard| guard.expires.as_micros());
        let kept_ms = guard.as_ref().map(|guard| guard.kept_ms);
        let of_guard = [new_guard, kept_ms]
            .map(|number| number.map_or(Vec::new(), |number| number.to_string().into_bytes()));
        let (mut keys, mut args) = (Vec::new(), vec![self.instant(), slack]);
        args.extend(of_guard);
        for index in indices {
            let charge = &charges[index];
            let unspent = Replay::open(charge, None, self.latest_time(), Effect::Look);
            keys.push(self.key(charge.key));
            args.extend([
                encode::program(charge, self.latest_time()),
                receipt.charges[index].clone(),
                encode::value(charge, &unspent.states().0, self.latest_time()),
            ]);
        }
        keys.extend(guard.map(|guard| guard.key));
        Call {
            script: &scripts::RENEW,
            keys,
            args,
            on_late_reply: None,
        }
    }
}

fn renewals(reply: Reply, call: &Call) -> Result<Vec<ChargeRenewal>, StoreError> {
    // Three arguments belong to each charge.
    let charges = call.args.len().saturating_sub(SHARED_ARGS) / 3;
    decode::renewals(reply, charges).ok_or_else(StoreError::unexpected_reply)
}
