//! A circuit breaker. While most requests to a server fail, the circuit breaker sends only a few
//! probes to the server.
//!
//! ```text
//!           failures of the window reach the ratio
//!   Closed ───────────────────────────────────────▶ Open
//!     ▲                                              │ after `open_for`
//!     │ every probe succeeds                         ▼
//!     └──────────────────────────────────────── HalfOpen ──▶ Open: a probe fails
//! ```

use tidegate_core::{Span, Timestamp};

use crate::rolling_window::{RollingWindow, WindowCounts};

/// The settings that determine when a circuit breaker opens and when it closes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// The length of the window over which results are counted. The default is 30 s.
    pub window: Span,
    /// At this percentage of failures, the breaker opens. The default is 50. A value over 100
    /// disables the breaker.
    pub failure_percent: u32,
    /// The minimum number of results in the window before the breaker may open. The default is 20.
    pub min_requests: u32,
    /// The time after opening during which no request is sent. The default is 5 s.
    pub open_for: Span,
    /// The number of probes that are sent after `open_for`. To close the breaker, all of these
    /// probes must succeed. The default is 3 and the minimum is 1. `probes` is also the maximum
    /// number of probes in flight.
    pub probes: u32,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            window: Span::from_secs(30),
            failure_percent: 50,
            min_requests: 20,
            open_for: Span::from_secs(5),
            probes: 3,
        }
    }
}

/// A permit to send one request. Pass the permit to [`CircuitBreaker::record`] when the result is
/// known.
#[derive(Debug)]
#[must_use = "a probe that is never recorded keeps the breaker half-open"]
pub struct BreakerPermit {
    /// The number of state changes of the breaker when the permit was issued.
    era: u64,
}

/// What the result of a request says about the server's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthSignal {
    /// The server is healthy.
    Success,
    /// The server is not healthy.
    Failure,
    /// Nothing is known about the server, because the request was cancelled or never sent.
    Unknown,
}

/// A circuit breaker that opens when the percentage of failures in a sliding window is too high.
///
/// # Examples
///
/// ```
/// use tidegate_client::{BreakerSettings, CircuitBreaker, HealthSignal, Span, Timestamp};
///
/// let settings = BreakerSettings { min_requests: 4, ..BreakerSettings::default() };
/// let mut breaker = CircuitBreaker::new(settings);
/// let now = Timestamp::from_micros(1);
/// for _ in 0..4 {
///     let permit = breaker.acquire(now).expect("the breaker is closed");
///     breaker.record(permit, HealthSignal::Failure, now);
/// }
/// assert_eq!(breaker.acquire(now).unwrap_err(), Span::from_secs(5));
/// assert!(breaker.acquire(now.after(Span::from_secs(5))).is_ok(), "a probe");
/// ```
#[derive(Clone, Debug)]
pub struct CircuitBreaker {
    settings: BreakerSettings,
    state: BreakerState,
    /// The number of state changes so far. The result of a request is ignored if this number has
    /// changed since the request's permit was issued.
    era: u64,
    /// The number of results, and the number of failures (as `events`).
    window: RollingWindow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerState {
    Closed,
    Open { until: Timestamp },
    HalfOpen(ProbeCounts),
}

/// The probes of a half-open breaker. Failed probes are not counted, because a failed probe opens
/// the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProbeCounts {
    in_flight: u32,
    succeeded: u32,
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        Self::new(BreakerSettings::default())
    }
}

impl CircuitBreaker {
    /// Creates a closed breaker.
    #[must_use]
    pub fn new(settings: BreakerSettings) -> Self {
        Self {
            settings: BreakerSettings {
                probes: settings.probes.max(1),
                ..settings
            },
            state: BreakerState::Closed,
            era: 0,
            window: RollingWindow::new(settings.window),
        }
    }

