//! Top talkers on this server: the keys with the most traffic. Every decision is recorded. A query
//! lists the top keys of one rule or of all rules.
//!
//! Each worker records decisions in its own shard. Only a reader can contend for the lock of a
//! shard, and the reader holds the lock only while it copies the counts of one rule.

mod fleet;
mod key_history;

use std::{
    cmp::Reverse,
    collections::BTreeSet,
    num::NonZero,
    sync::{Mutex, MutexGuard, PoisonError},
    thread::available_parallelism,
};

use tidegate_core::{
    Charge, Decision, Limits, Mode, Outcome, Rule, RuleSet, Source, StoreDecision, Timestamp,
    free_key_parts,
    top::{
        ChargedKey, GroupSummaries, History, Level, MAX_TOP_RULES, Measure, NO_RULE, Period,
        RecordedRequest, Recorder, Tally, TopBounds, TopKey, minute_of, top_keys,
    },
};
use tidegate_net::prometheus::{Metric, Page, count};

pub use self::{
    fleet::OtherServers,
    key_history::{HistoryQuery, KeyHistory, KeySlice, PublishedHistory},
};
use crate::{KeyMask, metrics, publisher::Publisher};

const BYTES: Metric = Metric::gauge(
    "tidegate_top_bytes",
    [],
    "Memory used by the lists of top talkers, in bytes.",
);

static PUBLICATIONS: Metric<1> = Metric::counter(
    "tidegate_top_publications_total",
    ["result"],
    "Attempts to write the top talkers of this server to Redis, by result.",
);

/// The maximum number of shards. If there are more threads, some threads share a shard.
const MAX_SHARDS: usize = 16;

/// The maximum number of completed minutes in a shard. [`TopTalkers::collect_ended`] moves
/// completed minutes to the history. If that method is not called in time, the worker itself moves
/// the minutes.
const MAX_CLOSED: usize = 2;

/// A query for the keys with the most requests, denials or cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopQuery {
    /// The rule; `None` means all rules.
    pub rule: Option<String>,
    /// The quantity by which keys are ranked.
    pub by: Measure,
    /// The period over which requests are counted.
    pub over: Period,
    /// The maximum number of rows.
    pub count: usize,
}

/// The result of a [`TopQuery`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopList {
    /// The time from which on decisions are counted. The time is at most one time slice before the
    /// start of the requested period.
    pub from: Timestamp,
    /// The time of the query.
    pub until: Timestamp,
    /// The exact totals over all keys.
    pub total: Tally,
    /// The keys, in descending order of their estimates.
    pub rows: Vec<TopRow>,
    /// The number of servers whose requests are counted.
    pub servers: usize,
    /// Why requests to other servers are missing; `None` if all servers were read.
    pub problem: Option<String>,
}

/// A key of a [`TopList`]. The true value is in `estimate - error ..= estimate`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopRow {
    /// The rule; `None` for a limit sent with the request.
    pub rule: Option<Box<str>>,
    /// The values of the key, hashed if `privacy` requires it.
    pub key: Vec<String>,
    /// The Redis protocol database, for a limit sent with the request.
    pub database: u8,
    /// The estimate, which is an upper bound of the true value.
    pub estimate: u64,
    /// The maximum error of the estimate: the difference between the upper bound and the lower
    /// bound.
    pub error: u64,
}

/// The reason why a query fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopError {
    /// Lists of top talkers are off.
    #[error(
        "top talkers are off: the rules file has `top: off`; remove this setting, and restart the server"
    )]
    Off,
    /// There is no rule with this name.
    #[error("there is no rule \"{0}\"")]
    UnknownRule(String),
    /// The rule exists, but has no list of top talkers.
    #[error(
        "rule \"{0}\" has no list of top talkers: only the first {MAX_TOP_RULES} rules of the rules file have a list; move the rule up in the file"
    )]
    Unlisted(String),
}

/// Records decisions and ranks their keys.
#[derive(Debug)]
pub struct TopTalkers {
    /// The number of keys that a sketch tracks.
    keys: usize,
    shards: Box<[TopShard]>,
    closed: Mutex<ClosedSlices>,
    publisher: Publisher,
}

