//! Records the errors that a reachable Redis server returns when it refuses calls. The connection
//! health does not include these errors.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::StoreError;
use tidegate_core::{Span, Timestamp};
use tokio::time::Instant;

/// How long a refusal is shown to operators. During this time, further errors of the same kind are
/// not logged.
const WINDOW: Span = Span::from_secs(60);

/// How long Redis is treated as failing after it has refused a call, unless Redis makes a decision
/// in that time.
const FAILING: Duration = Duration::from_secs(60);

/// The maximum number of error kinds logged within [`WINDOW`]. Normally, there are one or two
/// kinds.
const MAX_KINDS: usize = 16;

/// The latest error, and the recently logged error kinds.
#[derive(Debug, Default)]
pub(super) struct ServerErrors(Mutex<ErrorHistory>);

#[derive(Debug, Default)]
struct ErrorHistory {
    latest: Option<(StoreError, Timestamp)>,
    /// The time at which the latest refusal was recorded.
    refused_at: Option<Instant>,
    /// The recently logged error kinds, each with its time.
    logged: Vec<(Box<str>, Timestamp)>,
}

impl ServerErrors {
    /// Records `error` if it requires action by an operator. Logs the error, unless an error of the
    /// same kind was logged recently. Ignores errors from servers that are slow, unreachable or
    /// failing over, because the health of the servers already includes these errors.
    pub(super) fn record(&self, error: &StoreError, now: Timestamp) {
        let Some(kind) = kind(error) else { return };
        let mut history = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        history.refused_at = Some(Instant::now());
        match &mut history.latest {
            Some((latest, at)) if latest == error => *at = now,
            latest => *latest = Some((error.clone(), now)),
        }
        let logged = &mut history.logged;
        logged.retain(|(_, at)| at.after(WINDOW) > now);
        if logged.len() < MAX_KINDS && logged.iter().all(|(known, _)| **known != *kind) {
            tracing::warn!("{error}");
            logged.push((kind.into(), now));
        }
    }

    /// Returns the latest refusal within the last minute, if any.
    pub(super) fn latest(&self, now: Timestamp) -> Option<String> {
        let history = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (error, at) = history.latest.as_ref()?;
        (at.after(WINDOW) > now).then(|| error.to_string())
    }

    /// Returns whether Redis has refused a call within the last minute.
    pub(super) fn has_recent(&self) -> bool {
        let history = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let refused_at = history.refused_at;
        refused_at.is_some_and(|refused_at| refused_at.elapsed() < FAILING)
    }
}

/// Returns the kind of an error. Errors of one kind need the same action from an operator. Returns
/// `None` if an error needs no action.
fn kind(error: &StoreError) -> Option<&str> {
    match error {
        StoreError::NotExecuted(_) | StoreError::Unknown(_) => None,
        StoreError::Refused(problem) => Some(problem),
        StoreError::Foreign { .. } => Some("foreign"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(errors: &ServerErrors) -> usize {
        errors.0.lock().unwrap().logged.len()
    }

    /// A Redis server that refuses calls makes no decisions, although it is reachable.
    #[test]
    fn a_refusal_is_recent_for_a_while() {
        let (errors, now) = (ServerErrors::default(), Timestamp::from_micros(1));
        errors.record(
            &StoreError::NotExecuted("connection refused".to_owned()),
            now,
        );
        assert!(!errors.has_recent());
        errors.record(&StoreError::Refused("OOM".to_owned()), now);
        assert!(errors.has_recent());
    }

    #[test]
    fn each_kind_is_logged_once_a_minute_even_if_they_alternate() {
        let errors = ServerErrors::default();
        let at = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let refused = |problem: &str| StoreError::Refused(problem.to_owned());
        let foreign = |key: &str| StoreError::Foreign {
            key: key.to_owned(),
            problem: "a list".to_owned(),
        };
        for second in 0..30 {
            errors.record(&refused("OOM"), at(second));
            errors.record(&foreign(&second.to_string()), at(second));
            errors.record(&refused("NOPERM"), at(second));
        }
        assert_eq!(logged(&errors), 3);
        assert_eq!(errors.latest(at(88)), Some(refused("NOPERM").to_string()));
        assert_eq!(errors.latest(at(89)), None);
        errors.record(&StoreError::Unknown("late".to_owned()), at(70));
        assert_eq!(logged(&errors), 3, "its health shows it");
        errors.record(&refused("OOM"), at(70));
        assert_eq!(logged(&errors), 1, "the minute is over");
    }

    #[test]
    fn changing_errors_do_not_flood_the_log() {
        let errors = ServerErrors::default();
        for number in 0..1_000 {
            let error = StoreError::Refused(number.to_string());
            errors.record(&error, Timestamp::default());
        }
        assert_eq!(logged(&errors), MAX_KINDS);
    }
}
