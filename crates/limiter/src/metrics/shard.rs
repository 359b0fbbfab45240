//! Per-thread counters, which avoid cache line contention between cores.

use std::{
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use tidegate_core::Timestamp;
use tidegate_net::prometheus::{Exemplar, HistogramSample, Metric, Page};

use super::{
    ListenerKind, SAMPLE_EVERY, VERDICT_KINDS,
    histogram::{Histogram, bucket_of, nanos_to_seconds},
};

/// The number of shards. If there are more threads, some threads share a shard, which is slower but
/// loses no counts.
pub(crate) const SHARDS: usize = 16;

const LISTENERS: usize = ListenerKind::ALL.len();

const LATENCY: Metric = Metric::histogram(
    "tidegate_decision_duration_seconds",
    [],
    "Decision latency. Each thread measures one in 64 of its decisions.",
);

/// The upper bounds of the latency buckets: each bound in nanoseconds and in seconds.
const LATENCY_BOUNDS: [(u64, f64); 12] = [
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

thread_local! {
    static SHARD: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS
    };
    static UNTIL_SAMPLE: Cell<u32> = const { Cell::new(0) };
}

/// Returns the index of this thread's shard.
pub(crate) fn index() -> usize {
    SHARD.with(|index| *index)
}

/// Returns true for the first decision of a thread, and from then on for every [`SAMPLE_EVERY`]th
/// decision.
pub(super) fn take_sample() -> bool {
    UNTIL_SAMPLE.with(|left| {
        let sampled = left.get() == 0;
        left.set(if sampled {
            SAMPLE_EVERY - 1
        } else {
            left.get() - 1
        });
        sampled
    })
}

// A shard is aligned to two cache lines, because processors prefetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct DecisionShard {
    verdicts: [[AtomicU64; VERDICT_KINDS.len()]; LISTENERS],
    bad_requests: [AtomicU64; LISTENERS],
    unmatched: [AtomicU64; LISTENERS],
    unknown_entries: [AtomicU64; LISTENERS],
    latency: Histogram<{ LATENCY_BOUNDS.len() + 1 }>,
}

impl DecisionShard {
    pub(super) fn count(&self, listener: usize, kind: usize) {
        self.verdicts[listener][kind].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn observe_latency(&self, nanos: u64) {
        self.latency.observe(&LATENCY_BOUNDS, nanos);
    }

    pub(super) fn count_bad(&self, listener: usize) {
        self.bad_requests[listener].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_unmatched(&self, listener: usize) {
        self.unmatched[listener].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_unknown_entries(&self, listener: usize, count: u64) {
        self.unknown_entries[listener].fetch_add(count, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(super) struct Shards {
    shards: Box<[DecisionShard; SHARDS]>,
    /// The latest exemplar of each latency bucket.
    exemplars: Mutex<[Option<Exemplar>; LATENCY_BOUNDS.len() + 1]>,
}

impl Shards {
    pub(super) fn mine(&self) -> &DecisionShard {
        &self.shards[index()]
    }

    /// Keeps the trace of a decision that took `nanos` nanoseconds as the exemplar of its bucket.
    /// If another thread holds the lock, for example to read the metrics, the new exemplar is
    /// dropped instead of delaying the decision.
    pub(super) fn keep_exemplar(&self, nanos: u64, trace_id: String, now: Timestamp) {
        let bucket = bucket_of(&LATENCY_BOUNDS, nanos);
        if let Ok(mut exemplars) = self.exemplars.try_lock() {
            exemplars[bucket] = Some(Exemplar {
                bucket,
                trace_id,
                value: nanos_to_seconds(nanos),
                at_ms: now.as_millis(),
            });
        }
    }

    pub(super) fn verdicts(&self, listener: usize, kind: usize) -> u64 {
        self.sum(|shard| &shard.verdicts[listener][kind])
    }

    pub(super) fn bad_requests(&self, listener: usize) -> u64 {
        self.sum(|shard| &shard.bad_requests[listener])
    }

    pub(super) fn unmatched(&self, listener: usize) -> u64 {
        self.sum(|shard| &shard.unmatched[listener])
    }

    pub(super) fn unknown_entries(&self, listener: usize) -> u64 {
        self.sum(|shard| &shard.unknown_entries[listener])
    }

    pub(super) fn collect_latency(&self, page: &mut Page<'_>) {
        let mut sample = self.latency();
        let exemplars = self.exemplars.lock();
        let exemplars = exemplars.unwrap_or_else(PoisonError::into_inner);
        sample.exemplars = exemplars.iter().flatten().cloned().collect();
        drop(exemplars);
        page.histograms(&LATENCY, [([], sample)]);
    }

    /// Returns the latency histogram without exemplars.
    pub(super) fn latency(&self) -> HistogramSample {
        let latency = Histogram::sum(self.shards.iter().map(|shard| &shard.latency));
        latency.to_sample(&LATENCY_BOUNDS, nanos_to_seconds)
    }

    fn sum(&self, counter: impl Fn(&DecisionShard) -> &AtomicU64) -> u64 {
        self.shards
            .iter()
            .map(|shard| counter(shard).load(Ordering::Relaxed))
            .sum()
    }
}
