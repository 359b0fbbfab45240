//! A log throttle for failing endpoints. It logs the first failure and the recovery after it, and
//! not each failed request. Failure messages about an endpoint are at least a minute apart, however
//! often its state changes.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The minimum time between two failure messages about an endpoint.
const AT_MOST_EVERY: Duration = Duration::from_secs(60);

/// Whether an endpoint is failing, and when that was last logged.
#[derive(Debug, Default)]
pub(super) struct Trouble(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// Not failing; no failure was ever logged.
    #[default]
    Well,
    /// Not failing; the last failure message was logged at this time.
    WellSince(Instant),
    /// Failing; logged at this time.
    Told(Instant),
    /// Failing, but not logged yet: the last message, at this time, is less than a minute old.
    Untold(Instant),
}

/// Whether to log a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Nothing,
    Something,
}

impl Trouble {
    /// Records a failed request.
    pub(super) fn failed(&self, now: Instant) -> Said {
        self.change(|state| match state {
            State::WellSince(last) if now.duration_since(last) < AT_MOST_EVERY => {
                (State::Untold(last), Said::Nothing)
            }
            State::Untold(last) if now.duration_since(last) < AT_MOST_EVERY => {
                (state, Said::Nothing)
            }
            State::Told(_) => (state, Said::Nothing),
            State::Well | State::WellSince(_) | State::Untold(_) => {
                (State::Told(now), Said::Something)
            }
        })
    }

    /// Records a successful request.
    pub(super) fn answered(&self) -> Said {
        self.change(|state| match state {
            State::Told(last) => (State::WellSince(last), Said::Something),
            State::Untold(last) => (State::WellSince(last), Said::Nothing),
            State::Well | State::WellSince(_) => (state, Said::Nothing),
        })
    }

    fn change(&self, next: impl FnOnce(State) -> (State, Said)) -> Said {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, said) = next(*state);
        *state = now;
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_failure_and_the_recovery_are_logged() {
        let (trouble, start) = (Trouble::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(trouble.answered(), Said::Nothing);
        assert_eq!(trouble.failed(at(0)), Said::Something);
        assert_eq!(trouble.failed(at(1)), Said::Nothing);
        assert_eq!(trouble.failed(at(600)), Said::Nothing);
        assert_eq!(trouble.answered(), Said::Something);
        assert_eq!(trouble.answered(), Said::Nothing);
        assert_eq!(
            trouble.failed(at(601)),
            Said::Something,
            "the last failure was long ago"
        );
    }

    #[test]
    fn a_flapping_failure_is_logged_once_a_minute() {
        let (trouble, start) = (Trouble::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let said = (0..180).filter(|second| {
            let said = trouble.failed(at(*second));
            trouble.answered();
            said == Said::Something
        });
        assert_eq!(said.collect::<Vec<_>>(), [0, 60, 120]);
    }

    #[test]
    fn a_suppressed_failure_is_logged_if_it_lasts() {
        let (trouble, start) = (Trouble::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(trouble.failed(at(0)), Said::Something);
        assert_eq!(trouble.answered(), Said::Something);
        assert_eq!(trouble.failed(at(10)), Said::Nothing);
        assert_eq!(trouble.failed(at(59)), Said::Nothing);
        assert_eq!(trouble.failed(at(60)), Said::Something);
        assert_eq!(trouble.answered(), Said::Something);
    }
}
