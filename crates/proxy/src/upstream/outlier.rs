//! The health state of an endpoint, and its counters for outlier detection based on request
//! results. `try_eject` applies the threshold. `endpoint.rs` records the results and starts the
//! timer that ends an ejection. `balancer.rs` prefers healthy endpoints.
//!
//! ```text
//! healthy ── consecutive failed requests ──▶ ejected ── ejection time over ──▶ healthy
//! ```
//!
//! The first failure after an ejection ejects the endpoint again, unless a request has succeeded
//! since.
//!
//! Ejected endpoints receive no requests while the upstream has a healthy endpoint. If no endpoint
//! is healthy, all endpoints receive requests. An endpoint that fails its active health checks
//! (`health_check.rs`) also receives no requests while another endpoint is healthy.

use std::{
    error::Error,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};

use tidegate_config::Ejection;
use tokio::time::Instant;

use super::{
    endpoint_settings::EndpointSettings,
    failure_log::{FailureLog, LogDecision},
};
use crate::{body_error::EarlyEnd, error::ProxyError};

// Bits of `EndpointHealth::unavailable`.
const EJECTED: u8 = 1;
const DOWN: u8 = 2;

/// The health of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct EndpointHealth {
    /// The reasons why the endpoint is out of rotation, one bit each: [`EJECTED`] and [`DOWN`].
    unavailable: AtomicU8,
    /// The number of consecutive failed requests.
    failures: AtomicU32,
    /// Whether a failure was recorded since the last success. With this flag, a success usually
    /// takes only one atomic load.
    has_failed: AtomicBool,
    ejections: AtomicU64,
    /// The numbers of failed requests by kind, indexed as in [`ProxyError::OF_UPSTREAM`].
    pub(super) failed: [AtomicU64; ProxyError::OF_UPSTREAM.len()],
    log: FailureLog,
    checks: [AtomicU64; 2],
    /// The numbers of responses that ended early, indexed by [`EarlyEnd`].
    early_ends: [AtomicU64; EarlyEnd::ALL.len()],
    /// The cause of the last failed connection attempt.
    cause: Mutex<String>,
}

/// The result of a health check, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HealthCheckResult {
    Good,
    Bad,
}

impl HealthCheckResult {
    /// All results, in the order of their discriminants.
    pub(crate) const ALL: [Self; 2] = [Self::Good, Self::Bad];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
        }
    }
}

/// The maximum length of a logged cause, in characters.
const MAX_CAUSE_CHARS: usize = 256;

impl EndpointHealth {
    /// Records `error` as the cause of a failed connection attempt.
    pub(crate) fn record_connect_error(&self, error: &(dyn Error + 'static)) {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        *cause = with_causes(error);
    }

    /// Returns the cause of `error`, if the cause is known.
    pub(super) fn cause(&self, error: ProxyError) -> Option<String> {
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        (error == ProxyError::Unreachable).then(|| cause.clone())
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.unavailable.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn ejections(&self) -> u64 {
        self.ejections.load(Ordering::Relaxed)
    }

    /// Returns the number of health checks with this result.
    pub(crate) fn checks(&self, result: HealthCheckResult) -> u64 {
        self.checks[result as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of responses that ended early in this way.
    pub(crate) fn early_ends(&self, end: EarlyEnd) -> u64 {
        self.early_ends[end as usize].load(Ordering::Relaxed)
    }

    /// Counts a response that ended early in this way.
    pub(crate) fn count_early_end(&self, end: EarlyEnd) {
        self.early_ends[end as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of requests that failed with the error at index `at` of
    /// [`ProxyError::OF_UPSTREAM`].
    pub(crate) fn failures(&self, at: usize) -> u64 {
        self.failed
            .get(at)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Records a successful request. Returns whether to log a recovery.
    pub(super) fn record_success(&self) -> LogDecision {
        if !self.has_failed.load(Ordering::Relaxed) {
            return LogDecision::Skip;
        }
        self.has_failed.store(false, Ordering::Relaxed);
        self.failures.store(0, Ordering::Relaxed);
        self.log.record_success()
    }

    /// Records a failed request. Returns whether to log the failure.
    pub(super) fn record_failure(&self) -> LogDecision {
        self.has_failed.store(true, Ordering::Relaxed);
        self.log.record_failure(Instant::now())
    }

    /// Counts a consecutive failure. Returns true if the failure ejects the endpoint.
    pub(super) fn try_eject(&self, ejection: Ejection) -> bool {
        let failures = self
            .failures
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        let is_ejected = failures >= ejection.failures
            && self.unavailable.fetch_or(EJECTED, Ordering::Relaxed) & EJECTED == 0;
        if is_ejected {
            self.ejections.fetch_add(1, Ordering::Relaxed);
        }
        is_ejected
    }

    /// Ends the ejection if `endpoint_settings` does not configure outlier detection. Marks the
    /// endpoint as up if `endpoint_settings` does not configure active health checks.
    pub(crate) fn clear_unconfigured(&self, endpoint_settings: &EndpointSettings) {
        let ejected = endpoint_settings.eject.map_or(0, |_| EJECTED);
        let down = endpoint_settings.health.as_ref().map_or(0, |_| DOWN);
        self.unavailable
            .fetch_and(ejected | down, Ordering::Relaxed);
    }

    /// Counts a health check with this result.
    pub(super) fn count_check(&self, result: HealthCheckResult) {
        self.checks[result as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Marks the endpoint as down. Returns true if the endpoint was up.
    pub(super) fn mark_down(&self) -> bool {
        self.unavailable.fetch_or(DOWN, Ordering::Relaxed) & DOWN == 0
    }

    /// Marks the endpoint as up. Returns true if the endpoint was down.
    pub(super) fn mark_up(&self) -> bool {
        self.unavailable.fetch_and(!DOWN, Ordering::Relaxed) & DOWN != 0
    }

    /// Ends the ejection. Until a request succeeds, a single failure ejects the endpoint again.
    pub(super) fn end_ejection(&self, ejection: Ejection) {
        self.failures
            .store(ejection.failures - 1, Ordering::Relaxed);
        self.has_failed.store(true, Ordering::Relaxed);
        self.unavailable.fetch_and(!EJECTED, Ordering::Relaxed);
    }
}

/// Returns the message of `error` and the messages of its sources. Omits a message that is already
/// part of an outer message.
pub(super) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let message = cause.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        source = cause.source();
    }
    text.chars().take(MAX_CAUSE_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failure_and_recovery_are_logged_if_one_failure_ejects() {
        let ejection = Ejection {
            failures: 1,
            time: Duration::from_secs(10),
        };
        let health = EndpointHealth::default();
        for _ in 0..2 {
            assert_eq!(health.record_failure(), LogDecision::Log);
            assert!(health.try_eject(ejection));
            health.end_ejection(ejection);
            assert_eq!(health.record_success(), LogDecision::Log);
            assert_eq!(health.record_success(), LogDecision::Skip);
            tokio::time::advance(Duration::from_secs(61)).await;
        }
    }
}
