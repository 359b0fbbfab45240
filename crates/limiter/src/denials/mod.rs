//! Recent denials: a bounded list that shows an operator which clients were denied, by which limit,
//! and until when.
//!
//! Like the metrics, the list is sharded: each group of threads has its own list, so that threads
//! seldom wait for each other's lock. For an admitted request, the only work is to check whether a
//! shadow rule would have denied it.

mod fleet;
mod record;
mod ring;

use std::{
    borrow::Cow,
    sync::{Mutex, PoisonError},
    thread,
};

use record::{NewDenial, Record};
use ring::{DenialRing, RingCounts, SEGMENT_BYTES};
use tidegate::DecidedRequest;
use tidegate_config::DenialsConfig;
use tidegate_core::{
    Charge, Limit, Limits, Line, Mode, Outcome, Reason, RetryAfter, Rule, Scratch, Source,
    StoreDecision, Timestamp, Verdict, bounds, free_key_parts,
};
use tidegate_net::prometheus::Page;

pub use self::fleet::OtherDenials;
use crate::{
    KeyMask,
    metrics::{ListenerKind, shard},
    publisher::Publisher,
};

/// The name of the entry that contains the domain of a denied descriptor.
const DOMAIN: &str = "domain";

/// A request that a rule denied, or would have denied in shadow mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenialRecord {
    /// The time of the decision.
    pub at: Timestamp,
    /// The listener that handled the request.
    pub listener: ListenerKind,
    /// Whether the rule denied the request, or would have denied it in shadow mode.
    pub mode: Mode,
    /// The reason why the request was denied.
    pub reason: DenialReason,
    /// The time from `at` until the same request would be admitted by this rule.
    pub retry_after: RetryAfter,
    /// The name of the rule; `None` for a limit sent with the request, for an Envoy rate limit
    /// descriptor, and if the store was full.
    pub rule: Option<String>,
    /// The limit; `None` if a block or the store denied the request.
    pub policy: Option<String>,
    /// The values of the rule's key, the key sent with the limit, or the descriptor's values. Empty
    /// if a descriptor exceeds the maximum length of a key.
    pub key: Vec<String>,
    /// The request entries that the rule's conditions and key use, or the domain and the
    /// descriptor's entries. Long values are truncated, and entries beyond about 3 KiB are left
    /// out.
    pub entries: Vec<(String, String)>,
}

/// The reason for a listed denial. The reason is the verdict's [`Reason`], except that an
/// unreachable store is a separate reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialReason {
    /// A limit is exhausted.
    Limit,
    /// The key is blocked manually.
    Blocked,
    /// The store is full.
    Store,
    /// The store is unreachable, and the rule fails closed (`on_failure: closed`).
    OnFailure,
}

impl DenialReason {
    /// All reasons. The position of a reason is its ID in a record.
    const ALL: [Self; 4] = [Self::Limit, Self::Blocked, Self::Store, Self::OnFailure];

    /// Returns the name of the reason.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Blocked => "blocked",
            Self::Store => "store",
            Self::OnFailure => "on_failure",
        }
    }

    /// Returns the reason for the denial.
    fn of(verdict: &Verdict<'_>) -> Self {
        match verdict.reason {
            Some(Reason::Store) if verdict.source == Source::Policy => Self::OnFailure,
            Some(reason) => reason.into(),
            None => Self::Limit,
        }
    }
}

impl From<Reason> for DenialReason {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Limit => Self::Limit,
            Reason::Blocked => Self::Blocked,
            Reason::Store => Self::Store,
        }
    }
}

/// A filter that selects recent denials.
#[derive(Clone, Debug, Default)]
pub struct DenialFilter<'a> {
    /// The name of the rule; `None` selects every rule.
    pub rule: Option<&'a str>,
    /// The values of the key; an empty slice selects every key.
    pub key: &'a [&'a str],
    /// The earliest time of the selected denials.
    pub since: Timestamp,
}

/// An Envoy rate limit descriptor that is over its limit.
#[derive(Clone, Copy, Debug)]
pub struct DescriptorDenial<'a> {
    /// The listener that handled the request.
    pub listener: ListenerKind,
    /// The domain of the request.
    pub domain: &'a str,
    /// The descriptor's keys and values.
    pub descriptor: &'a [(String, String)],
    /// The limit in short notation.
    pub policy: &'a str,
    /// The reason: a limit, or a full store.
    pub reason: Reason,
    /// The time until the hits would be admitted.
    pub retry_after: RetryAfter,
    /// Whether the rule denied the request, or would have denied it in shadow mode.
    pub mode: Mode,
    /// The time of the decision.
    pub now: Timestamp,
}

