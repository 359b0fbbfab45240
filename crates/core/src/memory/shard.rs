//! A part of the store, under one lock: its keys, its blocks, and room for so many and no more.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hasher},
};

use super::{
    Block, MemoryStats, RandomState, WhenFull,
    entry::{Entry, key_bytes},
    index::{self, Index},
    slab::Slab,
};
use crate::{
    charge::{Charge, Effect},
    limits::{Asked, Cell, Mask},
    outcome::{Outcome, Retry},
    time::{Span, Timestamp},
};

/// How many entries an insertion looks at to find one that has expired or may be forgotten.
const SAMPLE: usize = 8;

/// How many entries an insertion looks at to drop those that have expired: more than one, so that under a
/// stream of new keys the expired ones go faster than new ones come.
const TIDY_ON_INSERT: usize = 3;

/// One decision in so many looks at one entry, so that an idle store empties without insertions.
const TIDY_EVERY: u32 = 16;

#[derive(Debug)]
pub(super) struct Shard {
    index: Index,
    entries: Slab,
    hasher: RandomState,
    blocks: HashMap<Box<[u8]>, BlockState>,
    room: Room,
    /// The latest instant seen: a clock that goes backwards counts as this.
    latest: Timestamp,
    /// Where tidying goes on.
    cursor: usize,
    decisions: u32,
    /// Bytes on the heap that belong to the entries.
    heap_bytes: usize,
    reserved: Reserved,
    counts: MemoryStats,
}

/// What a shard may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) keys: usize,
    pub(super) bytes: usize,
    pub(super) when_full: WhenFull,
}

/// Room that is kept for the keys that a decision is about to insert, and for what it lets grow.
#[derive(Clone, Copy, Debug, Default)]
struct Reserved {
    keys: usize,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct BlockState {
    until: Option<Timestamp>,
    reason: Box<str>,
}

/// There is no room, and this is when there may be.
#[derive(Debug)]
pub(super) struct Full {
    pub(super) retry_after: Retry,
}

/// Where the key of a charge is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Located {
    /// In the entry of this number.
    At(usize),
    /// Nowhere; there is room for it or not.
    Absent { has_room: bool },
}

/// Where the key of a charge is, or would be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) hash: u64,
    pub(super) located: Located,
}

/// One charge while it is being decided: its state is out of the store.
#[derive(Debug)]
pub(super) struct Pending<'c> {
    charge: &'c Charge<'c>,
    cost: u64,
    hash: u64,
    located: Located,
    cell: Cell,
    denied: Mask,
    charged: bool,
    kept: bool,
}

impl<'c> Pending<'c> {
    /// Asks the limits; true if they let the request pass, as those of a shadow rule always do.
    #[inline]
    pub(super) fn ask(&mut self, now: Timestamp) -> bool {
        let denied = self.charge.limits.denied(&mut self.cell, now, self.cost);
        // A cost of nothing always fits, also where more is spent than a lowered limit holds.
        self.denied = if self.cost == 0 { 0 } else { denied };
        self.denied == 0 || self.charge.limits.shadow()
    }

    /// Spends what is to be spent, given whether the request as a whole is `admitted`.
    #[inline]
    pub(super) fn settle(&mut self, admitted: bool, now: Timestamp) {
        let limits = self.charge.limits;
        if admitted && self.denied == 0 {
            limits.charge(&mut self.cell, now, self.cost);
            self.charged = true;
        } else if admitted == limits.shadow() {
            // Denied by these limits, or by others of the same request: a shadow limit takes no notice of those.
            self.kept |= limits.charge_denied(&mut self.cell, now, self.cost);
        }
        self.kept |= self.charged;
    }

    #[inline]
    pub(super) fn report(&self, now: Timestamp, outcomes: &mut Vec<Outcome>) -> bool {
        let first = outcomes.len();
        let asked = Asked {
            now,
            cost: self.cost,
            denied: self.denied,
            charged: self.charged && self.cost > 0,
        };
        self.charge.limits.report(&self.cell, asked, outcomes);
        outcomes[first..].iter().any(is_pressed)
    }
}

