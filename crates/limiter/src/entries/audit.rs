//! Audit of request entries: counts and logs requests to which no rule applies, and entries that no
//! rule uses. Each listener has its own audit. Each name is logged at most once a minute.
//!
//! A request with a misspelt entry escapes the limits: for example, no rule uses the entry
//! `custmer`, and no error is returned. However, services may also send extra entries on purpose.
//! An unknown entry that does not resemble a known entry is therefore logged once, and only counted
//! from then on.

use std::{
    cell::RefCell,
    hash::BuildHasher,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use foldhash::{HashMap, HashMapExt};
use tidegate::DecidedRequest;
use tidegate_core::{Rule, RuleSet, Scratch, Source, Timestamp, Verdict};
use tidegate_net::input::{nearest, shown};

use super::throttle::{EventLogThrottle, PERIOD};
use crate::metrics::{ListenerKind, Metrics};

/// The maximum number of distinct unknown entries that are logged per [`PERIOD`] and listener.
const MAX_UNKNOWN: usize = 32;

/// The maximum number of remembered unknown entries that resemble no known entry. These entries are
/// not dropped at the end of a [`PERIOD`], so that each of them is logged only once. The remaining
/// slots of [`MAX_UNKNOWN`] are for misspelt entries.
const MAX_UNRELATED: usize = 24;

/// The maximum number of names in one log record.
const MAX_NAMED: usize = 10;

/// After this number of requests, the audit logs the key entries that none of these requests had.
const REQUESTS_WITHOUT_KEY: u64 = 1_000;

/// The number of listener kinds.
const LISTENERS: usize = ListenerKind::ALL.len();

thread_local! {
    /// Buffers for matching requests against the allow list. The buffers are reused, so that an
    /// audit does not allocate buffers for each request.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The entries seen in requests under one rule set.
#[derive(Debug)]
pub(crate) struct EntryAudit {
    known: HashMap<Box<str>, KnownEntry>,
    unmatched: [EventLogThrottle; LISTENERS],
    unknown: [UnknownEntries; LISTENERS],
    /// The number of requests, counted up to [`REQUESTS_WITHOUT_KEY`].
    requests: AtomicU64,
}

/// An entry that a rule uses.
#[derive(Debug, Default)]
struct KnownEntry {
    is_key: bool,
    has_arrived: AtomicBool,
}

/// The request entries at one listener that no rule uses.
#[derive(Debug, Default)]
struct UnknownEntries {
    quiet: QuietNames,
    window: Mutex<UnknownWindow>,
}

/// The names that need not be logged now. Workers read this set without a lock. Only a worker that
/// has locked the [`UnknownWindow`] writes to the set.
#[derive(Debug, Default)]
struct QuietNames {
    until_micros: AtomicU64,
    len: AtomicUsize,
    hashes: [AtomicU64; MAX_UNKNOWN],
}

/// The unknown entries of the current [`PERIOD`].
#[derive(Debug, Default)]
struct UnknownWindow {
    entries: Vec<UnknownEntry>,
    /// The number of unknown entries that earlier log records have reported.
    covered: u64,
}

#[derive(Debug)]
struct UnknownEntry {
    name: Box<str>,
    /// The known entry that the client probably meant.
    nearest: Option<Box<str>>,
}

/// Unknown entries that must be logged.
#[derive(Debug, PartialEq, Eq)]
struct DueNames {
    names: Vec<String>,
    /// The number of unknown entries that no log record has reported yet.
    count: u64,
}

/// The source of a request's entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The service that sent the request. A service may misspell the name of an entry.
    Service,
    /// The listener. A listener derives exactly the entries that the rules use.
    Listener,
}

/// A decided request.
#[derive(Clone, Copy, Debug)]
pub struct AuditedRequest<'a> {
    /// The listener that handled the request.
    pub listener: ListenerKind,
    /// The source of the request's entry names.
    pub origin: Origin,
    /// The request, with the rules and the time of the decision.
    pub decided: DecidedRequest<'a>,
}

