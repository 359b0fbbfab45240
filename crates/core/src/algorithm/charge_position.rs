//! The position of a charge in the state of a limit, for a later refund.

use super::Exact;
use crate::time::Timestamp;

/// The position of a charge in a state, for a later refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// For GCRA: the theoretical arrival time right after the charge.
    Before(Exact),
    /// The tokens missing from an interval bucket. After the charge, the bucket was to be full
    /// again at this instant.
    FullAt(u64),
    /// The window that ends at this instant.
    Ending(u64),
    /// The log entry at the instant of the charge.
    Stamped,
    /// The entry in the log of held concurrency slots at the start of the current lease.
    HeldSince(Timestamp),
    /// The sub-window, or the weighted window, with this number.
    Numbered(u64),
}

/// The location of a charge in one state, with the effect of the refunds that were made since the
/// charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargePosition {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    pub(crate) mark: Mark,
    /// How far refunds of other charges have since moved this charge forward, in microseconds;
    /// `None` if this is unknown.
    pub(crate) shift: Option<u64>,
}
