//! Outlier detection based on request results, and the health state of an endpoint.
//!
//! ```text
//! healthy ── consecutive failed requests ──▶ ejected ── ejection time over ──▶ healthy
//! ```
//!
//! After an ejection has ended, the next failure ejects the endpoint again, unless a request has
//! succeeded in the meantime.
//!
//! Ejected endpoints get no requests while the upstream has a healthy endpoint. If no endpoint is
//! healthy, all of them get requests. Endpoints that fail their active health checks (see
//! `health_check`) are treated in the same way.

use std::{
    error::Error,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};

use tidegate_config::Ejection;
use tokio::time::{Instant, sleep};

use super::{
    endpoint::{Endpoint, EndpointSettings},
    failure_log::{FailureLog, LogDecision},
};
use crate::{error::ProxyError, request_body::EARLY_ENDS};

// Bits of `EndpointHealth::unavailable`.
const EJECTED: u8 = 1;
const DOWN: u8 = 2;

/// The health of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct EndpointHealth {
    /// The reasons why the endpoint is out of rotation, one bit each: [`EJECTED`] and [`DOWN`].
    unavailable: AtomicU8,
    /// Consecutive failed requests.
    failures: AtomicU32,
    /// Whether a failure was recorded since the last success. With this flag, the success path
    /// needs only one atomic load.
    has_failed: AtomicBool,
    ejections: AtomicU64,
    /// The numbers of failed requests by kind, indexed as in [`ProxyError::OF_UPSTREAM`].
    failed: [AtomicU64; ProxyError::OF_UPSTREAM.len()],
    log: FailureLog,
    checks: [AtomicU64; 2],
    /// The numbers of responses that ended early, indexed as in [`EARLY_ENDS`].
    early_ends: [AtomicU64; EARLY_ENDS.len()],
    /// The cause of the last failed connection attempt.
    cause: Mutex<String>,
}

/// The results of health checks, as metric labels.
pub(crate) const CHECK_RESULTS: [&str; 2] = ["good", "bad"];

/// The maximum length of a logged cause, in characters.
const MAX_CAUSE_CHARS: usize = 256;

impl EndpointHealth {
    /// Records `error` as the cause of a failed connection attempt.
    pub(crate) fn record_connect_error(&self, error: &(dyn Error + 'static)) {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        *cause = with_causes(error);
    }

    /// Returns the cause of `error`, if the cause is known.
    fn cause(&self, error: ProxyError) -> Option<String> {
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        (error == ProxyError::Unreachable).then(|| cause.clone())
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.unavailable.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn ejections(&self) -> u64 {
        self.ejections.load(Ordering::Relaxed)
    }

    /// Returns the number of health checks with this result, indexed as in [`CHECK_RESULTS`].
    pub(crate) fn checks(&self, result: usize) -> u64 {
        self.checks
            .get(result)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Returns the number of responses that ended early in the way at index `at` of [`EARLY_ENDS`].
    pub(crate) fn early_ends(&self, at: usize) -> u64 {
        self.early_ends
            .get(at)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Counts a response that ended early in the way at index `at` of [`EARLY_ENDS`].
    pub(crate) fn count_early_end(&self, at: usize) {
        if let Some(count) = self.early_ends.get(at) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of requests that failed with the error at index `at` of
    /// [`ProxyError::OF_UPSTREAM`].
    pub(crate) fn failures(&self, at: usize) -> u64 {
        self.failed
            .get(at)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Records a successful request. Returns whether to log a recovery.
    fn record_success(&self) -> LogDecision {
        if !self.has_failed.load(Ordering::Relaxed) {
            return LogDecision::Skip;
        }
        self.has_failed.store(false, Ordering::Relaxed);
        self.failures.store(0, Ordering::Relaxed);
        self.log.record_success()
    }

    /// Records a failed request. Returns whether to log the failure.
    fn record_failure(&self) -> LogDecision {
        self.has_failed.store(true, Ordering::Relaxed);
        self.log.record_failure(Instant::now())
    }

    /// Counts a consecutive failure. Returns true if the failure ejects the endpoint.
    fn try_eject(&self, ejection: Ejection) -> bool {
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

    /// Clears the causes of unavailability that `endpoint_settings` no longer configure.
    pub(crate) fn clear_unconfigured(&self, endpoint_settings: &EndpointSettings) {
        let ejected = endpoint_settings.eject.map_or(0, |_| EJECTED);
        let down = endpoint_settings.health.as_ref().map_or(0, |_| DOWN);
        self.unavailable
            .fetch_and(ejected | down, Ordering::Relaxed);
    }

    /// Counts the result of a health check.
    pub(super) fn count_check(&self, is_bad: bool) {
        self.checks[usize::from(is_bad)].fetch_add(1, Ordering::Relaxed);
    }

    /// Marks the endpoint as down. Returns true if it was up.
    pub(super) fn mark_down(&self) -> bool {
        self.unavailable.fetch_or(DOWN, Ordering::Relaxed) & DOWN == 0
    }

    /// Marks the endpoint as up. Returns true if it was down.
    pub(super) fn mark_up(&self) -> bool {
        self.unavailable.fetch_and(!DOWN, Ordering::Relaxed) & DOWN != 0
    }

    /// Ends the ejection. The next failure ejects the endpoint again, unless a request succeeds
    /// first.
    fn end_ejection(&self, ejection: Ejection) {
        self.failures
            .store(ejection.failures - 1, Ordering::Relaxed);
        self.has_failed.store(true, Ordering::Relaxed);
        self.unavailable.fetch_and(!EJECTED, Ordering::Relaxed);
    }
}

/// Records that `endpoint` has answered a request, whatever the status of the response.
pub(crate) fn record_success(endpoint: &Endpoint) {
    if endpoint.health.record_success() == LogDecision::Log {
        tracing::info!(upstream = %endpoint.settings().name, endpoint = %endpoint.url, "upstream endpoint recovered");
    }
}

/// Records that a request to `endpoint` failed, if the endpoint caused it. Ejects the endpoint
/// after too many consecutive failures.
pub(crate) fn record_failure(endpoint: &Arc<Endpoint>, error: ProxyError) {
    let at = ProxyError::OF_UPSTREAM
        .iter()
        .position(|blamed| *blamed == error);
    let Some(failed) = at.and_then(|at| endpoint.health.failed.get(at)) else {
        return;
    };
    failed.fetch_add(1, Ordering::Relaxed);
    if endpoint.health.record_failure() == LogDecision::Log {
        tracing::warn!(
            upstream = %endpoint.settings().name, endpoint = %endpoint.url, failure = error.as_str(), cause = endpoint.health.cause(error),
            "upstream endpoint failing (further failures suppressed until it recovers)"
        );
    }
    let Some(ejection) = endpoint.settings().eject else {
        return;
    };
    if !endpoint.health.try_eject(ejection) {
        return;
    }
    tracing::warn!(
        upstream = %endpoint.settings().name, endpoint = %endpoint.url, duration = ?ejection.time,
        "endpoint ejected after {} consecutive failures", ejection.failures
    );
    let endpoint = Arc::downgrade(endpoint);
    tokio::task::spawn_local(async move {
        sleep(ejection.time).await;
        if let Some(endpoint) = endpoint.upgrade() {
            endpoint.health.end_ejection(ejection);
            tracing::info!(upstream = %endpoint.settings().name, endpoint = %endpoint.url, "endpoint re-admitted");
        }
    });
}

/// Returns the message of `error` and the messages of its sources. Leaves out a message that an
/// outer message repeats.
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
