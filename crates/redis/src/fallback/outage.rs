//! Detects Redis outages. An outage begins when Redis stops making decisions, and ends when
//! decisions are exact again. The log has one line for the beginning and one line for the end of an
//! outage.
//!
//! ```text
//!            a decision fell back               Redis is back, and no fallback for STEADY
//!   exact ──────────────────────▶ outage (logged) ─────────────────────────▶ exact (logged)
//! ```
//!
//! Redis counts as recovered once it makes a decision, or once [`OutageWatch`] finds it connected
//! and without errors. Therefore, the end of an outage is logged even if there are no requests.
//!
//! If an outage begins shortly after the end of the previous outage, it is logged only if it lasts
//! for [`MIN_LOGGED`]. Without this rule, a Redis server that replies only intermittently would
//! fill the log.

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tidegate_core::{Source, Span, Timestamp};
use tokio::{runtime::Handle, sync::Notify, task::AbortHandle, time::Instant};

use super::add_elapsed;

/// After this time without a fallback decision, decisions count as exact again.
const STEADY: Span = Span::from_secs(1);

/// An outage that begins within this time after the previous outage is logged only if it lasts for
/// [`MIN_LOGGED`].
const QUIET: Span = Span::from_secs(10);

/// The minimum duration for logging an outage that begins within [`QUIET`] after the previous
/// outage.
const MIN_LOGGED: Span = Span::from_secs(1);

/// Interval at which an [`OutageWatch`] checks Redis during an outage.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The current outage, if there is one.
#[derive(Debug, Default)]
pub(super) struct OutageTracker {
    /// Whether there is an outage. Decisions by Redis check this flag first, so that they take no
    /// lock while there is no outage.
    is_ongoing: AtomicBool,
    phase: Mutex<OutagePhase>,
    begun: Notify,
}

#[derive(Debug)]
enum OutagePhase {
    /// Redis decides. An outage that begins before `quiet_until` is not logged immediately.
    Exact {
        quiet_until: Timestamp,
    },
    Outage(OngoingOutage),
}

