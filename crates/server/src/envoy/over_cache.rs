//! What is known to be over its limit, and until when: such a descriptor is answered without asking the store.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use tidegate_core::Timestamp;

/// What an entry takes beside its key, by estimate.
const ENTRY_BYTES: usize = 64;

/// Keys that are over until some instant. Old entries go when there are many: nothing is lost with them but time.
#[derive(Debug)]
pub(super) struct OverCache {
    most_bytes: usize,
    generations: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Box<[u8]>, Timestamp>,
    young_bytes: usize,
    old: HashMap<Box<[u8]>, Timestamp>,
}

impl OverCache {
    /// A cache of at most `bytes`; none if that is 0.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        (bytes > 0).then(|| Self {
            most_bytes: bytes,
            generations: Mutex::default(),
        })
    }

    pub(super) fn is_over(&self, key: &[u8], now: Timestamp) -> bool {
        let generations = self.lock();
        let until = generations
            .young
            .get(key)
            .or_else(|| generations.old.get(key));
        until.is_some_and(|until| *until > now)
    }

    pub(super) fn remember(&self, key: &[u8], until: Timestamp) {
        let mut generations = self.lock();
        let bytes = key.len() + ENTRY_BYTES;
        if generations.young_bytes + bytes > self.most_bytes / 2 {
            generations.old = std::mem::take(&mut generations.young);
            generations.young_bytes = 0;
        }
        if generations.young.insert(key.into(), until).is_none() {
            generations.young_bytes += bytes;
        }
    }

    /// Forgets `key`: something was given back to it.
    pub(super) fn forget(&self, key: &[u8]) {
        let mut generations = self.lock();
        generations.old.remove(key);
        if generations.young.remove(key).is_some() {
            generations.young_bytes -= key.len() + ENTRY_BYTES;
        }
    }

    /// Forgets everything: the limits have changed.
    pub(super) fn clear(&self) {
        *self.lock() = Generations::default();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Generations> {
        self.generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_forgets_what_is_old_and_stays_within_its_bytes() {
        let cache = OverCache::new(1_000).unwrap();
        let at = Timestamp::from_micros;
        cache.remember(b"a", at(10));
        assert!(cache.is_over(b"a", at(9)));
        assert!(!cache.is_over(b"a", at(10)));
        for number in 0..1_000_u32 {
            cache.remember(&number.to_be_bytes(), at(10));
        }
        let generations = cache.lock();
        assert!(generations.young.len() + generations.old.len() <= 1_000 / (4 + ENTRY_BYTES));
        drop(generations);
        assert!(!cache.is_over(b"a", at(9)));
        assert!(cache.is_over(&999_u32.to_be_bytes(), at(9)));
        cache.forget(&999_u32.to_be_bytes());
        assert!(!cache.is_over(&999_u32.to_be_bytes(), at(9)));
        cache.clear();
        assert!(!cache.is_over(&998_u32.to_be_bytes(), at(9)));
        assert!(OverCache::new(0).is_none());
    }
}