/// The completed time slices.
#[derive(Debug)]
struct ClosedSlices {
    history: History,
    /// The slices that have changed since they were last published.
    unpublished: BTreeSet<(Level, u64)>,
}

// A shard is aligned to two cache lines, because processors prefetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct TopShard(Mutex<Recorder>);

/// The counts of one rule: the counts of this server, and the counts that other servers have
/// published.
type Groups = Vec<GroupSummaries>;

impl TopTalkers {
    /// Creates lists of the keys of `rules`.
    pub(crate) fn new(bounds: TopBounds, rules: &RuleSet) -> Self {
        let TopBounds { keys, max_bytes } = bounds;
        let shards = available_parallelism().map_or(1, NonZero::get);
        let shards = shards.min(MAX_SHARDS);
        // Half of the memory is for the history, and the other half is divided among the shards.
        // The share of a shard is halved again, because a shard also stores the previous minute
        // until that minute is moved to the history.
        let shard = || {
            let mut recorder = Recorder::new(keys, max_bytes / 4 / shards);
            recorder.set_scopes(&scopes(rules));
            TopShard(Mutex::new(recorder))
        };
        Self {
            keys,
            shards: (0..shards).map(|_| shard()).collect(),
            closed: Mutex::new(ClosedSlices {
                history: History::new(keys, max_bytes / 2),
                unpublished: BTreeSet::new(),
            }),
            publisher: Publisher::new("top talkers", &PUBLICATIONS),
        }
    }

    /// Counts a decision on `charges` in the shard of this thread.
    #[inline]
    pub(crate) fn record(
        &self,
        now: Timestamp,
        charges: &[Charge<'_>],
        decided: &StoreDecision,
        outcomes: &[Outcome],
        fails_closed: impl Fn(&Limits) -> bool,
    ) {
        let decision = &decided.decision;
        let mut rest = outcomes;
        let keys = charges.iter().enumerate().map(|(at, charge)| {
            let (own, others) = rest.split_at(charge.limits.len().min(rest.len()));
            rest = others;
            ChargedKey {
                key: charge.key,
                cost: charge.cost.units(),
                denied: match decision {
                    Decision::Blocked { charge, .. } => *charge == at,
                    Decision::Full { .. } if decided.source == Source::Policy => {
                        fails_closed(charge.limits)
                    }
                    // The limits of a shadow rule may deny an admitted request.
                    _ => own.iter().any(|outcome| !outcome.allowed),
                },
            }
        });
        let costs = charges.iter().map(|charge| charge.cost.units());
        let request = RecordedRequest {
            cost: costs.max().unwrap_or(0),
            denied: *decision != Decision::Admitted,
        };
        let shard = &self.shards[metrics::shard_index() % self.shards.len()];
        let mut recorder = shard.lock();
        recorder.record(minute_of(now), request, keys);
        let is_overdue = recorder.closed() > MAX_CLOSED;
        drop(recorder);
        // A worker must not wait for a reader, so it only tries to take the lock.
        if is_overdue && let Ok(mut closed) = self.closed.try_lock() {
            self.collect_into(&mut closed, minute_of(now));
        }
    }

    /// Moves the slices that are complete at `now` from the shards to the history. Call this method
    /// every few seconds, on a thread that does not decide requests.
    pub fn collect_ended(&self, now: Timestamp) {
        self.collect_into(&mut self.closed(), minute_of(now));
    }

    /// Adds the metrics of the lists to `page`.
    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        page.single(&BYTES, count(self.heap_bytes()));
        self.publisher.collect(page);
    }

