//! Histograms with fixed buckets.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tidegate_net::prometheus::HistogramSample;

/// A histogram with `BUCKETS` buckets: one for each upper bound, and one for all larger numbers.
/// The bounds are constants that the caller passes to each method, so that thousands of histograms
/// do not each store them.
#[derive(Debug)]
pub(super) struct Histogram<const BUCKETS: usize> {
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
}

impl<const BUCKETS: usize> Default for Histogram<BUCKETS> {
    fn default() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum: AtomicU64::new(0),
        }
    }
}

/// The counts of a histogram at one time.
#[derive(Debug)]
pub(super) struct HistogramCounts<const BUCKETS: usize> {
    buckets: [u64; BUCKETS],
    sum: u64,
}

/// Returns the index of the bucket of `number`. `bounds` are the upper bounds in ascending order. A
/// bucket includes its upper bound.
pub(super) fn bucket_of(bounds: &[(u64, f64)], number: u64) -> usize {
    bounds.partition_point(|(bound, _)| *bound < number)
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    /// Counts `number` in its bucket. `bounds` consists of the upper bounds in ascending order,
    /// one fewer than there are buckets.
    pub(super) fn observe(&self, bounds: &[(u64, f64)], number: u64) {
        debug_assert_eq!(bounds.len() + 1, BUCKETS, "the last bucket has no bound");
        let bucket = bucket_of(bounds, number);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(number, Ordering::Relaxed);
    }

    /// Adds up the counts of all `parts`.
    pub(super) fn sum<'h>(parts: impl Iterator<Item = &'h Self>) -> HistogramCounts<BUCKETS> {
        let mut counts = HistogramCounts {
            buckets: [0; BUCKETS],
            sum: 0,
        };
        for part in parts {
            for (sum, bucket) in counts.buckets.iter_mut().zip(&part.buckets) {
                *sum += bucket.load(Ordering::Relaxed);
            }
            counts.sum += part.sum.load(Ordering::Relaxed);
        }
        counts
    }
}

impl<const BUCKETS: usize> HistogramCounts<BUCKETS> {
    /// Returns whether nothing has been observed.
    pub(super) fn is_empty(&self) -> bool {
        self.buckets.iter().all(|count| *count == 0)
    }

    /// Returns the counts as a sample of a metric. `bounds` contains each upper bound twice: in the
    /// unit of the observed numbers, and in the unit of the metric. `to_unit` converts the sum to
    /// the unit of the metric.
    pub(super) fn to_sample(
        &self,
        bounds: &[(u64, f64)],
        to_unit: fn(u64) -> f64,
    ) -> HistogramSample {
        let bounds = bounds.iter().map(|(_, bound)| *bound);
        HistogramSample {
            sum: to_unit(self.sum),
            buckets: bounds.chain([f64::INFINITY]).zip(self.buckets).collect(),
            exemplars: Vec::new(),
        }
    }
}

/// Converts nanoseconds to seconds.
pub(super) fn nanos_to_seconds(nanos: u64) -> f64 {
    Duration::from_nanos(nanos).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: [(u64, f64); 2] = [(100, 1e-7), (1_000_000_000, 1.0)];

    #[test]
    fn buckets_include_their_bound() {
        let parts = [Histogram::<3>::default(), Histogram::<3>::default()];
        assert!(Histogram::sum(parts.iter()).is_empty());
        parts[0].observe(&BOUNDS, 100);
        for nanos in [101, 1_000_000_000, 1_500_000_000] {
            parts[1].observe(&BOUNDS, nanos);
        }
        let counts = Histogram::sum(parts.iter());
        assert!(!counts.is_empty());
        let sample = counts.to_sample(&BOUNDS, nanos_to_seconds);
        assert_eq!(sample.buckets, [(1e-7, 1), (1.0, 2), (f64::INFINITY, 1)]);
        assert!((sample.sum - 2.500_000_201).abs() < 1e-12);
    }
}
