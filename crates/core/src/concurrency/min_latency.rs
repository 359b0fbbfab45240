//! A probe for the latency of requests without queueing (the minimum latency, called minRTT in
//! Envoy).
//!
//! The latency without queueing cannot be observed while the limit is fully used. Therefore, a
//! probe halves the limit for a short time. If the requests become faster, the probe halves the
//! limit again.
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
    /// The latency without queueing in fixed-point format, [`MinLatency::PARTS`] per microsecond;
    /// zero if the latency is unknown.
    latency: u128,
    phase: ProbePhase,
    /// The instant at which the current or the most recent probe began.
    began: Timestamp,
    /// The earliest instant at which the next probe can start.
    not_before: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbePhase {
    /// No probe is running. The value counts the measurement windows since the last probe, but only
    /// windows in which at least half of the limit was in use.
    Resting(u32),
    /// The probe is waiting until the number of requests in flight is at most the reduced limit.
    /// `halved` is the number of times that the limit was halved. `before` is the average latency,
    /// in microseconds, before the limit was last halved.
    Draining { halved: u32, before: u64 },
    /// The probe is measuring the requests that started at `since` or later.
    Measuring {
        halved: u32,
        before: u64,
        since: Timestamp,
    },
}

/// The initial phase. The first probe is due as soon as at least half of the limit is in use.
impl Default for ProbePhase {
    fn default() -> Self {
        Self::Resting(MinLatency::PROBE_INTERVAL)
    }
}

impl MinLatency {
    const PARTS: u128 = 1 << 16;

    /// The minimum number of measurement windows between two probes, counting only windows in which
    /// at least half of the limit was in use.
    const PROBE_INTERVAL: u32 = 100;

    /// The length of the pause after a probe, as a multiple of the probe's duration.
    const PAUSE_FACTOR: u64 = 50;

    /// The time constant of an exponential moving average, in measurement windows. While less than
    /// half of the limit is in use, the average updates the minimum latency.
    const SMOOTHING_WINDOWS: u128 = 50;

    /// After the limit is halved, requests are considered faster if their average latency is below
    /// this percentage of the average latency before.
    const FASTER_PERCENT: u64 = 90;

    /// The maximum number of times that one probe halves the limit.
    const MAX_HALVINGS: u32 = 20;

    /// Returns the latency without queueing in microseconds, or `None` if the latency is unknown.
    pub(super) fn micros(&self) -> Option<u64> {
        let micros = u64::try_from(self.latency / Self::PARTS).unwrap_or(u64::MAX);
        (self.latency > 0).then_some(micros.max(1))
    }

    /// Returns the number of times that the current probe has halved the limit; 0 if no probe is
    /// running.
    pub(super) fn halved(&self) -> u32 {
        match self.phase {
            ProbePhase::Resting(_) => 0,
            ProbePhase::Draining { halved, .. } | ProbePhase::Measuring { halved, .. } => halved,
        }
    }

    pub(super) fn is_probing(&self) -> bool {
        self.halved() > 0
    }

    /// Records the number of requests in flight. If a probe is waiting, and the number is at most
    /// the reduced `limit`, the probe starts to measure the requests that start at `now` or later.
    pub(super) fn record_in_flight(&mut self, now: Timestamp, in_flight: u32, limit: u32) {
        if let ProbePhase::Draining { halved, before } = self.phase
            && in_flight <= limit
        {
            self.phase = ProbePhase::Measuring {
                halved,
                before,
                since: now,
            };
        }
    }

    /// Returns whether a request that is completed at `now` with the latency `took` belongs to the
    /// current measurement. In the measuring phase, a request with a latency is counted only if it
    /// started after the phase began. In the measuring phase, a failed request, for which `took` is
    /// `None`, is always counted.
    pub(super) fn is_measured(&self, now: Timestamp, took: Option<Span>) -> bool {
        match self.phase {
            ProbePhase::Resting(_) => true,
            ProbePhase::Draining { .. } => false,
            ProbePhase::Measuring { since, .. } => took.is_none_or(|took| now.since(since) >= took),
        }
    }

    /// Updates the latency without queueing and the probe after a measurement window. `average` is
    /// the window's average latency in microseconds. Returns false if the window is part of a probe
    /// and must not change the limit. `is_used` is true if at least half of the limit was in use.
    /// `can_halve` is true if the limit can be halved once more without falling below its minimum.
    pub(super) fn record_window(
        &mut self,
        now: Timestamp,
        average: u64,
        is_used: bool,
        can_halve: bool,
    ) -> bool {
        match self.phase {
            ProbePhase::Resting(windows) if is_used => {
                if windows >= Self::PROBE_INTERVAL && now >= self.not_before && can_halve {
                    self.began = now;
                    self.phase = ProbePhase::Draining {
                        halved: 1,
                        before: average,
                    };
                    return false;
                }
                self.phase = ProbePhase::Resting(windows.saturating_add(1));
                if self.latency == 0 {
                    self.latency = parts(average);
                }
                true
            }
            ProbePhase::Resting(_) => {
                let before = if self.latency == 0 {
                    parts(average)
                } else {
                    self.latency
                };
                self.latency = (before * (Self::SMOOTHING_WINDOWS - 1) + parts(average))
                    / Self::SMOOTHING_WINDOWS;
                true
            }
            ProbePhase::Draining { .. } => false,
            ProbePhase::Measuring { halved, before, .. } => {
                let is_faster = average
                    < before / 100 * Self::FASTER_PERCENT
                        + before % 100 * Self::FASTER_PERCENT / 100;
                if is_faster && can_halve && halved < Self::MAX_HALVINGS {
                    self.phase = ProbePhase::Draining {
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

    /// Ends the current probe, if a probe is running. Resets the number of measurement windows
    /// since the last probe to zero.
    pub(super) fn end_probe(&mut self, now: Timestamp) {
        if self.is_probing() {
            let pause = now
                .since(self.began)
                .as_micros()
                .saturating_mul(Self::PAUSE_FACTOR);
            self.not_before = now.after(Span::from_micros(pause));
        }
        self.phase = ProbePhase::Resting(0);
    }
}

fn parts(micros: u64) -> u128 {
    u128::from(micros) * MinLatency::PARTS
}