impl Default for OutagePhase {
    fn default() -> Self {
        Self::Exact {
            quiet_until: Timestamp::default(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct OngoingOutage {
    since: Timestamp,
    latest: Timestamp,
    /// The time at which `latest` was recorded. The current time is `latest` plus the time that has
    /// elapsed since.
    recorded: Instant,
    /// The last instant at which Redis was known to be slow or unreachable.
    down_until: Timestamp,
    /// The first instant at which Redis was known to have recovered, counted from the latest
    /// fallback decision.
    recovered_at: Option<Timestamp>,
    is_logged: bool,
    quiet_until: Timestamp,
    local: u64,
    policy: u64,
}

/// A summary of an outage, logged when decisions are exact again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutageSummary {
    /// The duration of the outage, from the first fallback decision. The outage ends at the earlier
    /// of two instants: the recovery of Redis after the last fallback decision, and [`STEADY`]
    /// after Redis was last known to be slow or unreachable.
    pub(super) lasted: Span,
    /// Number of decisions that were made with this server's share of the limits during the outage.
    pub(super) local: u64,
    /// Number of decisions that were made by the failure policies `open` and `closed` during the
    /// outage.
    pub(super) policy: u64,
}

impl OutageTracker {
    /// Records a fallback decision by `source`. Returns true if the outage must be logged now.
    pub(super) fn record_fallback(&self, source: Source, now: Timestamp) -> bool {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_ongoing.store(true, Ordering::Relaxed);
        let mut outage = match *phase {
            OutagePhase::Outage(outage) => outage,
            OutagePhase::Exact { quiet_until } => {
                self.begun.notify_one();
                OngoingOutage {
                    since: now,
                    latest: now,
                    recorded: Instant::now(),
                    down_until: now,
                    recovered_at: None,
                    is_logged: false,
                    quiet_until,
                    local: 0,
                    policy: 0,
                }
            }
        };
        if now >= outage.latest {
            (outage.latest, outage.recorded) = (now, Instant::now());
        }
        outage.down_until = outage.down_until.max(now);
        outage.recovered_at = None;
        match source {
            Source::Local => outage.local += 1,
            _ => outage.policy += 1,
        }
        let logs_now = !outage.is_logged
            && (now >= outage.quiet_until || now >= outage.since.after(MIN_LOGGED));
        outage.is_logged |= logs_now;
        *phase = OutagePhase::Outage(outage);
        logs_now
    }

    /// Records whether a check during an outage found that Redis has recovered. If a logged outage
    /// is over, returns the summary to log.
    fn record_check(&self, is_back: bool) -> Option<OutageSummary> {
        let now = {
            let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
            let OutagePhase::Outage(outage) = &mut *phase else {
                return None;
            };
            let now = add_elapsed(outage.latest, outage.recorded);
            if !is_back {
                outage.down_until = outage.down_until.max(now);
                outage.recovered_at = None;
                return None;
            }
            now
        };
        self.record_exact(now)
    }

    /// Records that Redis decides again. If a logged outage is over, returns the summary to log.
    pub(super) fn record_exact(&self, now: Timestamp) -> Option<OutageSummary> {
        if !self.is_ongoing.load(Ordering::Relaxed) {
            return None;
        }
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let OutagePhase::Outage(outage) = &mut *phase else {
            return None;
        };
        let recovered_at = *outage.recovered_at.get_or_insert(now);
        if now < outage.latest.after(STEADY) {
            return None;
        }
        let summary = outage.is_logged.then_some(OutageSummary {
            // If there were no requests, Redis may have recovered long before this decision.
            lasted: recovered_at
                .min(outage.down_until.after(STEADY))
                .since(outage.since),
            local: outage.local,
            policy: outage.policy,
        });
        let quiet_until = if outage.is_logged {
            now.after(QUIET)
        } else {
            outage.quiet_until
        };
        *phase = OutagePhase::Exact { quiet_until };
        self.is_ongoing.store(false, Ordering::Relaxed);
        summary
    }

    fn is_ongoing(&self) -> bool {
        self.is_ongoing.load(Ordering::Relaxed)
    }
}

/// The beginning or the end of a Redis outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutageChange<'a> {
    /// Redis no longer decides.
    Began {
        /// A description of the problem.
        problem: &'a str,
    },
    /// Redis decides again, and decisions are exact.
    Ended {
        /// The duration of the outage.
        lasted: Span,
        /// The number of decisions that were made with this server's share of the limits during the
        /// outage.
        local: u64,
        /// The number of decisions that were made by the failure policies `open` and `closed`
        /// during the outage.
        policy: u64,
    },
}

/// A function that is called for each logged outage.
type OutageObserver = Box<dyn Fn(OutageChange<'_>) + Send + Sync>;

/// Logs outages, and passes them on to an observer.
#[derive(Default)]
pub(super) struct OutageLog(OnceLock<OutageObserver>);

impl fmt::Debug for OutageLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutageLog(…)")
    }
}

impl OutageLog {
    /// Sets the observer. Ignores all observers after the first.
    pub(super) fn observe(&self, observer: OutageObserver) {
        let _ = self.0.set(observer);
    }

    pub(super) fn begin(&self, problem: &str) {
        tracing::warn!(
            "Redis is unavailable ({problem}); the rules' `on_failure` policies apply until it recovers"
        );
        self.notify(OutageChange::Began { problem });
    }

    pub(super) fn end(&self, summary: OutageSummary) {
        let OutageSummary {
            lasted,
            local,
            policy,
        } = summary;
        tracing::info!(
            outage_ms = lasted.as_millis_ceil(),
            local,
            policy,
            "Redis recovered, and decisions are exact again; during the outage, `local` requests were decided with this server's share of the limits, and `policy` requests by `on_failure`"
        );
        self.notify(OutageChange::Ended {
            lasted,
            local,
            policy,
        });
    }

