//! The counters of an upstream, one set for each worker.

use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;

use crate::error::ProxyError;

/// The status classes of responses, as metric labels.
pub(crate) const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The errors that are counted per upstream.
pub(crate) const UPSTREAM_ERRORS: [ProxyError; 6] = [
    ProxyError::Full,
    ProxyError::Local,
    ProxyError::Unreachable,
    ProxyError::ConnectTimeout,
    ProxyError::HeadTimeout,
    ProxyError::BadResponse,
];

/// The counters of one upstream, one shard per worker.
#[derive(Debug)]
pub(crate) struct UpstreamMetrics(Box<[MetricsShard]>);

// Align to 128 bytes (two cache lines), because processors with adjacent-line prefetch load cache
// lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct MetricsShard {
    pub(crate) responses: [AtomicU64; STATUS_CLASSES.len()],
    pub(crate) failures: [AtomicU64; UPSTREAM_ERRORS.len()],
    pub(crate) retries: AtomicU64,
}

impl UpstreamMetrics {
    pub(crate) fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| MetricsShard::default()).collect())
    }

    /// Counts a response from the upstream.
    pub(crate) fn count_response(&self, worker: usize, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).wrapping_sub(1);
        let counter = self
            .0
            .get(worker)
            .and_then(|shard| shard.responses.get(class));
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a failed request, if the failure is one of [`UPSTREAM_ERRORS`].
    pub(crate) fn count_failure(&self, worker: usize, error: ProxyError) {
        let at = UPSTREAM_ERRORS.iter().position(|failure| *failure == error);
        if let Some((shard, at)) = self.0.get(worker).zip(at) {
            shard.failures[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a retry.
    pub(crate) fn count_retry(&self, worker: usize) {
        if let Some(shard) = self.0.get(worker) {
            shard.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn sum(&self, counter: impl Fn(&MetricsShard) -> &AtomicU64) -> u64 {
        self.0
            .iter()
            .map(|shard| counter(shard).load(Ordering::Relaxed))
            .sum()
    }
}
