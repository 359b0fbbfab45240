//! Events about keys, traffic, the store and the rules, for operators and other programs.
//!
//! ```text
//! decision ──▶ onset of denials, near limit ─┐
//! every second ──▶ surge detector ───────────┤            ┌▶ log, file, audit file
//! Redis lost and recovered ──────────────────┼──▶ emit ───┼▶ stream (GET /v1/events)
//! operator, reload ──────────────────────────┘            └▶ webhooks
//! ```
//!
//! Each destination has a bounded queue and its own thread. Events that do not fit into the queue
//! are dropped and counted, so a decision never waits for a destination.

mod onsets;
mod stream;
mod surges;
mod webhook;

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, Hash as _, Hasher as _, RandomState},
    io,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use serde_json::{Value, json};
use tidegate::{Clock, DecidedRequest};
use tidegate_config::{EventFile, EventType, EventsConfig, KeyMask};
use tidegate_core::{Line, Reason, RetryAfter, Rule, Span, Timestamp, Verdict};
use tidegate_net::{
    line_log::{LineLog, LineLogSettings},
    prometheus::{Metric, Page},
};
use tidegate_redis::OutageChange;

use self::{
    onsets::Onsets,
    stream::EventStream,
    surges::SurgeDetector,
    webhook::{Webhook, WebhookCounts},
};
pub use self::{
    stream::{
        EventId, EventList, EventSubscription, MAX_RECENT_EVENTS, MAX_SUBSCRIBERS, NotAnEventId,
        RecentEvent, StreamItem,
    },
    webhook::{WebhookSecret, WebhookSettings},
};
use crate::{date::rfc3339, metrics::TrafficCounts};

/// The `tracing` target under which events are logged.
pub const LOG_TARGET: &str = "tidegate::events";

const EVENTS: Metric<1> = Metric::counter("tidegate_events_total", ["type"], "Events by type.");
const LOST: Metric<1> = Metric::counter(
    "tidegate_events_lost_total",
    ["reason"],
    "Events that were not sent, because the number of events about keys exceeded events.max_per_second, a file could not be written in time, or a webhook did not accept them in time.",
);
const WEBHOOK_EVENTS: Metric<1> = Metric::counter(
    "tidegate_webhook_events_total",
    ["endpoint"],
    "Events that webhooks have accepted.",
);
const WEBHOOK_FAILURES: Metric<1> = Metric::counter(
    "tidegate_webhook_failed_attempts_total",
    ["endpoint"],
    "Failed attempts to deliver events to a webhook.",
);

/// The events of a process, and their destinations.
#[derive(Debug)]
pub struct Events {
    near_limit_percent: Option<u32>,
    max_per_second: u64,
    is_logged: bool,
    mask: KeyMask,
    hasher: RandomState,
    onsets: Onsets,
    /// The current second, and the number of events about keys in it.
    budget: Mutex<(u64, u64)>,
    surges: Option<Mutex<SurgeDetector>>,
    /// The sequence number of the last event. The lock also ensures that all destinations receive
    /// events in the same order.
    last: Mutex<u64>,
    counts: [AtomicU64; EventType::ALL.len()],
    over_budget: AtomicU64,
    file: Option<LineLog>,
    audit: Option<LineLog>,
    stream: EventStream,
    webhooks: Vec<Webhook>,
}

