//! The methods that compute the next adaptive limit from the results of a measurement window.

use super::{
    AdaptiveLimit, Completion, check,
    min_latency::MinLatency,
    window::{LoadSample, WindowStats},
};
use crate::{
    error::LimitError,
    time::{Span, Timestamp},
};

/// The method that computes an adaptive limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// AIMD, based on failures and a fixed latency threshold.
    Aimd(Aimd),
    /// Gradient, based on the ratio of the latency without queueing to the current latency.
    Gradient(Gradient),
}

impl Default for Method {
    fn default() -> Self {
        Self::Gradient(Gradient::default())
    }
}

/// AIMD: additive increase, multiplicative decrease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aimd {
    /// The factor, in percent, by which the limit is multiplied after a window in which more than
    /// 1% of the requests failed or were too slow: 50 to 99; default 90.
    pub backoff: u32,
    /// The latency at or above which a request counts as failed: longer than zero; default 5 s.
    pub too_slow: Span,
}

impl Default for Aimd {
    fn default() -> Self {
        Self {
            backoff: 90,
            too_slow: Span::from_secs(5),
        }
    }
}

/// Gradient: a method that scales the limit by the ratio of the latency without queueing to the
/// current latency, and adds some headroom for growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gradient {
    /// The latency above which the limit shrinks, in percent of the latency without queueing: 100
    /// to 1,000; default 150.
    pub tolerance: u32,
    /// The headroom for growth: the number of requests that the service can queue in addition to
    /// the requests it serves; up to 1,000; default 4. The headroom is never more than a quarter of
    /// the limit. The limit grows by at most this number per window.
    pub queue: u32,
    /// The smoothing of the limit: after each window, the limit moves towards the newly computed
    /// limit by this percentage of the difference; 1 to 100; default 20.
    pub smoothing: u32,
}

impl Default for Gradient {
    fn default() -> Self {
        Self {
            tolerance: 150,
            queue: 4,
            smoothing: 20,
        }
    }
}

impl Method {
    pub(super) fn errors(&self) -> impl Iterator<Item = LimitError> {
        let errors = match self {
            Self::Aimd(aimd) => {
                let problem = "must be longer than zero";
                let at_once = aimd.too_slow == Span::ZERO;
                [
                    check("backoff", aimd.backoff, 50..=99, "%"),
                    at_once.then(|| LimitError::new("too_slow", problem)),
                    None,
                ]
            }
            Self::Gradient(gradient) => [
                check("tolerance", gradient.tolerance, 100..=1_000, "%"),
                check("queue", gradient.queue, 0..=1_000, ""),
                check("smoothing", gradient.smoothing, 1..=100, "%"),
            ],
        };
        errors.into_iter().flatten()
    }

    /// Converts the result of a completed request to a sample for the measurement window. Returns
    /// `None` if the result gives no information about load. `min_latency` is the latency without
    /// queueing, in microseconds.
    pub(super) fn sample(&self, ended: Completion, min_latency: Option<u64>) -> Option<LoadSample> {
        match (self, ended) {
            (_, Completion::Ignored) => None,
            (_, Completion::Dropped) => Some(LoadSample::Failed),
            (Self::Aimd(aimd), Completion::Served(took) | Completion::Abandoned(took))
                if took >= aimd.too_slow =>
            {
                Some(LoadSample::Failed)
            }
            (_, Completion::Served(took)) => Some(LoadSample::Served(took)),
            // When the client disconnected, the request had already taken longer than the latency
            // without queueing, so count it as served with this latency. If abandoned requests were
            // ignored, a window in which clients abandon all requests would have no samples.
            (Self::Gradient(_), Completion::Abandoned(took)) if min_latency? < took.as_micros() => {
                Some(LoadSample::Served(took))
            }
            (_, Completion::Abandoned(_)) => None,
        }
    }

    /// Returns the new limit, in fixed-point format, at the end of a measurement window. The limit
    /// grows only if at least half of the limit was used. If less than half of the limit was used,
    /// the window gives no information about a higher limit.
    pub(super) fn next(
        &self,
        limit: &AdaptiveState,
        min_latency: &mut MinLatency,
        stats: &WindowStats,
    ) -> u64 {
        let AdaptiveState { parts, least, now } = *limit;
        let is_used = u64::from(stats.most_in_flight) * 2 * AdaptiveLimit::PARTS >= parts;
        match self {
            Self::Aimd(aimd) if stats.has_failed() => parts * u64::from(aimd.backoff) / 100,
            Self::Aimd(_) if is_used => parts + AdaptiveLimit::PARTS,
            Self::Aimd(_) => parts,
            Self::Gradient(gradient) => {
                if stats.has_failed() {
                    min_latency.end_probe(now);
                } else if let Some(average) = stats.average {
                    let can_halve = parts >> (min_latency.halved() + 1) >= least;
                    if !min_latency.record_window(now, average, is_used, can_halve) {
                        return parts;
                    }
                }
                gradient.next(parts, is_used, min_latency, stats)
            }
        }
    }
}

/// The state of an adaptive limit at the end of a measurement window.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdaptiveState {
    /// The limit in fixed-point format.
    pub(super) parts: u64,
    /// The minimum limit in fixed-point format.
    pub(super) least: u64,
    pub(super) now: Timestamp,
}

impl Gradient {
    fn next(&self, was: u64, is_used: bool, min_latency: &MinLatency, stats: &WindowStats) -> u64 {
        let limit = u128::from(was);
        let kept = match min_latency.micros().zip(stats.average) {
            Some((long, short)) => {
                let long = u128::from(long) * u128::from(self.tolerance) / 100;
                // The result is at least half of the limit and at most the whole limit.
                (long * limit / u128::from(short)).clamp(limit / 2, limit)
            }
            None => limit,
        };
        // Reduce the limit at least by the percentage of failed requests.
        let kept =
            kept.min(limit * u128::from(stats.ended - stats.failed) / u128::from(stats.ended));
        let waiting = (u128::from(self.queue) * u128::from(AdaptiveLimit::PARTS)).min(limit / 4);
        let smoothing = u128::from(self.smoothing);
        let next = (limit * (100 - smoothing) + (kept + waiting) * smoothing) / 100;
        let next = u64::try_from(next).unwrap_or(u64::MAX);
        if is_used { next } else { next.min(was) }
    }
}
