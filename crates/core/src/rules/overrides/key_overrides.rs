//! The overrides of a rule for single keys.

use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::key_override::KeyOverride;
use crate::hash_table::HashTable;

/// The number of shards of a large table, so that a change locks only one shard.
const SHARDS: usize = 64;

/// From this number of overrides on, the table is split into shards. A rule with fewer overrides
/// takes the memory of a single table, which is at least 4.2 KiB.
const SPLIT_AT: usize = 1_024;

type OverrideShard = RwLock<HashTable<KeyOverride>>;

/// A concurrent hash table of overrides. It starts with a single table. A large table is split once
/// into shards, and stays split.
#[derive(Debug, Default)]
pub(super) struct KeyOverrides {
    /// The table before the split; empty after it.
    first: OverrideShard,
    /// Set by the split, while `first` is locked.
    shards: OnceLock<Box<[OverrideShard]>>,
}

impl KeyOverrides {
    /// Starts to load the memory in which a lookup of the key with this hash begins.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        // Prefetching must not block: if the table is being changed, skip the key.
        if let Ok(table) = self.shard(hash).try_read() {
            table.prefetch_home(hash);
        }
    }

    /// Locks the table in which the key with this hash is, or would be.
    #[inline]
    pub(super) fn read(&self, hash: u64) -> RwLockReadGuard<'_, HashTable<KeyOverride>> {
        loop {
            let shard = self.shard(hash);
            let table = read(shard);
            // The table may have been split while this thread waited for the lock.
            if std::ptr::eq(shard, self.shard(hash)) {
                return table;
            }
        }
    }

    /// Locks the table in which the key with this hash is, or would be, to change it.
    pub(super) fn write(&self, hash: u64) -> RwLockWriteGuard<'_, HashTable<KeyOverride>> {
        loop {
            let shard = self.shard(hash);
            let table = write(shard);
            // As in `Self::read`.
            if std::ptr::eq(shard, self.shard(hash)) {
                return table;
            }
        }
    }

    /// Inserts an override for a key that may have one already. Returns the replaced override.
    pub(super) fn set(
        &self,
        hash: u64,
        new: KeyOverride,
        hash_of: impl Fn(&KeyOverride) -> u64,
    ) -> Option<KeyOverride> {
        let mut table = self.write(hash);
        if let Some(slot) = table.find(hash, new.key.bytes()) {
            return Some(table.replace(slot, new));
        }
        table.insert(hash, new, &hash_of);
        let is_large = table.len() >= SPLIT_AT;
        drop(table);
        if is_large && self.shards.get().is_none() {
            self.split(hash_of);
        }
        None
    }

    /// Calls `visit` with each table.
    pub(super) fn for_each_table(&self, mut visit: impl FnMut(&HashTable<KeyOverride>)) {
        let first = read(&self.first);
        let Some(shards) = self.shards.get() else {
            return visit(&first);
        };
        drop(first);
        shards.iter().for_each(|shard| visit(&read(shard)));
    }

    /// Calls `change` with each table.
    pub(super) fn change_each_table(&self, mut change: impl FnMut(&mut HashTable<KeyOverride>)) {
        let mut first = write(&self.first);
        let Some(shards) = self.shards.get() else {
            return change(&mut first);
        };
        drop(first);
        shards.iter().for_each(|shard| change(&mut write(shard)));
    }

    /// Returns whether no table is locked.
    #[cfg(test)]
    pub(super) fn is_unlocked(&self) -> bool {
        let mut shards = self.shards.get().into_iter().flatten();
        self.first.try_write().is_ok() && shards.all(|shard| shard.try_write().is_ok())
    }

    #[inline]
    fn shard(&self, hash: u64) -> &OverrideShard {
        match self.shards.get() {
            Some(shards) => &shards[shard_index(hash)],
            None => &self.first,
        }
    }

    fn split(&self, hash_of: impl Fn(&KeyOverride) -> u64) {
        let mut first = write(&self.first);
        // Another thread may have split the table since.
        if self.shards.get().is_some() {
            return;
        }
        let mut tables: Vec<_> = (0..SHARDS).map(|_| HashTable::default()).collect();
        std::mem::take(&mut *first).into_entries(|known| {
            let hash = hash_of(&known);
            tables[shard_index(hash)].insert(hash, known, &hash_of);
        });
        let shards = tables.into_iter().map(RwLock::new).collect();
        let split = self.shards.set(shards);
        debug_assert!(split.is_ok(), "`first` is locked");
    }
}

/// Returns the index of the shard for the hash of a key.
fn shard_index(hash: u64) -> usize {
    // Use the highest 6 bits, because lower bits select the slot in the shard's table. The
    // remainder is less than the number of shards, so it fits in a `usize`.
    ((hash >> 58) % SHARDS as u64) as usize
}

// No code panics while it holds a lock, so the lock cannot be poisoned.
fn read(shard: &OverrideShard) -> RwLockReadGuard<'_, HashTable<KeyOverride>> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(shard: &OverrideShard) -> RwLockWriteGuard<'_, HashTable<KeyOverride>> {
    shard.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        thread,
        time::Duration,
    };

    use foldhash::fast::FixedState;

    use super::{
        super::{Replacement, replacement::CompiledReplacement, stored::StoredOverride},
        *,
    };
    use crate::{hash_table::TableEntry as _, time::Timestamp};

    fn hash(key: &[u8]) -> u64 {
        std::hash::BuildHasher::hash_one(&FixedState::with_seed(7), key)
    }

    /// Returns the overrides of this number of keys.
    fn overrides(count: u32) -> KeyOverrides {
        let limits = Replacement::Limits(Box::new(["20/min".into()]));
        let compiled = Arc::new(CompiledReplacement::new(limits));
        let overrides = KeyOverrides::default();
        for number in 0..count {
            let key = number.to_le_bytes();
            let stored = StoredOverride {
                compiled: Arc::clone(&compiled),
                until: Timestamp::MAX,
                reason: "launch".into(),
            };
            let new = KeyOverride::new(&key, 1, stored, 0);
            overrides.set(hash(&key), new, |known| hash(known.key.bytes()));
        }
        overrides
    }

    #[test]
    fn an_override_takes_at_most_200_bytes() {
        const REASON_BYTES: usize = 32;
        for count in [100_000, 106_000, 112_000] {
            let mut bytes = 0;
            overrides(count).for_each_table(|table| bytes += table.heap_bytes());
            let each = bytes / count as usize + REASON_BYTES;
            assert!(each <= 200, "{each} bytes with {count} overrides");
        }
    }

    #[test]
    fn most_overrides_are_in_their_home_slot() {
        let (mut at_home, mut all) = (0, 0);
        overrides(50_000).for_each_table(|table| {
            all += table.len();
            at_home += table
                .iter()
                .filter(|known| known.distance().is_home())
                .count();
        });
        assert!(at_home * 10 > all * 7, "{at_home} of {all}");
    }

    #[test]
    fn prefetching_never_waits_for_a_table() {
        let overrides = overrides(1);
        let changed = overrides.write(0);
        let (sender, receiver) = mpsc::channel();
        let is_done = thread::scope(|scope| {
            scope.spawn(|| {
                overrides.prefetch(0);
                sender.send(()).unwrap();
            });
            // A prefetch that waits ends only after the change.
            let is_done = receiver.recv_timeout(Duration::from_secs(10)).is_ok();
            drop(changed);
            is_done
        });
        assert!(is_done, "the prefetch waits for the change");
    }
}
