//! The one place that reads a clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::Timestamp;

/// Tells the time: monotonic, anchored to the wall clock when it was made.
///
/// A step of the wall clock while the server runs changes nothing here: windows on the clock follow the
/// wall as it was at the start. Cloning is cheap, and clones tell the same time.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Real {
        clock: quanta::Clock,
        start: u64,
        anchor_micros: u64,
    },
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// A clock anchored to the wall now.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "the edge reads the wall clock once, to anchor the monotonic one"
    )]
    pub fn real() -> Self {
        let clock = quanta::Clock::new();
        let wall = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let anchor_micros = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        let start = clock.raw();
        Self(Source::Real {
            clock,
            start,
            anchor_micros,
        })
    }

    /// A clock that stands still until it is set, for tests.
    #[must_use]
    pub fn manual(now: Timestamp) -> Self {
        Self(Source::Manual(Arc::new(AtomicU64::new(now.as_micros()))))
    }

    /// Sets a manual clock and all its clones; a real one takes no notice.
    pub fn set(&self, now: Timestamp) {
        if let Source::Manual(micros) = &self.0 {
            micros.store(now.as_micros(), Ordering::SeqCst);
        }
    }

    /// Nanoseconds since some instant: for measuring how long something takes.
    #[must_use]
    pub fn nanos(&self) -> u64 {
        match &self.0 {
            Source::Real { clock, start, .. } => clock.delta_as_nanos(*start, clock.raw()),
            Source::Manual(micros) => micros.load(Ordering::SeqCst).saturating_mul(1_000),
        }
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        match &self.0 {
            Source::Real {
                clock,
                start,
                anchor_micros,
            } => Timestamp::from_micros(
                anchor_micros + clock.delta_as_nanos(*start, clock.raw()) / 1_000,
            ),
            Source::Manual(micros) => Timestamp::from_micros(micros.load(Ordering::SeqCst)),
        }
    }
}
