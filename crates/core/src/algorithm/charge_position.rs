//! The position of a charge in the state of a limit. A later refund needs this position.

use super::ExactMicros;
use crate::time::Timestamp;

/// The information with which a later refund finds a charge in a state. Each algorithm uses one
/// variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// For GCRA: the theoretical arrival time right after the charge.
    Before(ExactMicros),
    /// For a bucket that is refilled at intervals: the instant, computed right after the charge, at
    /// which the bucket would be full again.
    FullAt(u64),
    /// For a fixed window: the end of the window that contains the charge.
    Ending(u64),
    /// For a sliding log: the charge is the log entry at the instant of the charge.
    Stamped,
    /// For concurrency slots: the start of the current lease, which is the instant of the log
    /// entry.
    HeldSince(Timestamp),
    /// For a sliding window counter: the number of the window or sub-window that contains the
    /// charge.
    Numbered(u64),
}

/// The position of a charge in one state, adjusted for the refunds that were made since the charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargePosition {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    pub(crate) mark: Mark,
    /// By how many microseconds refunds of other charges have moved this charge forward; `None` if
    /// the number is unknown.
    pub(crate) shift: Option<u64>,
}