impl EntryAudit {
    /// Creates an audit of requests under `rules`.
    pub(crate) fn new(rules: &RuleSet, metrics: &Metrics) -> Self {
        let mut known: HashMap<Box<str>, KnownEntry> = HashMap::new();
        for name in rules.entry_names().chain(rules.extra_entry_names()) {
            known.insert(name.into(), KnownEntry::default());
        }
        for key in rules.iter().flat_map(Rule::key) {
            known.entry(key.into()).or_default().is_key = true;
        }
        Self {
            known,
            unmatched: ListenerKind::ALL
                .map(|listener| EventLogThrottle::after(metrics.unmatched_requests(listener))),
            unknown: ListenerKind::ALL
                .map(|listener| UnknownEntries::after(metrics.unknown_entries(listener))),
            requests: AtomicU64::new(0),
        }
    }

    /// Records the entries of a request that received `verdict`.
    pub(crate) fn observe(
        &self,
        audited: AuditedRequest<'_>,
        verdict: &Verdict<'_>,
        metrics: &Metrics,
    ) {
        let mut unknown = 0;
        for (name, _) in audited.decided.request.entries() {
            match self.known.get(*name) {
                // Write the flag only once, because an unconditional write would invalidate the
                // cache line for the other workers.
                Some(known) if !known.has_arrived.load(Ordering::Relaxed) => {
                    known.has_arrived.store(true, Ordering::Relaxed);
                }
                Some(_) => {}
                None => unknown += 1,
            }
        }
        self.count_request(audited.decided.rules);
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

    /// Returns the number of key entries that no request has contained since the rules were
    /// activated.
    pub(crate) fn missing_key_entries(&self) -> u64 {
        let missing = self.known.values().filter(|known| known.is_missing());
        u64::try_from(missing.count()).unwrap_or(u64::MAX)
    }

    fn report_unmatched(&self, audited: AuditedRequest<'_>, metrics: &Metrics) {
        let throttle = &self.unmatched[audited.listener.index()];
        let total = || metrics.unmatched_requests(audited.listener);
        let Some(requests) = throttle.open(audited.decided.now, total) else {
            return;
        };
        let names = audited
            .decided
            .request
            .entries()
            .iter()
            .map(|(name, _)| *name);
        let entries = listed(names);
        let listener = audited.listener.as_str();
        if audited.decided.rules.is_empty() {
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
                "requests matched no rule, so they were allowed and not counted; `entries` lists the entries of the last request"
            );
        }
    }

    fn report_unknown(&self, audited: AuditedRequest<'_>, metrics: &Metrics) {
        let names = audited
            .decided
            .request
            .entries()
            .iter()
            .map(|(name, _)| *name);
        let unknown = names.filter(|name| !self.known.contains_key(*name));
        let of_listener = &self.unknown[audited.listener.index()];
        let total = || metrics.unknown_entries(audited.listener);
        let Some(due) = of_listener.take_due(unknown, &self.known, audited.decided.now, total)
        else {
            return;
        };
        let listener = audited.listener.as_str();
        for (count, entries) in due.records() {
            tracing::warn!(
                count,
                listener,
                entries,
                "requests have entries that no rule uses; check the entry names, which are case-sensitive"
            );
        }
    }

    /// After [`REQUESTS_WITHOUT_KEY`] requests, logs once which key entries were missing from all
    /// of these requests.
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
            "no request has had these entries since the rules were loaded, so the rules keyed by these entries have limited no request"
        );
    }
}

impl KnownEntry {
    fn is_missing(&self) -> bool {
        self.is_key && !self.has_arrived.load(Ordering::Relaxed)
    }
}

impl UnknownEntries {
    /// Creates the state of a listener. Earlier log records have reported its first `covered`
    /// unknown entries.
    fn after(covered: u64) -> Self {
        let window = UnknownWindow {
            entries: Vec::new(),
            covered,
        };
        Self {
            quiet: QuietNames::default(),
            window: Mutex::new(window),
        }
    }

