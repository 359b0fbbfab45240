//! A Bloom filter that is checked before the table of overrides for single keys.
//!
//! Most requested keys have no override. A table with a million overrides is much larger than the
//! processor's caches, and a lookup in it takes longer than the rest of the decision. The filter
//! takes 2 MiB, and a lookup in the filter reads one word. All bits of a key are in one word, as in
//! the blocked filters of Putze, Sanders and Singler, "Cache-, Hash- and Space-Efficient Bloom
//! Filters" (2007). With a million overrides, about 1 in 200 keys without an override passes the
//! filter, and is then looked up in the table.
//!
//! Bits cannot be removed. After many removals, the filter is rebuilt. There are two arrays: while
//! one array is rebuilt, requests read the other array.

use std::sync::{
    OnceLock, PoisonError, RwLock, RwLockReadGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering, fence},
};

use crate::{hash_table::prefetch, limit::bounds::MAX_OVERRIDES};

/// The number of 64-bit integers in each of the two bit arrays of the filter. With
/// [`MAX_OVERRIDES`] keys, there are 16 bits per key.
const WORDS: usize = 1 << 18;

/// The filter is rebuilt only after more than this number of additions.
const MIN_ADDED: usize = MAX_OVERRIDES / 8;

type Words = Box<[AtomicU64]>;

/// The hashes of the keys that have an override, in any rule. Overrides with patterns are not in
/// the filter.
#[derive(Debug, Default)]
pub(super) struct KeyFilter {
    /// One array for even generations, and one array for odd generations. The first use of an array
    /// allocates it.
    arrays: [OnceLock<Words>; 2],
    /// The number of times that the filter was rebuilt. Whether the number is even or odd selects
    /// the array in use.
    generation: AtomicUsize,
    /// The number of additions since the filter was last built.
    added: AtomicUsize,
    /// Locked for writing while the filter is rebuilt, so that no key is added only to the old
    /// array.
    changes: RwLock<()>,
}

impl KeyFilter {
    /// Returns false if no key with this `hash` has an override. Returns true for every key that
    /// was added, and for a few other keys.
    #[inline]
    pub(super) fn may_contain(&self, hash: u64) -> bool {
        let generation = self.generation.load(Ordering::Acquire);
        let Some(words) = self.arrays[generation % 2].get() else {
            return false;
        };
        let bits = bits(hash);
        if words[index(hash)].load(Ordering::Acquire) & bits == bits {
            return true;
        }
        // If another thread rebuilt the filter after this lookup began, the array may already be
        // cleared for the next generation.
        fence(Ordering::Acquire);
        self.generation.load(Ordering::Relaxed) != generation
    }

    /// Starts to load the word that [`Self::may_contain`] reads for this `hash`.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        let generation = self.generation.load(Ordering::Relaxed);
        if let Some(words) = self.arrays[generation % 2].get() {
            prefetch(&words[index(hash)]);
        }
    }

    /// Adds a key. The caller adds the key before it stores the override, and holds the guard until
    /// the override is stored.
    pub(super) fn add(&self, hash: u64) -> RwLockReadGuard<'_, ()> {
        let guard = self.changes.read().unwrap_or_else(PoisonError::into_inner);
        let array = &self.arrays[self.generation.load(Ordering::Relaxed) % 2];
        set(array.get_or_init(empty), hash);
        self.added.fetch_add(1, Ordering::Relaxed);
        guard
    }

    /// Returns whether the filter should be rebuilt. `count` is the number of overrides. If more
    /// than twice as many keys were added since the filter was last built, most bits may belong to
    /// removed overrides.
    pub(super) fn is_stale(&self, count: usize) -> bool {
        self.added.load(Ordering::Relaxed) > MIN_ADDED.max(2 * count)
    }

    /// Rebuilds the filter from the hashes of all keys that have an override. The function
    /// `for_each_hash` passes each of these hashes to its argument.
    pub(super) fn rebuild(&self, for_each_hash: impl FnOnce(&mut dyn FnMut(u64))) {
        let _guard = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        let next = self.generation.load(Ordering::Relaxed).wrapping_add(1);
        let words = self.arrays[next % 2].get_or_init(empty);
        for word in words {
            // A reader that finds a cleared word in this array also sees the current generation.
            word.store(0, Ordering::Release);
        }
        let mut added = 0;
        for_each_hash(&mut |hash| {
            set(words, hash);
            added += 1;
        });
        self.added.store(added, Ordering::Relaxed);
        self.generation.store(next, Ordering::Release);
    }
}

