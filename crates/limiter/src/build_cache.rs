//! A cache of values, such as parsed limits. Building a value takes longer than a rate limit
//! decision.

use std::hash::{BuildHasher as _, Hash};

use foldhash::fast::RandomState;

/// The number of entries in a set of the cache.
const WAYS: usize = 4;

/// A set-associative cache: each key belongs to one set of `WAYS` entries, and a new key replaces
/// the oldest entry of a full set. Lookups take constant time, and the memory is bounded.
#[derive(Debug)]
pub struct BuildCache<K, V> {
    sets: Box<[EntrySet<K, V>]>,
    hasher: RandomState,
}

#[derive(Debug)]
struct EntrySet<K, V> {
    entries: Vec<(K, V)>,
    /// The index of the oldest entry, once the set is full.
    oldest: usize,
}

impl<K: Hash + Eq, V> BuildCache<K, V> {
    /// Creates a cache of `size` entries, rounded up to whole sets.
    #[must_use]
    pub fn new(size: usize) -> Self {
        let sets = (0..size.div_ceil(WAYS).max(1)).map(|_| EntrySet {
            entries: Vec::new(),
            oldest: 0,
        });
        Self {
            sets: sets.collect(),
            hasher: RandomState::default(),
        }
    }

    /// Returns the value of `key` from the cache.
    pub fn get(&self, key: &K) -> Option<&V> {
        let entries = &self.sets[self.set_of(key)].entries;
        let (_, value) = entries.iter().find(|(known, _)| known == key)?;
        Some(value)
    }

    /// Stores the value of `key`, which is not in the cache, and returns it.
    pub fn insert(&mut self, key: K, value: V) -> &V {
        let set = self.set_of(&key);
        self.sets[set].insert(key, value)
    }

    /// Returns the value of `key`. Builds and caches the value if it is not in the cache.
    ///
    /// # Errors
    ///
    /// Returns the error of `build`. Errors are not cached.
    pub fn get_or_build<E>(
        &mut self,
        key: K,
        build: impl FnOnce(&K) -> Result<V, E>,
    ) -> Result<&V, E> {
        let number = self.set_of(&key);
        let set = &mut self.sets[number];
        if let Some(found) = set.entries.iter().position(|(known, _)| *known == key) {
            return Ok(&set.entries[found].1);
        }
        let value = build(&key)?;
        Ok(set.insert(key, value))
    }

    fn set_of(&self, key: &K) -> usize {
        // The remainder is less than the number of sets, so it fits in a usize.
        usize::try_from(self.hasher.hash_one(key) % self.sets.len() as u64).unwrap_or(0)
    }
}

impl<K, V> EntrySet<K, V> {
    fn insert(&mut self, key: K, value: V) -> &V {
        let at = if self.entries.len() < WAYS {
            self.entries.push((key, value));
            self.entries.len() - 1
        } else {
            let at = self.oldest;
            self.entries[at] = (key, value);
            self.oldest = (at + 1) % WAYS;
            at
        };
        &self.entries[at].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_their_keys_if_keys_share_a_set() {
        let mut cache = BuildCache::new(16);
        for _ in 0..2 {
            for key in 0..1_000_u64 {
                let value = cache.get_or_build(key, |key| Ok::<_, ()>(key * 3));
                assert_eq!(value, Ok(&(key * 3)));
                assert_eq!(cache.get(&key), Some(&(key * 3)));
            }
        }
        let entries = cache.sets.iter().map(|set| set.entries.len());
        assert!(entries.sum::<usize>() <= 16);
    }

    /// Up to four keys are cached together, even if all four belong to one set.
    #[test]
    fn a_cached_value_is_not_built_again_and_an_error_is_not_cached() {
        let mut cache = BuildCache::new(WAYS);
        assert_eq!(cache.get_or_build(0, |_| Err("wrong")), Err("wrong"));
        for key in 0..4 {
            assert_eq!(cache.get_or_build(key, |key| Ok::<_, &str>(*key)), Ok(&key));
        }
        for key in 0..4 {
            let again = cache.get_or_build(key, |_| Err("built again"));
            assert_eq!(again, Ok(&key));
        }
    }
}
