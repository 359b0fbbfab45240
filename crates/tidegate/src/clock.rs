//! The clock. No other module of the server reads the system clocks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

#[cfg(feature = "tokio")]
use tidegate_core::Span;
use tidegate_core::Timestamp;

/// A monotonic clock, anchored to the wall clock when it is created.
///
/// Later changes of the wall clock have no effect. Until the program restarts, a change of the wall
/// clock shifts calendar windows and schedules by the size of the change. An
/// [upgrade](Self::continue_from) does not count as a restart. Calendar windows and schedules are
/// also off by the time for which the machine was suspended, because Linux's monotonic clock does
/// not count that time. Limits measure only elapsed time and are not affected. Clones are cheap and
/// return the same time.
///
/// The clock counts processor ticks, because reading any other clock takes longer than a decision.
/// The tick rate is known only to within a few parts per million, and the resulting error would add
/// up to minutes over months. [`Self::follow`] therefore corrects the counter against the system's
/// monotonic clock, whose rate is adjusted by time synchronisation.
///
/// The counter can also jump: it may count the time of a suspension, which the monotonic clock does
/// not count, or restart at zero. Therefore, the counter is trusted for only two seconds after each
/// comparison with the monotonic clock. If the two seconds have elapsed, or if the counter is lower
/// than before, a read of the time first makes a new comparison. A jump of the counter therefore
/// shifts the time by at most two seconds, and only until the next comparison.
#[derive(Clone, Debug)]
pub struct Clock(TimeSource);

#[derive(Clone, Debug)]
enum TimeSource {
    Real(Arc<TickCounter>),
    Manual(Arc<AtomicU64>),
    #[cfg(feature = "tokio")]
    Tokio {
        start: tokio::time::Instant,
        wall_start: Timestamp,
    },
}

/// Counts processor ticks since the counter was created.
#[derive(Debug)]
struct TickCounter {
    clock: quanta::Clock,
    start: u64,
    /// The duration of one tick, in units of 2^-64 microseconds.
    tick: u64,
    steady_start: Instant,
    /// The time at `steady_start`.
    wall_start_micros: AtomicU64,
    /// The offset added to the counted microseconds: the wall clock at the start, plus the
    /// accumulated lag of the counter behind the system's monotonic clock.
    anchor_micros: AtomicU64,
    /// The counter in microseconds at the last comparison with the system clock.
    compared_micros: AtomicU64,
}

/// The time for which the counter is trusted after a comparison: twice the server's interval
/// between comparisons, so that decisions normally do not read the system clock.
const TRUSTED_MICROS: u64 = 2_000_000;

impl TickCounter {
    fn nanos(&self) -> u64 {
        self.clock.delta_as_nanos(self.start, self.clock.raw())
    }

    /// Returns the microseconds since the start, computed from the ticks alone. Every decision
    /// converts ticks to microseconds, so the conversion takes only one multiplication.
    fn counted_micros(&self) -> u64 {
        // After a counter restart, the count is lower than at the start. The difference wraps
        // around, and the anchor compensates for the wrap.
        micros_of(self.clock.raw().wrapping_sub(self.start), self.tick)
    }

    #[inline]
    fn micros(&self) -> u64 {
        let counted = self.counted_micros();
        // Use `Acquire`, so that the anchor read below is not older than this comparison.
        let compared = self.compared_micros.load(Ordering::Acquire);
        // If the counter went backwards, the difference wraps around to a large number.
        if counted.wrapping_sub(compared) > TRUSTED_MICROS {
            return self.compared();
        }
        let anchor = self.anchor_micros.load(Ordering::Relaxed);
        anchor.wrapping_add(counted)
    }

    /// Compares the counter with the system clock and returns the corrected time.
    #[cold]
    fn compared(&self) -> u64 {
        let (steady, counted) = self.read_both();
        self.follow(steady, counted)
    }