    /// Returns the size in bytes of the lists on the heap.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        let shards = self.shards.iter();
        let live: usize = shards.map(|shard| shard.lock().heap_bytes()).sum();
        live + self.closed().history.summary_bytes()
    }

    /// Creates lists for the `new` rules. Drops the lists of `old` rules that no longer exist or
    /// whose key entries have changed.
    pub(crate) fn swap_rules(&self, old: &RuleSet, new: &RuleSet) {
        let listed = scopes(new);
        let has_same_key = |rule: &&Rule| {
            let new = new.rule(rule.name());
            new.is_some_and(|new| new.key().eq(rule.key()))
        };
        let old = old.iter().take(MAX_TOP_RULES);
        let kept: BTreeSet<u64> = old.filter(has_same_key).map(Rule::key_scope).collect();
        let mut closed = self.closed();
        for shard in &self.shards {
            let mut recorder = shard.lock();
            recorder.set_scopes(&listed);
            for scope in listed.iter().filter(|scope| !kept.contains(scope)) {
                recorder.reset_rule(*scope);
            }
        }
        let listed: BTreeSet<u64> = listed.into_iter().collect();
        closed
            .history
            .retain(|scope| scope == NO_RULE || (kept.contains(&scope) && listed.contains(&scope)));
    }

    /// Ranks the keys of one rule, or of all rules.
    pub(crate) fn list(
        &self,
        query: &TopQuery,
        others: &OtherServers,
        rules: &RuleSet,
        mask: &KeyMask,
        now: Timestamp,
    ) -> Result<TopList, TopError> {
        let minute = minute_of(now);
        let listed = |scope| listed_rule(rules, scope);
        // While `closed` is locked, no worker can move slices to the history.
        let mut closed = self.closed();
        self.collect_into(&mut closed, minute);
        let view = TopView {
            talkers: self,
            history: &closed.history,
            others,
            query,
            minute,
            mask,
        };
        let (total, rows) = match &query.rule {
            Some(name) => {
                let rule = rules.rule(name);
                let rule = rule.ok_or_else(|| TopError::UnknownRule(name.clone()))?;
                if listed(rule.key_scope()).is_none() {
                    return Err(TopError::Unlisted(name.clone()));
                }
                let groups = view.groups(rule.key_scope(), Some(rule));
                (tally(&groups), view.rows(Some(rule), &groups))
            }
            None => {
                let mut rows = Vec::new();
                for scope in view.scopes(rules) {
                    let rule = listed(scope);
                    if rule.is_none() && scope != NO_RULE {
                        continue;
                    }
                    // A rule in shadow mode has not denied these requests.
                    let is_shadow = rule.is_some_and(|rule| rule.mode() == Mode::Shadow);
                    if is_shadow && query.by == Measure::Denied {
                        continue;
                    }
                    rows.extend(view.rows(rule, &view.groups(scope, rule)));
                    rank(&mut rows, query.count);
                }
                (view.total(), rows)
            }
        };
        Ok(TopList {
            from: query.over.start(minute),
            until: now,
            total,
            rows,
            servers: others.slices.len() + 1,
            problem: others.problem.clone(),
        })
    }

    fn collect_into(&self, closed: &mut ClosedSlices, minute: u64) {
        let ClosedSlices {
            history,
            unpublished,
        } = closed;
        history.expire(minute);
        unpublished.retain(|(level, number)| history.slice(*level, *number).is_some());
        for shard in &self.shards {
            let mut recorder = shard.lock();
            recorder.advance(minute);
            let closed = recorder.take_closed();
            drop(recorder);
            if !closed.is_empty() {
                unpublished.extend(history.add(&closed, minute));
            }
        }
    }

    fn closed(&self) -> MutexGuard<'_, ClosedSlices> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TopShard {
    fn lock(&self) -> MutexGuard<'_, Recorder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The data that a query reads.
struct TopView<'v> {
    talkers: &'v TopTalkers,
    history: &'v History,
    others: &'v OtherServers,
    query: &'v TopQuery,
    minute: u64,
    mask: &'v KeyMask,
}

