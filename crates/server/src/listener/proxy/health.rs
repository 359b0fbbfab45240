//! Outlier detection, from the results of requests, and active health checks.
//!
//! ```text
//! healthy ── consecutive failed requests ──▶ ejected ── ejection time over ──▶ healthy
//! healthy ── consecutive failed checks ────▶ down ───── consecutive good checks ──▶ healthy
//! ```
//!
//! After an ejection, a single failure ejects the endpoint again.
//!
//! Ejected and down endpoints get no requests while the upstream has a healthy endpoint. If none is
//! healthy, all of them get requests.

use std::{
    error::Error,
    future::poll_fn,
    io,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use http::{HeaderValue, Request, header};
use tokio::time::{Instant, sleep, timeout};

use super::{
    address::{Address, Terms},
    body::{BREAKS, Upload},
    connect,
    link::Sender,
    live::Current,
    refusal::Refusal,
    target,
    trouble::{Said, Trouble},
};
use crate::config::{Ejection, HealthCheck, Proxy};

// Bits of `Health::away`.
const EJECTED: u8 = 1;
const DOWN: u8 = 2;

/// The health of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Why the endpoint is out of rotation: a bit per reason, [`EJECTED`] and [`DOWN`].
    away: AtomicU8,
    /// Consecutive failed requests.
    failures: AtomicU32,
    /// Whether a failure was recorded since the last success. Keeps the success path to a single
    /// load.
    has_failed: AtomicBool,
    ejections: AtomicU64,
    /// Failed requests by kind, indexed as in [`ITS_DOING`].
    failed: [AtomicU64; ITS_DOING.len()],
    trouble: Trouble,
    checks: [AtomicU64; 2],
    /// Responses that ended early, indexed as in [`BREAKS`].
    broken: [AtomicU64; BREAKS.len()],
    /// Why the last failed connection attempt failed.
    cause: Mutex<String>,
}

/// The results of health checks, as metric labels.
pub(super) const RESULTS: [&str; 2] = ["good", "bad"];

/// The failures that outlier detection holds against the endpoint.
pub(super) const ITS_DOING: [Refusal; 4] = [
    Refusal::Unreachable,
    Refusal::ConnectTimeout,
    Refusal::HeadTimeout,
    Refusal::BadAnswer,
];

/// The maximum length of a logged cause, in characters.
const MOST_OF_A_CAUSE: usize = 256;