    /// Reads the system clock and the counter at almost the same instant. The counter is read last,
    /// so that the corrected time is never ahead of the system clock.
    fn read_both(&self) -> (u64, u64) {
        /// Two reads that are at most this far apart count as simultaneous. Reading a clock takes
        /// less time, unless the thread is preempted or the machine is suspended.
        const TOGETHER_MICROS: u64 = 100;
        /// The number of attempts to read both clocks at the same time.
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

    fn continue_from(&self, now: u64) {
        let (steady, counted) = self.read_both();
        let start = now.saturating_sub(steady);
        self.wall_start_micros.store(start, Ordering::Relaxed);
        self.follow(steady, counted);
    }

    /// Moves the anchor so that the counter value `counted` corresponds to the time `steady_micros`
    /// after the start. Returns that time.
    fn follow(&self, steady_micros: u64, counted: u64) -> u64 {
        let start = self.wall_start_micros.load(Ordering::Relaxed);
        let now = start.saturating_add(steady_micros);
        let anchor = now.wrapping_sub(counted);
        self.anchor_micros.store(anchor, Ordering::Relaxed);
        self.compared_micros.store(counted, Ordering::Release);
        now
    }
}

/// Returns the duration of one tick of `clock`, in units of 2^-64 microseconds.
fn tick(clock: &quanta::Clock) -> u64 {
    /// 2^40 ticks take minutes at any tick rate, so whole nanoseconds are precise enough.
    const TICKS: u32 = 40;
    let nanos = clock.delta_as_nanos(0, 1 << TICKS);
    // A tick is shorter than a microsecond on every processor. With a longer tick, the conversion
    // would saturate.
    u64::try_from((u128::from(nanos) << (64 - TICKS)) / 1_000).unwrap_or(u64::MAX)
}

/// Converts `ticks` to microseconds, where one tick takes `tick` units of 2^-64 microseconds.
fn micros_of(ticks: u64, tick: u64) -> u64 {
    // The result is the upper half of the 128-bit product.
    u64::try_from((u128::from(ticks) * u128::from(tick)) >> 64).unwrap_or(u64::MAX)
}

impl Clock {
    /// Creates a clock anchored to the current wall clock time.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "only this function reads the wall clock, to anchor the monotonic counter"
    )]
    pub fn real() -> Self {
        let clock = quanta::Clock::new();
        let wall = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let wall_start_micros = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        let counter = TickCounter {
            start: clock.raw(),
            tick: tick(&clock),
            steady_start: Instant::now(),
            clock,
            wall_start_micros: AtomicU64::new(wall_start_micros),
            anchor_micros: AtomicU64::new(wall_start_micros),
            compared_micros: AtomicU64::new(0),
        };
        Self(TimeSource::Real(Arc::new(counter)))
    }

    /// Corrects the counted time against the system's monotonic clock. One call per second is
    /// enough, because the two clocks diverge by only a few dozen microseconds per second. A
    /// correction may move the time back by a few dozen microseconds. Until the time has caught up,
    /// stores use the latest instant that they have seen.
    pub fn follow(&self) {
        if let TimeSource::Real(counter) = &self.0 {
            counter.compared();
        }
    }

    /// Sets the time of this clock and of all its clones to `now`, which is the time of the old
    /// process in an upgrade. If the wall clock was stepped while the old process was running, the
    /// clocks of the two processes differ, and instants of the old process would be wrong in this
    /// process. Has no effect on a clock of tokio.
    pub fn continue_from(&self, now: Timestamp) {
        match &self.0 {
            TimeSource::Real(counter) => counter.continue_from(now.as_micros()),
            TimeSource::Manual(_) => self.set(now),
            #[cfg(feature = "tokio")]
            TimeSource::Tokio { .. } => {}
        }
    }

    /// Creates a clock for tests. The time of this clock changes only when the clock is set.
    #[must_use]
    pub fn manual(now: Timestamp) -> Self {
        Self(TimeSource::Manual(Arc::new(AtomicU64::new(
            now.as_micros(),
        ))))
    }

    /// Creates a clock that starts at `now` and advances with tokio's time, which tests can pause.
    #[cfg(feature = "tokio")]
    #[must_use]
    pub fn tokio(now: Timestamp) -> Self {
        Self(TimeSource::Tokio {
            start: tokio::time::Instant::now(),
            wall_start: now,
        })
    }

    /// Sets a manual clock and all its clones. Has no effect on other clocks.
    pub fn set(&self, now: Timestamp) {
        if let TimeSource::Manual(micros) = &self.0 {
            micros.store(now.as_micros(), Ordering::SeqCst);
        }
    }

    /// Returns the nanoseconds since an arbitrary instant, for measuring durations.
    #[must_use]
    pub fn nanos(&self) -> u64 {
        match &self.0 {
            TimeSource::Real(counter) => counter.nanos(),
            TimeSource::Manual(micros) => micros.load(Ordering::SeqCst).saturating_mul(1_000),
            #[cfg(feature = "tokio")]
            TimeSource::Tokio { start, .. } => {
                u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
            }
        }
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        match &self.0 {
            TimeSource::Real(counter) => Timestamp::from_micros(counter.micros()),
            TimeSource::Manual(micros) => Timestamp::from_micros(micros.load(Ordering::SeqCst)),
            #[cfg(feature = "tokio")]
            TimeSource::Tokio { start, wall_start } => {
                let micros = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
                wall_start.after(Span::from_micros(micros))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drifting_counter_is_corrected_in_both_directions() {
        const HOUR: u64 = 3_600_000_000;
        let TimeSource::Real(counter) = Clock::real().0 else {
            panic!("a real clock has a counter");
        };
        let start = counter.wall_start_micros.load(Ordering::Relaxed);
        // The test takes less than a minute.
        let is_about = |now: u64, expected: u64| now.abs_diff(expected) < HOUR / 60;
        let counted = counter.counted_micros();
        assert_eq!(counter.follow(HOUR, counted), start + HOUR);
        let anchor = counter.anchor_micros.load(Ordering::Relaxed);
        assert!(is_about(anchor + counter.counted_micros(), start + HOUR));
        let clock = Clock(TimeSource::Real(counter));
        clock.follow();
        assert!(is_about(clock.now().as_micros(), start));
    }

    /// Simulates a machine that is suspended for ten minutes, and a counter that restarts.
    #[test]
    fn a_counter_jump_does_not_move_the_clock() {
        const MINUTES: u64 = 600_000_000_000;
        let (ticks, mock) = quanta::Clock::mock();
        mock.increment(MINUTES);
        let TimeSource::Real(mut counter) = Clock::real().0 else {
            panic!("a real clock has a counter");
        };
        let mocked = Arc::get_mut(&mut counter).unwrap();
        (mocked.start, mocked.tick, mocked.clock) = (ticks.raw(), tick(&ticks), ticks);
        let clock = Clock(TimeSource::Real(counter));
        let start = clock.now();
        // The remaining difference is the duration of the test itself.
        let is_about_start =
            |now: Timestamp| now.as_micros().abs_diff(start.as_micros()) < 60_000_000;
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
    fn a_clock_continues_from_the_time_of_another_process() {
        const HOUR: u64 = 3_600_000_000;
        let clock = Clock::real();
        for shift in [-1, 1] {
            let other = clock
                .now()
                .as_micros()
                .strict_add_signed(shift * 3_600_000_000);
            clock.clone().continue_from(Timestamp::from_micros(other));
            for _ in 0..2 {
                let ahead = clock.now().as_micros() - other;
                assert!(ahead < HOUR / 60, "{ahead}");
                clock.follow();
            }
        }
    }

    #[test]
    fn ticks_are_microseconds_by_one_multiplication() {
        let TimeSource::Real(counter) = Clock::real().0 else {
            panic!("a real clock has a counter");
        };
        // At 3 GHz, these numbers of ticks take 0.35 ms, 24 minutes and 26 hours.
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
    fn a_manual_clock_moves_only_when_set() {
        let clock = Clock::manual(Timestamp::from_micros(7));
        clock.follow();
        assert_eq!(clock.now(), Timestamp::from_micros(7));
    }
}
