//! Reservations: charges that end once, whichever server ends them. A guard in Redis records that a
//! reservation was extended or has ended (`guard.lua`).

use futures_util::future::join_all;
use tidegate_core::{Charge, Settlement, Span, Timestamp};

use super::reserve::ChargeToSettle;
use crate::{
    RedisReceipt, RedisStore, StoreError,
    call::{Call, Reply},
    decode,
    exec::ExecError,
    layout, scripts,
};

/// For how long a guard is kept after its reservation expires.
const GUARD_KEPT: Span = Span::from_secs(60);

/// A reservation of charges in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedisReservation {
    /// A random number that identifies the reservation.
    pub id: [u8; 16],
    /// The instant at which the reservation expires, by the clocks of the servers, unless it was
    /// extended since.
    pub expires: Timestamp,
}

/// The status of a reservation after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationStatus {
    /// The call has ended the reservation.
    Ended,
    /// The reservation had ended before.
    EndedBefore,
    /// The reservation has expired. The call has not refunded it.
    Expired,
    /// The reservation is outstanding until this instant.
    Outstanding(Timestamp),
}

/// How a reservation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationEnd {
    /// Its holder settles it. The reservation must not have expired.
    Settle,
    /// It has expired. The reservation must not have been extended.
    Expire,
}

impl RedisStore {
    /// Ends a reservation of `charges`, for which [`reserve`](Self::reserve) issued `receipt`, and
    /// refunds the unused units in `settlements`. Does nothing if the reservation has ended before,
    /// or if `end` does not apply to it. A call with an unknown result may be repeated.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not everything was settled, or if the outcome is unknown.
    pub async fn end_reservation(
        &self,
        charges: &[Charge<'_>],
        receipt: &RedisReceipt,
        settlements: &[Settlement],
        reservation: RedisReservation,
        end: ReservationEnd,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let attempt = attempt(reservation, end, now);
        let settled = charges.iter().zip(receipt.parts()).zip(settlements);
        let settled: Vec<ChargeToSettle<'_>> = settled
            .map(|((charge, receipt), settlement)| ChargeToSettle {
                charge,
                receipt,
                settlement: *settlement,
            })
            .collect();
        let slots = self.group_by_slot(charges);
        let calls = slots.iter().filter_map(|slot| {
            let first = charges.get(*slot.first()?)?;
            let in_slot = slot.iter().filter_map(|index| settled.get(*index).copied());
            let mut call = self.settle_call(in_slot);
            call.keys
                .push(layout::guard_key(self.prefix(), first.key, &reservation.id));
            call.args[1].clone_from(&attempt);
            Some(call)
        });
        self.run_reservation_calls(calls.collect()).await
    }

    /// Extends a reservation of `charges`, so that it expires at `until`. The leases of its
    /// concurrency slots have to be [renewed](Self::renew) separately.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the reservation was not extended, or if the outcome is unknown.
    pub async fn extend_reservation(
        &self,
        charges: &[Charge<'_>],
        reservation: RedisReservation,
        until: Timestamp,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let slots = self.group_by_slot(charges);
        let calls = slots.iter().filter_map(|slot| {
            let first = charges.get(*slot.first()?)?;
            let instants = [now, reservation.expires, until].map(Timestamp::as_micros);
            let numbers = instants.into_iter().chain([kept_ms(until, now)]);
            Some(Call {
                script: &scripts::EXTEND,
                keys: vec![layout::guard_key(self.prefix(), first.key, &reservation.id)],
                args: numbers
                    .map(|number| number.to_string().into_bytes())
                    .collect(),
                on_late_reply: None,
            })
        });
        self.run_reservation_calls(calls.collect()).await
    }

    /// Runs one call for each slot. Returns the status in the first slot whose status is not
    /// [`ReservationStatus::Ended`].
    async fn run_reservation_calls(
        &self,
        calls: Vec<Call>,
    ) -> Result<ReservationStatus, StoreError> {
        let replies = join_all(calls.iter().map(|call| self.run_once(call))).await;
        let mut status = ReservationStatus::Ended;
        for (call, reply) in calls.iter().zip(replies) {
            let reply = match reply {
                Err(ExecError::SplitSlot(_)) => return Err(StoreError::slot_migrating()),
                reply => reply.map_err(|error| error.into_store_error(call))?,
            };
            let in_slot = reservation_status(&reply).ok_or_else(StoreError::unexpected_reply)?;
            if status == ReservationStatus::Ended {
                status = in_slot;
            }
        }
        Ok(status)
    }
}

fn reservation_status(reply: &Reply) -> Option<ReservationStatus> {
    match decode::integers(reply)?[..] {
        [0, _] => Some(ReservationStatus::EndedBefore),
        [1, _] => Some(ReservationStatus::Ended),
        [2, _] => Some(ReservationStatus::Expired),
        [3, until] => Some(ReservationStatus::Outstanding(Timestamp::from_micros(
            until,
        ))),
        _ => None,
    }
}

/// Encodes an attempt to end a reservation, for `guard.lua`.
fn attempt(reservation: RedisReservation, end: ReservationEnd, now: Timestamp) -> Vec<u8> {
    let until = reservation.expires.max(now);
    let mut attempt = vec![u8::from(end == ReservationEnd::Expire)];
    let instants = [now, reservation.expires].map(Timestamp::as_micros);
    for number in instants.into_iter().chain([kept_ms(until, now)]) {
        attempt.extend_from_slice(&number.to_be_bytes()[1..]);
    }
    attempt
}

/// Returns for how many milliseconds to keep the guard of a reservation that expires at `until`.
fn kept_ms(until: Timestamp, now: Timestamp) -> u64 {
    until.after(GUARD_KEPT).since(now).as_millis_ceil()
}