fn empty() -> Words {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

fn set(words: &[AtomicU64], hash: u64) {
    words[index(hash)].fetch_or(bits(hash), Ordering::Release);
}

/// Returns the index of the word for a hash. Does not use the bits of the hash that [`bits`] uses.
fn index(hash: u64) -> usize {
    // The remainder is less than the number of words, so it fits in a `usize`.
    ((hash >> 32) % WORDS as u64) as usize
}

/// Returns the bits of a hash in its word: up to four, each selected by six bits of the hash.
fn bits(hash: u64) -> u64 {
    [0, 6, 12, 18]
        .into_iter()
        .fold(0, |bits, shift| bits | 1 << (hash >> shift & 63))
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, hash::BuildHasher as _, thread};

    use foldhash::fast::FixedState;
    use proptest::prelude::*;

    use super::*;

    fn hash(key: u64) -> u64 {
        FixedState::with_seed(7).hash_one(key)
    }

    #[test]
    fn few_keys_pass_by_mistake_with_the_most_overrides() {
        let filter = KeyFilter::default();
        assert!(!filter.may_contain(hash(0)));
        let most = MAX_OVERRIDES as u64;
        for key in 0..most {
            drop(filter.add(hash(key)));
        }
        assert!((0..most).all(|key| filter.may_contain(hash(key))));
        let passed = (most..2 * most).filter(|key| filter.may_contain(hash(*key)));
        let per_mille = 1_000 * passed.count() / MAX_OVERRIDES;
        assert!(per_mille <= 10, "{per_mille} of 1,000 keys");
    }

    #[test]
    fn no_key_is_missed_while_the_filter_is_built_again() {
        let filter = KeyFilter::default();
        let kept = 0..1_000;
        kept.clone().for_each(|key| drop(filter.add(hash(key))));
        thread::scope(|scope| {
            let rebuilds = scope.spawn(|| {
                for _ in 0..50 {
                    filter.rebuild(|add| kept.clone().for_each(|key| add(hash(key))));
                }
            });
            loop {
                let is_last = rebuilds.is_finished();
                assert!(kept.clone().all(|key| filter.may_contain(hash(key))));
                if is_last {
                    break;
                }
            }
        });
        assert!(!filter.is_stale(0));
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Add(u64),
        Remove(u64),
        Rebuild,
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            8 => (0..40_u64).prop_map(Operation::Add),
            4 => (0..40_u64).prop_map(Operation::Remove),
            1 => Just(Operation::Rebuild),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_key_of_a_set_passes(operations in prop::collection::vec(operation(), 0..60)) {
            let filter = KeyFilter::default();
            let mut keys = HashSet::new();
            for operation in operations {
                match operation {
                    Operation::Add(key) => {
                        drop(filter.add(hash(key)));
                        keys.insert(key);
                    }
                    Operation::Remove(key) => drop(keys.remove(&key)),
                    Operation::Rebuild => {
                        filter.rebuild(|add| keys.iter().for_each(|key| add(hash(*key))));
                        prop_assert_eq!(filter.added.load(Ordering::Relaxed), keys.len());
                    }
                }
                prop_assert!(keys.iter().all(|key| filter.may_contain(hash(*key))));
            }
        }
    }
}
