//! A rate limit for log messages, applied to each call site separately.
//!
//! Clients can cause many log messages, for example with failed handshakes, refused connections and
//! invalid tokens. Without a limit, a client could fill the disk with log messages. Each call site
//! may write a burst of [`BURST`] messages, and then one more message every [`INTERVAL`].
//! Suppressed messages are counted, and the next written message reports the count.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use tidegate::Clock;
use tidegate_core::{Span, Timestamp};

/// The number of log messages that a call site may write in a burst.
pub const BURST: u64 = 30;

/// After its burst, a call site may write one more log message per interval.
pub const INTERVAL: Span = Span::from_secs(5);

/// The maximum number of tracked call sites. The number of call sites in a program is fixed, and
/// far below the maximum. Call sites beyond the maximum share one limit.
const MAX_SITES: usize = 4_096;

/// A rate limiter for log messages, with a separate limit for each call site. An `Id` identifies a
/// call site.
#[derive(Debug)]
pub struct LogThrottle<Id> {
    clock: Clock,
    sites: Mutex<HashMap<Option<Id>, Site>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Site {
    /// The time at which the whole burst is available again (the theoretical arrival time of GCRA).
    full_at: Timestamp,
    suppressed: u64,
}

/// Whether to write a log message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThrottleDecision {
    /// Write the message, and report how many messages from this call site were suppressed since
    /// its last written message.
    Write {
        /// The number of suppressed messages.
        suppressed: u64,
    },
    /// Suppress the message.
    Suppress,
}

impl<Id: Eq + Hash> LogThrottle<Id> {
    /// Creates a throttle that uses `clock`.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            sites: Mutex::default(),
        }
    }

    /// Creates a throttle that uses the system clock.
    #[must_use]
    pub fn real() -> Self {
        Self::new(Clock::real())
    }

    /// Decides whether the call site `id` may write a log message now.
    pub fn admit(&self, id: Id) -> ThrottleDecision {
        let now = self.clock.now();
        let mut sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
        let id = Some(id);
        let id = if sites.len() < MAX_SITES || sites.contains_key(&id) {
            id
        } else {
            None
        };
        sites.entry(id).or_default().admit(now)
    }
}

impl Site {
    fn admit(&mut self, now: Timestamp) -> ThrottleDecision {
        let interval = INTERVAL.as_micros();
        // The limit is GCRA: each message moves `full_at` forward by one interval, and `full_at`
        // may be at most one burst ahead of `now`.
        let full_at = self.full_at.as_micros().max(now.as_micros());
        let ahead = full_at - now.as_micros();
        if ahead > interval * (BURST - 1) {
            self.suppressed = self.suppressed.saturating_add(1);
            return ThrottleDecision::Suppress;
        }
        self.full_at = Timestamp::from_micros(full_at.saturating_add(interval));
        let suppressed = std::mem::take(&mut self.suppressed);
        ThrottleDecision::Write { suppressed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_secs(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000 + secs * 1_000_000)
    }

    #[test]
    fn a_burst_is_logged_and_then_one_record_per_interval_with_the_suppressed_count() {
        let clock = Clock::manual(at_secs(0));
        let throttle = LogThrottle::new(clock.clone());
        let written = |decision| matches!(decision, ThrottleDecision::Write { .. });
        let admitted = (0..1_000).filter(|_| written(throttle.admit("a"))).count();
        assert_eq!(admitted, 30);
        assert!(written(throttle.admit("b")), "another call site");
        clock.set(at_secs(4));
        assert_eq!(throttle.admit("a"), ThrottleDecision::Suppress);
        clock.set(at_secs(5));
        assert_eq!(
            throttle.admit("a"),
            ThrottleDecision::Write { suppressed: 971 }
        );
        assert_eq!(throttle.admit("a"), ThrottleDecision::Suppress);
        clock.set(at_secs(1_000));
        assert_eq!(
            throttle.admit("a"),
            ThrottleDecision::Write { suppressed: 1 }
        );
        assert_eq!(
            throttle.admit("a"),
            ThrottleDecision::Write { suppressed: 0 }
        );
    }

    #[test]
    fn memory_is_bounded_for_any_number_of_call_sites() {
        let throttle = LogThrottle::new(Clock::manual(at_secs(0)));
        for site in 0..2 * MAX_SITES {
            throttle.admit(site);
        }
        assert_eq!(throttle.sites.lock().unwrap().len(), MAX_SITES + 1);
        assert_eq!(throttle.admit(2 * MAX_SITES), ThrottleDecision::Suppress);
    }
}
