//! Lists the keys of a store page by page, with bounded work per page.
//!
//! A position in the listing is a shard and a hash. Within a shard, keys are visited in the order
//! of their hashes, which insertions and removals do not change. Therefore, a key that is in the
//! store during the whole listing is returned exactly once.

use super::{MemoryStore, shard::Shard};
use crate::{hash_table::hash_with, time::Timestamp};

/// The number of home slots after which a call returns its page. A key's home slot is the slot
/// selected by its hash.
const HOMES_PER_CALL: usize = 16_384;

/// The number of home slots visited per lock of a shard.
const HOMES_PER_LOCK: usize = 512;

/// A call counts at least this number of visited home slots for each lock of a shard. Therefore,
/// one call takes at most 256 locks.
const MIN_HOMES_PER_LOCK: usize = 64;

/// A position in a key listing. The default is the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCursor {
    /// The index of the shard.
    pub shard: u16,
    /// The low 32 bits of the lowest hash in this shard that the listing has not visited yet.
    pub hash: u32,
}

/// A page of a key listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyPage {
    /// The keys, in no particular order.
    pub keys: Vec<Box<[u8]>>,
    /// The position of the next page; `None` on the last page. Pages before the last one can have
    /// few keys or none.
    pub next: Option<KeyCursor>,
}

impl MemoryStore {
    /// Returns a page of the keys that begin with `prefix` and have not expired at `now`, starting
    /// at the position `from`. The page has at most `most` keys, plus any further keys with the
    /// same hash as the last key.
    ///
    /// A call visits at most about 16,384 slots of the store, so a page can have fewer keys than
    /// `most`, or none, even if more keys follow. The call locks one shard at a time, for at most
    /// 512 slots and the run of occupied slots after them.
    ///
    /// A position is valid only in the store that returned it. In another store, the listing can
    /// skip or repeat keys.
    #[must_use]
    pub fn keys(&self, prefix: &[u8], from: KeyCursor, most: usize, now: Timestamp) -> KeyPage {
        let (mut page, mut at) = (KeyPage::default(), from);
        let mut visited = 0;
        while let Some(shard) = self.shards.get(usize::from(at.shard)) {
            if visited >= HOMES_PER_CALL || page.keys.len() >= most {
                page.next = Some(at);
                return page;
            }
            let range = shard.0.lock().find_keys(prefix, at.hash, now);
            visited += range.homes.max(MIN_HOMES_PER_LOCK);
            let (mut found, next) = (range.keys, range.next);
            found.sort_unstable();
            let room = most - page.keys.len();
            // Put all keys with the same hash on one page, because the position for the next page
            // is a hash.
            let last = found.get(room.saturating_sub(1)).map(|(hash, _)| *hash);
            let rest = last.and_then(|last| found.iter().position(|(hash, _)| *hash > last));
            let next = match rest {
                Some(rest) if rest < found.len() => {
                    let next = found[rest].0;
                    found.truncate(rest);
                    Some(next)
                }
                _ => next,
            };
            page.keys.extend(found.into_iter().map(|(_, key)| key));
            at = match next {
                Some(hash) => KeyCursor { hash, ..at },
                None => KeyCursor {
                    shard: at.shard + 1,
                    hash: 0,
                },
            };
        }
        page
    }
}

/// Keys in a range of hashes.
struct KeyRange {
    /// Each key, preceded by the low 32 bits of its hash.
    keys: Vec<(u32, Box<[u8]>)>,
    /// The hash at which the next range begins; `None` after the last range.
    next: Option<u32>,
    /// An upper bound for the number of visited home slots.
    homes: usize,
}

impl Shard {
    /// Returns the keys with `prefix` in the next [`HOMES_PER_LOCK`] home slots, starting at
    /// `hash`.
    fn find_keys(&mut self, prefix: &[u8], hash: u32, now: Timestamp) -> KeyRange {
        let now = self.latest(now);
        let (hasher, mut keys) = (&self.cold.hasher, Vec::new());
        let next = self.entries.visit_homes(hash, HOMES_PER_LOCK, |entry| {
            let key = entry.key();
            if !key.starts_with(prefix) || entry.expires() <= now {
                return;
            }
            // The low 32 bits of the hash, which select the home slot.
            let low_bits = hash_with(hasher, key) & u64::from(u32::MAX);
            let own = u32::try_from(low_bits).unwrap_or(u32::MAX);
            if own >= hash {
                keys.push((own, key.into()));
            }
        });
        let homes = self.entries.homes().min(HOMES_PER_LOCK);
        KeyRange { keys, next, homes }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        AlgorithmName, Charge, Cost, Effect, LimitSpec, Limits, MemoryBounds, Span, notation,
    };

