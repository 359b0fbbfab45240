//! The memory store: sharded, bounded in keys and in bytes, exact under threads.
//!
//! A key lives in the shard that its hash names, under that shard's lock. A decision over several keys takes
//! the locks of their shards in order, decides on what it finds, and puts everything back before it lets go:
//! nobody ever sees half of it. There are no sweeps: each decision looks at a few entries at most, and an
//! insertion into a full shard at [a few more](room).
//!
//! The path of one decision, of which [`decide`] tells one step a line:
//!
//! ```text
//!   charges ─▶ hash each key ─▶ lock its shard                                 decide, held
//!                                    │  now = the latest instant seen          shard
//!                                    ▼
//!                               a block? ──────────────▶ Blocked               blocks
//!                                    │ no
//!                                    ▼
//!                    find the entry, reserve room ─────▶ Full                  table, room
//!                                    │
//!                                    ▼
//!                  take each state out (a peek: copy)                          entry
//!                                    │
//!                                    ▼
//!          ask every limit ─▶ charge all, or none ─▶ report outcomes           pending
//!                                    │
//!                                    ▼
//!                    put back, insert newcomers, tidy                          shard
//!                                    │
//!                                    ▼
//!                             unlock ─▶ Admitted or Limited
//! ```
//!
//! Most decisions take a short cut: where the rule is one plain schedule and its state lies in an entry, the step is made
//! [in place](shard::Shard::step_in_place), and answers the same.

mod blocks;
mod decide;
mod entry;
mod held;
mod ledger;
mod pending;
mod room;
mod settle;
mod shard;
mod snapshot;
mod table;
mod tags;

// Not `quality`, whose last round mixes once more with a number that everybody knows: it keeps no keys apart that collided, and keys lie
// no more evenly by it.
#[cfg(loom)]
use foldhash::fast::FixedState as RandomState;
#[cfg(not(loom))]
use foldhash::fast::RandomState;

pub use self::snapshot::SnapshotError;
use self::{
    room::Room,
    shard::{Shard, hash_with},
};
use crate::{
    bounds,
    prefetch::{PREFETCHES, prefetch},
    sync::{self, Mutex},
    time::{Span, Timestamp},
};

/// What a full store does for a key that it has not seen, and for one whose log has to grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Forgets a key that has spent no more than half of each limit and was not denied; if none is at hand,
    /// denies the newcomer.
    #[default]
    Evict,
    /// Forgets nothing and denies the newcomer.
    Deny,
    /// Forgets nothing and lets the newcomer pass uncounted; a log that cannot grow still denies what is too much for it
    /// as it is.
    Allow,
}

/// The bounds of a memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBounds {
    /// The most keys, at least 1; default 10,000,000.
    pub max_keys: usize,
    /// The most bytes, for keys and states and their table, at least 64 KiB; default 1 GiB. Manual blocks come on top, so
    /// that an operator can block whoever fills the store: at most [`bounds::MAX_BLOCKS`], each a key, a reason and some
    /// 100 bytes.
    pub max_bytes: usize,
    /// What a full store does for newcomers; default [`WhenFull::Evict`].
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

    /// As many shards as keep threads apart, but none so small that luck decides who finds room.
    fn shards(&self) -> usize {
        let by_keys = self.max_keys / 1_024;
        let by_bytes = self.max_bytes / (2 << 20);
        let shards = by_keys.min(by_bytes).clamp(1, MAX_SHARDS);
        1 << shards.ilog2()
    }
}

const MAX_SHARDS: usize = 256;

/// What the store has done so far and holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Keys held now.
    pub keys: usize,
    /// Bytes held now for keys, their states, their table and manual blocks, by the store's own account.
    pub bytes: usize,
    /// Expired keys that were dropped.
    pub expired: u64,
    /// Live keys that were forgotten to make room.
    pub evicted: u64,
    /// Charges denied because the store was full: on newcomers, and on keys whose log had to grow.
    pub newcomers_denied: u64,
    /// Such charges let through uncounted.
    pub newcomers_allowed: u64,
    /// Bytes held now to know what was given back to whom, at most 64 KiB for each shard, which then forgets all of it; not among the
    /// others.
    pub ledger_bytes: usize,
    /// Manual blocks held now. One that ended is held until its key is asked about, blocks are listed, or more need room.
    pub blocks: usize,
}

impl std::ops::AddAssign for MemoryStats {
    fn add_assign(&mut self, other: Self) {
        self.keys += other.keys;
        self.bytes += other.bytes;
        self.expired += other.expired;
        self.evicted += other.evicted;
        self.newcomers_denied += other.newcomers_denied;
        self.newcomers_allowed += other.newcomers_allowed;
        self.ledger_bytes += other.ledger_bytes;
        self.blocks += other.blocks;
    }
}

/// A manual block on one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The key, as charged.
    pub key: Box<[u8]>,
    /// When it ends; `None` stands until it is lifted.
    pub until: Option<Timestamp>,
    /// Why, in the operator's words.
    pub reason: String,
}

/// The store that keeps its state in this process.
///
/// # Examples
///
/// ```
/// use tidegate_core::{
///     AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore, Timestamp, notation,
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
    shards: Box<[Padded]>,
}

/// A shard on cache lines of its own, so that threads in different shards do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