    fn notify(&self, change: OutageChange<'_>) {
        if let Some(observer) = self.0.get() {
            observer(change);
        }
    }
}

/// Checks during an outage whether Redis has recovered, so that the end of the outage is logged
/// even if there are no requests. Dropping the value stops the checks.
#[derive(Debug)]
pub(super) struct OutageWatch(AbortHandle);

impl OutageWatch {
    /// Starts watching `outage`. `is_back` returns whether Redis is connected and without errors.
    pub(super) fn start(
        outage: Arc<OutageTracker>,
        is_back: impl Fn() -> bool + Send + 'static,
        log: impl Fn(OutageSummary) + Send + 'static,
        runtime: &Handle,
    ) -> Self {
        let watching = async move {
            loop {
                outage.begun.notified().await;
                while outage.is_ongoing() {
                    tokio::time::sleep(CHECK_INTERVAL).await;
                    if let Some(summary) = outage.record_check(is_back()) {
                        log(summary);
                    }
                }
            }
        };
        Self(runtime.spawn(watching).abort_handle())
    }
}

impl Drop for OutageWatch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(millis * 1_000)
    }

    #[test]
    fn an_outage_is_logged_once_and_its_end_once_with_duration_and_counts() {
        let outage = OutageTracker::default();
        assert_eq!(outage.record_exact(at(99_000)), None);
        assert!(outage.record_fallback(Source::Local, at(100_000)));
        for millis in 100_001..104_000 {
            assert!(!outage.record_fallback(Source::Local, at(millis)));
        }
        assert!(!outage.record_fallback(Source::Policy, at(104_000)));
        assert_eq!(outage.record_exact(at(104_010)), None, "not steady yet");
        assert_eq!(outage.record_exact(at(104_999)), None);
        let summary = OutageSummary {
            lasted: Span::from_millis(4_010),
            local: 4_000,
            policy: 1,
        };
        assert_eq!(outage.record_exact(at(105_000)), Some(summary));
        assert_eq!(outage.record_exact(at(105_001)), None);
    }

    #[test]
    fn a_time_without_requests_is_no_part_of_an_outage() {
        let outage = OutageTracker::default();
        assert!(outage.record_fallback(Source::Local, at(100_000)));
        assert!(!outage.record_fallback(Source::Local, at(102_000)));
        let summary = outage.record_exact(at(250_000)).unwrap();
        assert_eq!(summary.lasted, Span::from_millis(3_000));
    }

    #[test]
    fn intermittent_replies_are_one_outage() {
        let outage = OutageTracker::default();
        let mut logged = 0;
        for step in 0..100 {
            logged += u32::from(outage.record_fallback(Source::Local, at(100_000 + step * 900)));
            assert_eq!(outage.record_exact(at(100_400 + step * 900)), None);
        }
        assert_eq!(logged, 1);
        let summary = outage.record_exact(at(200_000)).unwrap();
        assert_eq!(
            (summary.local, summary.lasted),
            (100, Span::from_millis(89_500))
        );
    }

    #[test]
    fn an_outage_soon_after_another_is_logged_only_if_it_lasts() {
        let outage = OutageTracker::default();
        assert!(outage.record_fallback(Source::Local, at(100_000)));
        assert!(outage.record_exact(at(101_000)).is_some());
        // A single slow reply is not logged as an outage.
        assert!(!outage.record_fallback(Source::Local, at(103_000)));
        assert_eq!(outage.record_exact(at(104_000)), None);
        // An outage that persists is logged.
        assert!(!outage.record_fallback(Source::Local, at(106_000)));
        assert!(!outage.record_fallback(Source::Local, at(106_999)));
        assert!(outage.record_fallback(Source::Local, at(107_000)));
        let summary = outage.record_exact(at(108_000)).unwrap();
        assert_eq!(summary.local, 3);
        // Long after an outage, a new outage is logged immediately.
        assert!(outage.record_fallback(Source::Local, at(118_000)));
    }

    /// The fallback decision of a single request begins the outage. No further requests arrive.
    /// Redis recovers after a minute.
    #[tokio::test(start_paused = true)]
    async fn the_end_of_an_outage_is_logged_without_a_request() {
        let outage = Arc::<OutageTracker>::default();
        let start = Instant::now();
        let is_back = move || start.elapsed() >= Duration::from_secs(60);
        let (sender, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let log = move |summary| sender.send((start.elapsed(), summary)).unwrap();
        let _watch = OutageWatch::start(Arc::clone(&outage), is_back, log, &Handle::current());
        assert!(outage.record_fallback(Source::Local, at(100_000)));
        let (logged_after, summary) = ends.recv().await.unwrap();
        assert!(logged_after <= Duration::from_secs(60) + 2 * CHECK_INTERVAL);
        assert_eq!((summary.local, summary.policy), (1, 0));
        let lasted = summary.lasted.as_millis_ceil();
        assert!((60_000..=61_000).contains(&lasted), "{lasted}");
        assert_eq!(outage.record_exact(at(170_000)), None, "logged already");
        // The next outage is also checked.
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(outage.record_fallback(Source::Policy, at(200_000)));
        assert_eq!(ends.recv().await.unwrap().1.policy, 1);
    }

    /// Each check finds Redis connected, but another request falls back after the check.
    #[tokio::test(start_paused = true)]
    async fn an_outage_goes_on_while_decisions_fall_back() {
        let outage = Arc::<OutageTracker>::default();
        let (sender, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let log = move |summary| sender.send(summary).unwrap();
        let _watch = OutageWatch::start(Arc::clone(&outage), || true, log, &Handle::current());
        for tenths in 0..100 {
            outage.record_fallback(Source::Local, at(100_000 + tenths * 100));
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(ends.try_recv().is_err(), "{tenths}");
        }
        assert_eq!(ends.recv().await.unwrap().local, 100);
    }
}
