//! The memory store: sharded, bounded in keys and in bytes, exact under threads.
//!
//! A key lives in the shard that its hash names, under that shard's lock. A decision over several keys takes
//! the locks of their shards in order, decides on what it finds, and puts everything back before it lets go:
//! nobody ever sees half of it. There are no sweeps: each decision looks at a few entries at most, and an
//! insertion into a full shard at [a few more](shard).

mod blocks;
mod entry;
mod held;
mod index;
mod pending;
mod shard;
mod slab;
mod snapshot;

#[cfg(loom)]
use foldhash::quality::FixedState as RandomState;
#[cfg(not(loom))]
use foldhash::quality::RandomState;

pub use self::snapshot::SnapshotError;
use self::{
    held::Held,
    pending::{Pending, Place},
    shard::{Full, Room, Shard, hash_with},
};
use crate::{
    bounds,
    charge::{Charge, Effect},
    outcome::{Decision, Outcome, Retry},
    sync::{self, Mutex},
    time::{Span, Timestamp},
};

/// What a full store does for a key that it has not seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Forgets a key that has spent no more than half of each limit and was not denied; if none is at hand,
    /// denies the newcomer.
    #[default]
    Evict,
    /// Forgets nothing and denies the newcomer.
    Deny,
    /// Forgets nothing and lets the newcomer pass uncounted.
    Allow,
}