impl Shard {
    pub(super) fn new(hasher: RandomState, room: Room) -> Self {
        let room = Room {
            keys: room.keys.clamp(1, index::MAX_ENTRIES),
            ..room
        };
        Self {
            hasher,
            index: Index::default(),
            entries: Slab::default(),
            blocks: HashMap::new(),
            room,
            latest: Timestamp::default(),
            cursor: 0,
            decisions: 0,
            heap_bytes: 0,
            reserved: Reserved::default(),
            counts: MemoryStats::default(),
        }
    }

    /// The instant that `now` counts as.
    pub(super) fn latest(&mut self, now: Timestamp) -> Timestamp {
        self.latest = self.latest.max(now);
        self.latest
    }

    /// Finds the entry of `charge`, one of `all` that are decided together, and makes sure that what is
    /// charged can be kept.
    #[inline]
    pub(super) fn locate(
        &mut self,
        (charge, all): (&Charge<'_>, &[Charge<'_>]),
        hash: u64,
        now: Timestamp,
        effect: Effect,
    ) -> Result<Located, Full> {
        let found = self.find(hash, charge.key);
        let Some(number) = found else {
            let has_room = effect == Effect::Charge && self.reserve(charge, all, now)?;
            return Ok(Located::Absent { has_room });
        };
        if effect != Effect::Charge {
            return Ok(Located::At(number));
        }
        match self.entries[number].growth_bytes(charge.limits, charge.cost) {
            0 => Ok(Located::At(number)),
            growth => {
                self.make_room(0, growth, all, now)?;
                self.reserved.bytes += growth;
                Ok(self.locate_again(hash, charge.key, Located::At(number)))
            }
        }
    }

    /// The place of an entry that making room for others may have moved.
    pub(super) fn locate_again(&self, hash: u64, key: &[u8], located: Located) -> Located {
        match (located, self.find(hash, key)) {
            (Located::At(_), Some(number)) => Located::At(number),
            (Located::At(_), None) => Located::Absent { has_room: false },
            (absent @ Located::Absent { .. }, _) => absent,
        }
    }

    /// Makes room for the key of `charge`; false if it is to pass uncounted.
    #[cold]
    fn reserve(
        &mut self,
        charge: &Charge<'_>,
        all: &[Charge<'_>],
        now: Timestamp,
    ) -> Result<bool, Full> {
        let bytes = key_bytes(charge.key) + charge.limits.newcomer_bytes(charge.cost);
        match self.make_room(1, bytes, all, now) {
            Ok(()) => {
                self.reserved.keys += 1;
                self.reserved.bytes += bytes;
                Ok(true)
            }
            Err(_) if self.room.when_full == WhenFull::Allow => {
                self.counts.newcomers_allowed += 1;
                Ok(false)
            }
            Err(full) => {
                self.counts.newcomers_denied += 1;
                Err(full)
            }
        }
    }

    /// Decides a charge that is nothing but a schedule whose state lies in its entry, where it lies.
    ///
    /// `None` if it is anything else, and has to go the long way: the answer would be the same.
    #[inline]
    pub(super) fn decide_in_place(
        &mut self,
        charge: &Charge<'_>,
        number: usize,
        now: Timestamp,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<bool> {
        let schedule = charge.limits.sole_schedule()?;
        let entry = &mut self.entries[number];
        let tat = entry.schedule(charge.limits.fingerprint())?;
        let before = entry.heap_bytes();
        let (tat, outcome) = schedule.decide(tat, now, charge.cost.units());
        entry.put_schedule(tat, is_pressed(&outcome));
        self.heap_bytes = self.heap_bytes - before + entry.heap_bytes();
        outcomes.push(outcome);
        self.finish();
        Some(outcome.allowed)
    }

    /// Takes the state of `charge` out, or a copy of it where nothing is to be charged.
    #[inline]
    pub(super) fn open<'c>(
        &mut self,
        charge: &'c Charge<'c>,
        Place { hash, located }: Place,
        now: Timestamp,
        effect: Effect,
    ) -> Pending<'c> {
        let limits = charge.limits;
        let cell = match (located, effect) {
            (Located::Absent { .. }, _) => limits.fresh(),
            (Located::At(number), Effect::Charge) => {
                self.heap_bytes -= self.entries[number].heap_bytes();
                self.entries[number].take(limits, now)
            }
            (Located::At(number), Effect::Peek | Effect::Look) => {
                self.entries[number].copy(limits, now)
            }
        };
        let cost = if effect == Effect::Look {
            0
        } else {
            charge.cost.units()
        };
        Pending {
            charge,
            cost,
            hash,
            located,
            cell,
            denied: 0,
            charged: false,
            kept: false,
        }
    }

    /// Puts the state of a charge back that was there before; the others are to be inserted.
    #[inline]
    pub(super) fn put_back<'c>(
        &mut self,
        pending: Pending<'c>,
        pressed: bool,
    ) -> Option<Pending<'c>> {
        let Located::At(number) = pending.located else {
            return Some(pending);
        };
        let entry = &mut self.entries[number];
        entry.put(pending.cell, pending.charge.limits.fingerprint(), pressed);
        self.heap_bytes += entry.heap_bytes();
        None
    }

    /// Inserts the state of a charge that was not there before, if there is anything to remember and room
    /// was made for it.
    pub(super) fn insert_pending(&mut self, pending: Pending<'_>, pressed: bool) {
        if pending.kept && pending.located == (Located::Absent { has_room: true }) {
            let fingerprint = pending.charge.limits.fingerprint();
            self.insert(
                pending.hash,
                Entry::new(pending.charge.key, pending.cell, fingerprint, pressed),
            );
            self.tidy(TIDY_ON_INSERT, self.latest);
        }
    }

    /// Ends a decision. Nothing may move entries between [`Self::open`] and the last [`Self::put_back`].
    #[inline]
    pub(super) fn finish(&mut self) {
        self.reserved = Reserved::default();
        self.decisions = self.decisions.wrapping_add(1);
        if self.decisions.is_multiple_of(TIDY_EVERY) {
            self.tidy(1, self.latest);
        }
    }

    /// Forgets what a key has spent; true if there was anything.
    pub(super) fn forget(&mut self, hash: u64, key: &[u8]) -> bool {
        let found = self.find(hash, key);
        if let Some(number) = found {
            self.remove(number);
        }
        found.is_some()
    }

    /// Takes in a key from a snapshot, unless it is there already, has expired, or does not fit.
    pub(super) fn restore(&mut self, hash: u64, entry: Entry, now: Timestamp) -> bool {
        let wanted = entry.expires() > now && self.find(hash, entry.key()).is_none();
        let fits = wanted && self.make_room(1, entry.heap_bytes(), &[], now).is_ok();
        if fits {
            self.insert(hash, entry);
        }
        fits
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    pub(super) fn stats(&self) -> MemoryStats {
        MemoryStats {
            keys: self.entries.len(),
            bytes: self.bytes(),
            blocks: self.blocks.len(),
            ..self.counts
        }
    }

    #[inline]
    fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        self.index
            .find(hash, |number| self.entries[number].key() == key)
    }

    fn insert(&mut self, hash: u64, entry: Entry) {
        self.heap_bytes += entry.heap_bytes();
        self.entries.push(entry);
        let (entries, hasher) = (&self.entries, &self.hasher);
        self.index.insert(hash, entries.len() - 1, |number| {
            hash_with(hasher, entries[number].key())
        });
    }

    fn remove(&mut self, number: usize) {
        let (entries, hasher) = (&self.entries, &self.hasher);
        let hash_of = |number: usize| hash_with(hasher, entries[number].key());
        self.index.remove(hash_of(number), number, hash_of);
        let last = entries.len() - 1;
        if number != last {
            self.index.renumber(hash_of(last), last, number);
        }
        if let Some(removed) = self.entries.swap_remove(number) {
            self.heap_bytes -= removed.heap_bytes();
        }
        let (entries, hasher) = (&self.entries, &self.hasher);
        self.index
            .shrink_if_empty(|number| hash_with(hasher, entries[number].key()));
    }

    /// Looks at the next `count` entries and drops those that have expired.
    fn tidy(&mut self, count: usize, now: Timestamp) {
        for _ in 0..count.min(self.entries.len()) {
            if self.cursor >= self.entries.len() {
                self.cursor = 0;
            }
            if self.entries[self.cursor].expires() <= now {
                self.remove(self.cursor);
                self.counts.expired += 1;
            } else {
                self.cursor += 1;
            }
            if self.entries.is_empty() {
                return;
            }
        }
    }

    /// Makes room for `keys` more keys with `bytes` on the heap, by dropping what has expired or, if the
    /// policy is to evict, what has hardly been used, but none of those that are being `decided`: a bounded
    /// number of tries.
    fn make_room(
        &mut self,
        keys: usize,
        bytes: usize,
        decided: &[Charge<'_>],
        now: Timestamp,
    ) -> Result<(), Full> {
        let mut soonest = Timestamp::MAX;
        for _ in 0..SAMPLE {
            if self.has_room(keys, bytes) {
                return Ok(());
            }
            if self.entries.is_empty() {
                break;
            }
            self.cursor = if self.cursor < self.entries.len() {
                self.cursor
            } else {
                0
            };
            let candidate = &self.entries[self.cursor];
            let expired = candidate.expires() <= now;
            let idle = self.room.when_full == WhenFull::Evict && !candidate.pressed();
            let kept = || decided.iter().any(|charge| charge.key == candidate.key());
            soonest = soonest.min(candidate.expires());
            if (expired || idle) && !kept() {
                self.remove(self.cursor);
                *(if expired {
                    &mut self.counts.expired
                } else {
                    &mut self.counts.evicted
                }) += 1;
            } else {
                self.cursor += 1;
            }
        }
        if self.has_room(keys, bytes) {
            return Ok(());
        }
        Err(Full {
            retry_after: Retry::After(soonest.since(now).max(Span::from_micros(1))),
        })
    }

    fn has_room(&self, keys: usize, bytes: usize) -> bool {
        let keys = self.reserved.keys + keys;
        let growth = self.entries.growth_bytes(keys) + self.index.growth_bytes(keys);
        self.entries.len() + keys <= self.room.keys
            && self.bytes() + self.reserved.bytes + growth + bytes <= self.room.bytes
    }

    fn bytes(&self) -> usize {
        self.entries.heap_bytes() + self.index.heap_bytes() + self.heap_bytes
    }
}

