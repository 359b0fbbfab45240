//! The algorithms of limits, with their numbers.

use super::Rate;
use crate::{
    digest::Digest,
    time::{Calendar, Span},
};

/// How a token bucket is refilled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RefillMode {
    /// Tokens are added continuously, one by one at the rate of the refill.
    #[default]
    Continuous,
    /// All tokens of an interval are added together at its end.
    Interval,
}

impl RefillMode {
    /// All modes, each with its name in the rules file.
    pub const ALL: [(&'static str, Self); 2] = [
        ("continuous", Self::Continuous),
        ("interval", Self::Interval),
    ];
}

/// The start and the length of the windows of a fixed window limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Window {
    /// Windows start at whole multiples of this duration since the Unix epoch.
    Epoch(Span),
    /// A window starts with the first request of a key. The next window starts with the first
    /// request after its end.
    FirstRequest(Span),
    /// Windows are the days, weeks or months of a calendar.
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

/// The algorithms, by their usual names. Each algorithm is compiled into one of the implementations
/// in `src/algorithm/`, whose documentation states its guarantee, its weakness and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// One request every `rate.period / rate.count`, plus a burst of `burst` requests.
    Gcra {
        /// The steady rate.
        rate: Rate,
        /// How many requests are admitted at the same instant in addition to the regular request; 0
        /// enforces strict spacing.
        burst: u64,
    },
    /// A bucket of `capacity` tokens, refilled by `refill.count` each `refill.period`.
    TokenBucket {
        /// The maximum number of tokens in the bucket; a new bucket is full.
        capacity: u64,
        /// The number of tokens added per period.
        refill: Rate,
        /// Whether tokens are added one by one, or all at the end of an interval.
        mode: RefillMode,
    },
    /// A bucket of `capacity` that drains by `leak.count` every `leak.period`.
    LeakyBucket {
        /// The size of the bucket. For a queue: how many requests may wait behind the request that
        /// is being served.
        capacity: u64,
        /// The drain rate.
        leak: Rate,
        /// False: a meter that denies requests that would overflow. True: a shaper that admits them
        /// with a delay.
        queue: bool,
    },
    /// At most `limit` in each fixed window.
    FixedWindow {
        /// The maximum in one window; 0 denies every request.
        limit: u64,
        /// The start and the length of the windows.
        window: Window,
    },
    /// At most `limit` in any `window`, exactly.
    SlidingWindowLog {
        /// The maximum in any window; 0 denies every request.
        limit: u64,
        /// The length of the window.
        window: Span,
    },
    /// At most `limit` requests at the same time. An admitted request holds a concurrency slot
    /// until it is [settled](crate::MemoryStore::settle), or until `lease` has elapsed.
    Concurrency {
        /// The maximum number of slots in use; 0 denies every request.
        limit: u64,
        /// The lease of a slot. Choose a lease longer than any request takes, because a request is
        /// no longer counted once its lease has expired. The slot of a crashed client becomes free
        /// when the lease expires.
        lease: Span,
    },
    /// At most `limit` in a sliding `window`, approximated with counters.
    SlidingWindowCounter {
        /// The maximum in a window; 0 denies every request.
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
    /// The current and the previous window, weighted by their overlap with the sliding window.
    Weighted,
    /// A number of sub-windows.
    Buckets {
        /// The number of sub-windows; the window must be a whole multiple of it.
        buckets: u32,
        /// True: sums one additional bucket, so that no window ever exceeds the limit.
        strict: bool,
    },
}
