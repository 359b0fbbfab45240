//! A circuit breaker: while a server mostly fails, only a few probes are sent to it.
//!
//! ```text
//!           failures of the window reach the ratio
//!   Closed ───────────────────────────────────────▶ Open
//!     ▲                                              │ after `open_for`
//!     │ every probe succeeds                         ▼
//!     └──────────────────────────────────────── HalfOpen ──▶ Open: a probe fails
//! ```

use tidegate_core::{Span, Timestamp};

use crate::recent::{Counts, Recent};

/// When a circuit breaker opens, and how it closes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// The length of the window over which results are counted; 30 s.
    pub window: Span,
    /// The share of failures that opens the breaker, in percent; 50. A value over 100 disables it.
    pub failure_percent: u32,
    /// The minimum number of results in the window before the breaker may open; 20.
    pub min_requests: u32,
    /// How long nothing is sent after the breaker has opened; 5 s.
    pub open_for: Span,
    /// The number of probes after that, all of which must succeed to close the breaker, and also
    /// the most in flight at once; 3. At least 1.
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

/// Permission to send one request. Return it with [`CircuitBreaker::record`].
#[derive(Debug)]
#[must_use = "a probe that is never recorded keeps the breaker half-open"]
pub struct Permit {
    /// The era of the breaker when the permit was issued.
    era: u64,
}

/// The result of a request, as far as it concerns the health of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The server works.
    Success,
    /// The server does not work.
    Failure,
    /// No information: the request was cancelled, or never sent.
    Unknown,
}

