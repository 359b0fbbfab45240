//! A log throttle for failing endpoints. The first failure and the recovery are logged; the
//! failures in between are not logged. Failure messages about an endpoint are at least a minute
//! apart, even if the state of the endpoint changes often.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The minimum time between two failure messages about an endpoint.
const MIN_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Whether an endpoint is failing, and the time of its last failure message.
#[derive(Debug, Default)]
pub(crate) struct FailureLog(Mutex<FailureState>);

#[derive(Clone, Copy, Debug, Default)]
enum FailureState {
    /// The endpoint is not failing, and no failure has ever been logged.
    #[default]
    Healthy,
    /// The endpoint is not failing. The variant contains the time of the last failure message.
    HealthySince(Instant),
    /// The endpoint is failing. The variant contains the time at which the failure was logged.
    Logged(Instant),
    /// The endpoint is failing again, but no log message says so, because the last failure message
    /// was less than a minute before. The variant contains the time of the last failure message.
    Suppressed(Instant),
}

/// Whether to log a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogDecision {
    Skip,
    Log,
}

impl FailureLog {
    /// Records a failed request.
    pub(crate) fn record_failure(&self, now: Instant) -> LogDecision {
        self.change(|state| match state {
            FailureState::HealthySince(last) if now.duration_since(last) < MIN_LOG_INTERVAL => {
                (FailureState::Suppressed(last), LogDecision::Skip)
            }
            FailureState::Suppressed(last) if now.duration_since(last) < MIN_LOG_INTERVAL => {
                (state, LogDecision::Skip)
            }
            FailureState::Logged(_) => (state, LogDecision::Skip),
            FailureState::Healthy | FailureState::HealthySince(_) | FailureState::Suppressed(_) => {
                (FailureState::Logged(now), LogDecision::Log)
            }
        })
    }

    /// Records a successful request.
    pub(crate) fn record_success(&self) -> LogDecision {
        self.change(|state| match state {
            FailureState::Logged(last) => (FailureState::HealthySince(last), LogDecision::Log),
            FailureState::Suppressed(last) => (FailureState::HealthySince(last), LogDecision::Skip),
            FailureState::Healthy | FailureState::HealthySince(_) => (state, LogDecision::Skip),
        })
    }

    fn change(
        &self,
        next: impl FnOnce(FailureState) -> (FailureState, LogDecision),
    ) -> LogDecision {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, decision) = next(*state);
        *state = now;
        decision
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_failure_and_the_recovery_are_logged() {
        let (log, start) = (FailureLog::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(log.record_success(), LogDecision::Skip);
        assert_eq!(log.record_failure(at(0)), LogDecision::Log);
        assert_eq!(log.record_failure(at(1)), LogDecision::Skip);
        assert_eq!(log.record_failure(at(600)), LogDecision::Skip);
        assert_eq!(log.record_success(), LogDecision::Log);
        assert_eq!(log.record_success(), LogDecision::Skip);
        assert_eq!(
            log.record_failure(at(601)),
            LogDecision::Log,
            "the last failure was long ago"
        );
    }

    #[test]
    fn a_flapping_failure_is_logged_once_a_minute() {
        let (log, start) = (FailureLog::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let decision = (0..180).filter(|second| {
            let decision = log.record_failure(at(*second));
            log.record_success();
            decision == LogDecision::Log
        });
        assert_eq!(decision.collect::<Vec<_>>(), [0, 60, 120]);
    }

    #[test]
    fn a_suppressed_failure_is_logged_if_it_lasts() {
        let (log, start) = (FailureLog::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(log.record_failure(at(0)), LogDecision::Log);
        assert_eq!(log.record_success(), LogDecision::Log);
        assert_eq!(log.record_failure(at(10)), LogDecision::Skip);
        assert_eq!(log.record_failure(at(59)), LogDecision::Skip);
        assert_eq!(log.record_failure(at(60)), LogDecision::Log);
        assert_eq!(log.record_success(), LogDecision::Log);
    }
}
