//! The rate limit algorithms, with their parameters.

use super::Rate;
use crate::{
    digest::Digest,
    time::{Calendar, Span},
};

/// How a token bucket is refilled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RefillMode {
    /// Tokens are added one by one, evenly spread over the refill period.
    #[default]
    Continuous,
    /// All tokens of an interval are added at once when the interval ends.
    Interval,
}

impl RefillMode {
    /// All modes, each with its name in the rules file.
    pub const ALL: [(&'static str, Self); 2] = [
        ("continuous", Self::Continuous),
        ("interval", Self::Interval),
    ];
}

/// The windows of a fixed window limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Window {
    /// Windows of this length start at multiples of the length, counted from the Unix epoch.
    Epoch(Span),
    /// A window of this length starts with the first request of a key. The next window starts with
    /// the first request after the end of the window.
    FirstRequest(Span),
    /// Each day, week or month of a calendar is a window.
    Calendar(Calendar),
}

impl Window {
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        match self {
            Self::Epoch(span) => digest.numbers(&[1, span.as_micros()]),
            Self::FirstRequest(span) => digest.numbers(&[2, span.as_micros()]),
            Self::Calendar(calendar) => calendar.digest(digest.number(3)),
        }
    }
}

/// A rate limit algorithm with its parameters. The algorithms are implemented in `src/algorithm/`,
/// where the documentation states each algorithm's guarantee, weakness and source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// GCRA (generic cell rate algorithm): one request every `rate.period / rate.count`, plus a
    /// burst of `burst` requests.
    Gcra {
        /// The steady rate.
        rate: Rate,
        /// The number of extra requests that can be admitted at once; 0 enforces even spacing of
        /// requests.
        burst: u64,
    },
    /// A bucket of `capacity` tokens, to which `refill.count` tokens are added every
    /// `refill.period`.
    TokenBucket {
        /// The maximum number of tokens in the bucket; a new bucket is full.
        capacity: u64,
        /// The number of tokens that are added per period.
        refill: Rate,
        /// Whether tokens are added one by one, or all at once at the end of each period.
        mode: RefillMode,
    },
    /// A leaky bucket of size `capacity`, from which `leak.count` units drain every `leak.period`.
    LeakyBucket {
        /// The size of the bucket. For a queue, the maximum number of waiting requests, not
        /// counting the request being served.
        capacity: u64,
        /// The drain rate.
        leak: Rate,
        /// If false, the bucket is a meter, and a request that would overflow the bucket is denied.
        /// If true, the bucket is a queue, and admitted requests are delayed so that they leave at
        /// the drain rate.
        queue: bool,
    },
    /// At most `limit` units in each fixed window.
    FixedWindow {
        /// The maximum number of units in one window; 0 denies every request.
        limit: u64,
        /// The alignment and the length of the windows.
        window: Window,
    },
    /// At most `limit` units in any interval of length `window`, computed exactly.
    SlidingWindowLog {
        /// The maximum number of units in any window; 0 denies every request.
        limit: u64,
        /// The length of the window.
        window: Span,
    },
    /// At most `limit` requests in progress at the same time. An admitted request holds a
    /// concurrency slot until the request is [settled](crate::MemoryStore::settle), or until
    /// `lease` has elapsed.
    Concurrency {
        /// The maximum number of slots in use; 0 denies every request.
        limit: u64,
        /// How long a slot stays held without a renewal. Choose a lease longer than any request
        /// takes, because a request no longer counts after its lease has expired. The slot of a
        /// crashed client becomes free when the lease expires.
        lease: Span,
    },
    /// At most `limit` units in a sliding `window`, approximated with counters.
    SlidingWindowCounter {
        /// The maximum number of units in a window; 0 denies every request.
        limit: u64,
        /// The length of the window.
        window: Span,
        /// How the window is approximated.
        counting: Counting,
    },
}

/// How a sliding window counter approximates its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counting {
    /// The counts of the current and the previous fixed window are weighted by their overlap with
    /// the sliding window.
    Weighted,
    /// The window is divided into sub-windows, and the counts of the most recent sub-windows are
    /// added up.
    Buckets {
        /// The number of sub-windows. The length of the window in microseconds must be a multiple
        /// of the number of sub-windows.
        buckets: u32,
        /// If true, one more sub-window is included in the sum, so that no window ever exceeds the
        /// limit.
        strict: bool,
    },
}
