//! Top talkers: the keys with the most requests, denials or cost in the last minutes and hours. The
//! counts take bounded memory, and each count has an error bound.
//!
//! ```text
//! Recorder   one per worker: counts the decisions of the current minute
//!    │       Group      one per rule: exact totals, and a Sketch per stream
//!    ▼       Sketch     Space-Saving: at most `keys` counters, hashed
//! LiveSlice  the minute of one worker, once it is over
//!    │
//!    ▼
//! History    merges the minutes of all workers into time slices of 1 min, 5 min and 1 h
//!            Summary    a closed sketch: sorted, packed, and mergeable
//! ```
//!
//! # The bound
//!
//! A sketch keeps a `count` and an `error` for some keys, and a single `floor`. For a key in the
//! sketch, the true number is in `count - error ..= count`. For any other key, the true sum is at
//! most `floor`.
//!
//! The algorithm is Space-Saving (Metwally, Agrawal, El Abbadi 2005) with lazy eviction. When a
//! sketch has twice as many keys as its setting `keys`, the keys with the lowest counts are
//! dropped, and `floor` becomes the highest dropped count.
//!
//! A filter (Homem, Carvalho 2010, "Finding top-k elements in data streams") keeps rare keys out of
//! the sketch. It stores upper bounds for the keys without an entry, one for all keys whose hashes
//! have the same first bits. An addition to such a key increases the bound. The key gets an entry
//! only if the bound would exceed `floor`, and the former bound is its error, instead of `floor`.
//! If a key is dropped, its bound becomes at least its count.
//!
//! The error bound follows as for the Misra-Gries sketch, to which Space-Saving is isomorphic. Each
//! addition increases the sum of `count - floor` over all keys in the sketch by at most its weight.
//! Each increase of `floor` by 1 decreases this sum by at least `keys + 1`. Therefore, `floor <=
//! total / (keys + 1)`. If the keys are longer than 64 bytes on average, or if memory is short, the
//! sketch keeps fewer keys, and the bound is larger accordingly.
//!
//! Merging (Agarwal et al. 2012, "Mergeable Summaries") adds the counts, the errors and the floors
//! of two sketches. If only one sketch has a key, the floor of the other sketch is added to the
//! key's count and error. In the merged sketch, the bounds of the counts and of `floor` hold for
//! the sum of both totals. Therefore, merging does not weaken the bounds, no matter how often
//! sketches are merged.

mod group_summaries;
mod history;
mod merge;
mod packed;
mod recorder;
mod sketch;
mod summary;
mod tally;

pub use group_summaries::GroupSummaries;
pub use history::{ClosedSlice, History};
pub use merge::{TopKey, merge, top_keys};
pub use recorder::{ChargedKey, Group, LiveSlice, RecordedRequest, Recorder};
pub use sketch::Sketch;
pub use summary::{SumBounds, Summary, SummaryEntry};
pub use tally::Tally;

use crate::time::Timestamp;

/// The maximum number of rules with their own lists of top talkers: the first rules in the rules
/// file. Requests for later rules count only in the totals over all rules.
pub const MAX_TOP_RULES: usize = 1_000;

/// The maximum number of keys in one response.
pub const MAX_TOP_KEYS: usize = 1_000;

/// The [scope](crate::Rule::key_scope) for keys that do not belong to a rule, but to a limit sent
/// with a request. No rule has the scope 0.
pub const NO_RULE: u64 = 0;

/// The maximum size of the lists of top talkers: the number of keys per sketch, and the total
/// memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopBounds {
    /// The number of keys in each sketch. If `max_bytes` is large enough for all keys, the error of
    /// each number in a list is at most the sum of the numbers of all keys, divided by `keys`.
    pub keys: usize,
    /// The maximum memory for all lists, in bytes. If the lists would need more, the sketches keep
    /// fewer keys.
    pub max_bytes: usize,
}

impl Default for TopBounds {
    fn default() -> Self {
        Self {
            keys: 1_000,
            max_bytes: 32 << 20,
        }
    }
}

/// The number by which keys are ranked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// The number of requests.
    #[default]
    Requests,
    /// The number of requests that the rule denied, or would have denied outside shadow mode.
    Denied,
    /// The cost of the requests, denied or not.
    Cost,
}

impl Measure {
    /// All measures.
    pub const ALL: [Self; 3] = [Self::Requests, Self::Denied, Self::Cost];

    /// Returns the name used in queries.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Denied => "denied",
            Self::Cost => "cost",
        }
    }

    /// Returns the measure with this name in queries.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|by| by.as_str() == name)
    }

    /// Returns the streams whose sum is this measure. No addition is in more than one stream.
    #[must_use]
    pub const fn streams(self) -> &'static [Stream] {
        match self {
            Self::Requests => &[Stream::Passed, Stream::Denied],
            Self::Denied => &[Stream::Denied],
            Self::Cost => &[Stream::Passed, Stream::Denied, Stream::ExtraCost],
        }
    }
}

