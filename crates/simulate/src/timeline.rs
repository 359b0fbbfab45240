//! Counts over time, in a bounded number of intervals.

use serde::Serialize;
use tidegate_core::Timestamp;

/// The maximum number of intervals. If a log needs more intervals, pairs of intervals are merged.
const MAX_INTERVALS: usize = 240;

/// Counts over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Timeline {
    /// The start of the first interval, in milliseconds since the Unix epoch.
    pub start_ms: u64,
    /// The length of each interval, in milliseconds.
    pub interval_ms: u64,
    /// The number of requests in each interval.
    pub requests: Vec<u64>,
    /// The number of denied requests in each interval.
    pub denied: Vec<u64>,
}

impl Timeline {
    /// Sets the start of the first interval, so that several timelines can have the same intervals.
    pub(crate) fn start(&mut self, now: Timestamp) {
        self.interval_ms = 1_000;
        let now = now.as_micros() / 1_000;
        self.start_ms = now - now % self.interval_ms;
    }

    /// Counts a request at `now`, which must not be before the start.
    pub(crate) fn count(&mut self, now: Timestamp, is_denied: bool) {
        if self.interval_ms == 0 {
            self.start(now);
        }
        let now = now.as_micros() / 1_000;
        let mut at = now.saturating_sub(self.start_ms) / self.interval_ms;
        while at >= MAX_INTERVALS as u64 {
            self.join_pairs();
            at /= 2;
        }
        // After the loop, `at` is smaller than the maximum number of intervals.
        let at = usize::try_from(at).unwrap_or(0);
        if self.requests.len() <= at {
            self.requests.resize(at + 1, 0);
            self.denied.resize(at + 1, 0);
        }
        self.requests[at] += 1;
        self.denied[at] += u64::from(is_denied);
    }

    fn join_pairs(&mut self) {
        let joined = |counts: &[u64]| counts.chunks(2).map(|pair| pair.iter().sum()).collect();
        self.requests = joined(&self.requests);
        self.denied = joined(&self.denied);
        self.interval_ms *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_joined_when_there_are_too_many() {
        let mut timeline = Timeline::default();
        for second in 0..1_000_u64 {
            let now = Timestamp::from_micros((1_795_325_114 + second) * 1_000_000 + 999);
            timeline.count(now, second % 10 == 0);
        }
        assert_eq!(
            (timeline.interval_ms, timeline.requests.len()),
            (8_000, 125)
        );
        assert_eq!(timeline.start_ms, 1_795_325_114_000);
        assert_eq!(timeline.requests.iter().sum::<u64>(), 1_000);
        assert_eq!(timeline.denied.iter().sum::<u64>(), 100);
        assert_eq!(timeline.requests[..3], [8, 8, 8]);
        // A gap of many years must not create many intervals.
        timeline.count(Timestamp::MAX, true);
        assert!(timeline.requests.len() <= MAX_INTERVALS);
    }
}