/// A decided request that contained its own limits. It is the argument of
/// [`observe_throttle`](crate::ServerLimiter::observe_throttle).
#[derive(Clone, Copy, Debug)]
pub struct ThrottledRequest<'a> {
    /// The charge.
    pub charge: &'a Charge<'a>,
    /// The outcomes of the charge's limits.
    pub outcomes: &'a [Outcome],
    /// The time of the decision.
    pub now: Timestamp,
}

/// Recent denials, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DenialList {
    /// The selected denials, newest first.
    pub denials: Vec<DenialRecord>,
    /// The number of denials since the process started that are no longer in memory, regardless of
    /// the filter.
    pub lost: u64,
}

/// The recent denials of a process.
#[derive(Debug)]
pub struct DenialLog {
    /// One list for each group of threads; empty if denials are neither listed nor logged.
    shards: Box<[DenialShard]>,
    /// The maximum number of segments in each shard.
    segments: usize,
    log_percent: u32,
    publisher: Publisher,
    published: Mutex<PublishedCounts>,
}

/// The progress of this server's publications.
#[derive(Debug, Default)]
struct PublishedCounts {
    /// Each shard's counts at the time of the last publication.
    shards: Vec<RingCounts>,
    /// The number of denials that this server did not publish, as reported to Redis.
    unpublished: u64,
    /// The number of denials in failed publications that have not yet been reported to Redis as
    /// unpublished.
    failed: u64,
}

/// Whether to keep a denied request in memory, and whether to log it.
#[derive(Clone, Copy, Debug)]
struct Selection {
    is_kept: bool,
    is_logged: bool,
}

// A shard is aligned to two cache lines, because processors prefetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct DenialShard(Mutex<DenialRing>);

/// Returns whether, according to `verdict`, the request was denied or a shadow rule would have
/// denied it.
#[inline]
pub(crate) fn has_denial(verdict: &Verdict<'_>) -> bool {
    !verdict.allowed || verdict.lines.iter().any(|line| !line.outcome.allowed)
}

impl DenialLog {
    /// Creates an empty list of denials. Memory for records is allocated when the first denial is
    /// recorded.
    #[must_use]
    pub fn new(settings: &DenialsConfig) -> Self {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        Self::with_shards(settings, threads)
    }

    fn with_shards(settings: &DenialsConfig, threads: usize) -> Self {
        let shards = match settings {
            DenialsConfig {
                max_bytes: 0,
                log_percent: 0,
            } => 0,
            _ => threads.clamp(1, shard::SHARDS),
        };
        Self {
            shards: (0..shards).map(|_| DenialShard::default()).collect(),
            segments: settings.max_bytes / SEGMENT_BYTES / shards.max(1),
            log_percent: settings.log_percent,
            publisher: Publisher::new("recent denials", &fleet::PUBLICATIONS),
            published: Mutex::default(),
        }
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        self.publisher.collect(page);
    }

