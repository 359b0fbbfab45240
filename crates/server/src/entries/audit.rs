//! Audit of requests that no rule applies to and of entries that no rule uses: counted, and logged
//! at most once a minute.
//!
//! A misspelt entry fails open: nothing limits `custmer`, and no error is returned. Services may
//! also send extra entries on purpose. So an unknown entry that does not resemble a known one is
//! logged once and then only counted.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use foldhash::{HashMap, HashMapExt};
use tidegate_core::{Request, Rule, RuleSet, Scratch, Source, Timestamp, Verdict};

use super::throttle::LogThrottle;
use crate::{
    config::report::{nearest, shown},
    metrics::{ListenerKind, Metrics},
};

/// The maximum number of distinct unknown entries that are tracked.
const MAX_UNKNOWN: usize = 32;

/// The maximum number of names in one log record.
const MAX_NAMED: usize = 10;

/// The number of requests after which key entries that no request has had are logged.
const REQUESTS_WITHOUT_KEY: u64 = 1_000;

/// The entries seen in requests under one rule set.
#[derive(Debug)]
pub(crate) struct EntryAudit {
    known: HashMap<Box<str>, KnownEntry>,
    unmatched: LogThrottle,
    unknown: Mutex<UnknownEntries>,
    /// Counts up to [`REQUESTS_WITHOUT_KEY`].
    requests: AtomicU64,
}

/// An entry that a rule uses.
#[derive(Debug, Default)]
struct KnownEntry {
    is_key: bool,
    has_arrived: AtomicBool,
}

/// Entries that no rule uses.
#[derive(Debug, Default)]
struct UnknownEntries {
    throttle: LogThrottle,
    entries: Vec<UnknownEntry>,
}

#[derive(Debug)]
struct UnknownEntry {
    name: Box<str>,
    /// The known entry that was probably meant.
    nearest: Option<Box<str>>,
    is_due: bool,
}

/// The source of the entry names of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The service that sent the request, which may misspell an entry.
    Service,
    /// The listener, which derives the entries that the rules use.
    Listener,
}

/// A decided request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AuditedRequest<'a> {
    pub(crate) listener: ListenerKind,
    pub(crate) origin: Origin,
    pub(crate) request: &'a Request<'a>,
    pub(crate) rules: &'a RuleSet,
    pub(crate) now: Timestamp,
}

impl EntryAudit {
    /// Creates an audit of requests under `rules`.
    pub(crate) fn new(rules: &RuleSet, metrics: &Metrics) -> Self {
        let mut known: HashMap<Box<str>, KnownEntry> = HashMap::new();
        for name in rules.entry_names() {
            known.insert(name.into(), KnownEntry::default());
        }
        for key in rules.iter().flat_map(Rule::key) {
            known.entry(key.into()).or_default().is_key = true;
        }
        let unknown = UnknownEntries {
            throttle: LogThrottle::after(metrics.unknown_entries()),
            entries: Vec::new(),
        };
        Self {
            known,
            unmatched: LogThrottle::after(metrics.unmatched_requests()),
            unknown: Mutex::new(unknown),
            requests: AtomicU64::new(0),
        }
    }

    /// Records the entries of a request that was answered with `verdict`.
    pub(crate) fn observe(
        &self,
        audited: AuditedRequest<'_>,
        verdict: &Verdict<'_>,
        metrics: &Metrics,
    ) {
        let mut unknown = 0;
        for (name, _) in audited.request.entries() {
            match self.known.get(*name) {
                // Load before storing: an unconditional store would take the cache line from the
                // other workers.
                Some(known) if !known.has_arrived.load(Ordering::Relaxed) => {
                    known.has_arrived.store(true, Ordering::Relaxed);
                }
                Some(_) => {}
                None => unknown += 1,
            }
        }
        self.count_request(audited.rules);
        if is_unmatched(audited, verdict) {
            metrics.count_unmatched(audited.listener);
            if audited.origin == Origin::Service {
                self.report_unmatched(audited, metrics);
            }
        }
        if unknown > 0 {
            metrics.count_unknown_entries(audited.listener, unknown);
            self.report_unknown(audited, metrics);
        }
    }

    /// Returns the number of key entries that no request has had since the rules took effect.
    pub(crate) fn missing_key_entries(&self) -> u64 {
        let missing = self.known.values().filter(|known| known.is_missing());
        u64::try_from(missing.count()).unwrap_or(u64::MAX)
    }

