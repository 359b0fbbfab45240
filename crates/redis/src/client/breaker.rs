//! The circuit breaker of a server, and the backoff between connection attempts.

use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use tidegate_core::{Backoff, Jitter, Span};

/// Size of the sliding window, in batches.
const WINDOW: u32 = 16;

/// The breaker opens at this number of failures in the window.
const MAX_FAILURES: u32 = 8;

/// The breaker opens at this number of consecutive failures, regardless of the other outcomes in
/// the window.
const MAX_CONSECUTIVE: u32 = 3;

/// A circuit breaker that stores the outcomes of the latest batches, with one bit for each batch. A
/// reply after the timeout is counted as a failure, because a slow server delays callers as much as
/// a server that is down.
#[derive(Debug, Default)]
pub(super) struct Breaker(AtomicU32);

impl Breaker {
    /// Records whether a batch failed. Returns true if the breaker opens. Once the breaker is open,
    /// the server must not be used.
    pub(super) fn record(&self, failed: bool) -> bool {
        let shifted = |recent: u32| (recent << 1 | u32::from(failed)) & ((1 << WINDOW) - 1);
        let before = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |recent| {
                Some(shifted(recent))
            });
        let recent = before.map_or(0, shifted);
        recent.count_ones() >= MAX_FAILURES || recent.trailing_ones() >= MAX_CONSECUTIVE
    }

    /// Discards all outcomes, because a new connection was opened.
    pub(super) fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// The backoff between connection attempts, with jitter so that nodes do not all reconnect at the
/// same time.
#[derive(Debug, Default)]
pub(super) struct ReconnectBackoff {
    attempts: u32,
}

impl ReconnectBackoff {
    const BACKOFF: Backoff = Backoff::new(Span::from_millis(50), Span::from_secs(1), Jitter::Equal);

    /// Returns the wait time before the next attempt, which is zero for the first attempt. Each
    /// later wait time is between 50 and 100 percent of the exponential backoff.
    pub(super) fn next_wait(&mut self) -> Duration {
        let attempts = self.attempts;
        self.attempts = attempts.saturating_add(1);
        let Some(retry) = attempts.checked_sub(1) else {
            return Duration::ZERO;
        };
        // The random seed of a hasher is sufficient for jitter.
        let random = RandomState::new().hash_one(retry);
        Duration::from_micros(Self::BACKOFF.wait(retry, random).as_micros())
    }

    pub(super) fn reset(&mut self) {
        self.attempts = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failures_in_a_row_or_half_of_sixteen_open_the_breaker() {
        let breaker = Breaker::default();
        assert!(
            ![true, true, false, true, true]
                .iter()
                .any(|failed| breaker.record(*failed))
        );
        assert!(breaker.record(true));

        let breaker = Breaker::default();
        let trips = (0..16)
            .map(|at| breaker.record(at % 2 == 0))
            .collect::<Vec<_>>();
        assert_eq!(trips.iter().position(|trips| *trips), Some(14));
    }

    #[test]
    fn waits_grow_with_jitter_up_to_a_maximum() {
        let mut reconnect = ReconnectBackoff::default();
        let waits: Vec<Duration> = (0..20).map(|_| reconnect.next_wait()).collect();
        assert_eq!(waits[0], Duration::ZERO);
        let (first, longest) = (Duration::from_millis(50), Duration::from_secs(1));
        for (attempt, wait) in waits.iter().enumerate().skip(1) {
            let most = (first * (1 << (attempt - 1).min(5))).min(longest);
            assert!((most / 2..=most).contains(wait), "{attempt}: {wait:?}");
        }
        assert_ne!(
            waits[18], waits[19],
            "two waits are the same to the microsecond"
        );
        reconnect.reset();
        assert_eq!(reconnect.next_wait(), Duration::ZERO);
    }
}
