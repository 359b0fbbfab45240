//! The position of a charge in the state of a limit. A later refund of the charge needs the
//! position.

use super::ExactMicros;
use crate::time::Timestamp;

/// The information that a refund needs to find a charge in a state. Each kernel uses one variant of
/// this enum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// For GCRA: the theoretical arrival time right after the charge.
    TatAfter(ExactMicros),
    /// For a bucket refilled at intervals: the instant at which the bucket would be full again,
    /// computed right after the charge.
    FullAt(u64),
    /// For a fixed window: the end of the window that contains the charge.
    WindowEnd(u64),
    /// For a sliding window log: the charge is found by its timestamp, which is stored in the log
    /// entry.
    Stamped,
    /// For concurrency slots: the start time of the current lease, which is stored in the log
    /// entry.
    HeldSince(Timestamp),
    /// For a sliding window counter: the index of the window or sub-window that contains the
    /// charge.
    WindowIndex(u64),
}

/// The position of a charge in a state, adjusted for refunds made since the charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargePosition {
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
    pub(crate) mark: Mark,
    /// The number of microseconds by which this charge drains earlier because other charges were
    /// refunded; `None` if this number is unknown.
    pub(crate) shift: Option<u64>,
}