/// One of three disjoint streams of additions to keys. Each stream has a sketch of its own. Because
/// the streams are disjoint, a request of cost 1 is added to only one sketch, although there are
/// three measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Adds 1 for each request that the rule did not deny.
    Passed,
    /// Adds 1 for each request that the rule denied.
    Denied,
    /// Adds `cost - 1` for each request with a cost above 1.
    ExtraCost,
}

impl Stream {
    /// The number of streams.
    pub const COUNT: usize = 3;

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Passed => 0,
            Self::Denied => 1,
            Self::ExtraCost => 2,
        }
    }
}

/// A period that ends now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Period {
    /// The last 5 minutes, in time slices of 1 minute.
    #[default]
    FiveMinutes,
    /// The last 15 minutes, in time slices of 1 minute.
    QuarterHour,
    /// The last hour, in time slices of 5 minutes.
    Hour,
    /// The last day, in time slices of 1 hour.
    Day,
}

impl Period {
    /// All periods.
    pub const ALL: [Self; 4] = [Self::FiveMinutes, Self::QuarterHour, Self::Hour, Self::Day];

    /// Returns the name used in queries.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FiveMinutes => "5m",
            Self::QuarterHour => "15m",
            Self::Hour => "1h",
            Self::Day => "1d",
        }
    }

    /// Returns the period with this name in queries.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|over| over.as_str() == name)
    }

    /// Returns the length of the period in minutes.
    #[must_use]
    pub const fn minutes(self) -> u64 {
        match self {
            Self::FiveMinutes => 5,
            Self::QuarterHour => 15,
            Self::Hour => 60,
            Self::Day => 1_440,
        }
    }

    /// Returns the level of the time slices that cover the period.
    #[must_use]
    pub const fn level(self) -> Level {
        match self {
            Self::FiveMinutes | Self::QuarterHour => Level::Minutes,
            Self::Hour => Level::FiveMinutes,
            Self::Day => Level::Hours,
        }
    }

    /// Returns the index of the first time slice of the period ending in `minute`. This slice can
    /// begin before the period, so that the slices cover the whole period.
    #[must_use]
    pub const fn first_slice(self, minute: u64) -> u64 {
        minute.saturating_sub(self.minutes()) / self.level().minutes()
    }

    /// Returns the start of the time slice [`Self::first_slice`].
    #[must_use]
    pub const fn start(self, minute: u64) -> Timestamp {
        self.level().start(self.first_slice(minute))
    }
}

/// The length of a time slice. A [`History`] has slices of each length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// 1 minute.
    Minutes,
    /// 5 minutes.
    FiveMinutes,
    /// 1 hour.
    Hours,
}

impl Level {
    /// All levels.
    pub const ALL: [Self; 3] = [Self::Minutes, Self::FiveMinutes, Self::Hours];

    /// Returns the length of a time slice of this level in minutes.
    #[must_use]
    pub const fn minutes(self) -> u64 {
        match self {
            Self::Minutes => 1,
            Self::FiveMinutes => 5,
            Self::Hours => 60,
        }
    }

    /// Returns the start of the time slice with the index `number`.
    #[must_use]
    pub const fn start(self, number: u64) -> Timestamp {
        let minutes = number.saturating_mul(self.minutes());
        Timestamp::from_micros(minutes.saturating_mul(MINUTE_MICROS))
    }

    /// Returns the number of time slices to keep for the longest period of this level. One
    /// additional slice is needed, because the period can begin and end within a slice.
    #[must_use]
    pub const fn slices(self) -> u64 {
        match self {
            Self::Minutes => 16,
            Self::FiveMinutes => 13,
            Self::Hours => 25,
        }
    }

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Minutes => 0,
            Self::FiveMinutes => 1,
            Self::Hours => 2,
        }
    }
}

const MINUTE_MICROS: u64 = 60_000_000;

/// Returns the number of whole minutes from 1970 to `now`.
#[must_use]
pub const fn minute_of(now: Timestamp) -> u64 {
    now.as_micros() / MINUTE_MICROS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_covered_completely_and_by_the_slices_that_are_kept() {
        for over in Period::ALL {
            let length = over.level().minutes();
            for minute in 28_000_000..28_003_000 {
                let first = over.first_slice(minute);
                assert!(first * length <= minute - over.minutes());
                assert!(first * length + length > minute - over.minutes());
                let last = minute / length;
                assert!(last - first < over.level().slices());
            }
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        assert!(Measure::ALL.map(|by| Measure::parse(by.as_str())) == Measure::ALL.map(Some));
        assert!(Period::ALL.map(|over| Period::parse(over.as_str())) == Period::ALL.map(Some));
        assert_eq!(Measure::parse("asked"), None);
        assert_eq!(Period::parse("2h"), None);
    }
}
