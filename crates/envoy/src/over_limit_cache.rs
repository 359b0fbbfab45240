//! The local cache of over-limit descriptors. A cached descriptor is denied without a store query
//! until its window ends.
//!
//! A decision's result may be outdated when it arrives, because the limits may have changed or hits
//! may have been refunded since the decision started. Therefore, the cache's epoch (see
//! [`CacheEpoch`]) is recorded before each decision. If an entry has been invalidated since the
//! decision started, the result is not cached.
//!
//! ```text
//! decision  ├─ record epoch ─ the store denies ─────────── not cached
//! refund               the store refunds ────── invalidate ┘
//! ```

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    sync::{Mutex, PoisonError},
};

use tidegate_core::Timestamp;

/// The estimated size of an entry without its key, in bytes.
const ENTRY_BYTES: usize = 64;

/// The number of classes into which keys are divided by their hash. Refunds are counted per class.
const CLASSES: usize = 256;

/// The state of the cache before a decision started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheEpoch {
    /// The number of times that the whole cache was cleared.
    pub(super) cleared: u64,
    /// The number of refunds to keys in the same class as the decision's key.
    pub(super) refunds: u64,
}

/// A cache of over-limit keys, each with the end of its window. When the cache is full, the older
/// half of the entries is evicted. A descriptor without an entry is decided with a store query.
#[derive(Debug)]
pub(super) struct OverLimitCache {
    most_bytes: usize,
    hasher: RandomState,
    generations: Mutex<Generations>,
}

#[derive(Debug)]
struct Generations {
    cleared: u64,
    refunds: Box<[u64; CLASSES]>,
    young: HashMap<Box<[u8]>, Timestamp>,
    young_bytes: usize,
    old: HashMap<Box<[u8]>, Timestamp>,
}

impl OverLimitCache {
    /// Creates a cache with a maximum size of `bytes`; `None` if `bytes` is 0.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        (bytes > 0).then(|| Self {
            most_bytes: bytes,
            hasher: RandomState::new(),
            generations: Mutex::new(Generations {
                cleared: 0,
                refunds: Box::new([0; CLASSES]),
                young: HashMap::new(),
                young_bytes: 0,
                old: HashMap::new(),
            }),
        })
    }

    /// Returns the number of times that the cache was cleared. The caller must read this number
    /// before it looks up limits.
    pub(super) fn cleared(&self) -> u64 {
        self.lock().cleared
    }

    /// Returns the number of refunds to keys in the class of `key`. The caller must read this
    /// number before it queries the store.
    pub(super) fn refunds(&self, key: &[u8]) -> u64 {
        self.lock().refunds[self.class(key)]
    }

    /// Returns the end of the window in which `key` is over its limit; `None` if there is no cached
    /// entry.
    pub(super) fn over_until(&self, key: &[u8], now: Timestamp) -> Option<Timestamp> {
        let generations = self.lock();
        let until = generations
            .young
            .get(key)
            .or_else(|| generations.old.get(key));
        until.copied().filter(|until| *until > now)
    }

    /// Records that `key` is over its limit. The entry expires at `until`. Does nothing if entries
    /// were invalidated after `epoch`.
    pub(super) fn insert(&self, key: &[u8], until: Timestamp, epoch: CacheEpoch) {
        let class = self.class(key);
        let mut generations = self.lock();
        let now = CacheEpoch {
            cleared: generations.cleared,
            refunds: generations.refunds[class],
        };
        if epoch != now {
            return;
        }
        let bytes = key.len() + ENTRY_BYTES;
        if generations.young_bytes + bytes > self.most_bytes / 2 {
            generations.old = std::mem::take(&mut generations.young);
            generations.young_bytes = 0;
        }
        if generations.young.insert(key.into(), until).is_none() {
            generations.young_bytes += bytes;
        }
    }

    /// Returns a guard that removes `key` from the cache when dropped. The caller must hold the
    /// guard during a refund, so that the key is also removed if the request is cancelled.
    pub(super) fn invalidate_on_drop<'c>(&'c self, key: &'c [u8]) -> InvalidateOnDrop<'c> {
        InvalidateOnDrop { cache: self, key }
    }

    fn invalidate(&self, key: &[u8]) {
        let class = self.class(key);
        let mut generations = self.lock();
        generations.refunds[class] += 1;
        generations.old.remove(key);
        if generations.young.remove(key).is_some() {
            generations.young_bytes -= key.len() + ENTRY_BYTES;
        }
    }

    /// Clears the cache, because the limits have changed.
    pub(super) fn clear(&self) {
        let mut generations = self.lock();
        generations.cleared += 1;
        generations.young = HashMap::new();
        generations.young_bytes = 0;
        generations.old = HashMap::new();
    }

    fn class(&self, key: &[u8]) -> usize {
        let bits = self.hasher.hash_one(key) % CLASSES as u64;
        usize::try_from(bits).unwrap_or(0)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Generations> {
        self.generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guard that removes a key from the cache when dropped.
#[derive(Debug)]
pub(super) struct InvalidateOnDrop<'c> {
    cache: &'c OverLimitCache,
    key: &'c [u8],
}

impl Drop for InvalidateOnDrop<'_> {
    fn drop(&mut self) {
        self.cache.invalidate(self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(cache: &OverLimitCache, key: &[u8]) -> CacheEpoch {
        CacheEpoch {
            cleared: cache.cleared(),
            refunds: cache.refunds(key),
        }
    }

    #[test]
    fn a_result_older_than_an_invalidation_is_not_cached() {
        let (cache, until) = (
            OverLimitCache::new(1_000).unwrap(),
            Timestamp::from_micros(10),
        );
        let is_over = || cache.over_until(b"a", Timestamp::from_micros(9)).is_some();
        let before = epoch(&cache, b"a");
        drop(cache.invalidate_on_drop(b"a"));
        cache.insert(b"a", until, before);
        assert!(!is_over(), "a refund happened in between");
        let before = epoch(&cache, b"a");
        cache.clear();
        cache.insert(b"a", until, before);
        assert!(!is_over(), "the limits changed in between");
        cache.insert(b"a", until, epoch(&cache, b"a"));
        assert!(is_over());
    }

    #[test]
    fn old_entries_are_evicted_within_the_memory_bound() {
        let cache = OverLimitCache::new(1_000).unwrap();
        let at = Timestamp::from_micros;
        cache.insert(b"a", at(10), CacheEpoch::default());
        assert_eq!(cache.over_until(b"a", at(9)), Some(at(10)));
        assert_eq!(cache.over_until(b"a", at(10)), None);
        let is_over = |key: &[u8]| cache.over_until(key, at(9)).is_some();
        for number in 0..1_000_u32 {
            cache.insert(&number.to_be_bytes(), at(10), CacheEpoch::default());
        }
        let generations = cache.lock();
        assert!(generations.young.len() + generations.old.len() <= 1_000 / (4 + ENTRY_BYTES));
        drop(generations);
        assert!(!is_over(b"a"));
        assert!(is_over(&999_u32.to_be_bytes()));
        drop(cache.invalidate_on_drop(&999_u32.to_be_bytes()));
        assert!(!is_over(&999_u32.to_be_bytes()));
        cache.clear();
        assert!(!is_over(&998_u32.to_be_bytes()));
        assert!(OverLimitCache::new(0).is_none());
    }
}
