//! The in-memory store for rate limit states. The store is sharded, has a maximum number of keys
//! and bytes, and is exact under concurrent use.
//!
//! A key's hash selects its shard, and the shard's lock protects the key's state. A decision over
//! several keys locks their shards in ascending order. The decision writes all states back before
//! it unlocks any shard, so other decisions do not see a partial update. There is no background
//! task to remove expired entries. Instead, every insertion, and every 64th decision of a shard,
//! scans a few slots for expired entries and drops these entries. An insertion into a full shard
//! scans a few more entries (`shard::eviction`).
//!
//! The steps of one decision, with the modules that implement them on the right. [`decide`] has one
//! step per line:
//!
//! ```text
//!   charges ─▶ hash each key ─▶ lock its shard                               decide, locked_shards
//!                                    │  now = the latest instant seen        shard
//!                                    ▼
//!                               a block? ──────────────▶ Blocked             blocks
//!                                    │ no
//!                                    ▼
//!                    find the entry, reserve room ─────▶ Full                hash_table, eviction
//!                                    │
//!                                    ▼
//!           take each state out (a peek: borrow or copy it)                  key_entry
//!                                    │
//!                                    ▼
//!     evaluate every limit ─▶ charge all, or none ─▶ report outcomes         pending
//!                                    │
//!                                    ▼
//!              put states back, insert new keys, drop expired                shard
//!                                    │
//!                                    ▼
//!                             unlock ─▶ Admitted or Limited
//! ```
//!
//! Most decisions take a fast path. The fast path updates the state in the key's entry [in
//! place](shard::Shard::step_in_place), if the rule has a single plain GCRA limit. The fast path
//! gives the same results as the general path.

mod decide;
mod key_entry;
mod listing;
mod locked_shards;
mod moved_receipt;
mod pending;
mod refund_ledger;
mod settle;
mod shard;
mod snapshot;
mod sync;

use self::shard::{BlockCount, Capacity, Shard};
pub use self::{
    listing::{KeyCursor, KeyPage},
    snapshot::SnapshotError,
};
use crate::{
    hash_table::{PREFETCHES, RandomState, hash_with, prefetch},
    limit::bounds,
    memory::sync::Mutex,
    rules::{BlockedRule, former_values, is_of_rule},
    time::{Span, Timestamp},
};

/// The policy of a full store for a charge that needs more memory. A charge needs more memory if it
/// is for a new key, or for a sliding window log (the list of a key's recent charges) that must
/// grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Evicts a key that has spent at most half of each limit and whose last request was not
    /// denied. If none of the few inspected entries can be evicted, the charge is denied.
    #[default]
    Evict,
    /// Does not evict live keys, and denies the charge.
    Deny,
    /// Does not evict live keys, and admits the charge without counting it. A sliding window log
    /// that cannot grow still denies a charge whose cost exceeds the limit's remaining units.
    Allow,
}

/// The capacity of a memory store, and its policy when full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBounds {
    /// The maximum number of keys, at least 1; default 10,000,000.
    pub max_keys: usize,
    /// The maximum number of bytes for keys, states and the hash table, at least 64 KiB; default 1
    /// GiB.
    ///
    /// The memory for manual blocks is not included, so that an operator can still block a client
    /// that fills the store. There are at most [`bounds::MAX_BLOCKS`] blocks. A block takes about
    /// 150 bytes, plus its key, its reason and the name of its rule. Each entry name in the rule's
    /// key adds 16 bytes and the length of the name.
    pub max_bytes: usize,
    /// The policy when the store is full; default [`WhenFull::Evict`].
    pub when_full: WhenFull,
}

impl Default for MemoryBounds {
    fn default() -> Self {
        Self {
            max_keys: 10_000_000,
            max_bytes: 1 << 30,
            when_full: WhenFull::default(),
        }
    }
}

impl MemoryBounds {
    const MIN_BYTES: usize = 64 << 10;

