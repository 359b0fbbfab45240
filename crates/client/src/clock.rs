//! The clock of a client. Only this module reads the system's clocks.

use std::time::UNIX_EPOCH;

use tidegate_core::{Span, Timestamp};
use tokio::time::{Duration, Instant};

/// The clock of a client. The clock starts at the wall clock time and advances with tokio's time,
/// so that tests can pause it. Later changes of the wall clock do not affect this clock.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    /// The time at which this clock was created, by tokio's clock.
    started: Instant,
    /// The time of this clock when it was created.
    start: Timestamp,
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::system()
    }
}

impl TokioClock {
    /// Creates a clock that starts at the system's wall clock.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "only this function reads the wall clock"
    )]
    pub fn system() -> Self {
        let since_epoch = std::time::SystemTime::now().duration_since(UNIX_EPOCH);
        Self::starting_at(Timestamp::default().after(to_span(since_epoch.unwrap_or_default())))
    }

    /// Creates a clock that starts at `now`, for tests at a fixed time.
    #[must_use]
    pub fn starting_at(now: Timestamp) -> Self {
        Self {
            started: Instant::now(),
            start: now,
        }
    }

    /// Returns the current time of this clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.start.after(to_span(self.started.elapsed()))
    }
}

/// Converts a span to a [`Duration`], for timers.
pub(crate) fn to_duration(span: Span) -> Duration {
    Duration::from_micros(span.as_micros())
}

/// Converts a duration to whole microseconds. Saturates if the duration is too long.
fn to_span(duration: Duration) -> Span {
    Span::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}