/// A circuit breaker over the failure ratio of a sliding window.
///
/// # Examples
///
/// ```
/// use tidegate_client::{BreakerSettings, CircuitBreaker, Health, Span, Timestamp};
///
/// let settings = BreakerSettings { min_requests: 4, ..BreakerSettings::default() };
/// let mut breaker = CircuitBreaker::new(settings);
/// let now = Timestamp::from_micros(1);
/// for _ in 0..4 {
///     let permit = breaker.acquire(now).expect("the breaker is closed");
///     breaker.record(permit, Health::Failure, now);
/// }
/// assert_eq!(breaker.acquire(now).unwrap_err(), Span::from_secs(5));
/// assert!(breaker.acquire(now.after(Span::from_secs(5))).is_ok(), "a probe");
/// ```
#[derive(Clone, Debug)]
pub struct CircuitBreaker {
    settings: BreakerSettings,
    state: State,
    /// Number of state changes so far. A result from an earlier era is ignored.
    era: u64,
    /// Counts of results and of failures.
    recent: Recent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open { until: Timestamp },
    HalfOpen { in_flight: u32, succeeded: u32 },
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
            state: State::Closed,
            era: 0,
            recent: Recent::over(settings.window),
        }
    }

    /// Returns a permit to send a request.
    ///
    /// # Errors
    ///
    /// If the breaker is open, the time until it lets a probe pass. If it is half-open and all
    /// probes are in flight, zero: try again when one of them has a result.
    pub fn acquire(&mut self, now: Timestamp) -> Result<Permit, Span> {
        match &mut self.state {
            State::Closed => {}
            State::Open { until } if now < *until => return Err(until.since(now)),
            State::Open { .. } => self.turn(State::HalfOpen {
                in_flight: 1,
                succeeded: 0,
            }),
            State::HalfOpen {
                in_flight,
                succeeded,
            } if *in_flight + *succeeded < self.settings.probes => *in_flight += 1,
            State::HalfOpen { .. } => return Err(Span::ZERO),
        }
        Ok(Permit { era: self.era })
    }

    /// Records the result of a request.
    #[expect(clippy::needless_pass_by_value, reason = "a permit is for one request")]
    pub fn record(&mut self, permit: Permit, health: Health, now: Timestamp) {
        if permit.era != self.era {
            return;
        }
        match self.state {
            State::Closed => self.count(health, now),
            State::HalfOpen {
                in_flight,
                succeeded,
            } => self.probed(health, in_flight.saturating_sub(1), succeeded, now),
            State::Open { .. } => {}
        }
    }

    fn count(&mut self, health: Health, now: Timestamp) {
        let second = match health {
            Health::Success => 0,
            Health::Failure => 1,
            Health::Unknown => return,
        };
        self.recent.add(Counts { first: 1, second }, now);
        let counts = self.recent.sum(now);
        let enough = counts.first >= u64::from(self.settings.min_requests);
        let percent = u64::from(self.settings.failure_percent);
        let failed = counts.second > 0
            && counts.second.saturating_mul(100) >= counts.first.saturating_mul(percent);
        if enough && failed {
            self.open(now);
        }
    }

    fn probed(&mut self, health: Health, in_flight: u32, succeeded: u32, now: Timestamp) {
        let succeeded = match health {
            Health::Success => succeeded + 1,
            Health::Failure => return self.open(now),
            Health::Unknown => succeeded,
        };
        if succeeded >= self.settings.probes {
            self.recent.clear();
            self.turn(State::Closed);
        } else {
            self.state = State::HalfOpen {
                in_flight,
                succeeded,
            };
        }
    }

    fn open(&mut self, now: Timestamp) {
        let until = now.after(self.settings.open_for);
        self.turn(State::Open { until });
    }

    fn turn(&mut self, state: State) {
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
            Health::Success,
            Health::Success,
            Health::Failure,
            Health::Failure,
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
        breaker.record(one, Health::Success, at(5));
        assert_eq!(breaker.acquire(at(5)).unwrap_err(), Span::ZERO);
        breaker.record(other, Health::Success, at(5));
        assert!(breaker.acquire(at(5)).is_ok());
    }

    #[test]
    fn a_failed_probe_reopens_the_breaker_and_a_cancelled_probe_is_repeated() {
        let mut breaker = opened();
        let cancelled = breaker.acquire(at(5)).unwrap();
        breaker.record(cancelled, Health::Unknown, at(5));
        let (one, late) = (
            breaker.acquire(at(5)).unwrap(),
            breaker.acquire(at(5)).unwrap(),
        );
        breaker.record(one, Health::Failure, at(6));
        assert_eq!(breaker.acquire(at(6)).unwrap_err(), Span::from_secs(5));
        breaker.record(late, Health::Success, at(6));
        assert_eq!(breaker.acquire(at(6)).unwrap_err(), Span::from_secs(5));
    }

    #[test]
    fn results_from_an_earlier_era_do_not_count() {
        let mut breaker = CircuitBreaker::new(SETTINGS);
        let late = breaker.acquire(at(0)).unwrap();
        for _ in 0..4 {
            let permit = breaker.acquire(at(0)).unwrap();
            breaker.record(permit, Health::Failure, at(0));
        }
        let (one, other) = (
            breaker.acquire(at(5)).unwrap(),
            breaker.acquire(at(5)).unwrap(),
        );
        breaker.record(late, Health::Failure, at(5));
        breaker.record(one, Health::Success, at(5));
        breaker.record(other, Health::Success, at(5));
        assert!(breaker.acquire(at(5)).is_ok());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Wait(u64),
        Acquire,
        Record(usize, Health),
    }

    fn step() -> impl Strategy<Value = Step> {
        let health = prop_oneof![
            Just(Health::Success),
            Just(Health::Failure),
            Just(Health::Unknown)
        ];
        prop_oneof![
            (0..4_u64).prop_map(Step::Wait),
            Just(Step::Acquire),
            (0..8_usize, health).prop_map(|(which, health)| Step::Record(which, health)),
        ]
    }

    proptest! {
        /// Checks properties that are visible from outside: no permit within `open_for` after the
        /// breaker opened, and a bounded number of probes in flight.
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
                if let (State::Open { until }, true) = (breaker.state, was != breaker.state) {
                    prop_assert_eq!(until, now.after(SETTINGS.open_for));
                    closed_until = Some(until);
                }
                if let State::HalfOpen { .. } = breaker.state {
                    let probes = held.iter().filter(|permit| permit.era == breaker.era).count();
                    prop_assert!(probes <= 2);
                }
            }
        }
    }
}
