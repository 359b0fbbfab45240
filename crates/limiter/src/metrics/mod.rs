//! The server's metrics, in the Prometheus text format.
//!
//! Counting must cost nanoseconds, because the Redis protocol listener makes more than a million
//! decisions per second on one core. So the counters that every verdict updates are a fixed array
//! of atomics in a per-thread shard. Only a verdict that names a rule, and so has already paid for
//! a rule match, looks up that rule's counters. Metrics libraries find a counter by hashing its
//! labels under a lock; with labels known in advance no lookup is needed, and the text format takes
//! about thirty lines.
//!
//! Latency is measured on one in [`SAMPLE_EVERY`] decisions, because reading the clock twice would
//! cost as much as the decision.

mod histogram;
mod redis;
mod rules;
mod shard;
mod store;

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rules::Rules;
use shard::Shards;
use tidegate_core::{Decision, MemoryStats, Reason, Renewal, StoreDecision, Timestamp, Verdict};
use tidegate_net::{Listener, auth::Authenticator, prometheus::Text};
use tidegate_redis::FallbackStats;

pub use rules::MAX_RULE_LABELS;

/// The latency of one in this number of decisions is measured.
pub const SAMPLE_EVERY: u32 = 64;

/// The listeners, as labelled in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// The HTTP listener: checks, throttles and forward-auth.
    Http,
    /// Envoy's rate limit service.
    Grpc,
    /// The Redis protocol listener.
    Resp,
    /// The reverse proxy.
    Proxy,
}

impl ListenerKind {
    pub(crate) const ALL: [Self; 4] = [Self::Http, Self::Grpc, Self::Resp, Self::Proxy];

    /// Returns the value of the metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
            Self::Proxy => "proxy",
        }
    }

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Http => 0,
            Self::Grpc => 1,
            Self::Resp => 2,
            Self::Proxy => 3,
        }
    }
}

/// The listeners whose requests have their entries audited.
const NAMING_LISTENERS: [ListenerKind; 2] = [ListenerKind::Http, ListenerKind::Resp];

/// The result of a decision: `None` if allowed, otherwise the reason for the denial.
type Answer = Option<Reason>;

const ANSWERS: [Answer; 4] = [
    None,
    Some(Reason::Limit),
    Some(Reason::Blocked),
    Some(Reason::Store),
];

const fn answer_index(answer: Answer) -> usize {
    match answer {
        None => 0,
        Some(Reason::Limit) => 1,
        Some(Reason::Blocked) => 2,
        Some(Reason::Store) => 3,
    }
}

fn answer_label(answer: Answer) -> &'static str {
    answer.map_or("allowed", Reason::as_str)
}

/// The metrics of one server.
#[derive(Debug)]
pub struct Metrics {
    started: Timestamp,
    shards: Shards,
    rules: Rules,
    renewals: [AtomicU64; 3],
    reloads: [AtomicU64; 2],
    last_reload_failed: AtomicBool,
    snapshots: [AtomicU64; 2],
    last_snapshot_failed: AtomicBool,
    listeners: Mutex<Vec<(&'static str, Listener)>>,
    authenticators: Mutex<Vec<Arc<Authenticator>>>,
    writers: Writers,
}

/// Writes the metrics of a component to a page.
type Writer = Box<dyn Fn(&mut Text) + Send + Sync>;

/// The writers of other components.
#[derive(Default)]
struct Writers(Mutex<Vec<Writer>>);

impl fmt::Debug for Writers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Writers(…)")
    }
}

impl Metrics {
    /// Creates counters at zero. `started` is the start of the uptime.
    #[must_use]
    pub(crate) fn new(started: Timestamp) -> Self {
        Self {
            started,
            shards: Shards::default(),
            rules: Rules::default(),
            renewals: Default::default(),
            reloads: Default::default(),
            last_reload_failed: AtomicBool::new(false),
            snapshots: Default::default(),
            last_snapshot_failed: AtomicBool::new(false),
            listeners: Mutex::default(),
            authenticators: Mutex::default(),
            writers: Writers::default(),
        }
    }

