//! The precomputed parameters of a limit, for stores that decide remotely, and the terms (units) of
//! its state.

use super::Exact;
use crate::{digest::Digest, limit::Window, time::Span};

/// The parameters of one limit (of several sliding logs together), precomputed for one cost. With
/// these parameters, a decision needs only additions, carries and comparisons. Times are in
/// microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numbers<'l> {
    /// A theoretical arrival time (GCRA).
    Gcra {
        /// The number of parts of one microsecond.
        fraction: u64,
        /// The cost as a duration; `None` if it exceeds the capacity.
        duration: Option<Exact>,
        /// How far the arrival time may be ahead of the clock.
        tau: Exact,
        /// Whether admitted requests are delayed. Each admitted request already has its start time,
        /// so a refund must not move a request forward.
        queue: bool,
    },
    /// Tokens that return together at the end of an interval.
    Interval {
        /// The number of tokens that one interval returns.
        refill: u64,
        /// The length of an interval.
        every: u64,
        /// The maximum number of tokens in the bucket.
        capacity: u64,
    },
    /// A count that is reset at the start of each window.
    Window {
        /// The maximum number of units admitted in one window.
        limit: u64,
        /// The maximum number of units counted in one window; it exceeds `limit` if denied requests
        /// are counted in full.
        most: u64,
        /// The start and the length of the windows.
        grid: &'l Window,
    },
    /// Two windows, weighted by their overlap with the sliding window.
    Weighted {
        /// The maximum of the weighted sum.
        limit: u64,
        /// The length of a window.
        window: u64,
    },
    /// Sub-windows.
    Buckets {
        /// The maximum sum of the sub-windows that are added up.
        limit: u64,
        /// The length of a sub-window.
        width: u64,
        /// The number of sub-windows that are added up.
        summed: usize,
    },
    /// The instants of admitted requests.
    Log {
        /// The maximum and the length of each window.
        windows: Vec<(u64, Span)>,
    },
    /// The start times of held concurrency slots: a log with one window.
    Lease {
        /// The maximum number of slots in use.
        limit: u64,
        /// The lease: how long a slot is held without renewal.
        lease: Span,
    },
}

/// The terms (units) in which a kernel's state is counted. A state that was written in other terms
/// has to be converted. A state that was written in the same terms has the same meaning under any
/// limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// One unit takes `numerator / denominator` microseconds, in lowest terms.
    Gcra {
        /// At least 1.
        numerator: u64,
        /// At least 1.
        denominator: u64,
    },
    /// Tokens that return together at the end of an interval.
    Interval {
        /// The number of tokens that one interval returns, at least 1.
        refill: u64,
        /// The length of an interval in microseconds, at least 1.
        every: u64,
    },
    /// Windows that start with the first request of a key.
    FirstRequest {
        /// The length of a window in microseconds, at least 1.
        window: u64,
    },
    /// All other kernels: the state itself contains all that a conversion needs, so a digest is
    /// enough to distinguish terms.
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
