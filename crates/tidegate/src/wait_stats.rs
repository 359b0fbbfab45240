//! Statistics about how long requests have waited for concurrency slots.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::Span;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// The request was admitted.
    Admitted,
    /// The request was denied, because its longest wait elapsed or because another limit denied the
    /// request.
    Denied,
    /// The request was cancelled, for example because its client disconnected.
    Cancelled,
}

impl WaitEnd {
    /// All variants, in the order of their index.
    pub const ALL: [Self; 3] = [Self::Admitted, Self::Denied, Self::Cancelled];

    /// Returns the metric label value for this variant.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Denied => "denied",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Histograms of wait times, one for each [`WaitEnd`].
#[derive(Debug, Default)]
pub struct WaitStats {
    ends: [WaitCounts; 3],
}

/// The histogram of the waits with one [`WaitEnd`].
#[derive(Debug, Default)]
struct WaitCounts {
    /// The number of waits in each bucket of [`WaitStats::BOUNDS`]. The last element counts all
    /// longer waits.
    buckets: [AtomicU64; WaitStats::BOUNDS.len() + 1],
    micros: AtomicU64,
}

impl WaitStats {
    /// The upper bounds of the histogram buckets.
    pub const BOUNDS: [Span; 10] = [
        Span::from_millis(5),
        Span::from_millis(25),
        Span::from_millis(100),
        Span::from_millis(250),
        Span::from_millis(500),
        Span::from_secs(1),
        Span::from_millis(2_500),
        Span::from_secs(5),
        Span::from_secs(15),
        Span::from_secs(60),
    ];

    #[cfg_attr(
        not(feature = "tokio"),
        expect(
            dead_code,
            reason = "requests wait for slots only with the feature `tokio`"
        )
    )]
    pub(crate) fn observe(&self, end: WaitEnd, waited: Span) {
        let counts = self.counts(end);
        let bucket = Self::BOUNDS.partition_point(|bound| *bound < waited);
        counts.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = waited.as_micros();
        counts.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Returns the number of waits that ended this way, for each bucket of [`Self::BOUNDS`]. The
    /// last element counts all longer waits.
    #[must_use]
    pub fn buckets(&self, end: WaitEnd) -> Vec<u64> {
        let buckets = self.counts(end).buckets.iter();
        buckets.map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// Returns the total duration of the waits that ended this way.
    #[must_use]
    pub fn total(&self, end: WaitEnd) -> Span {
        Span::from_micros(self.counts(end).micros.load(Ordering::Relaxed))
    }

    fn counts(&self, end: WaitEnd) -> &WaitCounts {
        // The array `ends` has one element for each variant of [`WaitEnd`].
        match end {
            WaitEnd::Admitted => &self.ends[0],
            WaitEnd::Denied => &self.ends[1],
            WaitEnd::Cancelled => &self.ends[2],
        }
    }
}