    fn limits() -> Limits {
        let rate = notation::rate("3/min").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow).build();
        Limits::new(vec![limit.unwrap()]).unwrap()
    }

    struct Keys {
        store: MemoryStore,
        limits: Limits,
        now: Timestamp,
    }

    impl Keys {
        fn new() -> Self {
            Self {
                store: MemoryStore::new(MemoryBounds::default()),
                limits: limits(),
                now: Timestamp::from_micros(1_700_000_000_000_000),
            }
        }

        fn charge(&self, key: &str) {
            let charge = Charge::new(key.as_bytes(), &self.limits, Cost::ONE).unwrap();
            let mut outcomes = Vec::new();
            self.store
                .check(&[charge], self.now, Effect::Charge, &mut outcomes);
        }

        /// Lists all keys with `prefix`, and calls `between` after each page.
        fn list(
            &self,
            prefix: &str,
            most: usize,
            mut between: impl FnMut(usize),
        ) -> BTreeMap<String, usize> {
            let (mut listed, mut from) = (BTreeMap::new(), KeyCursor::default());
            for number in 0.. {
                let page = self.store.keys(prefix.as_bytes(), from, most, self.now);
                // Among a few thousand keys, two rarely share the low 32 bits of their hashes, and
                // three practically never do.
                assert!(page.keys.len() <= most + 1);
                for key in page.keys {
                    let key = String::from_utf8(key.into()).unwrap();
                    *listed.entry(key).or_insert(0) += 1;
                }
                between(number);
                match page.next {
                    Some(next) => {
                        assert_ne!(next, from, "every page makes progress");
                        from = next;
                    }
                    None => break,
                }
            }
            listed
        }
    }

    /// If the store has few keys, one call of `keys` visits all shards.
    #[test]
    fn a_few_keys_are_on_one_page() {
        let keys = Keys::new();
        for key in ["a1", "a2", "b"] {
            keys.charge(key);
        }
        let page = keys.store.keys(b"a", KeyCursor::default(), 10, keys.now);
        assert_eq!((page.keys.len(), page.next), (2, None));
    }

    #[test]
    fn every_key_with_the_prefix_is_listed_once() {
        for (count, most) in [(0, 1), (1, 1), (300, 1), (20_000, 7), (20_000, 1_000)] {
            let keys = Keys::new();
            (0..count).for_each(|number| keys.charge(&format!("a{number}")));
            (0..500).for_each(|number| keys.charge(&format!("b{number}")));
            let listed = keys.list("a", most, |_| {});
            assert_eq!(listed.len(), count, "{most}");
            assert!(listed.values().all(|times| *times == 1));
            assert!(listed.keys().all(|key| key.starts_with('a')));
        }
    }

    /// Insertions and removals move entries and rebuild the hash tables. Nevertheless, a key that
    /// stays in the store is listed exactly once.
    #[test]
    fn a_key_that_stays_is_listed_once_while_others_come_and_go() {
        let keys = Keys::new();
        (0..3_000).for_each(|number| keys.charge(&format!("stays{number}")));
        (0..30_000).for_each(|number| keys.charge(&format!("goes{number}")));
        let listed = keys.list("", 100, |page| {
            for number in 0..100 {
                let number = page * 100 + number;
                keys.charge(&format!("comes{number}"));
                keys.store.reset(format!("goes{number}").as_bytes());
            }
        });
        let stays: Vec<_> = listed
            .iter()
            .filter(|(key, _)| key.starts_with("stays"))
            .collect();
        assert_eq!(stays.len(), 3_000);
        assert!(listed.values().all(|times| *times == 1));
    }

    #[test]
    fn a_page_visits_a_bounded_number_of_slots() {
        let keys = Keys::new();
        (0..100_000).for_each(|number| keys.charge(&format!("other{number}")));
        let page = keys
            .store
            .keys(b"none", KeyCursor::default(), 100, keys.now);
        assert!(page.keys.is_empty() && page.next.is_some());
        assert!(keys.list("none", 100, |_| {}).is_empty());
    }

    #[test]
    fn expired_keys_and_an_unknown_shard_are_not_listed() {
        let mut keys = Keys::new();
        keys.charge("a");
        assert_eq!(keys.list("a", 10, |_| {}).len(), 1);
        let from = KeyCursor {
            shard: u16::MAX,
            hash: 0,
        };
        assert_eq!(
            keys.store.keys(b"a", from, 10, keys.now),
            KeyPage::default()
        );
        keys.now = keys.now.after(Span::from_secs(120));
        assert_eq!(keys.list("a", 10, |_| {}).len(), 0);
    }
}
