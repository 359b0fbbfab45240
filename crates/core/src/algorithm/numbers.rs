//! The precomputed parameters of a limit, for remote stores, and the units of measure ([`Terms`])
//! of its state.

use super::ExactMicros;
use crate::{digest::Digest, limit::Window, time::Span};

/// The parameters of a limit, precomputed for one cost. Sliding window log limits that share a
/// state also share one `Numbers` value. With these parameters, a decision needs only additions,
/// carries and comparisons. Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numbers<'l> {
    /// GCRA, whose state is a theoretical arrival time.
    Gcra {
        /// The denominator of fractions of a microsecond.
        fraction: u64,
        /// The cost as a duration; `None` if the cost exceeds the capacity.
        duration: Option<ExactMicros>,
        /// The maximum difference between the theoretical arrival time and the current time.
        tau: ExactMicros,
        /// Whether the limit is a queue, which delays admitted requests. In a queue, the start time
        /// of each admitted request is already fixed, so a refund must not change it.
        queue: bool,
    },
    /// A token bucket to which all tokens of an interval are added at once, at the end of the
    /// interval.
    Interval {
        /// The number of tokens added after each interval.
        refill: u64,
        /// The length of an interval.
        every: u64,
        /// The maximum number of tokens in the bucket.
        capacity: u64,
    },
    /// A fixed window: a count that is reset at the start of each window.
    Window {
        /// The maximum number of units admitted in one window.
        limit: u64,
        /// The maximum number of units counted in one window. `most` exceeds `limit` if denied
        /// requests are counted in full.
        most: u64,
        /// The alignment and the length of the windows.
        grid: &'l Window,
    },
    /// A sliding window counter over two fixed windows, which are weighted by their overlap with
    /// the sliding window.
    Weighted {
        /// The maximum of the weighted sum.
        limit: u64,
        /// The length of a window.
        window: u64,
    },
    /// A sliding window counter with sub-windows.
    Buckets {
        /// The maximum sum of the counts of the last `summed` sub-windows.
        limit: u64,
        /// The length of a sub-window.
        width: u64,
        /// The number of sub-windows whose counts are added up.
        summed: usize,
    },
    /// Sliding window logs: the instants of admitted requests.
    Log {
        /// For each window, the maximum number of units and the length of the window.
        windows: Vec<(u64, Span)>,
    },
    /// Concurrency slots: the start time of each held slot's lease.
    Lease {
        /// The maximum number of slots in use.
        limit: u64,
        /// The lease: how long a slot stays held without a renewal.
        lease: Span,
    },
}

/// The units of measure of an algorithm's state, called its *terms*. If two limits have the same
/// terms, both limits can use the same state without a conversion. If the terms of two limits
/// differ, a state of one limit must be converted before the other limit uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// GCRA, in which one unit drains in `numerator / denominator` microseconds, a reduced
    /// fraction.
    Gcra {
        /// The numerator of the fraction, at least 1.
        numerator: u64,
        /// The denominator of the fraction, at least 1.
        denominator: u64,
    },
    /// A token bucket to which all tokens of an interval are added at once, at the end of the
    /// interval.
    Interval {
        /// The number of tokens that are added after each interval, at least 1.
        refill: u64,
        /// The length of an interval in microseconds, at least 1.
        every: u64,
    },
    /// Fixed windows that start with the first request of a key.
    FirstRequest {
        /// The length of a window in microseconds, at least 1.
        window: u64,
    },
    /// Any other algorithm. The state itself contains everything needed for a conversion, so the
    /// terms are needed only for comparison, and a digest is enough.
    Digest(u32),
}

impl Terms {
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        match *self {
            Self::Gcra {
                numerator,
                denominator,
            } => digest.numbers(&[0, numerator, denominator]),
            Self::Interval { refill, every } => digest.numbers(&[1, refill, every]),
            Self::FirstRequest { window } => digest.numbers(&[2, window]),
            Self::Digest(other) => digest.numbers(&[3, other.into()]),
        }
    }
}