type Guard<'s> = sync::Guard<'s, Shard>;

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new(bounds: MemoryBounds) -> Self {
        let shards = bounds.shards();
        let room = Room {
            keys: bounds.max_keys / shards,
            bytes: bounds.max_bytes.max(MemoryBounds::MIN_BYTES) / shards,
            when_full: bounds.when_full,
        };
        let hasher = RandomState::default();
        let shards = (0..shards)
            .map(|_| Padded(Mutex::new(Shard::new(hasher.clone(), room))))
            .collect();
        Self { hasher, shards }
    }

    /// The most keys that [`Self::prefetch`] fetches: more would drive each other out of the caches.
    pub const PREFETCHED: usize = 32;

    /// Begins to fetch what is kept of `keys` into the processor's caches: of the first [`Self::PREFETCHED`] of them. It does
    /// nothing where the processor cannot be told.
    ///
    /// It changes no answer. Whoever is about to decide on several keys, one after the other, waits for memory once
    /// then, and not for each of them.
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
            // Who would have to wait for a shard gains nothing.
            if let Some(shard) = self.shards[self.shard_of(*hash)].0.try_lock() {
                shard.prefetch(*hash);
            }
        }
    }

    /// Forgets what `key` has spent; true if the store held it. A block on it stands.
    pub fn reset(&self, key: &[u8]) -> bool {
        let hash = hash_with(&self.hasher, key);
        self.lock_of(hash).forget(hash, key)
    }

    /// Blocks `key` for `span`, or until it is lifted; replaces an earlier block.
    ///
    /// False, and nothing changes, if [`bounds::MAX_BLOCKS`] blocks stand already, the key is over
    /// [`bounds::MAX_KEY_BYTES`], or the reason over [`bounds::MAX_REASON_BYTES`].
    pub fn block(&self, key: &[u8], span: Option<Span>, reason: &str, now: Timestamp) -> bool {
        if key.len() > bounds::MAX_KEY_BYTES || reason.len() > bounds::MAX_REASON_BYTES {
            return false;
        }
        let has_room = self.has_room_for_block(now);
        let mut shard = self.lock_of(hash_with(&self.hasher, key));
        let now = shard.latest(now);
        if !has_room && shard.blocked(key, now).is_none() {
            return false;
        }
        shard.block(key, span, reason, now);
        true
    }

    /// Whether there are fewer blocks than the most; looks for such as have ended only if there are not.
    fn has_room_for_block(&self, now: Timestamp) -> bool {
        let count = || -> usize {
            let shards = self.shards.iter();
            shards.map(|shard| shard.0.lock().block_count()).sum()
        };
        if count() < bounds::MAX_BLOCKS {
            return true;
        }
        for shard in &self.shards {
            shard.0.lock().drop_ended_blocks(now);
        }
        count() < bounds::MAX_BLOCKS
    }

    /// Lifts the block on `key`; true if one stood.
    pub fn unblock(&self, key: &[u8], now: Timestamp) -> bool {
        let mut shard = self.lock_of(hash_with(&self.hasher, key));
        let now = shard.latest(now);
        shard.unblock(key, now)
    }

    /// The block on `key` that stands at `now`.
    #[must_use]
    pub fn block_on(&self, key: &[u8], now: Timestamp) -> Option<Block> {
        let mut shard = self.lock_of(hash_with(&self.hasher, key));
        let now = shard.latest(now);
        shard.block_on(key, now)
    }

    /// Every block that stands at `now`, in no order.
    #[must_use]
    pub fn blocks(&self, now: Timestamp) -> Vec<Block> {
        self.shards
            .iter()
            .flat_map(|shard| shard.0.lock().blocks(now))
            .collect()
    }

    /// What the store holds and has done.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats::default();
        for shard in &self.shards {
            stats += shard.0.lock().stats();
        }
        stats
    }

    fn lock_of(&self, hash: u64) -> Guard<'_> {
        self.shards[self.shard_of(hash)].0.lock()
    }

    /// The shard of a hash: by its highest bits, which the index of a shard does not use.
    #[inline]
    fn shard_of(&self, hash: u64) -> usize {
        // Eight bits fit a usize, and the number of shards is a power of two up to 256.
        (hash >> 56) as usize & (self.shards.len() - 1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::hash::{BuildHasher, Hasher};

    use super::*;
    use crate::{Charge, Cost, Decision, Effect, LimitSpec, Limits, notation};

    #[test]
    fn what_is_fetched_is_decided_as_if_it_were_not() {
        let rate = notation::rate("3/min").unwrap();
        let limit = LimitSpec::shorthand(rate, crate::AlgorithmName::FixedWindow).build();
        let limits = Limits::new(vec![limit.unwrap()]).unwrap();
        let keys: Vec<[u8; 2]> = (0..100_u16).map(u16::to_le_bytes).collect();
        let now = Timestamp::from_micros(1_000_000);
        // Many shards, and one in which nothing has to make way: what does is a matter of chance.
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

    /// Every shard has an even part of the room, and a table of theirs looks at few entries for a key.
    #[test]
    fn keys_of_every_shape_lie_evenly() {
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
                // Of the 32 bits that are spread over the homes, the highest.
                homes[usize::from(u16::from_be_bytes([bytes[4], bytes[5]]) >> 2)] += 1;
            }
            // 1,024 and 16 on average; by chance alone five and ten deviations are out of reach of so many.
            let (fullest, nearest) = (shards.iter().max(), homes.iter().max());
            assert!(fullest < Some(&1_184), "{seed} {:?}: {fullest:?}", shape(7));
            assert!(nearest < Some(&56), "{seed} {:?}: {nearest:?}", shape(7));
        }
    }

    #[test]
    fn nobody_waits_for_a_shard_to_fetch_from_it() {
        let store = MemoryStore::new(MemoryBounds {
            max_keys: 1,
            ..MemoryBounds::default()
        });
        let held = store.lock_of(0);
        store.prefetch([b"k".as_slice()]);
        drop(held);
    }
}
