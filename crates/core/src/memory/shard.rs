//! A part of the store, under one lock: its keys, and room for so many and no more.

use std::hash::{BuildHasher, Hasher};

use super::{
    MemoryStats, RandomState, WhenFull,
    blocks::Blocks,
    entry::{Entry, key_bytes},
    index::{self, Index},
    pending::{Located, Pending, Place},
    slab::Slab,
};
use crate::{
    charge::{Charge, Effect},
    kernel::{Schedule, Step},
    outcome::Retry,
    time::{Span, Timestamp},
};

/// How many entries an insertion looks at to find one that has expired or may be forgotten.
const SAMPLE: usize = 8;

/// How many entries an insertion looks at to drop those that have expired: more than one, so that under a
/// stream of new keys the expired ones go faster than new ones come.
const TIDY_ON_INSERT: usize = 3;

/// One decision in so many looks at one entry, so that an idle store empties without insertions.
const TIDY_EVERY: u32 = 16;

/// What every decision touches lies together, beside the lock, and what few touch lies elsewhere: two threads in
/// one shard hand over one cache line.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Shard {
    entries: Slab,
    rest: Box<Rest>,
    index: Index,
    /// The latest instant seen: a clock that goes backwards counts as this.
    latest: Timestamp,
    decisions: u32,
    /// The blocks by hand; hardly ever any.
    pub(super) blocks: Option<Box<Blocks>>,
}

/// What only some decisions touch.
#[derive(Debug)]
struct Rest {
    hasher: RandomState,
    room: Room,
    /// Where tidying goes on.
    cursor: usize,
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

/// There is no room, and this is when there may be.
#[derive(Debug)]
pub(super) struct Full {
    pub(super) retry_after: Retry,
}

impl Shard {
    pub(super) fn new(hasher: RandomState, room: Room) -> Self {
        let room = Room {
            keys: room.keys.clamp(1, index::MAX_ENTRIES),
            ..room
        };
        let rest = Rest {
            hasher,
            room,
            cursor: 0,
            heap_bytes: 0,
            reserved: Reserved::default(),
            counts: MemoryStats::default(),
        };
        Self {
            entries: Slab::default(),
            rest: Box::new(rest),
            index: Index::default(),
            latest: Timestamp::default(),
            decisions: 0,
            blocks: None,
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
        if !effect.writes() {
            return Ok(Located::At(number));
        }
        match self.entries[number].growth_bytes(charge.limits, charge.cost) {
            0 => Ok(Located::At(number)),
            growth => {
                self.make_room(0, growth, all, now)?;
                self.rest.reserved.bytes += growth;
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
                self.rest.reserved.keys += 1;
                self.rest.reserved.bytes += bytes;
                Ok(true)
            }
            Err(_) if self.rest.room.when_full == WhenFull::Allow => {
                self.rest.counts.newcomers_allowed += 1;
                Ok(false)
            }
            Err(full) => {
                self.rest.counts.newcomers_denied += 1;
                Err(full)
            }
        }
    }

    /// Decides a charge that is nothing but `schedule` where its state lies.
    ///
    /// `None`, and nothing has changed, if that is not in an entry or there are blocks to look at: the long
    /// way answers the same.
    #[inline]
    pub(super) fn step_in_place(
        &mut self,
        charge: &Charge<'_>,
        schedule: &Schedule,
        hash: u64,
        now: Timestamp,
    ) -> Option<Step> {
        if self.blocks.is_some() {
            return None;
        }
        let number = self.find(hash, charge.key)?;
        let entry = &mut self.entries[number];
        let tat = entry.schedule(charge.limits.fingerprint())?;
        let step = schedule.step(tat, now, charge.cost.units());
        entry.put_schedule(step.tat(), schedule.is_pressed(&step));
        self.count();
        Some(step)
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
        let mut cell = match located {
            Located::Absent { .. } => limits.fresh(),
            Located::At(number) if effect.writes() => {
                self.rest.heap_bytes -= self.entries[number].heap_bytes();
                self.entries[number].take(limits, now)
            }
            Located::At(number) => self.entries[number].copy(limits, now),
        };
        if effect == Effect::Refund {
            limits.refund(&mut cell, now, charge.cost.units());
        }
        let cost = if effect.asks() {
            charge.cost.units()
        } else {
            0
        };
        Pending::new(charge, Place { hash, located }, cell, cost)
    }

    /// Puts the state of a charge back that was there before; the others are to be inserted.
    #[inline]
    pub(super) fn put_back<'c>(
        &mut self,
        pending: Pending<'c>,
        pressed: bool,
    ) -> Option<Pending<'c>> {
        let Located::At(number) = pending.place.located else {
            return Some(pending);
        };
        let entry = &mut self.entries[number];
        entry.put(pending.cell, pending.charge.limits.fingerprint(), pressed);
        self.rest.heap_bytes += entry.heap_bytes();
        None
    }

