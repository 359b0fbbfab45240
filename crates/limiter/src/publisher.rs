//! Publications: lists that each server writes to Redis, so that each server can report on all of
//! them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_net::prometheus::{Metric, Page};
use tidegate_redis::{StoreError, random_server_id};

/// The state of publishing a list (such as recent denials) to Redis, where the other servers read
/// it.
#[derive(Debug)]
pub(crate) struct Publisher {
    /// The ID of this server. Each start of the server creates a new ID.
    id: String,
    /// The name of the published content, for log records.
    content: &'static str,
    metric: &'static Metric<1>,
    is_publishing: AtomicBool,
    is_failing: AtomicBool,
    /// The numbers of successful and failed publications.
    counts: [AtomicU64; 2],
}

/// A publication in progress. The publication ends when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Publication<'p>(&'p Publisher);

impl Publisher {
    /// Creates the publisher of `content`. The `metric` exports the number of publications by
    /// result.
    pub(crate) fn new(content: &'static str, metric: &'static Metric<1>) -> Self {
        Self {
            id: random_server_id(),
            content,
            metric,
            is_publishing: AtomicBool::default(),
            is_failing: AtomicBool::default(),
            counts: Default::default(),
        }
    }

    /// Returns the ID of this server.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Begins a publication. Returns `None` if another publication is in progress.
    pub(crate) fn begin(&self) -> Option<Publication<'_>> {
        let was_publishing = self.is_publishing.swap(true, Ordering::Acquire);
        (!was_publishing).then_some(Publication(self))
    }

    /// Counts a publication, and logs when publications start to fail, and when they succeed again.
    pub(crate) fn record(&self, result: &Result<(), StoreError>) {
        self.counts[usize::from(result.is_err())].fetch_add(1, Ordering::Relaxed);
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        let content = self.content;
        match result {
            Err(error) if !was_failing => tracing::warn!(
                "failed to write {content} to Redis, so other servers do not list the latest requests of this server: \
                 {error}; retrying (further failures are not logged until an attempt succeeds)"
            ),
            Ok(()) if was_failing => tracing::info!("writing {content} to Redis succeeded again"),
            _ => {}
        }
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let [ok, failed] = &self.counts;
        let results = [("ok", ok), ("failed", failed)];
        let results = results.map(|(result, count)| ([result], count.load(Ordering::Relaxed)));
        page.family(self.metric, results);
    }
}

impl Drop for Publication<'_> {
    fn drop(&mut self) {
        self.0.is_publishing.store(false, Ordering::Release);
    }
}
