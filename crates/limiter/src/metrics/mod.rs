//! The server's metrics.
//!
//! Counting a decision must take only nanoseconds, because the Redis protocol listener makes more
//! than a million decisions per second on one core. Counting a verdict therefore increments atomics
//! in a fixed array, in the thread's own shard. The counters of a rule are looked up only if the
//! verdict names a rule. The counters are read when the metrics are requested.
//!
//! The latency is measured for only one in [`SAMPLE_EVERY`] decisions, because reading the clock
//! twice would take as long as the decision itself.

mod histogram;
mod redis;
mod rules;
pub(crate) mod shard;
mod store;
mod traffic;
mod waiting;

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rules::RuleMetrics;
use shard::Shards;
use tidegate::DecidedRequest;
use tidegate_core::{
    Charge, Decision, MemoryStats, Outcome, Reason, Renewal, RuleSet, StoreDecision, Timestamp,
    Verdict,
};
use tidegate_net::{
    Listener,
    auth::Authenticator,
    prometheus::{HistogramSample, Metric, Page, count},
};
use tidegate_redis::FallbackStats;

pub use rules::MAX_RULE_LABELS;
pub(crate) use shard::index as shard_index;
pub use traffic::{TRAFFIC_BUCKET, TRAFFIC_BUCKETS, Traffic, TrafficCounts};
pub(crate) use waiting::collect as collect_waiting;

const BUILD_INFO: Metric<1> =
    Metric::gauge("tidegate_build_info", ["version"], "The running version.");
const UPTIME: Metric = Metric::gauge("tidegate_uptime_seconds", [], "Seconds since the start.");
const DECISIONS: Metric<2> = Metric::counter(
    "tidegate_decisions_total",
    ["listener", "outcome"],
    "Decisions by listener and outcome. Read-only checks (/v1/peek) are not counted.",
);
const BAD_REQUESTS: Metric<1> = Metric::counter(
    "tidegate_bad_requests_total",
    ["listener"],
    "Invalid requests.",
);
const UNMATCHED: Metric<1> = Metric::counter(
    "tidegate_unmatched_requests_total",
    ["listener"],
    "Requests that were allowed because no rule applies to them.",
);
const UNKNOWN_ENTRIES: Metric<1> = Metric::counter(
    "tidegate_unknown_entries_total",
    ["listener"],
    "Request entries that no rule uses, for example because their names are misspelt.",
);
const MISSING_KEY_ENTRIES: Metric = Metric::gauge(
    "tidegate_missing_key_entries",
    [],
    "Entries of rule keys that no checked request has contained since the rules were loaded.",
);
const LEASE_RENEWALS: Metric<1> = Metric::counter(
    "tidegate_lease_renewals_total",
    ["result"],
    "Renewals of concurrency slot leases, by result.",
);
const RELOADS: Metric<1> = Metric::counter(
    "tidegate_reloads_total",
    ["result"],
    "Reloads of the rules file.",
);
const LAST_RELOAD_SUCCESS: Metric = Metric::gauge(
    "tidegate_last_reload_success",
    [],
    "0 if the last reload of the rules file failed, otherwise 1.",
);
const UPGRADES: Metric<1> = Metric::counter(
    "tidegate_upgrades_total",
    ["result"],
    "Upgrades to a new process without a gap: `ok` if this process has taken over from an older one, `failed` if a new process did not take over from this one.",
);
const SNAPSHOTS: Metric<1> = Metric::counter(
    "tidegate_snapshots_total",
    ["result"],
    "Attempts to write a snapshot of the counters, by result.",
);
const LAST_SNAPSHOT_SUCCESS: Metric = Metric::gauge(
    "tidegate_last_snapshot_success",
    [],
    "0 if the last attempt to write a snapshot failed, otherwise 1.",
);

/// A metric of a listener, and the function that reads it.
type ListenerMetric = (Metric<1>, fn(&Listener) -> u64);

