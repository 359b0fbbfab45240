//! What a node of a fleet has done, counted.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::Source;
use tidegate_redis::{Health, StoreError};

/// The sources of a fleet's decisions.
pub(crate) const SOURCES: [Source; 4] =
    [Source::Redis, Source::Cache, Source::Local, Source::Policy];

/// Why Redis gave no answer, as a metric's label says it.
pub(crate) const FAILURES: [&str; 3] = ["not_executed", "unknown", "refused"];

#[derive(Debug, Default)]
pub(super) struct Counters {
    decisions: [AtomicU64; SOURCES.len()],
    failures: [AtomicU64; FAILURES.len()],
}

/// What was done, and how Redis is.
#[derive(Clone, Debug)]
pub struct FleetStats {
    /// Decisions from Redis, from the cache of denials, on this node's share, and by policy.
    pub decisions: [u64; SOURCES.len()],
    /// Questions that were not executed, whose fate is unknown, and that Redis refused.
    pub failures: [u64; FAILURES.len()],
    /// How Redis is.
    pub health: Health,
}

impl Counters {
    pub(super) fn count(&self, source: Source) {
        if let Some(at) = SOURCES.iter().position(|known| *known == source) {
            self.decisions[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn count_failure(&self, error: &StoreError) {
        let at = match error {
            StoreError::NotExecuted(_) => 0,
            StoreError::Unknown(_) => 1,
            // Refused, or the value is not ours: somebody has to do something about it.
            _ => 2,
        };
        self.failures[at].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stats(&self, health: Health) -> FleetStats {
        FleetStats {
            decisions: self
                .decisions
                .each_ref()
                .map(|count| count.load(Ordering::Relaxed)),
            failures: self
                .failures
                .each_ref()
                .map(|count| count.load(Ordering::Relaxed)),
            health,
        }
    }
}
