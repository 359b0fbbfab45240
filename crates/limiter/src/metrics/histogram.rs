//! The histogram of decision latency.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tidegate_net::prometheus::{Metric, Page};

/// The upper bounds of the buckets. Each bound is given in nanoseconds and in seconds.
const BOUNDS: [(u64, f64); 12] = [
    (100, 1e-7),
    (250, 2.5e-7),
    (500, 5e-7),
    (1_000, 1e-6),
    (2_500, 2.5e-6),
    (5_000, 5e-6),
    (10_000, 1e-5),
    (25_000, 2.5e-5),
    (100_000, 1e-4),
    (1_000_000, 1e-3),
    (10_000_000, 1e-2),
    (100_000_000, 1e-1),
];

const LATENCY: Metric = Metric::histogram(
    "tidegate_decision_duration_seconds",
    "Decision latency. Each thread measures one in 64 of its decisions.",
);

#[derive(Debug, Default)]
pub(super) struct Histogram {
    /// The buckets, one more than there are bounds. The last bucket is `+Inf`.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    total_nanos: AtomicU64,
}

impl Histogram {
    pub(super) fn observe(&self, nanos: u64) {
        let bucket = BOUNDS.partition_point(|(bound, _)| *bound < nanos);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.total_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Adds the sum of the histograms in `parts` to `page`.
    pub(super) fn collect<'h>(
        parts: &(impl Iterator<Item = &'h Self> + Clone),
        page: &mut Page<'_>,
    ) {
        let sum = |counter: &dyn Fn(&Self) -> &AtomicU64| -> u64 {
            let parts = parts.clone();
            parts
                .map(|part| counter(part).load(Ordering::Relaxed))
                .sum()
        };
        let bounds = BOUNDS
            .iter()
            .map(|(_, seconds)| *seconds)
            .chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds
            .enumerate()
            .map(|(bucket, bound)| (bound, sum(&|part| &part.buckets[bucket])))
            .collect();
        let total = Duration::from_nanos(sum(&|part| &part.total_nanos));
        page.histogram(&LATENCY, total, &buckets);
    }
}

#[cfg(test)]
mod tests {
    use tidegate_net::prometheus::{Format, encode};

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histogram = Histogram::default();
        for nanos in [100, 101, 1_500, u64::from(u32::MAX)] {
            histogram.observe(nanos);
        }
        let text = encode(Format::Text, move |page| {
            Histogram::collect(&std::iter::once(&histogram), page);
        });
        for line in [
            "tidegate_decision_duration_seconds_bucket{le=\"1e-7\"} 1",
            "tidegate_decision_duration_seconds_bucket{le=\"2.5e-7\"} 2",
            "tidegate_decision_duration_seconds_bucket{le=\"0.0000025\"} 3",
            "tidegate_decision_duration_seconds_bucket{le=\"0.1\"} 3",
            "tidegate_decision_duration_seconds_bucket{le=\"+Inf\"} 4",
            "tidegate_decision_duration_seconds_sum 4.294968996",
            "tidegate_decision_duration_seconds_count 4",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is missing in\n{text}"
            );
        }
    }
}
