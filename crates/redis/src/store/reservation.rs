//! Reservations of charges. Any server can end a reservation, but only once. A guard in the cluster
//! slot of the charges records that a reservation was renewed or has ended (`guard.lua`). If the
//! charges are in several slots, each slot has its own guard.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use tidegate_core::{Charge, Settlement, Span, Timestamp, bounds::MAX_COUNT};

use super::reserve::ChargeToSettle;
use crate::{
    RedisReceipt, RedisStore, StoreError,
    call::{Call, Reply},
    client::hash_slot,
    decode,
    exec::ExecError,
    layout, scripts,
};

/// How long a guard is kept after its reservation expires. After the guard has expired, the store
/// can no longer tell whether the reservation has ended.
pub const GUARD_KEPT: Span = Span::from_secs(60);

/// A reservation of charges in Redis.
#[derive(Clone, Copy, Debug)]
pub struct RedisReservation<'r> {
    /// A random number that identifies the reservation.
    pub id: [u8; 16],
    /// The instant at which the reservation expires, according to the clocks of the Tidegate
    /// servers. The result does not include a later renewal.
    pub expires: Timestamp,
    /// The charges under the active rules.
    pub charges: &'r [Charge<'r>],
    /// The receipt of `charges`.
    pub receipt: &'r RedisReceipt,
    /// The keys of charges whose rules have since been removed. Nothing is refunded to these keys,
    /// but they determine the slots of the guards.
    pub former_keys: &'r [Box<[u8]>],
}

/// How a reservation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationEnd {
    /// The holder settles the reservation at this final cost. The reservation must not have
    /// expired.
    Settled(u64),
    /// The reservation has expired. The reservation must not have been renewed.
    Expired,
}

/// The status of a reservation after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationStatus {
    /// The call has ended the reservation.
    Ended,
    /// An earlier call has already ended the reservation in this way.
    EndedBefore(ReservationEnd),
    /// The reservation has expired. The call has not refunded the reservation.
    Expired,
    /// The reservation is outstanding until the instant.
    Outstanding(Timestamp),
}

/// The charges of a reservation in one cluster slot.
#[derive(Debug, Default)]
struct ReservedSlot {
    /// The indices of the charges.
    indices: Vec<usize>,
}

impl RedisStore {
    /// Ends `reservation`, and refunds the unused units in `settlements`. Does nothing if the
    /// reservation has already ended, or if `end` does not apply to it. A call whose result is
    /// unknown may be repeated: the repeated call completes the remaining work.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not everything was settled, or if the outcome is unknown.
    pub async fn end_reservation(
        &self,
        reservation: RedisReservation<'_>,
        settlements: &[Settlement],
        end: ReservationEnd,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let RedisReservation {
            charges, receipt, ..
        } = reservation;
        let attempt = attempt(&reservation, end, now);
        let settled = charges.iter().zip(receipt.parts()).zip(settlements);
        let settled: Vec<ChargeToSettle<'_>> = settled
            .map(|((charge, receipt), settlement)| ChargeToSettle {
                charge,
                receipt,
                settlement: *settlement,
            })
            .collect();
        let calls = self.reserved_slots(&reservation).into_iter().map(|slot| {
            let (number, ReservedSlot { indices }) = slot;
            let in_slot = indices
                .iter()
                .filter_map(|index| settled.get(*index).copied());
            let mut call = self.settle_call(in_slot);
            call.keys.push(self.guard(number, &reservation));
            call.args[1].clone_from(&attempt);
            call
        });
        let calls: Vec<Call> = calls.collect();
        let statuses = join_all(calls.iter().map(|call| self.end_in_slot(call))).await;
        combine(statuses, end)
    }

    /// Runs a call that ends a reservation in one slot. If the slot is migrating, the guard may be
    /// on another node than the keys, so a separate call updates the guard.
    async fn end_in_slot(&self, call: &Call) -> Result<ReservationStatus, StoreError> {
        match self.run_once(call).await {
            Err(ExecError::SplitSlot(_)) => {}
            reply => return status_of(&reply.map_err(|error| error.into_store_error(call))?),
        }
        let (mut guard, mut refund) = (call.clone(), call.clone());
        guard.keys = call.keys.last().cloned().into_iter().collect();
        guard.args.truncate(2);
        refund.keys.pop();
        refund.args[1].clear();
        let status = status_of(&self.run(&guard).await?)?;
        if status == ReservationStatus::Ended && !refund.keys.is_empty() {
            self.run_refund(&refund).await?;
        }
        Ok(status)
    }