    /// Inserts the state of a charge that was not there before, if there is anything to remember and room
    /// was made for it.
    pub(super) fn insert_pending(&mut self, pending: Pending<'_>, pressed: bool) {
        if pending.kept && pending.place.located == (Located::Absent { has_room: true }) {
            let fingerprint = pending.charge.limits.fingerprint();
            self.insert(
                pending.place.hash,
                Entry::new(pending.charge.key, pending.cell, fingerprint, pressed),
            );
            self.tidy(TIDY_ON_INSERT, self.latest);
        }
    }

    /// Ends a decision. Nothing may move entries between [`Self::open`] and the last [`Self::put_back`].
    #[inline]
    pub(super) fn finish(&mut self) {
        self.rest.reserved = Reserved::default();
        self.count();
    }

    /// Counts a decision, and tidies now and then.
    #[inline]
    fn count(&mut self) {
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
            blocks: self.blocks.as_ref().map_or(0, |blocks| blocks.len()),
            ..self.rest.counts
        }
    }

    #[inline]
    fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        self.index
            .find(hash, |number| self.entries[number].key() == key)
    }

    fn insert(&mut self, hash: u64, entry: Entry) {
        self.rest.heap_bytes += entry.heap_bytes();
        self.entries.push(entry);
        let (entries, hasher) = (&self.entries, &self.rest.hasher);
        self.index.insert(hash, entries.len() - 1, |number| {
            hash_with(hasher, entries[number].key())
        });
    }

    fn remove(&mut self, number: usize) {
        let (entries, hasher) = (&self.entries, &self.rest.hasher);
        let hash_of = |number: usize| hash_with(hasher, entries[number].key());
        self.index.remove(hash_of(number), number, hash_of);
        let last = entries.len() - 1;
        if number != last {
            self.index.renumber(hash_of(last), last, number);
        }
        if let Some(removed) = self.entries.swap_remove(number) {
            self.rest.heap_bytes -= removed.heap_bytes();
        }
        let (entries, hasher) = (&self.entries, &self.rest.hasher);
        self.index
            .shrink_if_empty(|number| hash_with(hasher, entries[number].key()));
    }

    /// Looks at the next `count` entries and drops those that have expired.
    fn tidy(&mut self, count: usize, now: Timestamp) {
        for _ in 0..count.min(self.entries.len()) {
            if self.rest.cursor >= self.entries.len() {
                self.rest.cursor = 0;
            }
            if self.entries[self.rest.cursor].expires() <= now {
                self.remove(self.rest.cursor);
                self.rest.counts.expired += 1;
            } else {
                self.rest.cursor += 1;
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
            self.rest.cursor = if self.rest.cursor < self.entries.len() {
                self.rest.cursor
            } else {
                0
            };
            let candidate = &self.entries[self.rest.cursor];
            let expired = candidate.expires() <= now;
            let idle = self.rest.room.when_full == WhenFull::Evict && !candidate.pressed();
            let kept = || decided.iter().any(|charge| charge.key == candidate.key());
            soonest = soonest.min(candidate.expires());
            if (expired || idle) && !kept() {
                self.remove(self.rest.cursor);
                *(if expired {
                    &mut self.rest.counts.expired
                } else {
                    &mut self.rest.counts.evicted
                }) += 1;
            } else {
                self.rest.cursor += 1;
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
        let keys = self.rest.reserved.keys + keys;
        let growth = self.entries.growth_bytes(keys) + self.index.growth_bytes(keys);
        self.entries.len() + keys <= self.rest.room.keys
            && self.bytes() + self.rest.reserved.bytes + growth + bytes <= self.rest.room.bytes
    }

    fn bytes(&self) -> usize {
        self.entries.heap_bytes() + self.index.heap_bytes() + self.rest.heap_bytes
    }
}

/// The hash of a key: keyed at random, so that nobody can choose keys that collide.
#[inline]
pub(super) fn hash_with(hasher: &RandomState, key: &[u8]) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(key);
    hasher.finish()
}