/// Manual blocks.
impl Shard {
    /// The block on `key` that stands at `now`: when it ends, if it does.
    #[inline]
    pub(super) fn blocked(&mut self, key: &[u8], now: Timestamp) -> Option<Option<Timestamp>> {
        if self.blocks.is_empty() {
            return None;
        }
        let until = self.blocks.get(key)?.until;
        if until.is_some_and(|until| until <= now) {
            self.blocks.remove(key);
            return None;
        }
        Some(until)
    }

    pub(super) fn block(&mut self, key: &[u8], until: Option<Timestamp>, reason: &str) {
        self.blocks.insert(
            key.into(),
            BlockState {
                until,
                reason: reason.into(),
            },
        );
    }

    pub(super) fn unblock(&mut self, key: &[u8], now: Timestamp) -> bool {
        let stood = self.blocked(key, now).is_some();
        self.blocks.remove(key);
        stood
    }

    pub(super) fn block_on(&mut self, key: &[u8], now: Timestamp) -> Option<Block> {
        self.blocked(key, now)?;
        self.blocks
            .get_key_value(key)
            .map(|(key, state)| state.as_block(key))
    }

    /// The blocks that stand at `now`; those that ended are dropped.
    pub(super) fn blocks(&mut self, now: Timestamp) -> Vec<Block> {
        self.blocks
            .retain(|_, state| state.until.is_none_or(|until| until > now));
        self.blocks
            .iter()
            .map(|(key, state)| state.as_block(key))
            .collect()
    }
}

impl BlockState {
    fn as_block(&self, key: &[u8]) -> Block {
        Block {
            key: key.into(),
            until: self.until,
            reason: self.reason.to_string(),
        }
    }
}

/// Whether the limit denied the request or is more than half spent: its key is not forgotten to make room.
fn is_pressed(outcome: &Outcome) -> bool {
    !outcome.allowed || outcome.remaining.saturating_mul(2) < outcome.limit
}

/// The hash of a key: keyed at random, so that nobody can choose keys that collide.
#[inline]
pub(super) fn hash_with(hasher: &RandomState, key: &[u8]) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(key);
    hasher.finish()
}
