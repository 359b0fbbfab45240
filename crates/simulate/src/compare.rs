//! Compares the decisions of two rules files.

use std::collections::HashMap;

use serde::Serialize;
use tidegate_core::{RuleSet, Timestamp};

use crate::replay::{ReplayDecision, RulesUnderTest, key_values};

/// The maximum number of listed keys for each kind of change.
const SHOWN_KEYS: usize = 20;

/// The differences between the decisions of this rules file and of another rules file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// The other rules file.
    pub against: String,
    /// The number of requests that could be decided with both files.
    pub compared: u64,
    /// The number of requests that could be decided only with the other file. With the file under
    /// test, these requests are rejected as invalid, for example because their cost entry is
    /// missing. `compared` does not include the rejected requests.
    pub newly_refused: u64,
    /// The number of requests that are denied with this file and admitted with the other file.
    pub newly_denied: u64,
    /// The number of requests that are admitted with this file and denied with the other file.
    pub no_longer_denied: u64,
    /// The rules and keys with the most newly denied requests.
    pub newly: Vec<ComparedKey>,
    /// The other file's rules and keys with the most requests that are no longer denied.
    pub no_longer: Vec<ComparedKey>,
}

/// A key with requests that are decided differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ComparedKey {
    /// The rule that denies the requests.
    pub rule: String,
    /// The values of the key entries.
    pub key: Vec<String>,
    /// The number of requests.
    pub requests: u64,
    /// The time of the first of these requests, in milliseconds since the Unix epoch.
    pub first_ms: u64,
    /// The time of the last of these requests, in milliseconds since the Unix epoch.
    pub last_ms: u64,
}

/// Counts the differences.
#[derive(Debug, Default)]
pub(crate) struct Differences {
    compared: u64,
    newly_refused: u64,
    newly: ChangedKeys,
    no_longer: ChangedKeys,
}

/// The position of a rule in its file, and a key of the rule.
type ComparedRuleKey = (usize, Box<[u8]>);

/// Counts the requests that are denied with one file and admitted with the other file, for each
/// rule and key.
#[derive(Debug, Default)]
struct ChangedKeys {
    requests: u64,
    keys: HashMap<ComparedRuleKey, ChangedRequests>,
}

/// The number of a key's requests that are decided differently, and the times of the first and the
/// last such request.
#[derive(Debug)]
struct ChangedRequests {
    count: u64,
    first: Timestamp,
    last: Timestamp,
}

impl ChangedKeys {
    fn count(&mut self, decided: ReplayDecision, now: Timestamp) {
        self.requests += 1;
        for key in decided.denied_by {
            let none = ChangedRequests {
                count: 0,
                first: now,
                last: now,
            };
            let requests = self.keys.entry(key).or_insert(none);
            requests.count += 1;
            requests.last = now;
        }
    }

    fn report(&self, rules: &RuleSet) -> Vec<ComparedKey> {
        let mut keys: Vec<_> = self.keys.iter().collect();
        keys.sort_unstable_by(|(key, one), (other_key, other)| {
            let by_count = other.count.cmp(&one.count);
            by_count.then_with(|| key.cmp(other_key))
        });
        keys.truncate(SHOWN_KEYS);
        let report = |((rule, key), requests): (&ComparedRuleKey, &ChangedRequests)| ComparedKey {
            rule: rules
                .iter()
                .nth(*rule)
                .map_or_else(String::new, |rule| rule.name().to_owned()),
            key: key_values(rules, key),
            requests: requests.count,
            first_ms: requests.first.as_millis(),
            last_ms: requests.last.as_millis(),
        };
        keys.into_iter().map(report).collect()
    }
}

impl Differences {
    /// Compares two decisions on one request.
    pub(crate) fn count(&mut self, new: ReplayDecision, old: ReplayDecision, now: Timestamp) {
        self.compared += 1;
        match (new.is_denied, old.is_denied) {
            (true, false) => self.newly.count(new, now),
            (false, true) => self.no_longer.count(old, now),
            (true, true) | (false, false) => {}
        }
    }

    /// Counts a request that could be decided only with the other file.
    pub(crate) fn count_refused(&mut self) {
        self.newly_refused += 1;
    }

    pub(crate) fn report(&self, new: &RulesUnderTest, old: &RulesUnderTest) -> Comparison {
        Comparison {
            against: old.name.clone(),
            compared: self.compared,
            newly_refused: self.newly_refused,
            newly_denied: self.newly.requests,
            no_longer_denied: self.no_longer.requests,
            newly: self.newly.report(new.rules()),
            no_longer: self.no_longer.report(old.rules()),
        }
    }
}