    /// Returns whether denials are kept in memory.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.segments > 0
    }

    /// Returns up to `most` of the newest denials that `filter` selects. Denials from one thread
    /// stay in the order in which they were recorded, even if their times are equal.
    #[must_use]
    pub fn list(&self, filter: &DenialFilter<'_>, most: usize) -> DenialList {
        let mut list = DenialList::default();
        for shard in &self.shards {
            // The lock is released before the records are read.
            let snapshot = shard.ring().snapshot();
            list.lost += snapshot.lost;
            let records = snapshot.segments.iter();
            let records = records.flat_map(|segment| segment.newest_first());
            let selected = records
                .filter_map(Record::decode)
                .filter(|record| filter.selects(record))
                .take(most);
            list.denials
                .extend(selected.map(|record| record.to_denial()));
        }
        list.denials
            .sort_by_key(|denial| std::cmp::Reverse(denial.at));
        list.denials.truncate(most);
        list
    }

    /// Adds one record for each rule that denied the request, or would have denied it in shadow
    /// mode. If several limits of a rule deny the request, the record contains the limit with the
    /// longest retry time. `fails_closed` returns whether a rule with the given limits denies
    /// requests while the store is unreachable.
    #[cold]
    pub(crate) fn record(
        &self,
        listener: ListenerKind,
        decided: DecidedRequest<'_>,
        verdict: &Verdict<'_>,
        fails_closed: impl Fn(&Limits) -> bool,
    ) {
        let Some(selection) = self.select(decided.now) else {
            return;
        };
        let denied = NewDenial {
            at: decided.now,
            listener,
            mode: Mode::Enforce,
            reason: DenialReason::of(verdict),
            retry_after: verdict.retry_after,
            rule: verdict.rule,
            policy: None,
            key: &[],
            entries: &[],
        };
        let mut is_explained = verdict.allowed;
        // All lines of one rule are consecutive in a verdict.
        for lines in verdict.lines.chunk_by(|one, other| one.rule == other.rule) {
            let denying = lines.iter().filter(|line| !line.outcome.allowed);
            if let Some(line) = denying.max_by_key(|line| line.outcome.retry_after) {
                let denied = NewDenial {
                    mode: mode_of(line),
                    reason: DenialReason::Limit,
                    retry_after: line.outcome.retry_after,
                    rule: line.rule,
                    policy: Some(line.limit.policy()),
                    ..denied
                };
                is_explained |= denied.mode == Mode::Enforce;
                self.push_for(decided, denied, selection);
            }
        }
        // The request was denied by a block, by a full store or by the fallback policy, and not by
        // a limit.
        if denied.reason == DenialReason::OnFailure {
            let (now, mut scratch) = (decided.now, Scratch::default());
            let charges = decided.rules.charges(decided.request, now, &mut scratch);
            let charges = charges.unwrap_or_default();
            let closed = charges.iter().map(|charge| charge.limits);
            for limits in closed.filter(|limits| fails_closed(limits)) {
                is_explained = true;
                let rule = limits.name();
                self.push_for(decided, NewDenial { rule, ..denied }, selection);
            }
        }
        if !is_explained {
            self.push_for(decided, denied, selection);
        }
    }

    /// Records the denial of a request that contained its own limits.
    #[cold]
    pub(crate) fn record_throttle(
        &self,
        listener: ListenerKind,
        request: ThrottledRequest<'_>,
        decided: &StoreDecision,
    ) {
        let ThrottledRequest {
            charge,
            outcomes,
            now,
        } = request;
        let Some(selection) = self.select(now) else {
            return;
        };
        let verdict = decided.verdict(&[*charge], outcomes);
        let (_, key) = free_key_parts(charge.key);
        let key: Cow<'_, str> = String::from_utf8_lossy(key);
        let policy = denying_limit(charge.limits.iter(), outcomes).map(|limit| &**limit.policy());
        let denied = NewDenial {
            at: now,
            listener,
            mode: Mode::Enforce,
            reason: DenialReason::of(&verdict),
            retry_after: verdict.retry_after,
            rule: None,
            policy,
            key: &[&key],
            entries: &[],
        };
        self.push(&denied, selection);
    }

    /// Records that an Envoy rate limit descriptor is over its limit.
    #[cold]
    pub(crate) fn record_descriptor(&self, denied: &DescriptorDenial<'_>) {
        let Some(selection) = self.select(denied.now) else {
            return;
        };
        let texts = denied.descriptor.iter();
        let pairs = texts.map(|(name, value)| (name.as_str(), value.as_str()));
        let values: Vec<&str> = pairs.clone().map(|(_, value)| value).collect();
        // A descriptor can be longer than the key of a rule, and a record has a maximum length.
        let bytes: usize = values.iter().map(|value| value.len()).sum();
        let fits = bytes <= bounds::MAX_KEY_BYTES && values.len() <= bounds::MAX_KEY_ENTRIES;
        let entries: Vec<(&str, &str)> =
            [(DOMAIN, denied.domain)].into_iter().chain(pairs).collect();
        let recorded = NewDenial {
            at: denied.now,
            listener: denied.listener,
            mode: denied.mode,
            reason: denied.reason.into(),
            retry_after: denied.retry_after,
            rule: None,
            policy: Some(denied.policy),
            key: if fits { &values } else { &[] },
            entries: &entries,
        };
        self.push(&recorded, selection);
    }

    /// Decides whether a denied request is kept, and whether it is logged. Returns `None` if the
    /// request is neither kept nor logged. A request that is not kept is counted as lost.
    fn select(&self, now: Timestamp) -> Option<Selection> {
        let shard = self.shards.get(shard::index() % self.shards.len().max(1))?;
        let mut ring = shard.ring();
        let selection = Selection {
            is_kept: self.is_kept() && ring.try_take(now),
            is_logged: ring.sample_for_log(self.log_percent),
        };
        drop(ring);
        (selection.is_kept || selection.is_logged).then_some(selection)
    }

    /// Records `denied` with the key and the entries of the request.
    fn push_for(&self, decided: DecidedRequest<'_>, denied: NewDenial<'_>, selection: Selection) {
        let request = decided.request;
        let rule = denied.rule.and_then(|name| decided.rules.rule(name));
        let Some(rule) = rule else {
            return self.push_without_rule(decided, denied, selection);
        };
        let key = decided.key_of(rule.name());
        let entries: Vec<(&str, &str)> = used_entries(rule)
            .into_iter()
            .filter_map(|name| Some((name, request.entry(name)?)))
            .collect();
        let denied = NewDenial {
            key: &key,
            entries: &entries,
            ..denied
        };
        self.push(&denied, selection);
    }

    /// Records `denied`, a denial without a rule. If a block by entries has denied the request, the
    /// record contains the values of these entries.
    fn push_without_rule(
        &self,
        decided: DecidedRequest<'_>,
        denied: NewDenial<'_>,
        selection: Selection,
    ) {
        let block = match denied.reason {
            DenialReason::Blocked => decided
                .rules
                .entry_block(decided.request, None, decided.now),
            _ => None,
        };
        let entries = block.iter().flat_map(|(target, _)| target.entries());
        let entries = entries.filter_map(|entry| {
            let value = decided.request.entry(&entry.name)?;
            Some((&*entry.name, value))
        });
        let entries: Vec<(&str, &str)> = entries.collect();
        let denied = NewDenial {
            entries: &entries,
            ..denied
        };
        self.push(&denied, selection);
    }

    fn push(&self, denied: &NewDenial<'_>, selection: Selection) {
        if selection.is_kept {
            let at = shard::index() % self.shards.len();
            let mut ring = self.shards[at].ring();
            ring.push(self.segments, |out| denied.encode(out));
        }
        if selection.is_logged {
            denied.log();
        }
    }

    #[cfg(test)]
    fn heap_bytes(&self) -> usize {
        let shards = self.shards.iter();
        shards.map(|shard| shard.ring().heap_bytes()).sum()
    }
}