    /// Returns the number of shards, a power of two. More shards reduce lock contention. If there
    /// are several shards, each has room for at least 1,024 keys and 2 MiB. In smaller shards, an
    /// uneven distribution of keys could fill one shard while others have room.
    fn shards(&self) -> usize {
        let by_keys = self.max_keys / 1_024;
        let by_bytes = self.max_bytes / (2 << 20);
        let shards = by_keys.min(by_bytes).clamp(1, MAX_SHARDS);
        1 << shards.ilog2()
    }
}

const MAX_SHARDS: usize = 256;

/// Counters and current sizes of a memory store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// The current number of keys.
    pub keys: usize,
    /// The bytes currently used by keys, states, the hash table and manual blocks, as counted by
    /// the store itself.
    pub bytes: usize,
    /// The number of expired keys that were dropped.
    pub expired: u64,
    /// The number of live keys that were evicted to make room.
    pub evicted: u64,
    /// The number of charges denied because the store was full. Each of these charges was for a new
    /// key, or for a key whose sliding window log had to grow.
    pub denied_when_full: u64,
    /// The number of charges admitted without being counted because the store was full
    /// ([`WhenFull::Allow`]).
    pub admitted_when_full: u64,
    /// The bytes currently used by the refund ledgers, which record recent refunds. `bytes` does
    /// not include the ledgers. Each shard has a ledger of at most 64 KiB. When a ledger reaches
    /// this size, the store shrinks or clears the ledger.
    pub ledger_bytes: usize,
    /// The current number of manual blocks. An expired block is counted until the store removes it.
    /// The store removes an expired block when it decides a charge on the block's key, when it
    /// lists blocks, or when a new block needs the space.
    pub blocks: usize,
}

impl std::ops::AddAssign for MemoryStats {
    fn add_assign(&mut self, other: Self) {
        self.keys += other.keys;
        self.bytes += other.bytes;
        self.expired += other.expired;
        self.evicted += other.evicted;
        self.denied_when_full += other.denied_when_full;
        self.admitted_when_full += other.admitted_when_full;
        self.ledger_bytes += other.ledger_bytes;
        self.blocks += other.blocks;
    }
}

/// A manual block on a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The blocked key, as it appears in a [`Charge`](crate::Charge).
    pub key: Box<[u8]>,
    /// When the block ends; `None` means that the block lasts until it is removed.
    pub until: Option<Timestamp>,
    /// The reason given by the operator.
    pub reason: String,
    /// The key's rule when the block was created. `None` if the block was created without a rule,
    /// or by a version that did not store rules.
    pub rule: Option<BlockedRule>,
}

impl Block {
    /// Returns true if the key belongs to a rule, even if the rule no longer exists. Returns false
    /// if the key belongs to a limit that was sent with a request.
    #[must_use]
    pub fn is_of_rule(&self) -> bool {
        is_of_rule(&self.key)
    }

    /// Returns the key's values under the rule for which the block was created. Returns `None` if
    /// that rule is unknown.
    #[must_use]
    pub fn values(&self) -> Option<Vec<&str>> {
        former_values(&self.key, self.rule.as_ref()?.key.len())
    }
}

/// Information for operators that is stored with a block. The information does not affect
/// decisions.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockNote<'a> {
    /// The reason for the block, at most [`bounds::MAX_REASON_BYTES`].
    pub reason: &'a str,
    /// The key's rule, if the key belongs to a rule.
    pub rule: Option<&'a BlockedRule>,
}

impl<'a> From<&'a str> for BlockNote<'a> {
    fn from(reason: &'a str) -> Self {
        Self { reason, rule: None }
    }
}

/// A store that keeps its state in the memory of this process.
///
/// # Examples
///
/// ```
/// use tidegate_core::{
///     AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore,
///     Timestamp, notation,
/// };
///
/// let rate = notation::rate("2/min").unwrap();
/// let limit = LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog).build().unwrap();
/// let limits = Limits::new(vec![limit]).unwrap();
/// let store = MemoryStore::new(MemoryBounds::default());
///
/// let charge = Charge::new(b"user:1", &limits, Cost::ONE).unwrap();
/// let (now, mut outcomes) = (Timestamp::from_micros(1_000_000), Vec::new());
/// assert_eq!(store.check(&[charge], now, Effect::Charge, &mut outcomes), Decision::Admitted);
/// assert_eq!(store.check(&[charge], now, Effect::Charge, &mut outcomes), Decision::Admitted);
/// assert_eq!(store.check(&[charge], now, Effect::Charge, &mut outcomes), Decision::Limited);
/// assert_eq!(outcomes[0].retry_after.span().unwrap().to_string(), "1min");
/// ```
#[derive(Debug)]
pub struct MemoryStore {
    hasher: RandomState,
    shards: Box<[AlignedShard]>,
}

