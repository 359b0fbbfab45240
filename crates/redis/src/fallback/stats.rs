//! Counters of a store with a fallback.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Health, StoreError};
use tidegate_core::Source;

/// The sources of decisions.
const SOURCES: [Source; 4] = [Source::Redis, Source::Cache, Source::Local, Source::Policy];

/// The reasons why Redis requests fail, as metric labels.
const FAILURES: [&str; 4] = ["not_executed", "unknown", "refused", "unavailable"];

/// Index of `unavailable` in `FAILURES`.
const UNAVAILABLE: usize = 3;

#[derive(Debug, Default)]
pub(super) struct FallbackCounters {
    decisions: [AtomicU64; SOURCES.len()],
    failures: [AtomicU64; FAILURES.len()],
}

/// The counters of a [`FallbackStore`](crate::FallbackStore), and the health of Redis.
#[derive(Clone, Debug)]
pub struct FallbackStats {
    /// Number of decisions by source: Redis, the denial cache, this node's share, and the failure
    /// policies `open` and `closed`.
    pub decisions: [(Source, u64); SOURCES.len()],
    /// Number of failed requests to Redis by reason: `not_executed`, `unknown` (the outcome),
    /// `refused` (by Redis), or `unavailable` (not sent because every server was known to be down).
    pub failures: [(&'static str, u64); FAILURES.len()],
    /// Number of servers that share this Redis, according to the last count; `None` if no count
    /// exists.
    pub servers: Option<u32>,
    /// The health of Redis.
    pub health: Health,
}

impl FallbackCounters {
    pub(super) fn count(&self, source: Source) {
        if let Some(at) = SOURCES.iter().position(|known| *known == source) {
            self.decisions[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn count_failure(&self, error: &StoreError) {
        let at = match error {
            StoreError::NotExecuted(_) => 0,
            StoreError::Unknown(_) => 1,
            // All other errors require action by an operator: Redis has refused the call, or the
            // value was not written by Tidegate.
            _ => 2,
        };
        self.failures[at].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_unavailable(&self) {
        self.failures[UNAVAILABLE].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stats(&self, health: Health, servers: Option<u32>) -> FallbackStats {
        let counted = |count: &AtomicU64| count.load(Ordering::Relaxed);
        FallbackStats {
            decisions: std::array::from_fn(|at| (SOURCES[at], counted(&self.decisions[at]))),
            failures: std::array::from_fn(|at| (FAILURES[at], counted(&self.failures[at]))),
            servers,
            health,
        }
    }
}