/// The reason why an event destination cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    /// A file cannot be opened.
    #[error("events.{field}: cannot open {path}: {source}; fix the path or its permissions")]
    File {
        /// The configuration field: `file` or `audit`.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The thread of a webhook cannot be started.
    #[error("events.webhooks: cannot start a thread: {0}; raise the thread limit")]
    Thread(#[from] io::Error),
}

impl Events {
    /// Opens the files in `settings`, and starts a thread for each of `webhooks`. `mask` determines
    /// how key values are shown.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be opened, or a thread cannot be started.
    pub fn open(
        settings: &EventsConfig,
        webhooks: Vec<WebhookSettings>,
        mask: KeyMask,
        clock: &Clock,
    ) -> Result<Self, EventsError> {
        let open = |field, name, file: &Option<EventFile>| {
            let opened = file.as_ref().map(|file| {
                let settings = LineLogSettings {
                    name,
                    path: Some(file.to.clone()),
                    // Rotation keeps one older file of the same size, so each of the two files may
                    // use half of the maximum.
                    rotate_at: Some(file.max_bytes as u64 / 2),
                };
                LineLog::open(settings).map_err(|source| EventsError::File {
                    field,
                    path: file.to.clone(),
                    source,
                })
            });
            opened.transpose()
        };
        let file = open("file", "event file", &settings.file)?;
        let audit = open("audit", "audit log", &settings.audit)?;
        let webhooks = webhooks.into_iter();
        let webhooks = webhooks.map(|webhook| Webhook::start(webhook, clock.clone()));
        Ok(Self {
            near_limit_percent: settings.near_limit_percent,
            max_per_second: settings.max_per_second.into(),
            is_logged: settings.log,
            mask,
            hasher: RandomState::new(),
            onsets: Onsets::new(),
            budget: Mutex::default(),
            surges: settings.surges.then(Mutex::default),
            last: Mutex::default(),
            counts: Default::default(),
            over_budget: AtomicU64::new(0),
            file,
            audit,
            stream: EventStream::new(clock.now()),
            webhooks: webhooks.collect::<Result<_, _>>()?,
        })
    }

    /// Sends an event to all destinations. `data` contains the fields of the event.
    pub fn emit(&self, kind: EventType, at: Timestamp, data: &Value) {
        if let Some(index) = EventType::ALL.iter().position(|known| *known == kind) {
            self.counts[index].fetch_add(1, Ordering::Relaxed);
        }
        if self.is_logged && !has_own_record(kind) {
            tracing::info!(target: LOG_TARGET, event = kind.as_str(), %data, "{}", message(kind));
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let document = self.stream.push(&mut last, |id| {
            let document = json!({
                "id": id.to_string(),
                "type": kind.as_str(),
                "timestamp": rfc3339(at),
                "at_ms": at.as_micros() / 1_000,
                "data": data,
            });
            document.to_string().into()
        });
        let audit = self.audit.iter().filter(|_| kind.is_change());
        for file in self.file.iter().chain(audit) {
            file.write(format!("{document}\n"));
        }
        for webhook in &self.webhooks {
            webhook.send(kind, &document);
        }
    }

    /// Returns the values of a key in the form in which events show them.
    #[must_use]
    pub fn shown_key<V: AsRef<str>>(&self, values: &[V]) -> Value {
        let values = values.iter();
        values
            .map(|value| Value::from(self.mask.value(value.as_ref())))
            .collect()
    }

    /// Sends an event if this verdict is the first of a series of denials for a key, or if a key
    /// has used most of one of its limits.
    #[inline]
    pub(crate) fn observe(&self, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) {
        let is_notable = |line: &Line<'_>| !line.outcome.allowed || self.is_near(line);
        if !verdict.allowed || verdict.lines.iter().any(is_notable) {
            self.observe_notable(decided, verdict);
        }
    }

    /// Returns whether the key has used at least the configured percentage (`near_limit`) of the
    /// limit.
    #[inline]
    fn is_near(&self, line: &Line<'_>) -> bool {
        self.near_units(line)
            .is_some_and(|units| line.outcome.remaining <= units)
    }

    /// Returns the number of units that remain when a key has used the configured percentage
    /// (`near_limit`) of the limit. Returns `None` if less than one unit remains.
    #[inline]
    fn near_units(&self, line: &Line<'_>) -> Option<u64> {
        let unused = u64::from(100_u32.saturating_sub(self.near_limit_percent?));
        let limit = line
            .outcome
            .limit
            .saturating_add(line.limit.soft_allowance());
        let units = limit.saturating_mul(unused) / 100;
        (units > 0).then_some(units)
    }

    #[cold]
    fn observe_notable(&self, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) {
        // All lines of one rule are consecutive in a verdict.
        for lines in verdict.lines.chunk_by(|one, other| one.rule == other.rule) {
            let Some(rule) = lines[0].rule.and_then(|name| decided.rules.rule(name)) else {
                continue;
            };
            let denying = lines.iter().filter(|line| !line.outcome.allowed);
            if let Some(line) = denying.max_by_key(|line| line.outcome.retry_after) {
                let kind = if line.shadow {
                    EventType::KeyWouldBeDenied
                } else {
                    EventType::KeyDenied
                };
                self.emit_key(kind, decided, rule, line.limit.window(), || {
                    json!({
                        "policy": &**line.limit.policy(),
                        "reason": Reason::Limit.as_str(),
                        "retry_after_ms": millis(line.outcome.retry_after),
                    })
                });
            } else if verdict.allowed {
                self.observe_near(decided, rule, lines);
            }
        }
        // For a blocked key, no limit is evaluated, so the verdict has no lines.
        if verdict.reason == Some(Reason::Blocked)
            && let Some(rule) = verdict.rule.and_then(|name| decided.rules.rule(name))
        {
            let window = verdict.retry_after.span().unwrap_or(onsets::MAX_QUIET);
            self.emit_key(EventType::KeyDenied, decided, rule, window, || {
                json!({
                    "policy": null,
                    "reason": Reason::Blocked.as_str(),
                    "retry_after_ms": millis(verdict.retry_after),
                })
            });
        }
    }

    /// Sends an event for the first of the rule's limits that this request has nearly exhausted.
    fn observe_near(&self, decided: DecidedRequest<'_>, rule: &Rule, lines: &[Line<'_>]) {
        let Ok(cost) = rule.cost_of(decided.request) else {
            return;
        };
        let crosses = |line: &&Line<'_>| {
            let remaining = line.outcome.remaining;
            self.near_units(line).is_some_and(|units| {
                remaining <= units && remaining.saturating_add(cost.units()) > units
            })
        };
        let Some(line) = lines.iter().find(crosses) else {
            return;
        };
        let window = line.limit.window();
        self.emit_key(EventType::KeyNearLimit, decided, rule, window, || {
            json!({
                "policy": &**line.limit.policy(),
                "limit": line.outcome.limit,
                "remaining": line.outcome.remaining,
            })
        });
    }

    /// Sends an event about the request's key under `rule`, unless an event of this type was sent
    /// for the key within the last `window`. `data` returns the event's fields other than the rule,
    /// the key and the mode.
    fn emit_key(
        &self,
        kind: EventType,
        decided: DecidedRequest<'_>,
        rule: &Rule,
        window: Span,
        data: impl FnOnce() -> Value,
    ) {
        let value = |name| decided.request.entry(name).unwrap_or_default();
        let mut hasher = self.hasher.build_hasher();
        kind.as_str().hash(&mut hasher);
        rule.name().hash(&mut hasher);
        rule.key().for_each(|name| value(name).hash(&mut hasher));
        if !self.onsets.try_begin(hasher.finish(), decided.now, window) {
            return;
        }
        if !self.take_budget(decided.now) {
            self.over_budget.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let key: Vec<&str> = rule.key().map(value).collect();
        let mut data = data();
        data["rule"] = rule.name().into();
        data["key"] = self.shown_key(&key);
        data["mode"] = rule.mode().as_str().into();
        self.emit(kind, decided.now, &data);
    }

    /// Returns whether another event about a key may be sent in the current second.
    fn take_budget(&self, now: Timestamp) -> bool {
        let second = now.as_micros() / 1_000_000;
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        if budget.0 != second {
            *budget = (second, 0);
        }
        budget.1 += 1;
        budget.1 <= self.max_per_second
    }

    /// Sends an event for each surge that has begun or ended. `total` contains the counters of all
    /// decisions, and `rules` the counters of each rule. Call this method every second.
    pub(crate) fn detect_surges<'n>(
        &self,
        now: Timestamp,
        total: TrafficCounts,
        rules: impl Iterator<Item = (&'n str, TrafficCounts)>,
    ) {
        let Some(detector) = &self.surges else { return };
        let mut detector = detector.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = detector.sample(now, total, rules);
        drop(detector);
        for change in changes {
            let kind = if change.began {
                EventType::TrafficSurge
            } else {
                EventType::TrafficSurgeEnded
            };
            let data = json!({
                "rule": change.rule.as_deref(),
                "measure": change.measure.as_str(),
                "count_in_10s": change.count,
                "usual_in_10s": change.usual,
            });
            self.emit(kind, now, &data);
        }
    }

    /// Sends an event for the beginning or the end of a Redis outage.
    pub(crate) fn emit_outage(&self, change: OutageChange<'_>, now: Timestamp) {
        match change {
            OutageChange::Began { problem } => {
                self.emit(EventType::StoreLost, now, &json!({"problem": problem}));
            }
            OutageChange::Ended {
                lasted,
                local,
                policy,
            } => {
                let data = json!({
                    "lasted_ms": lasted.as_millis_ceil(),
                    "local_decisions": local,
                    "policy_decisions": policy,
                });
                self.emit(EventType::StoreRecovered, now, &data);
            }
        }
    }

    /// Subscribes to the events after the event `after`, or to all recent events if this process
    /// has not sent that event. Returns `None` if there are already [`MAX_SUBSCRIBERS`].
    #[must_use]
    pub fn subscribe(&self, after: EventId) -> Option<EventSubscription> {
        self.stream.subscribe(after)
    }

    /// Returns the first `most` recent events after the event `after`. If this process did not send
    /// that event, the list begins with the oldest recent event. Without `after`, returns the last
    /// `most` events. At most [`MAX_RECENT_EVENTS`] events are in memory.
    #[must_use]
    pub fn list(&self, after: Option<EventId>, most: usize) -> EventList {
        self.stream.list(after, most)
    }

    /// Reopens the files before the next event is written. Call this method after another program
    /// has moved the files.
    pub fn reopen(&self) {
        self.files().for_each(LineLog::reopen);
    }

    /// Waits until all events so far are written and sent. Waits at most 2 seconds for each file,
    /// and at most 2 seconds for all webhooks together. Events that are not sent by then are lost.
    pub fn finish(&self) {
        self.files().for_each(LineLog::finish);
        webhook::finish(&self.webhooks);
    }

    fn files(&self) -> impl Iterator<Item = &LineLog> {
        self.file.iter().chain(&self.audit)
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let counts = self.counts.iter().zip(EventType::ALL);
        let counts = counts.map(|(count, kind)| ([kind.as_str()], count.load(Ordering::Relaxed)));
        page.family(&EVENTS, counts);
        // Webhooks with the same origin share one time series. The label contains only the origin,
        // because the rest of a URL can contain a credential.
        let mut webhooks = BTreeMap::<&str, WebhookCounts>::new();
        for webhook in &self.webhooks {
            *webhooks.entry(webhook.name()).or_default() += webhook.counts();
        }
        let lost = [
            ("rate", self.over_budget.load(Ordering::Relaxed)),
            ("file", self.files().map(LineLog::lost).sum()),
            ("webhook", webhooks.values().map(|counts| counts.lost).sum()),
        ];
        page.family(&LOST, lost.map(|(reason, count)| ([reason], count)));
        let webhooks = webhooks.iter();
        let delivered = webhooks
            .clone()
            .map(|(name, counts)| ([*name], counts.delivered));
        page.family(&WEBHOOK_EVENTS, delivered);
        let failed = webhooks.map(|(name, counts)| ([*name], counts.failed_attempts));
        page.family(&WEBHOOK_FAILURES, failed);
    }
}

/// Returns whether the server has its own log message for this type of event, even if events are
/// off.
const fn has_own_record(kind: EventType) -> bool {
    matches!(
        kind,
        EventType::StoreLost
            | EventType::StoreRecovered
            | EventType::RulesReloaded
            | EventType::RulesReloadFailed
            | EventType::CandidatePromoted
    )
}

/// Returns the log message for events of this type.
const fn message(kind: EventType) -> &'static str {
    match kind {
        EventType::KeyDenied => "a key is being denied",
        EventType::KeyWouldBeDenied => "a key would be denied by a rule in shadow mode",
        EventType::KeyNearLimit => "a key has used most of a limit",
        EventType::TrafficSurge => "a traffic surge has begun",
        EventType::TrafficSurgeEnded => "a traffic surge has ended",
        EventType::StoreLost => "Redis is unavailable",
        EventType::StoreRecovered => "Redis has recovered",
        EventType::RulesReloaded => "new rules are active",
        EventType::RulesReloadFailed => "the rules file could not be loaded",
        EventType::CandidatePromoted => "the candidate rules were activated",
        EventType::BlockAdded => "a key was blocked",
        EventType::BlockLifted => "a block was lifted",
        EventType::KeyReset => "the counters of a key were reset",
        EventType::OverrideSet => "an override was set",
        EventType::OverrideRemoved => "an override was removed",
    }
}

/// Returns the wait time in milliseconds, rounded up; `None` if the request is never admitted.
fn millis(retry_after: RetryAfter) -> Option<u64> {
    retry_after.span().map(Span::as_millis_ceil)
}

#[cfg(test)]
mod tests;