    /// Renews `reservation`, so that it expires at `until`. The caller must [renew](Self::renew)
    /// the leases of the concurrency slots separately.
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
        let calls = self.reserved_slots(&reservation).into_keys().map(|number| {
            let instants = [now, reservation.expires, until].map(Timestamp::as_micros);
            let numbers = instants.into_iter().chain([kept_ms(until, now)]);
            Call {
                script: &scripts::RENEW_RESERVATION,
                keys: vec![self.guard(number, &reservation)],
                args: numbers
                    .map(|number| number.to_string().into_bytes())
                    .collect(),
                on_late_reply: None,
            }
        });
        let calls: Vec<Call> = calls.collect();
        let replies = join_all(calls.iter().map(|call| self.run(call))).await;
        let statuses = replies.into_iter().map(|reply| status_of(&reply?));
        combine(statuses.collect(), ReservationEnd::Expired)
    }

    /// Returns what the guard of `reservation` records: that the reservation has ended, or the
    /// instant until which it was renewed; `None` without a guard. If the guards of several slots
    /// differ, the result is the latest renewal or, without a renewal, `None` if a guard is
    /// missing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis did not answer.
    pub async fn read_guard(
        &self,
        reservation: RedisReservation<'_>,
    ) -> Result<Option<ReservationStatus>, StoreError> {
        let calls = self.reserved_slots(&reservation).into_keys();
        let calls = calls.map(|number| Call {
            script: &scripts::READ_GUARD,
            keys: vec![self.guard(number, &reservation)],
            args: Vec::new(),
            on_late_reply: None,
        });
        let calls: Vec<Call> = calls.collect();
        let replies = join_all(calls.iter().map(|call| self.run(call))).await;
        let (mut ended, mut renewed) = (None, None);
        for reply in replies {
            match status_of(&reply?)? {
                ReservationStatus::Outstanding(until) => renewed = renewed.max(Some(until)),
                status => ended = Some(status),
            }
        }
        Ok(match renewed {
            None => ended,
            // The slot has no guard.
            Some(until) if until == Timestamp::from_micros(0) => None,
            Some(until) => Some(ReservationStatus::Outstanding(until)),
        })
    }

    /// Groups the charges of `reservation` by slot. If Redis is not a cluster, there is a single
    /// group without a slot number.
    fn reserved_slots(
        &self,
        reservation: &RedisReservation<'_>,
    ) -> BTreeMap<Option<u16>, ReservedSlot> {
        let is_cluster = self.executor.is_cluster();
        let number = |key: &[u8]| is_cluster.then(|| hash_slot(&self.key(key)));
        let mut slots: BTreeMap<Option<u16>, ReservedSlot> = BTreeMap::new();
        for (index, charge) in reservation.charges.iter().enumerate() {
            let slot = slots.entry(number(charge.key)).or_default();
            slot.indices.push(index);
        }
        for key in reservation.former_keys {
            slots.entry(number(key)).or_default();
        }
        slots
    }

    fn guard(&self, slot: Option<u16>, reservation: &RedisReservation<'_>) -> Vec<u8> {
        layout::guard_key(self.prefix(), slot, &reservation.id)
    }
}

/// Combines the statuses of all slots. An earlier call may have ended the reservation in some
/// slots, and this call in the remaining slots. If both calls ended it in the same way, the
/// reservation counts as ended by this call.
fn combine(
    statuses: Vec<Result<ReservationStatus, StoreError>>,
    end: ReservationEnd,
) -> Result<ReservationStatus, StoreError> {
    let (mut has_ended, mut had_ended) = (false, false);
    for status in statuses {
        match status? {
            ReservationStatus::Ended => has_ended = true,
            ReservationStatus::EndedBefore(before) if before == end => had_ended = true,
            status => return Ok(status),
        }
    }
    Ok(if had_ended && !has_ended {
        ReservationStatus::EndedBefore(end)
    } else {
        ReservationStatus::Ended
    })
}

fn status_of(reply: &Reply) -> Result<ReservationStatus, StoreError> {
    let numbers = decode::integers(reply).ok_or_else(StoreError::unexpected_reply)?;
    Ok(match numbers[..] {
        [0, 0] => ReservationStatus::EndedBefore(ReservationEnd::Expired),
        [0, cost] => ReservationStatus::EndedBefore(ReservationEnd::Settled(cost - 1)),
        [1, _] => ReservationStatus::Ended,
        [2, _] => ReservationStatus::Expired,
        [3, until] => ReservationStatus::Outstanding(Timestamp::from_micros(until)),
        _ => return Err(StoreError::unexpected_reply()),
    })
}

/// Encodes an attempt to end a reservation, for `guard.lua`.
fn attempt(reservation: &RedisReservation<'_>, end: ReservationEnd, now: Timestamp) -> Vec<u8> {
    let (is_expiry, cost) = match end {
        ReservationEnd::Settled(cost) => (0, cost.min(MAX_COUNT)),
        ReservationEnd::Expired => (1, 0),
    };
    let until = reservation.expires.max(now);
    let mut attempt = vec![is_expiry];
    let instants = [now, reservation.expires].map(Timestamp::as_micros);
    for number in [cost]
        .into_iter()
        .chain(instants)
        .chain([kept_ms(until, now)])
    {
        attempt.extend_from_slice(&number.to_be_bytes()[1..]);
    }
    attempt
}

/// Returns how long to keep the guard of a reservation that expires at `until`, in milliseconds.
fn kept_ms(until: Timestamp, now: Timestamp) -> u64 {
    until.after(GUARD_KEPT).since(now).as_millis_ceil()
}