    /// Returns the unknown `names` that must be logged now, each with the known entry that was
    /// probably meant. Usually, no name must be logged, and no lock is taken. `total` returns the
    /// number of unknown entries so far.
    fn take_due<'n>(
        &self,
        names: impl Iterator<Item = &'n str> + Clone,
        known: &HashMap<Box<str>, KnownEntry>,
        now: Timestamp,
        total: impl FnOnce() -> u64,
    ) -> Option<DueNames> {
        let hash = |name: &str| known.hasher().hash_one(name);
        if self.quiet.has_all(names.clone().map(hash), now) {
            return None;
        }
        // If another worker is logging, this worker has nothing to do, because the total already
        // includes its request.
        let mut window = self.window.try_lock().ok()?;
        if !self.quiet.is_open(now) {
            window.drop_misspelled();
            let retained = window.entries.iter().map(|entry| hash(&entry.name));
            self.quiet.begin(retained, now);
        }
        let mut names_due = Vec::new();
        for name in names {
            let is_logged = |entry: &UnknownEntry| *entry.name == *name;
            if window.entries.len() < MAX_UNKNOWN && !window.entries.iter().any(is_logged) {
                let entry = UnknownEntry {
                    name: name.into(),
                    nearest: resembling(name, known).map(Box::from),
                };
                names_due.push(entry.describe());
                window.entries.push(entry);
                self.quiet.add(hash(name));
            }
        }
        if names_due.is_empty() {
            return None;
        }
        let total = total();
        let covered = std::mem::replace(&mut window.covered, total);
        Some(DueNames {
            names: names_due,
            count: total.saturating_sub(covered),
        })
    }
}

impl DueNames {
    /// Splits the names into log records of at most [`MAX_NAMED`] names each. Only the first record
    /// has the count: with the count in each record, the sum over all log records would be too
    /// high.
    fn records(&self) -> impl Iterator<Item = (Option<u64>, String)> {
        let counts = std::iter::once(Some(self.count)).chain(std::iter::repeat(None));
        let names = self.names.chunks(MAX_NAMED);
        counts.zip(names.map(|names| names.join(", ")))
    }
}

impl UnknownWindow {
    /// Drops the entries that resemble a known entry, so that they are logged again in the next
    /// period.
    fn drop_misspelled(&mut self) {
        self.entries.retain(|entry| entry.nearest.is_none());
        self.entries.truncate(MAX_UNRELATED);
    }
}

impl QuietNames {
    /// Returns whether no name with one of these hashes needs to be logged at `now`.
    fn has_all(&self, mut hashes: impl Iterator<Item = u64>, now: Timestamp) -> bool {
        let len = self.len.load(Ordering::Acquire);
        let quiet = &self.hashes[..len.min(MAX_UNKNOWN)];
        let is_quiet = |hash: u64| quiet.iter().any(|own| own.load(Ordering::Relaxed) == hash);
        self.is_open(now) && (len >= MAX_UNKNOWN || hashes.all(is_quiet))
    }

    /// Returns whether the current period has not ended yet.
    fn is_open(&self, now: Timestamp) -> bool {
        now.as_micros() < self.until_micros.load(Ordering::Acquire)
    }

    /// Begins a period in which the names with these hashes need not be logged.
    fn begin(&self, hashes: impl Iterator<Item = u64>, now: Timestamp) {
        self.len.store(0, Ordering::Release);
        hashes.for_each(|hash| self.add(hash));
        let until = now.after(PERIOD).as_micros();
        self.until_micros.store(until, Ordering::Release);
    }

    fn add(&self, hash: u64) {
        let len = self.len.load(Ordering::Relaxed);
        if let Some(free) = self.hashes.get(len) {
            free.store(hash, Ordering::Relaxed);
            self.len.store(len + 1, Ordering::Release);
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

/// Returns the known entry that `name` was probably meant to be. A known entry that differs only in
/// case takes precedence over the known entry with the smallest edit distance.
fn resembling<'k>(name: &str, known: &'k HashMap<Box<str>, KnownEntry>) -> Option<&'k str> {
    let mut names: Vec<&str> = known.keys().map(|name| &**name).collect();
    names.sort_unstable();
    let same = names.iter().find(|known| known.eq_ignore_ascii_case(name));
    same.copied().or_else(|| nearest(name, &names))
}

/// Returns whether the request was allowed because no rule applies to it. Returns false if the
/// request matches the allow list.
fn is_unmatched(audited: AuditedRequest<'_>, verdict: &Verdict<'_>) -> bool {
    let is_unlimited =
        verdict.allowed && verdict.lines.is_empty() && verdict.source == Source::Memory;
    let DecidedRequest {
        request,
        rules,
        now,
    } = audited.decided;
    is_unlimited && SCRATCH.with_borrow_mut(|scratch| !rules.is_allow_listed(request, now, scratch))
}

/// Joins names into one string of limited length.
fn listed<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let mut names = names;
    let mut listed: Vec<String> = names.by_ref().take(MAX_NAMED).map(shown).collect();
    let more = names.count();
    if more > 0 {
        listed.push(format!("and {more} more"));
    }
    listed.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(names: &[&str]) -> HashMap<Box<str>, KnownEntry> {
        let entry = |name: &&str| (Box::from(*name), KnownEntry::default());
        names.iter().map(entry).collect()
    }