/// The metrics that every listener has.
const LISTENER_METRICS: [ListenerMetric; 6] = [
    (
        Metric::gauge("tidegate_connections", ["listener"], "Open connections."),
        |listener| count(listener.open()),
    ),
    (
        Metric::counter(
            "tidegate_connections_accepted_total",
            ["listener"],
            "Connections served.",
        ),
        Listener::accepted,
    ),
    (
        Metric::counter(
            "tidegate_connections_refused_total",
            ["listener"],
            "Connections refused because the listener was at its connection limit and no connection was idle.",
        ),
        Listener::refused,
    ),
    (
        Metric::counter(
            "tidegate_connections_refused_to_client_total",
            ["listener"],
            "Connections refused because the client already had its maximum number of connections.",
        ),
        Listener::refused_to_client,
    ),
    (
        Metric::counter(
            "tidegate_connections_evicted_total",
            ["listener"],
            "Idle connections closed to make room for others.",
        ),
        Listener::evicted,
    ),
    (
        Metric::counter(
            "tidegate_http2_floods_total",
            ["listener"],
            "Connections closed because the client sent almost only HTTP/2 control frames.",
        ),
        Listener::floods,
    ),
];

/// The latency of one in `SAMPLE_EVERY` decisions is measured.
pub const SAMPLE_EVERY: u32 = 64;

/// The kinds of listeners, with their names in metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// The HTTP listener: checks, throttles and forward-auth.
    Http,
    /// The gRPC listener with Envoy's rate limit service.
    Grpc,
    /// The Redis protocol listener.
    Resp,
    /// The SPOP listener, for HAProxy.
    Spop,
    /// The reverse proxy.
    Proxy,
}

impl ListenerKind {
    pub(crate) const ALL: [Self; 5] = [Self::Http, Self::Grpc, Self::Resp, Self::Spop, Self::Proxy];

    /// Returns the value of the metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
            Self::Spop => "spop",
            Self::Proxy => "proxy",
        }
    }

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Http => 0,
            Self::Grpc => 1,
            Self::Resp => 2,
            Self::Spop => 3,
            Self::Proxy => 4,
        }
    }
}

/// The listeners at which services name their own entries. The server audits these entries.
const NAMING_LISTENERS: [ListenerKind; 3] =
    [ListenerKind::Http, ListenerKind::Resp, ListenerKind::Spop];

/// The result of a decision: `None` if the request was allowed, otherwise the reason for the
/// denial.
type VerdictKind = Option<Reason>;

const VERDICT_KINDS: [VerdictKind; 4] = [
    None,
    Some(Reason::Limit),
    Some(Reason::Blocked),
    Some(Reason::Store),
];

const fn verdict_kind_index(kind: VerdictKind) -> usize {
    match kind {
        None => 0,
        Some(Reason::Limit) => 1,
        Some(Reason::Blocked) => 2,
        Some(Reason::Store) => 3,
    }
}

fn verdict_kind_label(kind: VerdictKind) -> &'static str {
    kind.map_or("allowed", Reason::as_str)
}

/// The result of an upgrade to a new process, in the order of the labels of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeResult {
    /// This process has taken over from an older process.
    TakenOver,
    /// A new process did not take over from this one.
    Failed,
}

/// The metrics of one server.
#[derive(Debug)]
pub struct Metrics {
    started_micros: AtomicU64,
    shards: Shards,
    rules: RuleMetrics,
    traffic: traffic::TrafficRecorder,
    renewals: [AtomicU64; 3],
    reloads: [AtomicU64; 2],
    upgrades: [AtomicU64; 2],
    last_reload_failed: AtomicBool,
    snapshots: [AtomicU64; 2],
    last_snapshot_failed: AtomicBool,
    listeners: Mutex<Vec<(&'static str, Listener)>>,
    authenticators: Mutex<Vec<Arc<Authenticator>>>,
    collectors: Collectors,
}

/// A function that adds the metrics of a component to a page.
type Collect = Box<dyn Fn(&mut Page<'_>) + Send + Sync>;

/// The functions that add the metrics of components that do not belong to this crate.
#[derive(Default)]
struct Collectors(Mutex<Vec<Collect>>);

impl fmt::Debug for Collectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Collectors(…)")
    }
}

