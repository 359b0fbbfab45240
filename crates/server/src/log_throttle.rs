//! A rate limit for log records, one for each place in the code that logs.
//!
//! Many log records are caused by clients: a failed handshake, a refused connection, a wrong token. Without a limit a
//! client writes the log, and fills the disk with it. Each call site may write [`BURST`] records at once and one more
//! every [`INTERVAL`]; what comes sooner is counted, and the number is told with the next record that is written.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use tidegate_core::{Span, Timestamp};
use tidegate_http::Clock;

/// How many records a call site may write at once.
pub const BURST: u64 = 30;

/// How often a call site may write one more record after the burst.
pub const INTERVAL: Span = Span::from_secs(5);

/// The most call sites that are tracked. A program has a fixed number of them, far below this; records of any
/// further ones share one limit.
const MAX_SITES: usize = 4_096;

/// Limits the log records of each call site, which is identified by an `Id`.
#[derive(Debug)]
pub struct LogThrottle<Id> {
    clock: Clock,
    sites: Mutex<HashMap<Option<Id>, Site>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Site {
    /// The theoretical arrival time of GCRA: when all of the burst is available again.
    full_at: Timestamp,
    suppressed: u64,
}

/// Whether a record is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Write it, and tell how many records of its call site were suppressed since the last one.
    Write {
        /// How many were suppressed.
        suppressed: u64,
    },
    /// Do not write it.
    Suppress,
}

impl<Id: Eq + Hash> LogThrottle<Id> {
    /// A throttle that reads `clock`.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            sites: Mutex::default(),
        }
    }

    /// A throttle on the real clock.
    #[must_use]
    pub fn real() -> Self {
        Self::new(Clock::real())
    }

    /// Decides about one record of the call site `id`, now.
    pub fn admit(&self, id: Id) -> Admission {
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
    fn admit(&mut self, now: Timestamp) -> Admission {
        let interval = INTERVAL.as_micros();
        let full_at = self.full_at.as_micros().max(now.as_micros());
        let ahead = full_at - now.as_micros();
        if ahead > interval * (BURST - 1) {
            self.suppressed = self.suppressed.saturating_add(1);
            return Admission::Suppress;
        }
        self.full_at = Timestamp::from_micros(full_at.saturating_add(interval));
        let suppressed = std::mem::take(&mut self.suppressed);
        Admission::Write { suppressed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_secs(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000 + secs * 1_000_000)
    }

    #[test]
    fn a_burst_is_written_and_then_one_record_an_interval_with_the_number_left_out() {
        let clock = Clock::manual(at_secs(0));
        let throttle = LogThrottle::new(clock.clone());
        let written = |admission| matches!(admission, Admission::Write { .. });
        let admitted = (0..1_000).filter(|_| written(throttle.admit("a"))).count();
        assert_eq!(admitted, 30);
        assert!(written(throttle.admit("b")), "another call site");
        clock.set(at_secs(4));
        assert_eq!(throttle.admit("a"), Admission::Suppress);
        clock.set(at_secs(5));
        assert_eq!(throttle.admit("a"), Admission::Write { suppressed: 971 });
        assert_eq!(throttle.admit("a"), Admission::Suppress);
        clock.set(at_secs(1_000));
        assert_eq!(throttle.admit("a"), Admission::Write { suppressed: 1 });
        assert_eq!(throttle.admit("a"), Admission::Write { suppressed: 0 });
    }

    #[test]
    fn memory_is_bounded_whatever_the_number_of_call_sites() {
        let throttle = LogThrottle::new(Clock::manual(at_secs(0)));
        for site in 0..2 * MAX_SITES {
            throttle.admit(site);
        }
        assert_eq!(throttle.sites.lock().unwrap().len(), MAX_SITES + 1);
        assert_eq!(throttle.admit(2 * MAX_SITES), Admission::Suppress);
    }
}