    fn report_unmatched(&self, audited: AuditedRequest<'_>, metrics: &Metrics) {
        let Some(requests) = self
            .unmatched
            .open(audited.now, || metrics.unmatched_requests())
        else {
            return;
        };
        let names = audited.request.entries().iter().map(|(name, _)| *name);
        let entries = listed(names);
        let listener = audited.listener.as_str();
        if audited.rules.is_empty() {
            tracing::warn!(
                requests,
                listener,
                "no rules are loaded: requests were allowed and not counted"
            );
        } else {
            tracing::warn!(
                requests,
                listener,
                entries,
                "requests matched no rule: they were allowed and not counted; `entries` are those of the last one"
            );
        }
    }

    fn report_unknown(&self, audited: AuditedRequest<'_>, metrics: &Metrics) {
        // Another worker is logging. This request has been counted already.
        let Ok(mut unknown) = self.unknown.try_lock() else {
            return;
        };
        for (name, _) in audited.request.entries() {
            if !self.known.contains_key(*name) {
                unknown.add(name, &self.known);
            }
        }
        if !unknown.entries.iter().any(|entry| entry.is_due) {
            return;
        }
        let Some(count) = unknown
            .throttle
            .open(audited.now, || metrics.unknown_entries())
        else {
            return;
        };
        let due = unknown.entries.iter_mut().filter(|entry| entry.is_due);
        let mut described = Vec::new();
        for entry in due.take(MAX_NAMED) {
            entry.is_due = false;
            described.push(entry.describe());
        }
        let (listener, entries) = (audited.listener.as_str(), described.join(", "));
        tracing::warn!(
            count,
            listener,
            entries,
            "requests have entries that no rule uses; entry names are case-sensitive"
        );
    }

    /// Logs the key entries that no request has had, once, after [`REQUESTS_WITHOUT_KEY`] requests.
    fn count_request(&self, rules: &RuleSet) {
        if self.requests.load(Ordering::Relaxed) >= REQUESTS_WITHOUT_KEY {
            return;
        }
        let before = self.requests.fetch_add(1, Ordering::Relaxed);
        if before + 1 != REQUESTS_WITHOUT_KEY {
            return;
        }
        let missing = self.known.iter().filter(|(_, known)| known.is_missing());
        let mut missing: Vec<&str> = missing.map(|(name, _)| &**name).collect();
        if missing.is_empty() {
            return;
        }
        missing.sort_unstable();
        let is_idle = |rule: &&Rule| rule.key().any(|key| missing.contains(&key));
        let idle = listed(rules.iter().filter(is_idle).map(Rule::name));
        let entries = listed(missing.into_iter());
        tracing::warn!(
            entries,
            rules = idle,
            requests = REQUESTS_WITHOUT_KEY,
            "no request has had these entries since the rules were loaded, so the rules keyed by them have limited nothing"
        );
    }
}

impl KnownEntry {
    fn is_missing(&self) -> bool {
        self.is_key && !self.has_arrived.load(Ordering::Relaxed)
    }
}

impl UnknownEntries {
    fn add(&mut self, name: &str, known: &HashMap<Box<str>, KnownEntry>) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| *entry.name == *name) {
            // An entry that resembles no known one may be intended, so it is logged only once.
            entry.is_due |= entry.nearest.is_some();
        } else if self.entries.len() < MAX_UNKNOWN {
            self.entries.push(UnknownEntry {
                name: name.into(),
                nearest: resembling(name, known).map(Box::from),
                is_due: true,
            });
        }
    }
}

impl UnknownEntry {
    fn describe(&self) -> String {
        let name = shown(&self.name);
        match &self.nearest {
            Some(nearest) => format!("{name} (did you mean {}?)", shown(nearest)),
            None => name,
        }
    }
}

/// Returns the known entry that `name` was probably meant to be. A match that differs only in case
/// wins over the edit distance.
fn resembling<'k>(name: &str, known: &'k HashMap<Box<str>, KnownEntry>) -> Option<&'k str> {
    let mut names: Vec<&str> = known.keys().map(|name| &**name).collect();
    names.sort_unstable();
    let same = names.iter().find(|known| known.eq_ignore_ascii_case(name));
    same.copied().or_else(|| nearest(name, &names))
}

/// Returns whether `verdict` allowed the request because no rule applies to it. A request on the
/// allow list does not count.
fn is_unmatched(audited: AuditedRequest<'_>, verdict: &Verdict<'_>) -> bool {
    let is_unlimited =
        verdict.allowed && verdict.lines.is_empty() && verdict.source == Source::Memory;
    let AuditedRequest {
        request,
        rules,
        now,
        ..
    } = audited;
    is_unlimited && !rules.is_allow_listed(request, now, &mut Scratch::default())
}

/// Joins names into one text of limited length.
fn listed<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let mut names = names;
    let mut listed: Vec<String> = names.by_ref().take(MAX_NAMED).map(shown).collect();
    let more = names.count();
    if more > 0 {
        listed.push(format!("and {more} more"));
    }
    listed.join(", ")
}
