//! The state of the task that writes the expiry queue.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_net::prometheus::{Metric, Page};
use tidegate_redis::StoreError;

const WRITES: Metric<1> = Metric::counter(
    "tidegate_expiry_queue_writes_total",
    ["result"],
    "Attempts to write the outstanding reservations of this server to Redis, by result.",
);

/// The state of the task that writes the expiry queue.
#[derive(Debug, Default)]
pub(crate) struct ExpiryQueueWriter {
    /// This lock is held during a write, so that the last write before the server stops does not
    /// overlap with a write of the background task. No call of a client waits for the lock, so it
    /// may be held across an await.
    pub(crate) write_lock: tokio::sync::Mutex<()>,
    is_failing: AtomicBool,
    is_full: AtomicBool,
    /// The numbers of successful and failed writes.
    counts: [AtomicU64; 2],
}

impl ExpiryQueueWriter {
    /// Counts a write, and logs when writes start to fail, and when they succeed again. The result
    /// is the number of reservations that did not fit in the expiry queue.
    pub(crate) fn record(&self, result: &Result<u64, StoreError>) {
        self.counts[usize::from(result.is_err())].fetch_add(1, Ordering::Relaxed);
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match result {
            Err(error) if !was_failing => tracing::warn!(
                "failed to write the outstanding reservations to Redis, so they stay charged if this server is killed: {error}; \
                 retrying (further failures are not logged until an attempt succeeds)"
            ),
            Ok(_) if was_failing => {
                tracing::info!("writing the outstanding reservations to Redis succeeded again");
            }
            _ => {}
        }
        let is_full = matches!(result, Ok(1..));
        let was_full = self.is_full.swap(is_full, Ordering::Relaxed);
        if is_full && !was_full {
            tracing::warn!(
                "Redis holds too many outstanding reservations; further ones stay charged if this server is stopped; \
                 shorten the `ttl` of the reservations, or settle them"
            );
        }
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let [ok, failed] = &self.counts;
        let results = [("ok", ok), ("failed", failed)];
        let results = results.map(|(result, count)| ([result], count.load(Ordering::Relaxed)));
        page.family(&WRITES, results);
    }
}
