//! The one place that reads a clock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
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

/// Ticks since a start.
#[derive(Debug)]
struct Counter {
    clock: quanta::Clock,
    start: u64,
    /// How many microseconds a tick takes, in parts of 2^64.
    tick: u64,
    steady_start: Instant,
    wall_start_micros: u64,
    /// What the counted microseconds are added to: the wall at the start, and by how much the ticks have lagged behind the system's
    /// clock since.
    anchor_micros: AtomicU64,
}

impl Counter {
    fn nanos(&self) -> u64 {
        self.clock.delta_as_nanos(self.start, self.clock.raw())
    }

    /// Since the start, by ticks alone: one multiplication, because every decision waits for it.
    fn counted_micros(&self) -> u64 {
        micros_of(self.clock.raw().saturating_sub(self.start), self.tick)
    }

    fn micros(&self) -> u64 {
        let anchor = self.anchor_micros.load(Ordering::Relaxed);
        anchor.saturating_add(self.counted_micros())
    }

    /// Moves the anchor so that the time is `steady_micros` after the start.
    fn follow(&self, steady_micros: u64) {
        let now = self.wall_start_micros.saturating_add(steady_micros);
        let anchor = now.saturating_sub(self.counted_micros());
        self.anchor_micros.store(anchor, Ordering::Relaxed);
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
        let wall_start_micros = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        let counter = Counter {
            start: clock.raw(),
            tick: tick(&clock),
            steady_start: Instant::now(),
            clock,
            wall_start_micros,
            anchor_micros: AtomicU64::new(wall_start_micros),
        };
        Self(Source::Real(Arc::new(counter)))
    }

    /// Corrects the counted time by the system's monotonic clock. Once a second is plenty: what the two disagree
    /// about in a second is a few dozen microseconds. Where the time goes back by that little, stores
    /// count it as the latest instant that they have seen.
    pub fn follow(&self) {
        if let Source::Real(counter) = &self.0 {
            let steady = counter.steady_start.elapsed().as_micros();
            counter.follow(u64::try_from(steady).unwrap_or(u64::MAX));
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
        const HOUR: u64 = 3_600_000_000;
        let Source::Real(counter) = Clock::real().0 else {
            panic!("a real clock counts");
        };
        let start = counter.wall_start_micros;
        // Nothing here takes a minute.
        let is_about = |now: u64, expected: u64| now.abs_diff(expected) < HOUR / 60;
        counter.follow(HOUR);
        assert!(is_about(counter.micros(), start + HOUR));
        let clock = Clock(Source::Real(counter));
        clock.follow();
        assert!(is_about(clock.now().as_micros(), start));
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
