//! Durations and instants with an exact fraction of a microsecond.

use crate::time::{Span, Timestamp};

/// A number of microseconds with an exact fraction: `whole + part / l`, with `part < l`. The
/// denominator `l` is that of the limit's time per unit, which is `p / l` microseconds in lowest
/// terms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExactMicros {
    /// The integer part, in microseconds.
    pub whole: u64,
    /// The fraction, in units of `1 / l` microseconds.
    pub part: u64,
}

impl ExactMicros {
    /// A value later than any instant.
    pub(super) const NEVER: Self = Self {
        whole: u64::MAX,
        part: 0,
    };

    pub(super) fn as_span(self) -> Span {
        Span::from_micros(self.whole.saturating_add(u64::from(self.part > 0)))
    }

    pub(super) fn at(now: Timestamp) -> Self {
        Self {
            whole: now.as_micros(),
            part: 0,
        }
    }

    /// Returns the value rounded up to whole microseconds.
    pub(crate) fn ceil(self) -> Timestamp {
        Timestamp::from_micros(self.whole.saturating_add(u64::from(self.part > 0)))
    }
}
