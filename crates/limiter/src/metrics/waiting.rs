//! Metrics of requests waiting for concurrency slots.

use tidegate::{WaitEnd, WaitStats, Waiters};
use tidegate_core::Span;
use tidegate_net::prometheus::{HistogramSample, Metric, Page, count};

const WAITING: Metric = Metric::gauge(
    "tidegate_waiting_requests",
    [],
    "Requests waiting for a concurrency slot.",
);

const WAIT_SECONDS: Metric<1> = Metric::histogram(
    "tidegate_wait_duration_seconds",
    ["result"],
    "Time that requests waited for a concurrency slot, by result: admitted, denied or cancelled.",
);

/// Adds the metrics of `waiters` to `page`.
pub(crate) fn collect(waiters: &Waiters, page: &mut Page<'_>) {
    page.single(&WAITING, count(waiters.count()));
    let stats = waiters.stats();
    let waits = WaitEnd::ALL.map(|end| ([end.as_str()], sample(stats, end)));
    page.histograms(&WAIT_SECONDS, waits);
}

fn sample(stats: &WaitStats, end: WaitEnd) -> HistogramSample {
    let bounds = WaitStats::BOUNDS.map(seconds).into_iter();
    HistogramSample {
        sum: seconds(stats.total(end)),
        buckets: bounds
            .chain([f64::INFINITY])
            .zip(stats.buckets(end))
            .collect(),
        exemplars: Vec::new(),
    }
}

fn seconds(span: Span) -> f64 {
    std::time::Duration::from(span).as_secs_f64()
}
