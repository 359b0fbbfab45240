//! The keys whose requests the candidate rules decide differently.

use std::collections::HashMap;

use tidegate_core::Timestamp;

use super::RuleKey;
use crate::KeyMask;

/// The maximum number of keys for which changed requests are counted. Further keys are counted
/// together.
const MAX_KEYS: usize = 10_000;

/// The changed requests, by rule and key.
#[derive(Debug, Default)]
pub(super) struct ChangedKeys {
    requests: u64,
    keys: HashMap<RuleKey, ChangedRequests>,
    /// The number of requests whose key was not counted, because there were too many keys.
    uncounted: u64,
}

/// The changed requests of one key.
#[derive(Clone, Copy, Debug)]
struct ChangedRequests {
    count: u64,
    first: Timestamp,
    last: Timestamp,
}

/// The keys with the most changed requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangedKeyList {
    /// The keys, by descending number of requests.
    pub keys: Vec<ChangedKey>,
    /// The number of requests whose key was not counted, because there were too many keys.
    pub uncounted: u64,
}

/// A key whose requests are decided differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedKey {
    /// The rule that denies the requests.
    pub rule: String,
    /// The values of the key of the rule.
    pub key: Vec<String>,
    /// The number of requests.
    pub requests: u64,
    /// The time of the first of these requests.
    pub first: Timestamp,
    /// The time of the last of these requests.
    pub last: Timestamp,
}

impl ChangedKeys {
    /// Counts one request at `now` for each of the keys that deny it.
    pub(super) fn count(&mut self, denied_by: impl IntoIterator<Item = RuleKey>, now: Timestamp) {
        self.requests += 1;
        for key in denied_by {
            if let Some(known) = self.keys.get_mut(&key) {
                known.count += 1;
                known.last = now;
            } else if self.keys.len() < MAX_KEYS {
                let first = ChangedRequests {
                    count: 1,
                    first: now,
                    last: now,
                };
                self.keys.insert(key, first);
            } else {
                self.uncounted += 1;
            }
        }
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns the keys with the most requests, at most `most`.
    pub(super) fn list(&self, mask: &KeyMask, most: usize) -> ChangedKeyList {
        let mut keys: Vec<_> = if most == 0 {
            Vec::new()
        } else {
            self.keys.iter().collect()
        };
        keys.sort_unstable_by(|(key, one), (other_key, other)| {
            let by_count = other.count.cmp(&one.count);
            by_count.then_with(|| (&key.rule, &key.key).cmp(&(&other_key.rule, &other_key.key)))
        });
        keys.truncate(most);
        let row = |(key, requests): (&RuleKey, &ChangedRequests)| ChangedKey {
            rule: key.rule.to_string(),
            key: key
                .key
                .iter()
                .map(|value| mask.value(value).into_owned())
                .collect(),
            requests: requests.count,
            first: requests.first,
            last: requests.last,
        };
        ChangedKeyList {
            keys: keys.into_iter().map(row).collect(),
            uncounted: self.uncounted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(value: &str) -> RuleKey {
        RuleKey {
            rule: "api".into(),
            key: vec![value.to_owned()],
        }
    }

    #[test]
    fn the_keys_with_the_most_requests_come_first() {
        let mut changed = ChangedKeys::default();
        for (at, value) in ["a", "b", "b", "c", "b", "c"].into_iter().enumerate() {
            changed.count([key(value)], Timestamp::from_micros(at as u64));
        }
        let list = changed.list(&KeyMask::plain(), 2);
        let rows: Vec<_> = list
            .keys
            .iter()
            .map(|row| (&*row.key[0], row.requests))
            .collect();
        assert_eq!(rows, [("b", 3), ("c", 2)]);
        assert_eq!(list.keys[0].first.as_micros(), 1);
        assert_eq!(list.keys[0].last.as_micros(), 4);
        assert_eq!((changed.requests(), list.uncounted), (6, 0));
    }

    #[test]
    fn the_number_of_keys_is_bounded() {
        let mut changed = ChangedKeys::default();
        let now = Timestamp::from_micros(1);
        for number in 0..MAX_KEYS + 5 {
            changed.count([key(&number.to_string())], now);
        }
        changed.count([key("0")], now);
        let list = changed.list(&KeyMask::plain(), usize::MAX);
        assert_eq!((list.keys.len(), list.uncounted), (MAX_KEYS, 5));
        assert_eq!(list.keys[0].requests, 2);
        assert_eq!(changed.requests(), MAX_KEYS as u64 + 6);
    }
}
