//! A duration in whole microseconds.

use std::time::Duration;

/// The longest period, window or interval: 10 years of 365.25 days.
pub const MAX_PERIOD: Span = Span::from_secs(315_576_000);

/// A duration in whole microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

/// The threshold for detecting that the clock was set back. If a stored instant is ahead of the
/// clock by more than this duration, the instants in the stored states are clamped to the clock's
/// time. A smaller difference is treated as normal.
///
/// In a remote store, the stored instant is the time at which a state was written. In the memory
/// store, the stored instant is the latest instant that a shard has seen. A caller reads the clock
/// before it acquires the shard's lock. Other threads can finish decisions while the caller waits
/// for the lock, so the caller's time can be earlier than the stored instant. The delay between
/// reading the clock and acquiring the lock is normally a few microseconds. The delay can be a
/// tenth of a second if the operating system throttles the process, and a few seconds on a machine
/// that swaps. All of these delays are far below ten seconds. If the caller's time is earlier than
/// the stored instant by at most `CLOCK_JUMP`, the store uses the stored instant as the current
/// time. Suppose the clock was ahead by less than `CLOCK_JUMP` and is then set back: keys that were
/// charged in the meantime recover later by at most this difference.
///
/// The delay can be longer than `CLOCK_JUMP` if the process is stopped between reading the clock
/// and acquiring the lock, for example by `SIGSTOP` or in a suspended virtual machine. When the
/// process resumes, the caller's time is still the time of the stop, and the states are clamped to
/// that time. All charges made before the stop remain. Charges that other threads make in the first
/// microseconds after the process resumes can be moved back to the time of the stop.
pub const CLOCK_JUMP: Span = Span::from_secs(10);

impl Span {
    /// A duration of zero.
    pub const ZERO: Self = Self(0);

    /// Returns a span of `micros` microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns a span of `millis` milliseconds; saturates at the maximum of `u64` microseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Returns a span of `secs` seconds; saturates at the maximum of `u64` microseconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Returns the span in microseconds.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the span in milliseconds, rounded up, so that a client that waits this long never
    /// retries too early.
    #[must_use]
    pub const fn as_millis_ceil(self) -> u64 {
        self.0.div_ceil(1_000)
    }

    /// Returns the span in seconds, rounded up.
    #[must_use]
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        Self::from_micros(span.0)
    }
}

/// Rounds the duration up to whole microseconds; saturates.
impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        let micros = duration.as_nanos().div_ceil(1_000);
        Self(u64::try_from(micros).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_up_and_saturate() {
        let span = Span::from(Duration::from_nanos(1_001));
        assert_eq!(
            (span, Duration::from(span)),
            (Span(2), Duration::from_micros(2))
        );
        assert_eq!(Span::from(Duration::MAX), Span(u64::MAX));
    }

    #[test]
    fn waits_are_rounded_up() {
        for (micros, millis, secs) in [(0, 0, 0), (1, 1, 1), (1_000, 1, 1), (1_000_001, 1_001, 2)] {
            let span = Span::from_micros(micros);
            assert_eq!((span.as_millis_ceil(), span.as_secs_ceil()), (millis, secs));
        }
    }
}