    /// Gives every rule in `names` a counter. Rules that already have one keep it.
    pub(crate) fn name_rules<'n>(&self, names: impl Iterator<Item = &'n str>) {
        self.rules.rename(names);
    }

    pub(crate) fn observe(&self, listener: ListenerKind, verdict: &Verdict<'_>) {
        self.shards
            .mine()
            .count(listener.index(), answer_index(verdict.reason));
        if !verdict.lines.is_empty() || verdict.rule.is_some() {
            self.rules.count(verdict);
        }
    }

    /// Counts a response of Envoy's rate limit service.
    pub fn observe_answer(&self, listener: ListenerKind, is_over_limit: bool) {
        let answer = is_over_limit.then_some(Reason::Limit);
        self.shards
            .mine()
            .count(listener.index(), answer_index(answer));
    }

    pub(crate) fn observe_throttle(&self, listener: ListenerKind, decided: &StoreDecision) {
        let answer = match decided.decision {
            Decision::Admitted => None,
            Decision::Limited => Some(Reason::Limit),
            Decision::Blocked { .. } => Some(Reason::Blocked),
            Decision::Full { .. } => Some(Reason::Store),
        };
        self.shards
            .mine()
            .count(listener.index(), answer_index(answer));
    }

    /// Returns whether the latency of the next decision is measured.
    pub(crate) fn is_sampled() -> bool {
        shard::is_sampled()
    }

    pub(crate) fn observe_latency(&self, nanos: u64) {
        self.shards.mine().latency.observe(nanos);
    }

    /// Counts a request that was rejected as malformed.
    pub fn count_bad_request(&self, listener: ListenerKind) {
        self.shards.mine().count_bad(listener.index());
    }

    /// Counts a request that no rule applied to.
    pub(crate) fn count_unmatched(&self, listener: ListenerKind) {
        self.shards.mine().count_unmatched(listener.index());
    }

    /// Counts request entries that no rule uses.
    pub(crate) fn count_unknown_entries(&self, listener: ListenerKind, count: u64) {
        self.shards
            .mine()
            .count_unknown_entries(listener.index(), count);
    }

    /// Returns the number of requests at `listener` that no rule applied to.
    pub(crate) fn unmatched_requests(&self, listener: ListenerKind) -> u64 {
        self.shards.unmatched(listener.index())
    }

    /// Returns the number of entries of requests at `listener` that no rule used.
    pub(crate) fn unknown_entries(&self, listener: ListenerKind) -> u64 {
        self.shards.unknown_entries(listener.index())
    }

    /// Counts the result of renewing the leases of a request's concurrency slots.
    pub(crate) fn observe_renewal(&self, renewal: Renewal) {
        let number = match renewal {
            Renewal::Held => 0,
            Renewal::Lost => 1,
            Renewal::Unknown => 2,
        };
        self.renewals[number].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a reload of the rules file and records whether it failed.
    pub fn count_reload(&self, failed: bool) {
        self.reloads[usize::from(failed)].fetch_add(1, Ordering::Relaxed);
        self.last_reload_failed.store(failed, Ordering::Relaxed);
    }

    /// Returns whether the last reload failed.
    #[must_use]
    pub fn last_reload_failed(&self) -> bool {
        self.last_reload_failed.load(Ordering::Relaxed)
    }

    /// Counts a snapshot and records whether it failed.
    pub fn count_snapshot(&self, failed: bool) {
        self.snapshots[usize::from(failed)].fetch_add(1, Ordering::Relaxed);
        self.last_snapshot_failed.store(failed, Ordering::Relaxed);
    }

    /// Records that the check at startup failed. This does not count as a snapshot.
    pub fn note_snapshot_failure(&self) {
        self.last_snapshot_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether the last snapshot could not be written.
    #[must_use]
    pub fn last_snapshot_failed(&self) -> bool {
        self.last_snapshot_failed.load(Ordering::Relaxed)
    }

    /// Returns the instant at which counting began.
    #[must_use]
    pub fn started(&self) -> Timestamp {
        self.started
    }

    /// Returns the name, address and open connections of each listener, as JSON.
    #[must_use]
    pub fn listeners(&self) -> Vec<serde_json::Value> {
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let document = |(name, listener): &(&'static str, Listener)| {
            serde_json::json!({
                "name": name,
                "address": listener.local_addr().to_string(),
                "connections": listener.open(),
            })
        };
        listeners.iter().map(document).collect()
    }

    /// Exports the connection metrics of `listener` under the label `listener`.
    pub fn show_listener(&self, name: &'static str, listener: Listener) {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((name, listener));
    }

    /// Exports the metrics of `authenticator`.
    pub fn show_authenticator(&self, authenticator: Arc<Authenticator>) {
        self.authenticators
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(authenticator);
    }

    /// Exports the metrics that `writer` writes.
    pub fn show(&self, writer: impl Fn(&mut Text) + Send + Sync + 'static) {
        self.writers
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(writer));
    }

    /// Returns all metrics in the Prometheus text format. `store` and `redis` are the statistics
    /// of those components at `now`.
    #[must_use]
    pub fn exposition(
        &self,
        store: &MemoryStats,
        redis: Option<&FallbackStats>,
        now: Timestamp,
    ) -> String {
        let mut text = Text::default();
        self.write_process(&mut text, now);
        self.write_verdicts(&mut text);
        self.write_entries(&mut text);
        self.rules.write(&mut text);
        self.shards.write_latency(&mut text);
        store::write(&mut text, store);
        let writers = self
            .writers
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        writers.iter().for_each(|write| write(&mut text));
        drop(writers);
        if let Some(redis) = redis {
            redis::write(&mut text, redis);
        }
        self.write_renewals(&mut text);
        self.write_reloads(&mut text);
        self.write_connections(&mut text);
        let authenticators = self
            .authenticators
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Authenticator::write(&authenticators, &mut text);
        text.finish()
    }

    fn write_process(&self, text: &mut Text, now: Timestamp) {
        text.family("tidegate_build_info", "gauge", "The running version.");
        text.sample(
            "tidegate_build_info",
            &[("version", env!("CARGO_PKG_VERSION"))],
            1,
        );
        let uptime = now.since(self.started).as_micros() / 1_000_000;
        text.single(
            "tidegate_uptime_seconds",
            "gauge",
            "Seconds since the start.",
            uptime,
        );
    }

    fn write_verdicts(&self, text: &mut Text) {
        let name = "tidegate_decisions_total";
        text.family(
            name,
            "counter",
            "Decisions by listener and outcome; peeks are not counted.",
        );
        for listener in ListenerKind::ALL {
            for answer in ANSWERS {
                let count = self.shards.verdicts(listener.index(), answer_index(answer));
                text.sample(
                    name,
                    &[
                        ("listener", listener.as_str()),
                        ("outcome", answer_label(answer)),
                    ],
                    count,
                );
            }
        }
        let name = "tidegate_bad_requests_total";
        text.family(name, "counter", "Invalid requests.");
        for listener in ListenerKind::ALL {
            text.sample(
                name,
                &[("listener", listener.as_str())],
                self.shards.bad_requests(listener.index()),
            );
        }
    }

    fn write_entries(&self, text: &mut Text) {
        let name = "tidegate_unmatched_requests_total";
        let help = "Requests that were allowed because no rule applies to them.";
        text.family(name, "counter", help);
        for listener in NAMING_LISTENERS {
            let count = self.shards.unmatched(listener.index());
            text.sample(name, &[("listener", listener.as_str())], count);
        }
        let name = "tidegate_unknown_entries_total";
        let help = "Entries of requests that no rule uses; their names may be misspelt.";
        text.family(name, "counter", help);
        for listener in NAMING_LISTENERS {
            let count = self.shards.unknown_entries(listener.index());
            text.sample(name, &[("listener", listener.as_str())], count);
        }
    }

    /// Returns the metric for the number of key entries that no request has contained so far.
    pub(crate) fn key_entries(missing: u64) -> String {
        let mut text = Text::default();
        let name = "tidegate_missing_key_entries";
        let help = "Entries that rules are keyed by and that no checked request has had since the rules were loaded.";
        text.single(name, "gauge", help, missing);
        text.finish()
    }

    fn write_renewals(&self, text: &mut Text) {
        let name = "tidegate_lease_renewals_total";
        let help = "Renewals of concurrency slot leases, by result.";
        text.family(name, "counter", help);
        let results = ["held", "lost", "unknown"];
        for (result, count) in results.iter().zip(&self.renewals) {
            text.sample(name, &[("result", result)], count.load(Ordering::Relaxed));
        }
    }

    fn write_reloads(&self, text: &mut Text) {
        let name = "tidegate_reloads_total";
        text.family(name, "counter", "Reloads of the rules file.");
        for (result, count) in ["ok", "failed"].iter().zip(&self.reloads) {
            text.sample(name, &[("result", result)], count.load(Ordering::Relaxed));
        }
        let name = "tidegate_last_reload_success";
        let succeeded = !self.last_reload_failed.load(Ordering::Relaxed);
        text.single(
            name,
            "gauge",
            "1 unless the last reload failed.",
            u64::from(succeeded),
        );
        let name = "tidegate_snapshots_total";
        text.family(name, "counter", "Snapshots of the counters by result.");
        for (result, count) in ["ok", "failed"].iter().zip(&self.snapshots) {
            text.sample(name, &[("result", result)], count.load(Ordering::Relaxed));
        }
        let name = "tidegate_last_snapshot_success";
        let help = "1 unless the last snapshot could not be written.";
        text.single(name, "gauge", help, u64::from(!self.last_snapshot_failed()));
    }

    fn write_connections(&self, text: &mut Text) {
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let families: [Family; 6] = [
            (
                "tidegate_connections",
                "gauge",
                "Open connections.",
                |listener| u64::try_from(listener.open()).unwrap_or(u64::MAX),
            ),
            (
                "tidegate_connections_accepted_total",
                "counter",
                "Connections served.",
                Listener::accepted,
            ),
            (
                "tidegate_connections_refused_total",
                "counter",
                "Connections refused because the listener was full and no other connection was idle.",
                Listener::refused,
            ),
            (
                "tidegate_connections_refused_to_client_total",
                "counter",
                "Connections refused because their client was at its connection limit.",
                Listener::refused_to_client,
            ),
            (
                "tidegate_connections_evicted_total",
                "counter",
                "Idle connections closed to make room for others.",
                Listener::evicted,
            ),
            (
                "tidegate_http2_floods_total",
                "counter",
                "Connections closed because they sent almost nothing but HTTP/2 control frames.",
                Listener::floods,
            ),
        ];
        for (name, kind, help, read) in families {
            text.family(name, kind, help);
            for (label, listener) in listeners.iter() {
                text.sample(name, &[("listener", label)], read(listener));
            }
        }
    }
}

/// A metric that every listener has: name, kind, help text and the function that reads it.
type Family = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Listener) -> u64,
);
