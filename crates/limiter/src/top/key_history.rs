//! The history of one key: its requests and denials in each time slice of a period.

use std::collections::BTreeMap;

use tidegate_core::{
    Rule, RuleSet, Timestamp,
    top::{ClosedSlice, GroupSummaries, Level, Measure, Period, SumBounds, minute_of},
};
use tidegate_redis::RedisStore;

use super::{TopError, TopTalkers, fleet, listed_rule};
use crate::KeyMask;

/// A query for the history of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryQuery {
    /// The rule.
    pub rule: String,
    /// The encoded key, as [`Rule::encode_key`] returns it.
    pub key: Vec<u8>,
    /// The period that the history covers.
    pub over: Period,
}

/// The requests and denials of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyHistory {
    /// The length of a time slice, in minutes.
    pub slice_minutes: u64,
    /// All time slices of the period, oldest first. The last slice is incomplete.
    pub slices: Vec<KeySlice>,
    /// The number of servers whose requests are counted.
    pub servers: usize,
    /// Why requests to other servers are missing; `None` if all servers were read.
    pub problem: Option<String>,
}

/// The requests and denials of a key in one time slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeySlice {
    /// The start of the time slice.
    pub start: Timestamp,
    /// All requests, including denied requests.
    pub requests: SumBounds,
    /// The requests that the rule denied, or would have denied if it were not in shadow mode.
    pub denied: SumBounds,
}

/// The slices published by other servers, by server ID and slice number.
#[derive(Debug, Default)]
pub struct PublishedHistory {
    slices: BTreeMap<(String, u64), ClosedSlice>,
    problem: Option<String>,
}

impl PublishedHistory {
    /// Returns the result to use if the other servers' slices cannot be read.
    #[must_use]
    pub fn unknown(problem: String) -> Self {
        Self {
            slices: BTreeMap::new(),
            problem: Some(problem),
        }
    }

    fn servers(&self) -> usize {
        let mut servers: Vec<&str> = self.slices.keys().map(|(server, _)| &**server).collect();
        servers.dedup();
        servers.len()
    }
}

impl KeySlice {
    fn add(&mut self, group: &GroupSummaries, key: &[u8]) {
        self.requests += group.bounds_of(Measure::Requests, key);
        self.denied += group.bounds_of(Measure::Denied, key);
    }
}

impl TopTalkers {
    /// Returns the counts of a rule in the time slice `number` of `level`. If the slice contains
    /// the current minute, includes each worker's counts for that minute.
    fn groups_in(&self, scope: u64, level: Level, number: u64, minute: u64) -> Vec<GroupSummaries> {
        // While `closed` is locked, no worker can move slices to the history.
        let closed = self.closed();
        let slice = closed.history.slice(level, number);
        let group = slice.and_then(|slice| slice.groups.get(&scope));
        let mut groups: Vec<GroupSummaries> = group.cloned().into_iter().collect();
        let mut live = Vec::new();
        if number == minute / level.minutes() {
            for shard in &self.shards {
                live.extend(shard.lock().groups(scope));
            }
        }
        // The locks are released before the sketches are sorted.
        drop(closed);
        groups.extend(live.iter().map(|group| group.summaries()));
        groups
    }

    /// Returns the requests and denials of a key on this server and on the `others`.
    ///
    /// # Errors
    ///
    /// Fails if the rule does not exist or has no list.
    pub(crate) fn key_history(
        &self,
        query: &HistoryQuery,
        others: &PublishedHistory,
        rules: &RuleSet,
        mask: &KeyMask,
        now: Timestamp,
    ) -> Result<KeyHistory, TopError> {
        let rule = rules.rule(&query.rule);
        let rule = rule.ok_or_else(|| TopError::UnknownRule(query.rule.clone()))?;
        let scope = rule.key_scope();
        if listed_rule(rules, scope).is_none() {
            return Err(TopError::Unlisted(query.rule.clone()));
        }
        let key = fleet::without_scope(&query.key);
        let published_key = published_key(rule, key, mask);
        let (minute, level) = (minute_of(now), query.over.level());
        self.collect_ended(now);
        let first = query.over.first_slice(minute);
        let slices = (first..=minute / level.minutes()).map(|number| {
            let mut slice = KeySlice {
                start: level.start(number),
                ..KeySlice::default()
            };
            for group in self.groups_in(scope, level, number, minute) {
                slice.add(&group, key);
            }
            for ((_, other), published) in &others.slices {
                if let Some(group) = published.groups.get(&scope).filter(|_| *other == number) {
                    slice.add(group, &published_key);
                }
            }
            slice
        });
        Ok(KeyHistory {
            slice_minutes: level.minutes(),
            slices: slices.collect(),
            servers: others.servers() + 1,
            problem: others.problem.clone(),
        })
    }

    /// Reads the slices that the other servers have published in `store`.
    pub(crate) async fn history_of_other_servers(
        &self,
        store: &RedisStore,
        rules: &RuleSet,
        query: &HistoryQuery,
        now: Timestamp,
    ) -> PublishedHistory {
        let mut history = PublishedHistory::default();
        let scope = rules.rule(&query.rule).map(Rule::key_scope);
        let read = self.read_published(store, query.over, now, |server, number, mut slice| {
            // Keep only the rule's counts, because a slice of all rules has up to 256 KiB and there
            // are many slices.
            slice.groups.retain(|group, _| Some(*group) == scope);
            history.slices.insert((server.to_owned(), number), slice);
        });
        match read.await {
            Ok(()) => history,
            Err(error) => PublishedHistory::unknown(error.to_string()),
        }
    }
}

/// Returns `key` as the servers publish it: hashed, if the setting `privacy` says so.
fn published_key(rule: &Rule, key: &[u8], mask: &KeyMask) -> Vec<u8> {
    if !mask.is_hashed() {
        return key.to_vec();
    }
    let hashed = fleet::hashed_key(key, Some(rule), mask);
    hashed.unwrap_or_else(|| key.to_vec())
}
