//! The replies of the scripts that read or change the guard of a reservation (`guard.lua`).

use tidegate_core::{Refund, Timestamp};

use crate::{StoreError, call::Reply, decode};

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
    /// The call has ended the reservation. The field is whether all unused units were refunded.
    Ended(Refund),
    /// An earlier call has already ended the reservation in this way. The second field is whether
    /// all unused units were refunded.
    EndedBefore(ReservationEnd, Refund),
    /// The reservation has expired. The call has not refunded the reservation.
    Expired,
    /// The reservation is outstanding until the instant.
    Outstanding(Timestamp),
}

/// The reply of a script that reads or changes a guard.
#[derive(Clone, Debug)]
pub(super) struct GuardReply {
    pub(super) status: ReservationStatus,
    /// Whether all unused units were refunded in the hash slot, by this call or by an earlier one.
    pub(super) refund: Refund,
    /// How long Redis still keeps the guard, in milliseconds; 0 if the reservation has not ended.
    pub(super) guard_ttl_ms: u64,
    /// The packed receipts with the renewed leases, which the guard contained before the
    /// reservation ended.
    pub(super) renewed_leases: Vec<u8>,
}

/// Decodes the reply of a script that reads or changes a guard. A script that refunds nothing
/// returns no receipts.
pub(super) fn guard_reply(reply: Reply) -> Result<GuardReply, StoreError> {
    decode_guard_reply(reply).ok_or_else(StoreError::unexpected_reply)
}

fn decode_guard_reply(reply: Reply) -> Option<GuardReply> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    let mut parts = parts.into_iter();
    let mut integer = || decode::integer(&parts.next()?);
    let (status, number, guard_ttl_ms) = (integer()?, integer()?, integer()?);
    let refund = match integer()? {
        0 => Refund::Complete,
        _ => Refund::Incomplete,
    };
    let status = match (status, number) {
        (0, 0) => ReservationStatus::EndedBefore(ReservationEnd::Expired, refund),
        (0, cost) => ReservationStatus::EndedBefore(ReservationEnd::Settled(cost - 1), refund),
        (1, _) => ReservationStatus::Ended(refund),
        (2, _) => ReservationStatus::Expired,
        (3, until) => ReservationStatus::Outstanding(Timestamp::from_micros(until)),
        _ => return None,
    };
    Some(GuardReply {
        status,
        refund,
        guard_ttl_ms,
        renewed_leases: parts.next().map_or(Some(Vec::new()), decode::bytes)?,
    })
}