impl Health {
    /// Records the `error` of a failed connection attempt.
    pub(super) fn blame(&self, error: &(dyn Error + 'static)) {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        *cause = with_causes(error);
    }

    /// Returns the cause of `refusal`, if known.
    fn cause(&self, refusal: Refusal) -> Option<String> {
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        (refusal == Refusal::Unreachable).then(|| cause.clone())
    }

    pub(super) fn is_well(&self) -> bool {
        self.away.load(Ordering::Relaxed) == 0
    }

    pub(super) fn ejections(&self) -> u64 {
        self.ejections.load(Ordering::Relaxed)
    }

    /// Returns how many checks had this result, indexed as in [`RESULTS`].
    pub(super) fn checks(&self, result: usize) -> u64 {
        self.checks
            .get(result)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Returns how many responses ended early in this way, indexed as in [`BREAKS`].
    pub(super) fn breaks(&self, at: usize) -> u64 {
        self.broken
            .get(at)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Counts a response that ended early.
    pub(super) fn count_break(&self, at: usize) {
        if let Some(count) = self.broken.get(at) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how many requests failed in this way, indexed as in [`ITS_DOING`].
    pub(super) fn failures(&self, at: usize) -> u64 {
        self.failed
            .get(at)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Records a successful request; returns whether to log a recovery.
    fn answered(&self) -> Said {
        if !self.has_failed.load(Ordering::Relaxed) {
            return Said::Nothing;
        }
        self.has_failed.store(false, Ordering::Relaxed);
        self.failures.store(0, Ordering::Relaxed);
        self.trouble.answered()
    }

    /// Records a failed request; returns whether to log it.
    fn failed(&self) -> Said {
        self.has_failed.store(true, Ordering::Relaxed);
        self.trouble.failed(Instant::now())
    }

    /// Counts a consecutive failure. Returns true if it ejects the endpoint.
    fn is_ejected_by_this(&self, ejection: Ejection) -> bool {
        let failures = self
            .failures
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        let is_ejected = failures >= ejection.failures
            && self.away.fetch_or(EJECTED, Ordering::Relaxed) & EJECTED == 0;
        if is_ejected {
            self.ejections.fetch_add(1, Ordering::Relaxed);
        }
        is_ejected
    }

    /// Clears the reasons that `terms` no longer configure.
    pub(super) fn settle(&self, terms: &Terms) {
        let ejected = terms.eject.map_or(0, |_| EJECTED);
        let down = terms.health.as_ref().map_or(0, |_| DOWN);
        self.away.fetch_and(ejected | down, Ordering::Relaxed);
    }

    /// Ends the ejection. One more failure ejects the endpoint again.
    fn readmit(&self, ejection: Ejection) {
        self.failures
            .store(ejection.failures - 1, Ordering::Relaxed);
        self.has_failed.store(true, Ordering::Relaxed);
        self.away.fetch_and(!EJECTED, Ordering::Relaxed);
    }
}

/// Records that `address` has answered a request, with any status.
pub(super) fn note_answer(address: &Address) {
    if address.health.answered() == Said::Something {
        tracing::info!(upstream = %address.terms().name, endpoint = %address.url, "upstream endpoint recovered");
    }
}

/// Records that a request to `address` failed, if the endpoint caused it. Ejects the endpoint after
/// too many consecutive failures.
pub(super) fn note_failure(address: &Arc<Address>, refusal: Refusal) {
    let at = ITS_DOING.iter().position(|doing| *doing == refusal);
    let Some(failed) = at.and_then(|at| address.health.failed.get(at)) else {
        return;
    };
    failed.fetch_add(1, Ordering::Relaxed);
    if address.health.failed() == Said::Something {
        tracing::warn!(
            upstream = %address.terms().name, endpoint = %address.url, failure = refusal.as_str(), cause = address.health.cause(refusal),
            "upstream endpoint failing (further failures suppressed until it recovers)"
        );
    }
    let Some(ejection) = address.terms().eject else {
        return;
    };
    if !address.health.is_ejected_by_this(ejection) {
        return;
    }
    tracing::warn!(
        upstream = %address.terms().name, endpoint = %address.url, duration = ?ejection.time,
        "endpoint ejected after {} consecutive failures", ejection.failures
    );
    let address = Arc::downgrade(address);
    tokio::task::spawn_local(async move {
        sleep(ejection.time).await;
        if let Some(address) = address.upgrade() {
            address.health.readmit(ejection);
            tracing::info!(upstream = %address.terms().name, endpoint = %address.url, "endpoint re-admitted");
        }
    });
}

/// Runs active health checks of an endpoint, until it is gone or its checks are no longer
/// configured. Each check uses the settings in force at that time.
pub(super) async fn watch(address: Weak<Address>, current: Weak<ArcSwap<Current>>) {
    // Consecutive good or bad results.
    let mut row = Row::default();
    while let (Some(address), Some(current)) = (address.upgrade(), current.upgrade()) {
        let settings = Arc::clone(&current.load().settings);
        drop(current);
        let terms = Arc::clone(&address.terms());
        let Some(check) = &terms.health else {
            address.health.settle(&terms);
            address.end_watch();
            // A reload may have enabled checks again, and have seen this task as still running.
            if address.begin_watch() {
                continue;
            }
            return;
        };
        let asked = timeout(check.timeout, ask(&address, check, &settings)).await;
        let problem = match asked {
            Ok(Ok(())) => None,
            // A local error says nothing about the endpoint.
            Ok(Err(error)) if connect::is_local(&error) => {
                tracing::warn!(upstream = %terms.name, %error, "health check skipped: out of local resources");
                let interval = check.interval;
                drop(address);
                sleep(interval).await;
                continue;
            }
            Ok(Err(error)) => Some(with_causes(&error)),
            Err(_) => Some("no response in time".to_owned()),
        };
        row.note(&address, check, problem);
        drop(address);
        sleep(check.interval).await;
    }
}

/// Returns the message of `error` and of its sources, without those that an outer message repeats.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        source = cause.source();
    }
    text.chars().take(MOST_OF_A_CAUSE).collect()
}

/// Consecutive results of health checks.
#[derive(Default)]
struct Row {
    good: u32,
    bad: u32,
}

impl Row {
    /// Records a `check` of `address`, which failed with `problem` or succeeded.
    fn note(&mut self, address: &Address, check: &HealthCheck, problem: Option<String>) {
        let health = &address.health;
        health.checks[usize::from(problem.is_some())].fetch_add(1, Ordering::Relaxed);
        (self.good, self.bad) = match problem {
            None => (self.good.saturating_add(1), 0),
            Some(_) => (0, self.bad.saturating_add(1)),
        };
        if self.bad >= check.unhealthy_after
            && health.away.fetch_or(DOWN, Ordering::Relaxed) & DOWN == 0
        {
            tracing::warn!(
                upstream = %address.terms().name, endpoint = %address.url, problem = problem.unwrap_or_default(),
                "health check failed: endpoint marked down, used only if no other endpoint is healthy"
            );
        }
        if self.good >= check.healthy_after
            && health.away.fetch_and(!DOWN, Ordering::Relaxed) & DOWN != 0
        {
            tracing::info!(upstream = %address.terms().name, endpoint = %address.url, "health check passed: endpoint marked up");
        }
    }
}

/// Performs one health check of `address`, on a new connection.
async fn ask(address: &Address, check: &HealthCheck, settings: &Proxy) -> io::Result<()> {
    let sender = connect::connect(address, settings).await?;
    let status = match sender {
        Sender::Http1(mut exchange) => {
            exchange.begin(question(address, check)?, None);
            poll_fn(|cx| exchange.poll_head(cx)).await?.status()
        }
        Sender::Http2(mut shared) => {
            let answer = shared.send(question(address, check)?).await;
            let answer = answer.map_err(|error| io::Error::other(error.into_error()))?;
            answer.status()
        }
    };
    let is_good = status.is_success() || status.is_redirection();
    is_good
        .then_some(())
        .ok_or_else(|| io::Error::other(format!("unexpected status {status}")))
}

fn question(address: &Address, check: &HealthCheck) -> io::Result<Request<Upload>> {
    let request = Request::get(&*check.path)
        .header(header::HOST, address.url.authority())
        .header(header::USER_AGENT, HeaderValue::from_static("tidegate"))
        .body(Upload::nothing())
        .map_err(io::Error::other)?;
    if !address.http2 {
        return Ok(request);
    }
    let (mut head, body) = request.into_parts();
    let scheme = match address.url.scheme {
        crate::config::Scheme::Http => http::uri::Scheme::HTTP,
        crate::config::Scheme::Https => http::uri::Scheme::HTTPS,
    };
    target::as_http2(&mut head, &scheme).map_err(|_| io::Error::other("the host is invalid"))?;
    Ok(Request::from_parts(head, body))
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
        let health = Health::default();
        for _ in 0..2 {
            assert_eq!(health.failed(), Said::Something);
            assert!(health.is_ejected_by_this(ejection));
            health.readmit(ejection);
            assert_eq!(health.answered(), Said::Something);
            assert_eq!(health.answered(), Said::Nothing);
            tokio::time::advance(Duration::from_secs(61)).await;
        }
    }
}
