//! The histogram of decision latency.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_net::prometheus::Text;

/// The upper bounds of the buckets: in nanoseconds, and in seconds as Prometheus writes them.
const BOUNDS: [(u64, &str); 12] = [
    (100, "1e-07"),
    (250, "2.5e-07"),
    (500, "5e-07"),
    (1_000, "1e-06"),
    (2_500, "2.5e-06"),
    (5_000, "5e-06"),
    (10_000, "1e-05"),
    (25_000, "2.5e-05"),
    (100_000, "0.0001"),
    (1_000_000, "0.001"),
    (10_000_000, "0.01"),
    (100_000_000, "0.1"),
];

const NAME: &str = "tidegate_decision_duration_seconds";

#[derive(Debug, Default)]
pub(super) struct Histogram {
    /// One more bucket than bounds: the last is `+Inf`.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    total_nanos: AtomicU64,
}

impl Histogram {
    pub(super) fn observe(&self, nanos: u64) {
        let bucket = BOUNDS.partition_point(|(bound, _)| *bound < nanos);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.total_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Writes the sum of `parts`.
    pub(super) fn write<'h>(parts: &(impl Iterator<Item = &'h Self> + Clone), text: &mut Text) {
        text.family(
            NAME,
            "histogram",
            "Decision latency, measured on one decision in 64 of each thread.",
        );
        let count_in = |bucket: usize| -> u64 {
            parts
                .clone()
                .map(|part| part.buckets[bucket].load(Ordering::Relaxed))
                .sum()
        };
        let mut below = 0;
        let labels = BOUNDS.iter().map(|(_, label)| *label).chain(["+Inf"]);
        for (bucket, label) in labels.enumerate() {
            below += count_in(bucket);
            text.sample(
                "tidegate_decision_duration_seconds_bucket",
                &[("le", label)],
                below,
            );
        }
        let nanos: u64 = parts
            .clone()
            .map(|part| part.total_nanos.load(Ordering::Relaxed))
            .sum();
        text.nanos_as_seconds("tidegate_decision_duration_seconds_sum", nanos);
        text.sample("tidegate_decision_duration_seconds_count", &[], below);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histogram = Histogram::default();
        for nanos in [100, 101, 1_500, u64::from(u32::MAX)] {
            histogram.observe(nanos);
        }
        let mut text = Text::default();
        Histogram::write(&std::iter::once(&histogram), &mut text);
        let text = text.finish();
        for line in [
            "tidegate_decision_duration_seconds_bucket{le=\"1e-07\"} 1",
            "tidegate_decision_duration_seconds_bucket{le=\"2.5e-07\"} 2",
            "tidegate_decision_duration_seconds_bucket{le=\"2.5e-06\"} 3",
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
