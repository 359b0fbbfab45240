//! The one place that reads a clock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Instant,
};

use tidegate_core::Timestamp;

/// Tells the time: monotonic, anchored to the wall clock when it was made.
///
/// A step of the wall clock while the program runs changes nothing here: calendar windows and schedules follow the
/// wall as it was at the start, and are off by the step until the program is started anew. So are they by the time for
/// which a machine was suspended, which the monotonic clock of Linux does not count. Limits only measure what has passed, and do not
/// mind either. Cloning is cheap, and clones tell the same time.
///
/// It counts the processor's own ticks, because reading anything else takes longer than a decision. Their rate is only
/// known to some millionths, which come to minutes in months, so [`Self::follow`] holds them to the system's
/// monotonic clock, which time synchronisation steers.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Real(Arc<Counter>),
    Manual(Arc<AtomicU64>),
}

/// Ticks since an anchor.
#[derive(Debug)]
struct Counter {
    clock: quanta::Clock,
    start: u64,
    steady_start: Instant,
    anchor_micros: u64,
    /// By how many microseconds the ticks lag behind the system's clock.
    lag_micros: AtomicI64,
}

impl Counter {
    fn nanos(&self) -> u64 {
        self.clock.delta_as_nanos(self.start, self.clock.raw())
    }

    fn micros(&self) -> u64 {
        let lag = self.lag_micros.load(Ordering::Relaxed);
        (self.anchor_micros + self.nanos() / 1_000).saturating_add_signed(lag)
    }
}

/// By how many microseconds a counter that has come to `counted` nanoseconds lags behind one at `steady`.
fn lag_micros(counted: u64, steady: u64) -> i64 {
    let (counted, steady) = (counted / 1_000, steady / 1_000);
    // A difference of two numbers of microseconds since the start fits for 290,000 years.
    i64::try_from(i128::from(steady) - i128::from(counted)).unwrap_or(0)
}

impl Clock {
    /// A clock anchored to the wall now.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "the edge reads the system's clocks once, to anchor the counter"
    )]
    pub fn real() -> Self {
        let clock = quanta::Clock::new();
        let wall = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let counter = Counter {
            start: clock.raw(),
            steady_start: Instant::now(),
            clock,
            anchor_micros: u64::try_from(wall.as_micros()).unwrap_or(u64::MAX),
            lag_micros: AtomicI64::new(0),
        };
        Self(Source::Real(Arc::new(counter)))
    }

    /// Corrects the counted time by the system's monotonic clock. Once a second is plenty: what the two disagree
    /// about in a second is a few dozen microseconds. Where the time goes back by that little, stores
    /// count it as the latest instant that they have seen.
    pub fn follow(&self) {
        if let Source::Real(counter) = &self.0 {
            let steady = counter.steady_start.elapsed().as_nanos();
            let steady = u64::try_from(steady).unwrap_or(u64::MAX);
            let lag = lag_micros(counter.nanos(), steady);
            counter.lag_micros.store(lag, Ordering::Relaxed);
        }
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
            Source::Real(counter) => counter.nanos(),
            Source::Manual(micros) => micros.load(Ordering::SeqCst).saturating_mul(1_000),
        }
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        match &self.0 {
            Source::Real(counter) => Timestamp::from_micros(counter.micros()),
            Source::Manual(micros) => Timestamp::from_micros(micros.load(Ordering::SeqCst)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_held_to_the_steady_clock_in_both_directions() {
        assert_eq!(lag_micros(1_000_000, 3_500_999), 2_500);
        assert_eq!(lag_micros(3_500_000, 1_000_000), -2_500);
        let Source::Real(counter) = Clock::real().0 else {
            panic!("a real clock counts");
        };
        let before = counter.micros();
        counter.lag_micros.store(60_000_000, Ordering::Relaxed);
        assert!(counter.micros() >= before + 60_000_000);
        let clock = Clock(Source::Real(counter));
        clock.follow();
        let after = clock.now().as_micros();
        assert!(
            after < before + 30_000_000,
            "{after} is a minute ahead of {before}"
        );
    }

    #[test]
    fn a_manual_clock_follows_nobody() {
        let clock = Clock::manual(Timestamp::from_micros(7));
        clock.follow();
        assert_eq!(clock.now(), Timestamp::from_micros(7));
    }
}