    /// Returns the names that must be logged. Sets the total of unknown entries to 0, because the
    /// tests do not check it.
    fn due_names(
        unknown: &UnknownEntries,
        known: &HashMap<Box<str>, KnownEntry>,
        names: &[&str],
        secs: u64,
    ) -> Vec<String> {
        let due = unknown.take_due(names.iter().copied(), known, at(secs), || 0);
        due.map(|due| due.names).unwrap_or_default()
    }

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000 + secs * 1_000_000)
    }

    #[test]
    fn each_misspelt_name_is_logged_once_a_minute() {
        let (unknown, known) = (UnknownEntries::after(0), known(&["customer", "ip"]));
        let due = |names: &[&str], secs| due_names(&unknown, &known, names, secs);
        let customer = "custmer (did you mean customer?)";
        assert_eq!(due(&["custmer"], 0), [customer]);
        assert_eq!(due(&["custmer"], 1), [""; 0]);
        assert_eq!(due(&["custmer", "IP"], 2), ["IP (did you mean ip?)"]);
        assert_eq!(due(&["plan"], 3), ["plan"]);
        assert_eq!(due(&["custmer", "IP", "plan"], 59), [""; 0]);
        // A name that resembles no known entry may be sent on purpose, so it is not logged again.
        assert_eq!(due(&["plan", "custmer"], 60), [customer]);
        assert_eq!(due(&["plan", "custmer"], 119), [""; 0]);
    }

    #[test]
    fn the_number_of_names_logged_in_a_minute_is_bounded() {
        let (unknown, known) = (UnknownEntries::after(0), known(&["customer"]));
        let names: Vec<String> = (0..100).map(|number| format!("extra-{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let due = |secs| due_names(&unknown, &known, &names, secs);
        assert_eq!(due(0).len(), MAX_UNKNOWN);
        assert_eq!(due(1), [""; 0]);
        let misspelt = |secs| due_names(&unknown, &known, &["custmer"], secs);
        assert_eq!(misspelt(2), [""; 0], "beyond the bound");
        assert_eq!(
            misspelt(60).len(),
            1,
            "unrelated names leave room for misspelt names"
        );
    }

    #[test]
    fn records_count_what_earlier_ones_did_not() {
        let (unknown, known) = (UnknownEntries::after(5), known(&["customer"]));
        let due = |names: &[&str], total| {
            let due = unknown.take_due(names.iter().copied(), &known, at(0), || total);
            due.map(|due| due.count)
        };
        assert_eq!(due(&["a"], 7), Some(2));
        assert_eq!(due(&["a"], 9), None);
        assert_eq!(due(&["b"], 10), Some(3));
    }

    #[test]
    fn the_count_is_logged_once_however_many_names_are_due() {
        let (unknown, known) = (UnknownEntries::after(0), known(&["customer"]));
        let names: Vec<String> = (0..25).map(|number| format!("extra-{number}")).collect();
        let names = names.iter().map(String::as_str);
        let due = unknown.take_due(names, &known, at(0), || 25).unwrap();
        let records: Vec<_> = due.records().collect();
        let counts: Vec<_> = records.iter().map(|(count, _)| *count).collect();
        assert_eq!(counts, [Some(25), None, None]);
        let named = records
            .iter()
            .map(|(_, entries)| entries.split(", ").count());
        assert_eq!(named.collect::<Vec<_>>(), [10, 10, 5]);
    }
}
