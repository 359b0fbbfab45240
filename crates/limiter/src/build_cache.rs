//! A cache of values that take longer to build than a decision, such as the limits of a request.

use std::hash::{BuildHasher as _, Hash};

use foldhash::fast::RandomState;

/// A direct-mapped cache: each key has exactly one slot, and replaces the key that was there. So a
/// lookup takes constant time, and the memory is bounded.
#[derive(Debug)]
pub struct BuildCache<K, V> {
    slots: Vec<Option<(K, V)>>,
    /// The number of slots, which are allocated when the first value is stored.
    size: usize,
    hasher: RandomState,
}

impl<K: Hash + Eq, V> BuildCache<K, V> {
    /// Creates a cache of `size` slots, at least one.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self {
            slots: Vec::new(),
            size: size.max(1),
            hasher: RandomState::default(),
        }
    }

    /// Returns the value of `key`, if it is in the cache.
    pub fn get(&self, key: &K) -> Option<&V> {
        let (known, value) = self.slots.get(self.slot(key))?.as_ref()?;
        (known == key).then_some(value)
    }

    /// Stores the value of `key`, and returns it.
    pub fn insert(&mut self, key: K, value: V) -> &V {
        if self.slots.is_empty() {
            self.slots.resize_with(self.size, || None);
        }
        let slot = self.slot(&key);
        &self.slots[slot].insert((key, value)).1
    }

    /// Returns the value of `key`, and builds it if it is not in the cache.
    ///
    /// # Errors
    ///
    /// Returns the error of `build`. Errors are not cached.
    pub fn get_or_build<E>(
        &mut self,
        key: K,
        build: impl FnOnce(&K) -> Result<V, E>,
    ) -> Result<&V, E> {
        if self.slots.is_empty() {
            self.slots.resize_with(self.size, || None);
        }
        let number = self.slot(&key);
        let slot = &mut self.slots[number];
        if slot.as_ref().is_some_and(|(known, _)| *known != key) {
            *slot = None;
        }
        match slot {
            Some((_, value)) => Ok(value),
            empty => {
                let value = build(&key)?;
                Ok(&empty.insert((key, value)).1)
            }
        }
    }

    fn slot(&self, key: &K) -> usize {
        // The remainder is less than the number of slots, so it fits a usize.
        usize::try_from(self.hasher.hash_one(key) % self.size as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_their_keys_if_keys_share_a_slot() {
        let mut cache = BuildCache::new(16);
        for _ in 0..2 {
            for key in 0..1_000_u64 {
                let value = cache.get_or_build(key, |key| Ok::<_, ()>(key * 3));
                assert_eq!(value, Ok(&(key * 3)));
                assert_eq!(cache.get(&key), Some(&(key * 3)));
            }
        }
        assert_eq!(cache.slots.len(), 16);
    }

    #[test]
    fn a_cached_value_is_not_built_again_and_an_error_is_not_cached() {
        let mut cache = BuildCache::new(4);
        assert_eq!(cache.get_or_build("key", |_| Err("wrong")), Err("wrong"));
        assert_eq!(cache.get_or_build("key", |_| Ok::<_, &str>(1)), Ok(&1));
        let again = cache.get_or_build("key", |_| Err("built again"));
        assert_eq!(again, Ok(&1));
    }
}
