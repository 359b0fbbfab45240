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
    /// How many microseconds a tick takes, in parts of 2^64.
    tick: u64,
    steady_start: Instant,
    anchor_micros: u64,
    /// By how many microseconds the ticks lag behind the system's clock.
    lag_micros: AtomicI64,
}

impl Counter {
    fn nanos(&self) -> u64 {
        self.clock.delta_as_nanos(self.start, self.clock.raw())
    }

    /// Since the anchor, by ticks alone: one multiplication, because every decision waits for it.
    fn counted_micros(&self) -> u64 {
        micros_of(self.clock.raw().saturating_sub(self.start), self.tick)
    }

    fn micros(&self) -> u64 {
        let lag = self.lag_micros.load(Ordering::Relaxed);
        (self.anchor_micros + self.counted_micros()).saturating_add_signed(lag)
    }
}

/// How many microseconds a tick of `clock` takes, in parts of 2^64.
fn tick(clock: &quanta::Clock) -> u64 {
    /// Minutes at least, whatever ticks, so that whole nanoseconds of it are exact enough.
    const TICKS: u32 = 40;
    let nanos = clock.delta_as_nanos(0, 1 << TICKS);
    // A tick that took a microsecond or more would be none of a processor's.
    u64::try_from((u128::from(nanos) << (64 - TICKS)) / 1_000).unwrap_or(u64::MAX)
}

/// So many `ticks`, each of which takes `tick` parts of 2^64 of a microsecond.
fn micros_of(ticks: u64, tick: u64) -> u64 {
    // The upper half of a product of two halves.
    u64::try_from((u128::from(ticks) * u128::from(tick)) >> 64).unwrap_or(u64::MAX)
}

/// By how many microseconds a counter that has come to `counted` lags behind one at `steady`.
fn lag_micros(counted: u64, steady: u64) -> i64 {
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
            tick: tick(&clock),
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
            let steady = counter.steady_start.elapsed().as_micros();
            let steady = u64::try_from(steady).unwrap_or(u64::MAX);
            let lag = lag_micros(counter.counted_micros(), steady);
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
        assert_eq!(lag_micros(1_000, 3_500), 2_500);
        assert_eq!(lag_micros(3_500, 1_000), -2_500);
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
    fn ticks_are_microseconds_by_one_multiplication() {
        let Source::Real(counter) = Clock::real().0 else {
            panic!("a real clock counts");
        };
        // Some microseconds, minutes, and a day at least.
        for ticks in [1 << 20, 1 << 42, 1 << 48] {
            let expected = u128::from(counter.clock.delta_as_nanos(0, ticks)) / 1_000;
            let micros = u128::from(micros_of(ticks, counter.tick));
            let error = expected.abs_diff(micros);
            assert!(
                error <= 1 + expected / 1_000_000_000,
                "{micros} is not {expected}"
            );
        }
    }

    #[test]
    fn a_manual_clock_follows_nobody() {
        let clock = Clock::manual(Timestamp::from_micros(7));
        clock.follow();
        assert_eq!(clock.now(), Timestamp::from_micros(7));
    }
}