impl DenialShard {
    fn ring(&self) -> std::sync::MutexGuard<'_, DenialRing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DenialRecord {
    /// Returns the denial, with the values of its key and entries hashed if `mask` requires it.
    #[must_use]
    pub fn masked(self, mask: &KeyMask) -> Self {
        if !mask.is_hashed() {
            return self;
        }
        let hashed = |value: &String| mask.value(value).into_owned();
        let entries = self.entries.into_iter();
        Self {
            key: self.key.iter().map(hashed).collect(),
            entries: entries
                .map(|(name, value)| (name, hashed(&value)))
                .collect(),
            ..self
        }
    }
}

impl DenialFilter<'_> {
    fn selects(&self, record: &Record<'_>) -> bool {
        record.at >= self.since
            && self.rule.is_none_or(|rule| record.rule == Some(rule))
            && (self.key.is_empty() || record.key == self.key)
    }
}

impl NewDenial<'_> {
    fn log(&self) {
        tracing::info!(
            rule = self.rule,
            key = self.key.join(", "),
            policy = self.policy,
            reason = self.reason.as_str(),
            retry_after_ms = self
                .retry_after
                .span()
                .map(tidegate_core::Span::as_millis_ceil),
            listener = self.listener.as_str(),
            mode = self.mode.as_str(),
            "request denied"
        );
    }
}

/// Returns the names of the entries that the rule uses: first the entries of its conditions, then
/// the entries of its key.
fn used_entries(rule: &Rule) -> Vec<&str> {
    let mut names: Vec<&str> = rule.applies_when().entry_names().collect();
    for name in rule.key() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn mode_of(line: &Line<'_>) -> Mode {
    if line.shadow {
        Mode::Shadow
    } else {
        Mode::Enforce
    }
}

/// Returns the denying limit with the longest retry time.
fn denying_limit<'l>(
    limits: impl Iterator<Item = &'l Limit>,
    outcomes: &[Outcome],
) -> Option<&'l Limit> {
    let denying = limits.zip(outcomes).filter(|(_, outcome)| !outcome.allowed);
    let longest = denying.max_by_key(|(_, outcome)| outcome.retry_after);
    longest.map(|(limit, _)| limit)
}

#[cfg(test)]
mod tests;
