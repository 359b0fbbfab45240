//! The keys whose requests get a different decision under the candidate rules.

use std::{
    cmp::{Ordering, Reverse},
    collections::HashMap,
};

use tidegate_core::Timestamp;

use super::CandidateKey;
use crate::KeyMask;

/// The maximum number of keys for which changed requests are counted. If there are more keys, the
/// half with the fewest requests is discarded.
const MAX_KEYS: usize = 10_000;

/// The changed requests, by rule and key.
#[derive(Debug, Default)]
pub(super) struct ChangedKeys {
    requests: u64,
    keys: HashMap<CandidateKey, ChangedRequests>,
    /// The number of changed requests of keys that were discarded.
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
    /// The number of requests of keys that were discarded because there were too many keys. If
    /// `uncounted` is 0, the request counts are exact. If `uncounted` is not 0, a key may have had
    /// more requests than its count shows.
    pub uncounted: u64,
}

/// A key whose requests get a different decision under the candidate rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedKey {
    /// The rule that denies the requests.
    pub rule: String,
    /// The values of the rule's key.
    pub key: Vec<String>,
    /// The number of requests.
    pub requests: u64,
    /// The time of the first of these requests.
    pub first: Timestamp,
    /// The time of the last of these requests.
    pub last: Timestamp,
}

impl ChangedKeys {
    /// Counts one request at `now` for each rule and key in `denied_by`.
    pub(super) fn count(
        &mut self,
        denied_by: impl IntoIterator<Item = CandidateKey>,
        now: Timestamp,
    ) {
        self.requests += 1;
        for key in denied_by {
            if let Some(known) = self.keys.get_mut(&key) {
                known.count += 1;
                known.last = now;
                continue;
            }
            if self.keys.len() >= MAX_KEYS {
                self.evict_half();
            }
            let first = ChangedRequests {
                count: 1,
                first: now,
                last: now,
            };
            self.keys.insert(key, first);
        }
    }

    /// Discards the half of the keys with the fewest requests. The discarded keys make room for new
    /// keys, which may later have the most requests.
    fn evict_half(&mut self) {
        let mut counts: Vec<u64> = self.keys.values().map(|requests| requests.count).collect();
        let (_, median, _) = counts.select_nth_unstable(MAX_KEYS / 2);
        let median = *median;
        // If a key's count equals the median, keep the key only if there is still room.
        let above = self
            .keys
            .values()
            .filter(|requests| requests.count > median);
        let mut room = (MAX_KEYS / 2).saturating_sub(above.count());
        let uncounted = &mut self.uncounted;
        self.keys.retain(|_, requests| {
            let is_kept = match requests.count.cmp(&median) {
                Ordering::Greater => true,
                Ordering::Equal if room > 0 => {
                    room -= 1;
                    true
                }
                _ => false,
            };
            if !is_kept {
                *uncounted += requests.count;
            }
            is_kept
        });
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns copies of the keys with the most requests, at most `most` keys, in no particular
    /// order.
    pub(super) fn top(&self, most: usize) -> TopChangedKeys {
        let mut keys: Vec<_> = self.keys.iter().collect();
        if most < keys.len() {
            keys.select_nth_unstable_by_key(most, |(_, requests)| Reverse(requests.count));
            keys.truncate(most);
        }
        let copied = keys.into_iter();
        TopChangedKeys {
            keys: copied
                .map(|(key, requests)| (key.clone(), *requests))
                .collect(),
            uncounted: self.uncounted,
        }
    }
}

/// The keys with the most changed requests, in no particular order.
#[derive(Debug)]
pub(super) struct TopChangedKeys {
    keys: Vec<(CandidateKey, ChangedRequests)>,
    uncounted: u64,
}

impl TopChangedKeys {
    /// Sorts the keys, and formats their values with `mask`.
    pub(super) fn into_list(mut self, mask: &KeyMask) -> ChangedKeyList {
        self.keys
            .sort_unstable_by(|(key, one), (other_key, other)| {
                let by_count = other.count.cmp(&one.count);
                by_count.then_with(|| (&key.rule, &key.key).cmp(&(&other_key.rule, &other_key.key)))
            });
        let row = |(key, requests): (CandidateKey, ChangedRequests)| ChangedKey {
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
            keys: self.keys.into_iter().map(row).collect(),
            uncounted: self.uncounted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(value: &str) -> CandidateKey {
        CandidateKey {
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
        let list = changed.top(2).into_list(&KeyMask::plain());
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
    fn the_number_of_keys_is_bounded_and_a_late_key_is_still_found() {
        let mut changed = ChangedKeys::default();
        let now = Timestamp::from_micros(1);
        let keys = 10 * MAX_KEYS;
        for number in 0..keys {
            changed.count([key(&number.to_string())], now);
            // The key `heavy` gets requests only in the second half of the test.
            if number > keys / 2 && number % 100 == 0 {
                changed.count([key("heavy")], now);
            }
            assert!(changed.keys.len() <= MAX_KEYS);
        }
        let list = changed.top(1).into_list(&KeyMask::plain());
        assert_eq!(list.keys[0].key, ["heavy"]);
        assert!(list.keys[0].requests > 300, "{list:?}");
        let all = changed.top(usize::MAX).into_list(&KeyMask::plain());
        let counted: u64 = all.keys.iter().map(|key| key.requests).sum();
        assert_eq!(counted + all.uncounted, changed.requests());
    }
}