/// A shard on its own cache lines, to avoid false sharing between threads that use different
/// shards.
#[derive(Debug)]
#[repr(align(128))]
struct AlignedShard(Mutex<Shard>);

type ShardGuard<'s> = sync::LockGuard<'s, Shard>;

impl MemoryStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new(bounds: MemoryBounds) -> Self {
        let shards = bounds.shards();
        let capacity = Capacity {
            keys: bounds.max_keys / shards,
            bytes: bounds.max_bytes.max(MemoryBounds::MIN_BYTES) / shards,
            when_full: bounds.when_full,
        };
        let (hasher, blocks) = (RandomState::default(), BlockCount::default());
        let shards = (0..shards)
            .map(|_| {
                AlignedShard(Mutex::new(Shard::new(
                    hasher.clone(),
                    capacity,
                    blocks.clone(),
                )))
            })
            .collect();
        Self { hasher, shards }
    }

    /// The maximum number of keys that [`Self::prefetch`] fetches. More keys would evict each
    /// other's cache lines from the CPU caches.
    pub const PREFETCHED: usize = 32;

    /// Starts to load the states of the first [`Self::PREFETCHED`] of `keys` into the CPU caches.
    /// Does nothing on processors for which stable Rust has no prefetch intrinsic.
    ///
    /// Prefetching does not affect any decision. A caller that decides on several keys in sequence
    /// can prefetch all of them first, so that their cache misses overlap.
    pub fn prefetch<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if !PREFETCHES {
            return;
        }
        let mut hashes = [0; Self::PREFETCHED];
        let mut count = 0;
        for (key, hash) in keys.into_iter().zip(&mut hashes) {
            *hash = hash_with(&self.hasher, key);
            prefetch(&self.shards[self.shard_of(*hash)]);
            count += 1;
        }
        for hash in &hashes[..count] {
            // Prefetching must not block: if the shard is locked, skip the key.
            if let Some(shard) = self.shards[self.shard_of(*hash)].0.try_lock() {
                shard.prefetch(*hash);
            }
        }
    }

    /// Drops the state of `key`, so that the key is treated like a new key. Returns true if the
    /// store had a state for `key`. A block on the key remains. Has no effect after
    /// [`Self::save_and_seal`].
    pub fn reset(&self, key: &[u8]) -> bool {
        let hash = hash_with(&self.hasher, key);
        let mut shard = self.lock_of(hash);
        !shard.is_sealed && shard.reset(hash, key)
    }

    /// Blocks `key` for `span`, or until it is unblocked if `span` is `None`. Replaces an earlier
    /// block.
    ///
    /// Returns false, and changes nothing, in any of these cases:
    ///
    /// - There are already [`bounds::MAX_BLOCKS`] blocks.
    /// - Another process has taken over the state of the key ([`Self::save_and_seal`]).
    /// - The key is longer than [`bounds::MAX_KEY_BYTES`].
    /// - The reason is longer than [`bounds::MAX_REASON_BYTES`].
    /// - The name of the rule is longer than [`bounds::MAX_RULE_NAME_BYTES`].
    /// - The rule's key has more than [`bounds::MAX_KEY_ENTRIES`] entries, or an entry whose name
    ///   is longer than [`bounds::MAX_ENTRY_NAME_BYTES`].
    pub fn block<'a>(
        &self,
        key: &[u8],
        span: Option<Span>,
        note: impl Into<BlockNote<'a>>,
        now: Timestamp,
    ) -> bool {
        let note = note.into();
        let is_valid = key.len() <= bounds::MAX_KEY_BYTES
            && note.reason.len() <= bounds::MAX_REASON_BYTES
            && note.rule.is_none_or(BlockedRule::is_within_bounds);
        if !is_valid {
            return false;
        }
        let block = || {
            let mut shard = self.lock_of(hash_with(&self.hasher, key));
            let now = shard.latest(now);
            !shard.is_sealed && shard.block(key, span, note, now)
        };
        if block() {
            return true;
        }
        // Drop expired blocks to make room. Only one shard is locked at a time.
        for shard in &self.shards {
            shard.0.lock().drop_ended_blocks(now);
        }
        block()
    }

    /// Removes the block on `key`. Returns true if `key` had an unexpired block. Has no effect
    /// after [`Self::save_and_seal`].
    pub fn unblock(&self, key: &[u8], now: Timestamp) -> bool {
        let mut shard = self.lock_of(hash_with(&self.hasher, key));
        let now = shard.latest(now);
        !shard.is_sealed && shard.unblock(key, now)
    }

    /// Returns the keys of all blocks, including expired blocks that are still stored, in no
    /// particular order.
    #[must_use]
    pub fn blocked_keys(&self) -> Vec<Box<[u8]>> {
        self.shards
            .iter()
            .flat_map(|shard| shard.0.lock().blocked_keys())
            .collect()
    }

    /// Removes the block on `key`, even if the block has expired.
    pub fn drop_block(&self, key: &[u8]) {
        self.lock_of(hash_with(&self.hasher, key)).drop_block(key);
    }

    /// Returns the block on `key` that is active at `now`.
    #[must_use]
    pub fn block_on(&self, key: &[u8], now: Timestamp) -> Option<Block> {
        let mut shard = self.lock_of(hash_with(&self.hasher, key));
        let now = shard.latest(now);
        shard.block_on(key, now)
    }

    /// Returns the remaining duration of this store's `block` at `now`; `None` if the block has no
    /// end.
    ///
    /// If the clock was set back by at most 10 seconds, this function uses the latest instant seen
    /// by the key's shard, like [`Self::block`]. Therefore, the result never exceeds the span for
    /// which the key was blocked.
    #[must_use]
    pub fn time_left(&self, block: &Block, now: Timestamp) -> Option<Span> {
        let mut shard = self.lock_of(hash_with(&self.hasher, &block.key));
        let now = shard.latest(now);
        block.until.map(|until| until.since(now))
    }

    /// Returns all blocks that are active at `now`, in no particular order.
    #[must_use]
    pub fn blocks(&self, now: Timestamp) -> Vec<Block> {
        self.shards
            .iter()
            .flat_map(|shard| shard.0.lock().blocks(now))
            .collect()
    }

    /// Returns the counters and current sizes, summed over all shards.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats::default();
        for shard in &self.shards {
            stats += shard.0.lock().stats();
        }
        stats
    }

    fn lock_of(&self, hash: u64) -> ShardGuard<'_> {
        self.shards[self.shard_of(hash)].0.lock()
    }

    /// Returns the index of the shard for a key with this hash, from the top 8 bits of the hash.
    /// The hash table of a shard uses other bits of the hash.
    #[inline]
    fn shard_of(&self, hash: u64) -> usize {
        // Eight bits fit in a `usize`, and the number of shards is a power of two up to 256.
        (hash >> 56) as usize & (self.shards.len() - 1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::hash::{BuildHasher, Hasher};

    use super::*;
    use crate::{Charge, Cost, Decision, Effect, LimitSpec, Limits, notation};

    #[test]
    fn prefetching_does_not_change_decisions() {
        let rate = notation::rate("3/min").unwrap();
        let limit = LimitSpec::shorthand(rate, crate::AlgorithmName::FixedWindow).build();
        let limits = Limits::new(vec![limit.unwrap()]).unwrap();
        let keys: Vec<[u8; 2]> = (0..100_u16).map(u16::to_le_bytes).collect();
        let now = Timestamp::from_micros(1_000_000);
        // The first store has many shards, and the second store has a single shard. Both stores
        // have room for all keys: if keys were evicted, the result would depend on the random hash.
        let bounds = [10_000_000, 1_000].map(|max_keys| MemoryBounds {
            max_keys,
            ..MemoryBounds::default()
        });
        let decisions = |fetches: bool, bounds: MemoryBounds| -> Vec<Decision> {
            let (store, mut outcomes) = (MemoryStore::new(bounds), Vec::new());
            let rounds = (0..4).flat_map(|_| &keys);
            let decide = rounds.map(|key| {
                if fetches {
                    store.prefetch(keys.iter().map(<[u8; 2]>::as_slice));
                }
                let charge = Charge::new(key, &limits, Cost::ONE).unwrap();
                store.check(&[charge], now, Effect::Charge, &mut outcomes)
            });
            decide.collect()
        };
        for bounds in bounds {
            let decided = decisions(true, bounds);
            assert_eq!(decided, decisions(false, bounds));
            let (first, last) = (&decided[..300], &decided[300..]);
            assert!(first.iter().all(|decision| *decision == Decision::Admitted));
            assert!(last.iter().all(|decision| *decision == Decision::Limited));
        }
    }

    #[test]
    fn the_bytes_of_a_blocked_rule_are_counted() {
        let rule = BlockedRule {
            name: "login".into(),
            key: Box::new(["user".into(), "ip".into()]),
        };
        assert_eq!(rule.heap_bytes(), 5 + 2 * size_of::<Box<str>>() + 4 + 2);
    }

    #[test]
    fn keys_use_every_shard() {
        let store = MemoryStore::new(MemoryBounds::default());
        let mut keys = vec![0; store.shards.len()];
        for key in 0..100_000_u64 {
            keys[store.shard_of(hash_with(&store.hasher, &key.to_le_bytes()))] += 1;
        }
        assert!(keys.iter().all(|keys| *keys > 0), "{keys:?}");
    }

    /// Keys are spread evenly over the shards, and over the home slots within a shard, so that
    /// lookups probe few slots.
    #[test]
    fn keys_of_every_shape_are_distributed_evenly() {
        const KEYS: u64 = 1 << 18;
        let shapes: [fn(u64) -> Vec<u8>; 6] = [
            |key| key.to_le_bytes().to_vec(),
            |key| key.to_be_bytes().to_vec(),
            |key| format!("user:{key:08}").into(),
            |key| [&[0xFF, 3][..], &key.to_be_bytes(), b":", &key.to_le_bytes()].concat(),
            |key| format!("2001:db8::{:x}:{:x}", key >> 16, key & 0xFFFF).into(),
            |key| format!("tenant=acme,path=/v1/orders/{key},method=GET").into(),
        ];
        for (seed, shape) in (1..4).flat_map(|seed| shapes.map(|shape| (seed, shape))) {
            let hasher = foldhash::fast::FixedState::with_seed(seed);
            let mut shards = vec![0_u32; MAX_SHARDS];
            let mut homes = vec![0_u32; 1 << 14];
            for key in 0..KEYS {
                let mut hash = hasher.build_hasher();
                hash.write(&shape(key));
                let bytes = hash.finish().to_be_bytes();
                shards[usize::from(bytes[0])] += 1;
                // The low 32 bits of the hash select the home slot. Use the 14 highest of these
                // bits.
                homes[usize::from(u16::from_be_bytes([bytes[4], bytes[5]]) >> 2)] += 1;
            }
            // The averages are 1,024 keys in a shard and 16 in a home slot. The maxima below are
            // five and ten standard deviations above these averages, and chance practically never
            // exceeds them.
            let (fullest, nearest) = (shards.iter().max(), homes.iter().max());
            assert!(fullest < Some(&1_184), "{seed} {:?}: {fullest:?}", shape(7));
            assert!(nearest < Some(&56), "{seed} {:?}: {nearest:?}", shape(7));
        }
    }

    #[test]
    fn prefetching_never_waits_for_a_shard() {
        let store = MemoryStore::new(MemoryBounds {
            max_keys: 1,
            ..MemoryBounds::default()
        });
        let held = store.lock_of(0);
        store.prefetch([b"k".as_slice()]);
        drop(held);
    }
}