/// The bounds of a memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBounds {
    /// The most keys, at least 1; default 10,000,000.
    pub max_keys: usize,
    /// The most bytes, for keys and states and their index, at least 64 KiB; default 1 GiB.
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
    /// Bytes held now for keys, their states and their index, by the store's own account.
    pub bytes: usize,
    /// Expired keys that were dropped.
    pub expired: u64,
    /// Live keys that were forgotten to make room.
    pub evicted: u64,
    /// Newcomers denied because the store was full.
    pub newcomers_denied: u64,
    /// Newcomers let through uncounted because the store was full.
    pub newcomers_allowed: u64,
    /// Manual blocks held now.
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

    /// Decides `charges` at `now`: all are charged, or none.
    ///
    /// `outcomes` is cleared and filled with one outcome a limit, in the order of the charges and their
    /// limits; it stays empty when no limit was asked, because a key is blocked or the store is full. The
    /// keys of `charges` must differ from each other. An instant earlier than one that the keys' shards
    /// have seen counts as the latest seen.
    pub fn check(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        outcomes.clear();
        if let [charge] = charges {
            self.check_one(charge, now, effect, outcomes)
        } else {
            self.check_all(charges, now, effect, outcomes)
        }
    }

    #[inline]
    fn check_one(
        &self,
        charge: &Charge<'_>,
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        let hash = hash_with(&self.hasher, charge.key);
        let mut shard = self.shards[self.shard_of(hash)].0.lock();
        let now = shard.latest(now);
        if effect == Effect::Charge
            && let Some(schedule) = charge.limits.sole_schedule()
            && let Some(step) = shard.step_in_place(charge, schedule, hash, now)
        {
            drop(shard);
            outcomes.push(schedule.outcome(&step, now));
            return if step.allowed() {
                Decision::Admitted
            } else {
                Decision::Limited
            };
        }
        if effect.asks()
            && let Some(until) = shard.blocked(charge.key, now)
        {
            return blocked(0, until, now);
        }
        let alone = std::slice::from_ref(charge);
        let located = match shard.locate((charge, alone), hash, now, effect) {
            Ok(located) => located,
            Err(Full { retry_after }) => return Decision::Full { retry_after },
        };
        let mut pending = shard.open(charge, Place { hash, located }, now, effect);
        let admitted = pending.ask(now);
        if effect.asks() {
            pending.settle(admitted, now);
        }
        let pressed = pending.report(now, outcomes);
        if effect.writes() {
            if let Some(newcomer) = shard.put_back(pending, pressed) {
                shard.insert_pending(newcomer, pressed);
            }
            shard.finish();
        }
        if admitted {
            Decision::Admitted
        } else {
            Decision::Limited
        }
    }

    fn check_all(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        let hashes: Vec<u64> = charges
            .iter()
            .map(|charge| hash_with(&self.hasher, charge.key))
            .collect();
        let mut held = Held::lock(self, &hashes);
        let now = held.latest(now);
        if effect.asks()
            && let Some(decision) = held.blocked(self, charges, &hashes, now)
        {
            return decision;
        }
        let mut located = Vec::with_capacity(charges.len());
        for (charge, hash) in charges.iter().zip(&hashes) {
            let shard = held.shard(self.shard_of(*hash));
            match shard.locate((charge, charges), *hash, now, effect) {
                Ok(place) => located.push(place),
                Err(Full { retry_after }) => {
                    held.finish();
                    return Decision::Full { retry_after };
                }
            }
        }
        let mut pending: Vec<Pending<'_>> = charges
            .iter()
            .zip(&hashes)
            .zip(located)
            .map(|((charge, hash), located)| {
                let shard = held.shard(self.shard_of(*hash));
                let located = shard.locate_again(*hash, charge.key, located);
                shard.open(
                    charge,
                    Place {
                        hash: *hash,
                        located,
                    },
                    now,
                    effect,
                )
            })
            .collect();
        let mut admitted = true;
        for pending in &mut pending {
            // Every limit is asked, whatever the others say: each has its own answer.
            admitted &= pending.ask(now);
        }
        if effect.asks() {
            pending
                .iter_mut()
                .for_each(|pending| pending.settle(admitted, now));
        }
        let pressed: Vec<bool> = pending
            .iter()
            .map(|pending| pending.report(now, outcomes))
            .collect();
        if effect.writes() {
            self.put_all(&mut held, pending.into_iter().zip(pressed), &hashes);
        }
        if admitted {
            Decision::Admitted
        } else {
            Decision::Limited
        }
    }

    /// Puts the states of a decision back: first those that were there, because an insertion moves others.
    fn put_all<'c>(
        &self,
        held: &mut Held<'_>,
        decided: impl Iterator<Item = (Pending<'c>, bool)>,
        hashes: &[u64],
    ) {
        let mut newcomers = Vec::new();
        for ((pending, pressed), hash) in decided.zip(hashes) {
            let shard = self.shard_of(*hash);
            let newcomer = held.shard(shard).put_back(pending, pressed);
            newcomers.extend(newcomer.map(|newcomer| (shard, newcomer, pressed)));
        }
        for (shard, newcomer, pressed) in newcomers {
            held.shard(shard).insert_pending(newcomer, pressed);
        }
        held.finish();
    }

    /// Forgets what `key` has spent; true if there was anything. A block on it stands.
    pub fn reset(&self, key: &[u8]) -> bool {
        let hash = hash_with(&self.hasher, key);
        self.lock_of(hash).forget(hash, key)
    }

    /// Blocks `key` for `span`, or until it is lifted; replaces an earlier block.
    ///
    /// False, and nothing changes, if there are [`bounds::MAX_BLOCKS`] blocks already.
    pub fn block(&self, key: &[u8], span: Option<Span>, reason: &str, now: Timestamp) -> bool {
        let is_full = self.stats().blocks >= bounds::MAX_BLOCKS;
        let mut shard = self.lock_of(hash_with(&self.hasher, key));
        let now = shard.latest(now);
        if is_full && shard.blocked(key, now).is_none() {
            return false;
        }
        shard.block(key, span.map(|span| now.after(span)), reason);
        true
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

fn blocked(charge: usize, until: Option<Timestamp>, now: Timestamp) -> Decision {
    let retry_after = until.map_or(Retry::Never, |until| Retry::After(until.since(now)));
    Decision::Blocked {
        charge,
        until,
        retry_after,
    }
}
