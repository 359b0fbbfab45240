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
///
/// The counter can also jump: by the length of a suspension, which it may count and the monotonic clock does
/// not, or back to zero. So it is trusted for two seconds at a time. Whoever reads the clock later than that,
/// or finds the counter behind, compares it with the monotonic clock first. A jump therefore shifts the time by
/// two seconds at most, and only until the clock is compared again.
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
    /// What the counter showed when it was last compared with the system's clock.
    compared_micros: AtomicU64,
}

/// How far the counter is trusted after it was compared with the system's clock: twice as long as it takes the
/// server to compare them again, so that decisions do not read that clock.
const TRUSTED_MICROS: u64 = 2_000_000;

impl Counter {
    fn nanos(&self) -> u64 {
        self.clock.delta_as_nanos(self.start, self.clock.raw())
    }

    /// Since the start, by ticks alone: one multiplication, because every decision waits for it.
    fn counted_micros(&self) -> u64 {
        // A counter that began anew is behind its start. It wraps around, and the anchor with it.
        micros_of(self.clock.raw().wrapping_sub(self.start), self.tick)
    }

    #[inline]
    fn micros(&self) -> u64 {
        let counted = self.counted_micros();
        // Acquired before the anchor is read, so that the anchor is not older than the comparison.
        let compared = self.compared_micros.load(Ordering::Acquire);
        // Wraps around, and so is large, where the counter went back.
        if counted.wrapping_sub(compared) > TRUSTED_MICROS {
            return self.compared();
        }
        let anchor = self.anchor_micros.load(Ordering::Relaxed);
        anchor.wrapping_add(counted)
    }

    /// The time by the system's clock, to which the counter is held.
    #[cold]
    fn compared(&self) -> u64 {
        let (steady, counted) = self.read_both();
        self.follow(steady, counted)
    }

    /// The system's clock and the counter at about one instant: the counter never earlier, so that the time
    /// does not lead.
    fn read_both(&self) -> (u64, u64) {
        /// More than it takes to read a clock, unless the thread is interrupted or the machine suspended.
        const TOGETHER_MICROS: u64 = 100;
        const TRIES: usize = 4;
        let mut both = (0, 0);
        for _ in 0..TRIES {
            let before = self.counted_micros();
            let steady = self.steady_start.elapsed().as_micros();
            let after = self.counted_micros();
            both = (u64::try_from(steady).unwrap_or(u64::MAX), after);
            if after.wrapping_sub(before) <= TOGETHER_MICROS {
                break;
            }
        }
        both
    }

    /// Moves the anchor so that the time is `steady_micros` after the start where the counter shows `counted`;
    /// answers that time.
    fn follow(&self, steady_micros: u64, counted: u64) -> u64 {
        let now = self.wall_start_micros.saturating_add(steady_micros);
        let anchor = now.wrapping_sub(counted);
        self.anchor_micros.store(anchor, Ordering::Relaxed);
        self.compared_micros.store(counted, Ordering::Release);
        now
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
            compared_micros: AtomicU64::new(0),
        };
        Self(Source::Real(Arc::new(counter)))
    }

    /// Corrects the counted time by the system's monotonic clock. Once a second is plenty: what the two disagree
    /// about in a second is a few dozen microseconds. Where the time goes back by that little, stores
    /// count it as the latest instant that they have seen.
    pub fn follow(&self) {
        if let Source::Real(counter) = &self.0 {
            counter.compared();
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
        let counted = counter.counted_micros();
        assert_eq!(counter.follow(HOUR, counted), start + HOUR);
        let anchor = counter.anchor_micros.load(Ordering::Relaxed);
        assert!(is_about(anchor + counter.counted_micros(), start + HOUR));
        let clock = Clock(Source::Real(counter));
        clock.follow();
        assert!(is_about(clock.now().as_micros(), start));
    }

    /// A machine that is suspended for ten minutes, and a counter that begins anew.
    #[test]
    fn a_counter_that_jumps_does_not_take_the_time_along() {
        const MINUTES: u64 = 600_000_000_000;
        let (ticks, mock) = quanta::Clock::mock();
        mock.increment(MINUTES);
        let Source::Real(mut counter) = Clock::real().0 else {
            panic!("a real clock counts");
        };
        let mocked = Arc::get_mut(&mut counter).unwrap();
        (mocked.start, mocked.tick, mocked.clock) = (ticks.raw(), tick(&ticks), ticks);
        let clock = Clock(Source::Real(counter));
        let start = clock.now();
        // What is left is what the test itself takes.
        let is_about_start = |now: Timestamp| now.since(start) < tidegate_core::Span::from_secs(60);
        for _ in 0..3 {
            mock.increment(MINUTES);
            assert!(is_about_start(clock.now()), "forward");
        }
        for _ in 0..3 {
            mock.decrement(MINUTES);
            assert!(is_about_start(clock.now()), "back");
            assert!(start <= clock.now());
        }
        mock.decrement(MINUTES);
        assert!(is_about_start(clock.now()), "before the start");
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