impl TopView<'_> {
    /// Returns the exact totals over all rules.
    fn total(&self) -> Tally {
        let mut total = Tally::default();
        let slices = self.history.slices(self.query.over, self.minute);
        slices.for_each(|slice| total += slice.total);
        let shards = self.talkers.shards.iter();
        shards.for_each(|shard| total += shard.lock().total());
        let others = self.others.slices.iter();
        others.for_each(|slice| total += slice.total);
        total
    }

    /// Returns the scopes that may have counts. A scope identifies a rule.
    fn scopes(&self, rules: &RuleSet) -> BTreeSet<u64> {
        let mut scopes = self.history.scopes(self.query.over, self.minute);
        scopes.extend(self::scopes(rules));
        let others = self.others.slices.iter();
        scopes.extend(others.flat_map(|slice| slice.groups.keys()));
        scopes.insert(NO_RULE);
        scopes
    }

    /// Returns the counts of a scope in the slices of the period, and in the current minute. If
    /// other servers have published counts with hashed keys, the keys in the returned counts are
    /// hashed, too.
    fn groups(&self, scope: u64, rule: Option<&Rule>) -> Groups {
        let slices = self.history.slices(self.query.over, self.minute);
        let mut groups: Groups = slices
            .filter_map(|slice| slice.groups.get(&scope).cloned())
            .collect();
        for shard in &self.talkers.shards {
            // The lock is released before the sketches are sorted.
            let live: Vec<_> = shard.lock().groups(scope).collect();
            groups.extend(live.iter().map(|group| group.summaries()));
        }
        if self.is_hashed() {
            let hash = |group: &GroupSummaries| fleet::hashed(group, rule, self.mask);
            groups = groups.iter().map(hash).collect();
        }
        let others = self.others.slices.iter();
        groups.extend(others.filter_map(|slice| slice.groups.get(&scope).cloned()));
        groups
    }

    /// Returns whether keys must be hashed, so that they match the hashed keys of other servers.
    fn is_hashed(&self) -> bool {
        self.mask.is_hashed() && !self.others.slices.is_empty()
    }

    fn rows(&self, rule: Option<&Rule>, groups: &Groups) -> Vec<TopRow> {
        let by = self.query.by;
        let summaries = groups.iter().flat_map(|group| group.of(by));
        let keys = top_keys(summaries, self.query.count);
        keys.iter().filter_map(|top| self.row(rule, top)).collect()
    }

    /// Returns a row of the list; `None` if the key was counted while the rule had different key
    /// entries.
    fn row(&self, rule: Option<&Rule>, top: &TopKey<'_>) -> Option<TopRow> {
        let plain = KeyMask::plain();
        let mask = if self.is_hashed() { &plain } else { self.mask };
        let (key, database) = match rule {
            Some(rule) => {
                let values = rule.decode_values(top.key)?;
                let values = values.into_iter();
                (
                    values.map(|value| mask.value(value).into_owned()).collect(),
                    0,
                )
            }
            None => {
                let (database, key) = free_key_parts(top.key);
                let shown = mask.bytes(key);
                (vec![String::from_utf8_lossy(&shown).into_owned()], database)
            }
        };
        Some(TopRow {
            rule: rule.map(|rule| rule.name().into()),
            key,
            database,
            estimate: top.estimate,
            error: top.error,
        })
    }
}

/// Keeps the `count` rows with the highest estimates, in descending order.
fn rank(rows: &mut Vec<TopRow>, count: usize) {
    let place = |row: &TopRow| (Reverse(row.estimate), row.error);
    let name = |row: &TopRow| (row.rule.clone(), row.key.clone());
    rows.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| name(a).cmp(&name(b))));
    rows.truncate(count);
}

fn tally(groups: &Groups) -> Tally {
    let mut tally = Tally::default();
    groups.iter().for_each(|group| tally += group.tally);
    tally
}

/// Returns the rule with this scope, if it has a list.
fn listed_rule(rules: &RuleSet, scope: u64) -> Option<&Rule> {
    let mut listed = rules.iter().take(MAX_TOP_RULES);
    listed.find(|rule| rule.key_scope() == scope)
}

/// Returns the scopes of the rules that have lists.
fn scopes(rules: &RuleSet) -> Vec<u64> {
    let listed = rules.iter().take(MAX_TOP_RULES);
    listed.map(Rule::key_scope).collect()
}
