//! A log throttle: at most one record a minute.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::{Span, Timestamp};

/// The minimum time between two records of one kind.
pub(super) const PERIOD: Span = Span::from_secs(60);

/// A throttle for one kind of log record. The throttle stores when the next record may be logged,
/// and how many events earlier records have reported.
#[derive(Debug, Default)]
pub(super) struct EventLogThrottle {
    next_micros: AtomicU64,
    covered: AtomicU64,
}

impl EventLogThrottle {
    /// Creates a throttle. Earlier log records have already reported the first `covered` events.
    pub(super) fn after(covered: u64) -> Self {
        Self {
            next_micros: AtomicU64::new(0),
            covered: AtomicU64::new(covered),
        }
    }

    /// Returns the number of events that a record logged at `now` must report. Returns `None` if a
    /// record was logged less than a minute ago; this check is a single atomic load. `total`
    /// returns the number of events so far.
    pub(super) fn open(&self, now: Timestamp, total: impl FnOnce() -> u64) -> Option<u64> {
        let next = self.next_micros.load(Ordering::Relaxed);
        if now.as_micros() < next {
            return None;
        }
        let later = now.after(PERIOD).as_micros();
        self.next_micros
            .compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed)
            .ok()?;
        let total = total();
        let covered = self.covered.swap(total, Ordering::Relaxed);
        Some(total.saturating_sub(covered))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_minute_counts_the_suppressed_ones() {
        let throttle = EventLogThrottle::after(5);
        let at = |secs: u64| Timestamp::from_micros(1_700_000_000_000_000 + secs * 1_000_000);
        assert_eq!(throttle.open(at(0), || 6), Some(1));
        assert_eq!(throttle.open(at(59), || unreachable!()), None);
        assert_eq!(throttle.open(at(60), || 16), Some(10));
        assert_eq!(throttle.open(at(61), || unreachable!()), None);
    }
}
