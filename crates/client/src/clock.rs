//! The one place of this crate that reads a clock.

use std::time::UNIX_EPOCH;

use tidegate_core::{Span, Timestamp};
use tokio::time::{Duration, Instant};

/// The time of a client: tokio's, so that a test's paused time is its time too, counted from the wall clock as it was when the
/// clock was made. A step of the wall clock later on changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    began: Instant,
    at: Timestamp,
}

impl Default for Clock {
    fn default() -> Self {
        Self::system()
    }
}

impl Clock {
    /// From the system's wall clock.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that reads the wall clock"
    )]
    pub fn system() -> Self {
        let since_epoch = std::time::SystemTime::now().duration_since(UNIX_EPOCH);
        Self::starting_at(Timestamp::default().after(span(since_epoch.unwrap_or_default())))
    }

    /// It is `now` at this moment: for tests that stand at an instant of their own.
    #[must_use]
    pub fn starting_at(now: Timestamp) -> Self {
        Self {
            began: Instant::now(),
            at: now,
        }
    }

    /// The present instant.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.at.after(span(self.began.elapsed()))
    }
}

/// How long a timer is to wait for `span`.
pub(crate) fn duration(span: Span) -> Duration {
    Duration::from_micros(span.as_micros())
}

/// `duration` in whole microseconds; saturates.
fn span(duration: Duration) -> Span {
    Span::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}
