//! Measures the latency of requests without queueing (minimum latency, as Envoy's minRTT).
//!
//! This latency cannot be observed while a limit is fully used. So the limit is periodically halved
//! for a short time, and halved again as long as halving makes requests faster.
//!
//! ```text
//! resting ─▶ draining: fewer admitted ─▶ measuring ──┬─▶ faster: halve again, drain
//!    ▲                                               └─▶ not faster: latency is known ─┐
//!    └─────────────────────────────────────────────────────────────────────────────────┘
//! ```

use crate::time::{Span, Timestamp};

/// The latency of requests without queueing, and the state of the probe that measures it.
#[derive(Clone, Debug, Default)]
pub(super) struct MinLatency {
    /// The latency in fixed-point format, [`MinLatency::PARTS`] per microsecond; zero if the
    /// latency is unknown.
    latency: u128,
    phase: Phase,
    /// When the current or most recent probe began.
    began: Timestamp,
    /// The earliest start of the next probe.
    not_before: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Not probing. The value counts the windows since the last probe in which the limit was in
    /// use.
    Resting(u32),
    /// Waiting until the requests in flight are within the reduced limit. `halved` is how many
    /// times the limit was halved; `before` is the average latency in microseconds before the limit
    /// was last halved.
    Draining { halved: u32, before: u64 },
    /// Measuring requests that started after `since`.
    Measuring {
        halved: u32,
        before: u64,
        since: Timestamp,
    },
}

/// The first probe is due as soon as the limit is in use.
impl Default for Phase {
    fn default() -> Self {
        Self::Resting(MinLatency::PROBE_INTERVAL)
    }
}

impl MinLatency {
    const PARTS: u128 = 1 << 16;

    /// The number of windows in which the limit was in use, after which the next probe is due.
    const PROBE_INTERVAL: u32 = 100;

    /// The pause after a probe, as a multiple of the probe's duration.
    const PAUSE_FACTOR: u64 = 50;

    /// The time constant, in windows, of the exponential moving average with which the known
    /// latency follows the measured latency while the limit is not in use.
    const SMOOTHING_WINDOWS: u128 = 50;

    /// Requests count as faster if their latency is below this percentage of the former latency.
    const FASTER_PERCENT: u64 = 90;

    /// The maximum number of times that the limit is halved.
    const MAX_HALVINGS: u32 = 20;

    /// Returns the latency without queueing in microseconds; `None` if it is unknown.
    pub(super) fn micros(&self) -> Option<u64> {
        let micros = u64::try_from(self.latency / Self::PARTS).unwrap_or(u64::MAX);
        (self.latency > 0).then_some(micros.max(1))
    }

    /// Returns how many times the limit is halved now.
    pub(super) fn halved(&self) -> u32 {
        match self.phase {
            Phase::Resting(_) => 0,
            Phase::Draining { halved, .. } | Phase::Measuring { halved, .. } => halved,
        }
    }

    pub(super) fn is_probing(&self) -> bool {
        self.halved() > 0
    }

    /// Records the in-flight count. Once it drops to the limit, requests that start from `now` on
    /// are measured.
    pub(super) fn record_in_flight(&mut self, now: Timestamp, in_flight: u32, limit: u32) {
        if let Phase::Draining { halved, before } = self.phase
            && in_flight <= limit
        {
            self.phase = Phase::Measuring {
                halved,
                before,
                since: now,
            };
        }
    }

    /// Returns whether a request that ends at `now` belongs to the current measurement. While
    /// measuring, only requests that started after the limit was reduced are counted.
    pub(super) fn is_measured(&self, now: Timestamp, took: Option<Span>) -> bool {
        match self.phase {
            Phase::Resting(_) => true,
            Phase::Draining { .. } => false,
            Phase::Measuring { since, .. } => took.is_none_or(|took| now.since(since) >= took),
        }
    }

    /// Updates the known latency and the probe from a window with an `average` latency in
    /// microseconds. Returns false if the window is part of a probe and must not change the limit.
    /// `is_used`: at least half of the limit was in use. `can_halve`: the limit may be halved once
    /// more.
    pub(super) fn record_window(
        &mut self,
        now: Timestamp,
        average: u64,
        is_used: bool,
        can_halve: bool,
    ) -> bool {
        match self.phase {
            Phase::Resting(windows) if is_used => {
                if windows >= Self::PROBE_INTERVAL && now >= self.not_before && can_halve {
                    self.began = now;
                    self.phase = Phase::Draining {
                        halved: 1,
                        before: average,
                    };
                    return false;
                }
                self.phase = Phase::Resting(windows.saturating_add(1));
                if self.latency == 0 {
                    self.latency = parts(average);
                }
                true
            }
            Phase::Resting(_) => {
                let before = if self.latency == 0 {
                    parts(average)
                } else {
                    self.latency
                };
                self.latency = (before * (Self::SMOOTHING_WINDOWS - 1) + parts(average))
                    / Self::SMOOTHING_WINDOWS;
                true
            }
            Phase::Draining { .. } => false,
            Phase::Measuring { halved, before, .. } => {
                let is_faster = average
                    < before / 100 * Self::FASTER_PERCENT
                        + before % 100 * Self::FASTER_PERCENT / 100;
                if is_faster && can_halve && halved < Self::MAX_HALVINGS {
                    self.phase = Phase::Draining {
                        halved: halved + 1,
                        before: average,
                    };
                } else {
                    self.latency = parts(average.min(before));
                    self.end_probe(now);
                }
                false
            }
        }
    }

    /// Ends the current probe, if there is one, and restarts the count of windows.
    pub(super) fn end_probe(&mut self, now: Timestamp) {
        if self.is_probing() {
            let pause = now
                .since(self.began)
                .as_micros()
                .saturating_mul(Self::PAUSE_FACTOR);
            self.not_before = now.after(Span::from_micros(pause));
        }
        self.phase = Phase::Resting(0);
    }
}

fn parts(micros: u64) -> u128 {
    u128::from(micros) * MinLatency::PARTS
}
