//! The position of a charge in the state of a kernel, for a later refund.

use super::Exact;
use crate::time::Timestamp;

/// The position of a charge in a state, for a later refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The charge ends at this theoretical arrival time.
    Before(Exact),
    /// In the tokens missing from a bucket that, after the charge, was to be full again at this
    /// instant.
    FullAt(u64),
    /// In the window that ends at this instant.
    Ending(u64),
    /// In the log, at the instant of the charge.
    Stamped,
    /// In the log of held concurrency slots, at the start of the current lease.
    HeldSince(Timestamp),
    /// In the bucket, or the weighted window, with this number.
    Numbered(u64),
}

/// The location of a charge in one state, with the refunds made since.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargePosition {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    pub(crate) mark: Mark,
    /// How far refunds to other charges have moved this one forward since, in microseconds; `None`
    /// if unknown.
    pub(crate) shift: Option<u64>,
}