impl Metrics {
    /// Creates the metrics, with all counters at zero. The uptime is counted from `started`.
    #[must_use]
    pub(crate) fn new(started: Timestamp) -> Self {
        Self {
            started_micros: AtomicU64::new(started.as_micros()),
            shards: Shards::default(),
            rules: RuleMetrics::default(),
            traffic: traffic::TrafficRecorder::default(),
            renewals: Default::default(),
            reloads: Default::default(),
            upgrades: Default::default(),
            last_reload_failed: AtomicBool::new(false),
            snapshots: Default::default(),
            last_snapshot_failed: AtomicBool::new(false),
            listeners: Mutex::default(),
            authenticators: Mutex::default(),
            collectors: Collectors::default(),
        }
    }

    /// Gives every rule in `names` a counter. Rules that already have a counter keep it.
    pub(crate) fn name_rules<'n>(&self, names: impl Iterator<Item = &'n str>) {
        self.rules.rename(names);
    }

    pub(crate) fn observe(
        &self,
        listener: ListenerKind,
        decided: DecidedRequest<'_>,
        verdict: &Verdict<'_>,
    ) {
        self.shards
            .mine()
            .count(listener.index(), verdict_kind_index(verdict.reason));
        if !verdict.lines.is_empty() || verdict.rule.is_some() {
            self.rules.count(decided, verdict);
        }
    }

    /// Counts a response of Envoy's rate limit service.
    pub fn observe_response(&self, listener: ListenerKind, is_over_limit: bool) {
        let kind = is_over_limit.then_some(Reason::Limit);
        self.shards
            .mine()
            .count(listener.index(), verdict_kind_index(kind));
    }

    pub(crate) fn observe_throttle(&self, listener: ListenerKind, decided: &StoreDecision) {
        let kind = match decided.decision {
            Decision::Admitted => None,
            Decision::Limited => Some(Reason::Limit),
            Decision::Blocked { .. } => Some(Reason::Blocked),
            Decision::Full { .. } => Some(Reason::Store),
        };
        self.shards
            .mine()
            .count(listener.index(), verdict_kind_index(kind));
    }

    /// Adds the decisions since the last sample to the 15-minute traffic history.
    pub(crate) fn sample_traffic(&self, now: Timestamp) {
        let total = self.total_traffic();
        self.rules
            .with_counts(|rules| self.traffic.sample(now, total, rules));
    }

    /// Returns the decision counts since the start. Shadow denials are counted only per rule, so
    /// they are 0 here.
    pub(crate) fn total_traffic(&self) -> TrafficCounts {
        let mut total = TrafficCounts::default();
        for listener in ListenerKind::ALL {
            for kind in VERDICT_KINDS {
                let count = self
                    .shards
                    .verdicts(listener.index(), verdict_kind_index(kind));
                total.requests += count;
                total.denied += if kind.is_some() { count } else { 0 };
            }
        }
        total
    }

    /// Returns the number of requests at `listener` since the start, including malformed requests.
    #[must_use]
    pub fn requests(&self, listener: ListenerKind) -> u64 {
        let index = listener.index();
        let counts = VERDICT_KINDS
            .into_iter()
            .map(|kind| self.shards.verdicts(index, verdict_kind_index(kind)));
        counts.sum::<u64>() + self.shards.bad_requests(index)
    }

    /// Returns the latency of the sampled decisions, in seconds.
    #[must_use]
    pub fn latency(&self) -> HistogramSample {
        self.shards.latency()
    }

    /// Calls `read` with the decision counts of each rule since the start.
    pub(crate) fn with_rule_traffic(
        &self,
        read: impl FnOnce(&mut dyn Iterator<Item = (&str, TrafficCounts)>),
    ) {
        self.rules.with_counts(read);
    }

    /// Returns the traffic from the last `buckets` buckets up to `now`, at most
    /// [`TRAFFIC_BUCKETS`].
    #[must_use]
    pub fn traffic(&self, now: Timestamp, buckets: usize) -> Traffic {
        self.sample_traffic(now);
        self.traffic.traffic(now, buckets)
    }

    /// Counts a decision of this thread. Returns whether to measure its latency.
    pub(crate) fn take_sample() -> bool {
        shard::take_sample()
    }

    /// Records a sampled decision that took `nanos` nanoseconds.
    pub(crate) fn observe_sample(&self, nanos: u64, charges: &[Charge<'_>], outcomes: &[Outcome]) {
        self.shards.mine().observe_latency(nanos);
        self.rules.observe_sample(nanos, charges, outcomes);
    }

    /// Keeps the trace of a decision that took `nanos` nanoseconds as an exemplar in the latency
    /// histogram.
    pub(crate) fn keep_exemplar(&self, nanos: u64, trace_id: String, now: Timestamp) {
        self.shards.keep_exemplar(nanos, trace_id, now);
    }

    /// Counts a request that was rejected because it is malformed.
    pub fn count_bad_request(&self, listener: ListenerKind) {
        self.shards.mine().count_bad(listener.index());
    }

    /// Counts a request to which no rule applied.
    pub(crate) fn count_unmatched(&self, listener: ListenerKind) {
        self.shards.mine().count_unmatched(listener.index());
    }

    /// Counts request entries that no rule uses.
    pub(crate) fn count_unknown_entries(&self, listener: ListenerKind, count: u64) {
        self.shards
            .mine()
            .count_unknown_entries(listener.index(), count);
    }

    /// Returns the number of requests at `listener` to which no rule applied.
    pub(crate) fn unmatched_requests(&self, listener: ListenerKind) -> u64 {
        self.shards.unmatched(listener.index())
    }

    /// Returns the number of request entries at `listener` that no rule used.
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

    /// Counts an upgrade.
    pub fn count_upgrade(&self, result: UpgradeResult) {
        self.upgrades[result as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a snapshot, and records whether writing the snapshot failed.
    pub fn count_snapshot(&self, failed: bool) {
        self.snapshots[usize::from(failed)].fetch_add(1, Ordering::Relaxed);
        self.last_snapshot_failed.store(failed, Ordering::Relaxed);
    }

    /// Records that the snapshot check at startup failed. The check does not count as a snapshot.
    pub fn note_snapshot_failure(&self) {
        self.last_snapshot_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether the last snapshot could not be written. Until the first snapshot, returns
    /// whether the check at startup failed.
    #[must_use]
    pub fn last_snapshot_failed(&self) -> bool {
        self.last_snapshot_failed.load(Ordering::Relaxed)
    }

    /// Returns the time at which counting began.
    #[must_use]
    pub fn started(&self) -> Timestamp {
        Timestamp::from_micros(self.started_micros.load(Ordering::Relaxed))
    }

    /// Sets the instant from which the uptime is counted, after the clock was set.
    pub(crate) fn set_started(&self, started: Timestamp) {
        let micros = started.as_micros();
        self.started_micros.store(micros, Ordering::Relaxed);
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

    /// Passes the name of each listener and the listener to `visit`.
    pub fn visit_listeners(&self, mut visit: impl FnMut(&str, &Listener)) {
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (name, listener) in listeners.iter() {
            visit(name, listener);
        }
    }

    /// Exports the metrics of `authenticator`.
    pub fn show_authenticator(&self, authenticator: Arc<Authenticator>) {
        self.authenticators
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(authenticator);
    }

    /// Exports the metrics that `collect` adds to a page.
    pub fn show(&self, collect: impl Fn(&mut Page<'_>) + Send + Sync + 'static) {
        self.collectors
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(collect));
    }

    /// Adds the metrics to `page`. `stats` contains the statistics of components that the caller
    /// owns.
    pub(crate) fn collect(&self, stats: &Stats, page: &mut Page<'_>) {
        page.family(&BUILD_INFO, [([env!("CARGO_PKG_VERSION")], 1)]);
        let uptime = stats.now.since(self.started()).as_micros() / 1_000_000;
        page.single(&UPTIME, uptime);
        self.collect_requests(page);
        self.rules.collect(&stats.rules, page);
        self.shards.collect_latency(page);
        store::collect(&stats.store, page);
        let collectors = self
            .collectors
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        collectors.iter().for_each(|collect| collect(page));
        drop(collectors);
        if let Some(redis) = &stats.redis {
            redis::collect(redis, page);
        }
        self.collect_results(page);
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (metric, read) in &LISTENER_METRICS {
            let samples = listeners.iter();
            page.family(
                metric,
                samples.map(|(name, listener)| ([*name], read(listener))),
            );
        }
        drop(listeners);
        let authenticators = self
            .authenticators
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Authenticator::collect(&authenticators, page);
        page.single(&MISSING_KEY_ENTRIES, stats.missing_key_entries);
    }

    fn collect_requests(&self, page: &mut Page<'_>) {
        let decisions = ListenerKind::ALL.into_iter().flat_map(|listener| {
            VERDICT_KINDS.map(|kind| {
                let count = self
                    .shards
                    .verdicts(listener.index(), verdict_kind_index(kind));
                ([listener.as_str(), verdict_kind_label(kind)], count)
            })
        });
        page.family(&DECISIONS, decisions);
        let by_listener = |read: fn(&Shards, usize) -> u64| {
            move |listener: ListenerKind| {
                ([listener.as_str()], read(&self.shards, listener.index()))
            }
        };
        page.family(
            &BAD_REQUESTS,
            ListenerKind::ALL.map(by_listener(Shards::bad_requests)),
        );
        page.family(
            &UNMATCHED,
            NAMING_LISTENERS.map(by_listener(Shards::unmatched)),
        );
        page.family(
            &UNKNOWN_ENTRIES,
            NAMING_LISTENERS.map(by_listener(Shards::unknown_entries)),
        );
    }

    fn collect_results(&self, page: &mut Page<'_>) {
        page.family(
            &LEASE_RENEWALS,
            by_result(["held", "lost", "unknown"], &self.renewals),
        );
        page.family(&RELOADS, by_result(["ok", "failed"], &self.reloads));
        page.single(&LAST_RELOAD_SUCCESS, u64::from(!self.last_reload_failed()));
        page.family(&UPGRADES, by_result(["ok", "failed"], &self.upgrades));
        page.family(&SNAPSHOTS, by_result(["ok", "failed"], &self.snapshots));
        page.single(
            &LAST_SNAPSHOT_SUCCESS,
            u64::from(!self.last_snapshot_failed()),
        );
    }
}

/// The statistics of the limiter's components, for one page of metrics.
#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) store: MemoryStats,
    pub(crate) redis: Option<FallbackStats>,
    pub(crate) now: Timestamp,
    /// The active rules.
    pub(crate) rules: Arc<RuleSet>,
    /// The number of key entries that no request has contained so far.
    pub(crate) missing_key_entries: u64,
}

/// Returns one sample for each result: its label and its count.
fn by_result<const N: usize>(
    results: [&'static str; N],
    counts: &[AtomicU64; N],
) -> impl Iterator<Item = ([&'static str; 1], u64)> {
    let counts = counts.iter().map(|count| count.load(Ordering::Relaxed));
    results.into_iter().map(|result| [result]).zip(counts)
}