    /// Returns a permit to send a request.
    ///
    /// # Errors
    ///
    /// If the breaker is open, returns the time until it admits a probe. If the breaker is
    /// half-open and all probes are in flight, returns zero. The caller should try again when a
    /// probe has a result.
    pub fn acquire(&mut self, now: Timestamp) -> Result<BreakerPermit, Span> {
        match &mut self.state {
            BreakerState::Closed => {}
            BreakerState::Open { until } if now < *until => return Err(until.since(now)),
            BreakerState::Open { .. } => self.transition(BreakerState::HalfOpen(ProbeCounts {
                in_flight: 1,
                succeeded: 0,
            })),
            BreakerState::HalfOpen(probes) => {
                // A successful probe keeps its slot until the breaker closes. A probe that ended
                // without a result has freed its slot.
                if probes.in_flight + probes.succeeded >= self.settings.probes {
                    return Err(Span::ZERO);
                }
                probes.in_flight += 1;
            }
        }
        Ok(BreakerPermit { era: self.era })
    }

    /// Records the result of a request.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a permit can be used only once"
    )]
    pub fn record(&mut self, permit: BreakerPermit, signal: HealthSignal, now: Timestamp) {
        // Ignore the result of a request that was sent before the last state change, because it
        // says nothing about the server's current health.
        if permit.era != self.era {
            return;
        }
        match self.state {
            BreakerState::Closed => self.record_closed(signal, now),
            BreakerState::HalfOpen(probes) => self.record_probe(signal, probes, now),
            BreakerState::Open { .. } => debug_assert!(false, "an open breaker issues no permit"),
        }
    }

    fn record_closed(&mut self, signal: HealthSignal, now: Timestamp) {
        let failures = match signal {
            HealthSignal::Success => 0,
            HealthSignal::Failure => 1,
            HealthSignal::Unknown => return,
        };
        let result = WindowCounts {
            requests: 1,
            events: failures,
        };
        self.window.add(result, now);
        if self.has_too_many_failures(now) {
            self.open(now);
        }
    }

    fn has_too_many_failures(&mut self, now: Timestamp) -> bool {
        let WindowCounts {
            requests,
            events: failures,
        } = self.window.sum(now);
        let percent = u64::from(self.settings.failure_percent);
        requests >= u64::from(self.settings.min_requests)
            && failures > 0
            && failures.saturating_mul(100) >= requests.saturating_mul(percent)
    }

    fn record_probe(&mut self, signal: HealthSignal, mut probes: ProbeCounts, now: Timestamp) {
        debug_assert!(
            probes.in_flight > 0,
            "the permit was issued in the current era of the breaker"
        );
        probes.in_flight = probes.in_flight.saturating_sub(1);
        match signal {
            HealthSignal::Success => probes.succeeded += 1,
            HealthSignal::Failure => return self.open(now),
            HealthSignal::Unknown => {}
        }
        debug_assert!(probes.in_flight + probes.succeeded <= self.settings.probes);
        if probes.succeeded >= self.settings.probes {
            self.window.clear();
            self.transition(BreakerState::Closed);
        } else {
            self.state = BreakerState::HalfOpen(probes);
        }
    }

    fn open(&mut self, now: Timestamp) {
        let until = now.after(self.settings.open_for);
        self.transition(BreakerState::Open { until });
    }

    fn transition(&mut self, state: BreakerState) {
        self.state = state;
        self.era += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SETTINGS: BreakerSettings = BreakerSettings {
        window: Span::from_secs(10),
        failure_percent: 50,
        min_requests: 4,
        open_for: Span::from_secs(5),
        probes: 2,
    };

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000).after(Span::from_secs(secs))
    }

    fn opened() -> CircuitBreaker {
        let mut breaker = CircuitBreaker::new(SETTINGS);
        for health in [
            HealthSignal::Success,
            HealthSignal::Success,
            HealthSignal::Failure,
            HealthSignal::Failure,
        ] {
            let permit = breaker.acquire(at(0)).unwrap();
            breaker.record(permit, health, at(0));
        }
        breaker
    }

    #[test]
    fn successful_probes_close_the_breaker() {
        let mut breaker = opened();
        assert_eq!(breaker.acquire(at(2)).unwrap_err(), Span::from_secs(3));
        let (one, other) = (
            breaker.acquire(at(5)).unwrap(),
            breaker.acquire(at(5)).unwrap(),
        );
        assert_eq!(breaker.acquire(at(5)).unwrap_err(), Span::ZERO);
        breaker.record(one, HealthSignal::Success, at(5));
        assert_eq!(breaker.acquire(at(5)).unwrap_err(), Span::ZERO);
        breaker.record(other, HealthSignal::Success, at(5));
        assert!(breaker.acquire(at(5)).is_ok());
    }

    #[test]
    fn a_failed_probe_reopens_the_breaker_and_a_cancelled_probe_is_repeated() {
        let mut breaker = opened();
        let cancelled = breaker.acquire(at(5)).unwrap();
        breaker.record(cancelled, HealthSignal::Unknown, at(5));
        let (one, late) = (
            breaker.acquire(at(5)).unwrap(),
            breaker.acquire(at(5)).unwrap(),
        );
        breaker.record(one, HealthSignal::Failure, at(6));
        assert_eq!(breaker.acquire(at(6)).unwrap_err(), Span::from_secs(5));
        breaker.record(late, HealthSignal::Success, at(6));
        assert_eq!(breaker.acquire(at(6)).unwrap_err(), Span::from_secs(5));
    }

    #[test]
    fn results_from_an_earlier_era_do_not_count() {
        let mut breaker = CircuitBreaker::new(SETTINGS);
        let late = breaker.acquire(at(0)).unwrap();
        for _ in 0..4 {
            let permit = breaker.acquire(at(0)).unwrap();
            breaker.record(permit, HealthSignal::Failure, at(0));
        }
        let (one, other) = (
            breaker.acquire(at(5)).unwrap(),
            breaker.acquire(at(5)).unwrap(),
        );
        breaker.record(late, HealthSignal::Failure, at(5));
        breaker.record(one, HealthSignal::Success, at(5));
        breaker.record(other, HealthSignal::Success, at(5));
        assert!(breaker.acquire(at(5)).is_ok());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Wait(u64),
        Acquire,
        Record(usize, HealthSignal),
    }

    fn step() -> impl Strategy<Value = Step> {
        let health = prop_oneof![
            Just(HealthSignal::Success),
            Just(HealthSignal::Failure),
            Just(HealthSignal::Unknown)
        ];
        prop_oneof![
            (0..4_u64).prop_map(Step::Wait),
            Just(Step::Acquire),
            (0..8_usize, health).prop_map(|(which, health)| Step::Record(which, health)),
        ]
    }

    proptest! {
        /// Checks two properties: after a breaker has opened, it issues no permit for the time
        /// `open_for`, and the number of probes in flight is bounded.
        #[test]
        fn the_breaker_keeps_its_bounds(steps in proptest::collection::vec(step(), 1..300)) {
            let mut breaker = CircuitBreaker::new(SETTINGS);
            let (mut now, mut held, mut closed_until) = (at(0), Vec::new(), None);
            for step in steps {
                let was = breaker.state;
                match step {
                    Step::Wait(secs) => now = now.after(Span::from_secs(secs)),
                    Step::Acquire => match breaker.acquire(now) {
                        Ok(permit) => {
                            prop_assert!(closed_until.is_none_or(|until| now >= until));
                            held.push(permit);
                        }
                        Err(wait) => prop_assert!(wait <= SETTINGS.open_for),
                    },
                    Step::Record(which, health) if which < held.len() => {
                        breaker.record(held.swap_remove(which), health, now);
                    }
                    Step::Record(..) => {}
                }
                let has_changed = was != breaker.state;
                if let (BreakerState::Open { until }, true) = (breaker.state, has_changed) {
                    prop_assert_eq!(until, now.after(SETTINGS.open_for));
                    closed_until = Some(until);
                }
                if let BreakerState::HalfOpen(_) = breaker.state {
                    let probes = held.iter().filter(|permit| permit.era == breaker.era).count();
                    prop_assert!(probes <= 2);
                }
            }
        }
    }
}
