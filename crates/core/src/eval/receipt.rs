//! Receipts: the location of a charge in the state of its key. With a receipt, a store can refund
//! exactly the charge of one request.
//!
//! A refund without a receipt can refund too much: the bucket may have drained since the charge, so
//! that units charged by later requests are refunded instead. With a receipt, a store refunds only
//! units that this request was charged and that are still in the state.
//!
//! ```text
//!   reserve ──▶ admitted, with a receipt ──▶ the request runs ──▶ settle: its leases end, and
//!                                                                unused units are refunded
//! ```
//!
//! - **Windows, buckets, logs.** The units are removed where they were counted, if they are still
//!   there.
//! - **Schedules (GCRA).** The state is an instant, the theoretical arrival time, and part of a
//!   charge is used up as time passes. The schedule is like a queue of work that is served in order
//!   of arrival: only the part of the charge that is not yet served can be refunded. Two lower
//!   bounds of that part are known, and the larger one is refunded. The first bound is
//!   `cost - (now - time of the charge)`, because no more than the elapsed time can have been
//!   served since the charge. The second bound is
//!   `min(cost, arrival after the charge - refunds to others since - now)`. The charge ends at that
//!   arrival time, and only refunds of earlier charges move this end; a refund of the last charge
//!   moves no other charge. In a queue that delays requests, only the last request can be refunded,
//!   because later requests already have their start times.
//! - **Tokens refilled by intervals.** The refills since the charge may have returned part of the
//!   charge; that part is not refunded again.
//! - **Changed limits.** Once the state has been converted to other limits, only concurrency slots
//!   are released, even if the limits were changed back: under the other limits, the charge may
//!   have drained faster or may have been dropped.
//! - **Concurrency slots.** A request that runs longer than its lease renews the lease. The slot
//!   then counts as acquired at the time of the renewal. A slot can be missing because the renewal
//!   was late or the store lost the slot. A missing slot is acquired again if a slot is free, and
//!   is lost otherwise. A renewal of a slot that is still held never fails for lack of a free slot.
//!
//! Dropping a receipt refunds nothing. That is safe: the charge stays, and leases expire.

use crate::{algorithm::Mark, time::Timestamp};

/// The charges of one decision, with their locations.
///
/// A receipt is valid once, for the charges that it was returned with, in the store that created
/// it.
#[derive(Debug, Default)]
pub struct Receipt {
    pub(crate) charged: Vec<Option<ChargeRecord>>,
}

impl Receipt {
    /// Returns true if nothing was charged, so there is nothing to refund.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.charged.iter().all(Option::is_none)
    }
}

/// The settlement of one charge after its request has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// The number of units to refund, at most the cost; with 0 the whole cost stays charged. Leases
    /// end in either case.
    pub unused: u64,
}

/// The result of renewing the leases of a receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// All slots are held, and their leases have been renewed.
    Held,
    /// At least one slot was no longer held, because its lease had expired or the store had lost
    /// the slot, and no slot was free to acquire instead.
    Lost,
    /// The result is not known: the store was unreachable, the state is not available, or the store
    /// has no memory to acquire a slot again. The leases have not changed and may be renewed later.
    Unknown,
}

impl Renewal {
    /// Returns [`Self::Held`] if all slots are held (`are_held`), and [`Self::Lost`] otherwise.
    pub(crate) fn of(are_held: bool) -> Self {
        if are_held { Self::Held } else { Self::Lost }
    }

    /// Combines two results. A lost slot takes precedence, then an unknown result.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Lost, _) | (_, Self::Lost) => Self::Lost,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Held, Self::Held) => Self::Held,
        }
    }
}

/// The location of one charge.
#[derive(Clone, Debug)]
pub(crate) struct ChargeRecord {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    /// The fingerprint of the limits.
    pub(crate) fingerprint: u32,
    /// The position of the charge in the state of each group of limits; `None` for a group that
    /// counts denied requests as well.
    pub(crate) marks: Box<[Option<Mark>]>,
    /// For each group of limits, the total shift by refunds that the ledger had recorded at the
    /// time of the charge, in microseconds.
    pub(crate) shifts: Box<[u64]>,
    /// The number of the latest conversion of the state that the ledger had recorded at the time of
    /// the charge; 0 for none.
    pub(crate) conversion: u64,
}

impl ChargeRecord {
    /// Adjusts the charge record after the clock had been ahead of `now` and the state was clamped
    /// to `rewound`.
    ///
    /// A slot counts as held since `rewound`. All other charges whose instant is in the future are
    /// not refunded, because it is unknown how many of their units are still in the state.
    pub(crate) fn clamp(&mut self, now: Timestamp, rewound: Timestamp) {
        let is_ahead = self.at > now;
        for mark in &mut self.marks {
            match mark {
                Some(Mark::HeldSince(since)) if *since > now => *since = rewound,
                Some(Mark::HeldSince(_)) | None => {}
                Some(_) if is_ahead => *mark = None,
                Some(_) => {}
            }
        }
    }
}
