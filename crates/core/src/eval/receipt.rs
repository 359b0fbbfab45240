//! Receipts. A receipt records the position of each charge of a request in its key's state. With a
//! receipt, a store can refund exactly the charges of one request.
//!
//! A refund without a receipt can be too large: if the bucket has drained since the charge, the
//! refund removes units charged by later requests. With a receipt, a store refunds only units that
//! this request charged and that are still in the state.
//!
//! ```text
//!   reserve ──▶ admitted, with a receipt ──▶ the request runs ──▶ settle: its leases end, and
//!                                                                unused units are refunded
//! ```
//!
//! - **Windows, sub-windows, logs.** The units are removed from the window, sub-window or log entry
//!   in which they were counted, if the state still contains it.
//! - **GCRA.** The state is one instant, the theoretical arrival time (TAT). GCRA is equivalent to
//!   a leaky bucket, in which charges drain one after another as time passes. Only the part of a
//!   charge that has not drained can be refunded. Two lower bounds for the remaining part of a
//!   charge are known. The store refunds the larger of the two bounds. Costs are expressed as
//!   durations. The first bound is `cost - (now - time of the charge)`, because a charge drains at
//!   most at the speed of the clock. The second bound is `min(cost, TAT after the charge - later
//!   refunds of other charges - now)`. `TAT after the charge` is the TAT computed right after the
//!   charge. Without refunds, the charge has drained completely at that TAT. Only refunds of
//!   earlier charges make the charge drain earlier. A refund of the last charge affects no other
//!   charge. In a queue that delays requests, only the last request can be refunded, because a
//!   refund must not change the start times of later requests.
//! - **Buckets refilled at intervals.** Tokens that refills may have added back since the charge
//!   are not refunded again.
//! - **Changed limits.** If the state has been converted to other limits since the charge, only
//!   concurrency slots are released, even if the limits have been changed back. Under the other
//!   limits, the charge may have drained, or the store may have dropped the charge.
//! - **Concurrency slots.** A request that runs longer than its lease must renew the lease. After a
//!   renewal, the slot counts as acquired at the time of the renewal. If the renewal is too late or
//!   the store has lost the slot, the renewal acquires a free slot instead. If no slot is free, the
//!   slot is lost. A renewal of a slot that is still held does not need a free slot.
//!
//! Dropping a receipt is safe: nothing is refunded, the charges stay counted, and the leases
//! expire.

use smallvec::SmallVec;

use crate::{algorithm::Mark, time::Timestamp};

/// The records of a request's charges, in the order of the charges. A record is `None` if the
/// charge was not made or not stored. Most requests have one charge, whose record needs no heap
/// memory.
pub(crate) type ChargeRecords = SmallVec<[Option<ChargeRecord>; 1]>;

/// The position of a charge in the state of each limit group; `None` for a group that does not
/// support refunds by receipt. Most rules have one limit.
pub(crate) type Marks = SmallVec<[Option<Mark>; 1]>;

/// The charges of one decision, with the position of each charge in its key's state.
///
/// A receipt can be used once, in the store that created it, together with the charges for which it
/// was created.
#[derive(Debug, Default)]
pub struct Receipt {
    pub(crate) charged: ChargeRecords,
}

impl Receipt {
    /// Returns true if nothing was charged, so that there is nothing to refund.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.charged.iter().all(Option::is_none)
    }

    /// Returns whether the charge with index `at` was made. The charge of a rule in shadow mode is
    /// not made if the rule would have denied it.
    #[must_use]
    pub fn is_charged(&self, at: usize) -> bool {
        self.charged.get(at).is_some_and(Option::is_some)
    }
}

/// The settlement of one charge after its request is finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// The number of units to refund, at most the cost. If `unused` is 0, the whole cost stays
    /// charged. Settling always releases all concurrency slots.
    pub unused: u64,
}

/// Whether a settlement has given back all unused units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refund {
    /// No unused unit stays charged: the store has refunded the units, or they had drained or
    /// expired before.
    #[default]
    Complete,
    /// Unused units of at least one limit stay charged, because the store cannot find them in the
    /// key's state. The state was converted to other limits, or the limit counts denied requests.
    Incomplete,
}

impl Refund {
    /// Combines the refunds of two charges: complete if both are complete.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Complete, Self::Complete) => Self::Complete,
            (Self::Incomplete, _) | (_, Self::Incomplete) => Self::Incomplete,
        }
    }
}

/// The result of renewing the leases of a receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// All concurrency slots are held, and their leases have been renewed.
    Held,
    /// At least one concurrency slot is lost: its lease expired or the store lost the slot, and no
    /// other slot was free.
    Lost,
    /// The result is unknown: the store was unreachable, the state was not available, or the store
    /// had no memory to acquire a slot again. The caller can retry the renewal later.
    Unknown,
}

impl Renewal {
    /// Returns [`Self::Held`] if all slots are held (`are_held`), otherwise [`Self::Lost`].
    pub(crate) fn of(are_held: bool) -> Self {
        if are_held { Self::Held } else { Self::Lost }
    }

    /// Combines the results of two renewals: `Lost` takes precedence over `Unknown`, and `Unknown`
    /// over `Held`.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Lost, _) | (_, Self::Lost) => Self::Lost,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Held, Self::Held) => Self::Held,
        }
    }
}

/// The position of a charge in its key's state.
#[derive(Clone, Debug)]
pub(crate) struct ChargeRecord {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    /// The fingerprint of the limits to which the cost was charged.
    pub(crate) fingerprint: u32,
    pub(crate) marks: Marks,
    /// For each limit group, the shift that was recorded in the refund ledger at the time of the
    /// charge, in microseconds. Because of refunds, later charges drain earlier; the shift is
    /// the difference.
    pub(crate) shifts: Box<[u64]>,
    /// The ID of the latest conversion of the state, as recorded in the refund ledger at the time
    /// of the charge; 0 if no conversion was recorded.
    pub(crate) conversion: u64,
}

impl ChargeRecord {
    /// Adjusts the charge record after the clock was set back. The clock had been ahead of `now`,
    /// and the state was clamped to the instant `rewound`.
    ///
    /// A concurrency slot whose start is in the future counts as held since `rewound`. Any other
    /// charge in the future is not refunded, because it is unknown how many of its units are still
    /// in the state.
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
