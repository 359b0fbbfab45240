//! A part of the store, under one lock: its keys and what is remembered of each.

use std::hash::{BuildHasher, Hasher};

use super::{
    MemoryStats, RandomState,
    blocks::Blocks,
    entry::{Clock, Entry},
    ledger::Ledger,
    pending::{Located, Pending, Place},
    room::{Full, Reserved, Room},
    table::{self, Table},
};
use crate::{
    charge::{Charge, Effect},
    kernel::Schedule,
    limits::Loaded,
    outcome::Outcome,
    question::Question,
    time::{Span, Timestamp},
};

/// How many slots a decision looks at for each key that it inserts, to drop the entries that have expired: enough that
/// under a stream of new keys the expired ones go faster than new ones come.
const TIDY_ON_INSERT: usize = 6;

/// One decision in so many looks at a few slots that lie together, so that an idle store empties without insertions.
const TIDY_EVERY: u32 = 64;
const TIDY_TOGETHER: usize = 6;

/// How far the latest instant seen may lead the time of a caller before it is taken for wrong.
///
/// A caller's time is behind the latest seen because it read the clock, and others decided before it got the
/// shard's lock. That takes microseconds; a tenth of a second where the kernel throttles the process; some
/// seconds on a machine that swaps. All of these stay far below ten seconds, and count as the latest seen.
/// A clock that leads by less than this delays the keys that were charged meanwhile by as much, at most.
///
/// One caller can be late by more: a process that is stopped (`SIGSTOP`, a frozen container, a suspended guest)
/// between reading the clock and deciding. Its time is then that of the stop, to which states are clamped:
/// everything charged before the stop stays, and what others charged since they went on, some
/// microseconds of work, may count as of the stop.
pub(super) const JUMP: Span = Span::from_secs(10);

/// What every decision writes lies together, beside the lock, before what it only reads: two threads in one shard hand over one
/// cache line.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Shard {
    /// The latest instant seen: a clock that goes backwards by up to [`JUMP`] counts as this.
    latest: Timestamp,
    decisions: u32,
    /// The blocks by hand; hardly ever any.
    pub(super) blocks: Option<Box<Blocks>>,
    pub(super) entries: Table,
    pub(super) rest: Box<Rest>,
}

#[cfg(not(loom))]
const _: () = assert!(
    align_of::<Shard>() + std::mem::offset_of!(Shard, entries) <= 64,
    "the lock and what every decision writes are one line"
);

/// What only some decisions touch.
#[derive(Debug)]
pub(super) struct Rest {
    hasher: RandomState,
    pub(super) room: Room,
    /// Where tidying goes on.
    pub(super) cursor: usize,
    /// Bytes on the heap that belong to the entries.
    pub(super) heap_bytes: usize,
    pub(super) reserved: Reserved,
    pub(super) counts: MemoryStats,
    pub(super) ledger: Ledger,
    /// To what unclamped entries are clamped: when the clock was last found to have been ahead.
    pub(super) rewound: Timestamp,
}

impl Shard {
    pub(super) fn new(hasher: RandomState, room: Room) -> Self {
        let room = Room {
            keys: room.keys.clamp(1, table::MAX_ENTRIES),
            ..room
        };
        let rest = Rest {
            hasher,
            room,
            cursor: 0,
            heap_bytes: 0,
            reserved: Reserved::default(),
            counts: MemoryStats::default(),
            ledger: Ledger::default(),
            rewound: Timestamp::default(),
        };
        Self {
            entries: Table::default(),
            rest: Box::new(rest),
            latest: Timestamp::default(),
            decisions: 0,
            blocks: None,
        }
    }

    /// The instant that `now` counts as.
    #[inline]
    pub(super) fn latest(&mut self, now: Timestamp) -> Timestamp {
        self.latest = self.latest.max(now);
        if self.latest.since(now) > JUMP {
            self.rewind(now);
        }
        self.latest
    }

    /// Takes note of an instant that other shards have seen.
    pub(super) fn advance(&mut self, latest: Timestamp) {
        self.latest = self.latest.max(latest);
    }

    /// The clock was ahead: time goes on from `now`, and whatever was left meanwhile is clamped to it.
    ///
    /// What a full key is only its limits know, so entries are marked here and clamped when they are next loaded.
    /// That one nobody asks for again is held until the wrong instant at which it would have expired.
    #[cold]
    fn rewind(&mut self, now: Timestamp) {
        self.latest = now;
        self.rest.rewound = now;
        self.entries.iter_mut().for_each(Entry::mark_unclamped);
        if let Some(blocks) = &mut self.blocks {
            blocks.clamp(now);
        }
    }

    /// Begins to fetch the entry of a key with that hash.
    pub(super) fn prefetch(&self, hash: u64) {
        self.entries.prefetch(hash);
    }

    /// Finds the entry of `charge`, one of `all` that are decided together, and reserves room for what is charged.
    #[inline]
    pub(super) fn locate(
        &mut self,
        (charge, all): (&Charge<'_>, &[Charge<'_>]),
        hash: u64,
        now: Timestamp,
        effect: Effect,
    ) -> Result<Located, Full> {
        let found = self.find(hash, charge.key);
        let wanted = self.wanted(charge, found, effect);
        let has_room = wanted.is_nothing() || self.reserve_for((wanted, hash), all, now, effect)?;
        Ok(match found {
            Some(number) => Located::At { number, has_room },
            None => Located::Absent { has_room },
        })
    }

    /// The place of an entry that making way for others may have moved.
    pub(super) fn locate_again(&self, hash: u64, key: &[u8], located: Located) -> Located {
        match (located, self.find(hash, key)) {
            (Located::At { has_room, .. }, Some(number)) => Located::At { number, has_room },
            (Located::At { .. }, None) => Located::Absent { has_room: false },
            (absent @ Located::Absent { .. }, _) => absent,
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
    ) -> Option<Outcome> {
        if self.blocks.is_some() {
            return None;
        }
        let entry = self.entries.find_mut(hash, charge.key)?;
        let tat = entry.schedule(charge.limits.fingerprint())?;
        let step = schedule.decide(tat, now, charge.cost.units());
        entry.put_schedule(step.tat, step.is_pressed);
        self.count();
        Some(step.outcome)
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
        let rewound = self.rest.rewound;
        let clock = Clock { now, rewound };
        let mut is_lent = false;
        let loaded = match located {
            Located::Absent { .. } => Loaded {
                cell: limits.fresh(),
                left: None,
            },
            Located::At {
                number,
                has_room: true,
            } if effect.writes() => {
                self.rest.heap_bytes -= self.entries[number].heap_bytes();
                self.entries[number].take(limits, clock)
            }
            Located::At { number, .. } => {
                let entry = &mut self.entries[number];
                is_lent = !effect.writes() && entry.can_be_lent(limits);
                if is_lent {
                    self.rest.heap_bytes -= entry.heap_bytes();
                    entry.take(limits, clock)
                } else {
                    entry.copy(limits, clock)
                }
            }
        };
        Pending {
            charge,
            place: Place { hash, located },
            question: Question::open(charge, loaded.cell, now, effect),
            left: loaded.left,
            kept: false,
            lent: is_lent.then(Vec::new),
        }
    }

    /// Puts the state of a charge back that [`Self::open`] took; those of newcomers are to be inserted.
    #[inline]
    pub(super) fn put_back<'c>(
        &mut self,
        pending: Pending<'c>,
        pressed: bool,
    ) -> Option<Pending<'c>> {
        let Located::At { number, has_room } = pending.place.located else {
            return Some(pending);
        };
        if !has_room {
            return None;
        }
        let entry = &mut self.entries[number];
        if let Some(left) = pending.left {
            entry.put(left.cell, left.fingerprint, pressed);
        } else {
            let fingerprint = pending.charge.limits.fingerprint();
            entry.put(pending.question.cell, fingerprint, pressed);
        }
        self.rest.heap_bytes += entry.heap_bytes();
        None
    }

    /// Puts a state back, as it was, that [`Self::open`] has lent to a decision that changes nothing.
    pub(super) fn put_back_lent(&mut self, pending: Pending<'_>, now: Timestamp) {
        let Located::At { number, .. } = pending.place.located else {
            return;
        };
        let fingerprint = pending.charge.limits.fingerprint();
        let Some(cell) = pending.undone(now) else {
            return;
        };
        let entry = &mut self.entries[number];
        let pressed = entry.pressed;
        entry.put(cell, fingerprint, pressed);
        self.rest.heap_bytes += entry.heap_bytes();
    }

    /// Inserts the state of a charge that was not there before, if there is anything to remember and room
    /// was made for it.
    pub(super) fn insert_pending(&mut self, pending: Pending<'_>, pressed: bool) {
        if pending.kept && pending.place.located == (Located::Absent { has_room: true }) {
            let fingerprint = pending.charge.limits.fingerprint();
            self.insert(
                pending.place.hash,
                Entry::new(
                    pending.charge.key,
                    pending.question.cell,
                    fingerprint,
                    pressed,
                ),
            );
        }
    }

    /// Ends a decision, and tidies a little. Nothing may move entries between [`Self::open`] and the last
    /// [`Self::put_back`].
    #[inline]
    pub(super) fn finish(&mut self, effect: Effect) {
        let newcomers = self.rest.reserved.clear();
        if effect.writes() {
            self.tidy(newcomers * TIDY_ON_INSERT, self.latest);
            self.count();
        }
    }

    /// Counts a decision, and tidies now and then.
    #[inline]
    fn count(&mut self) {
        self.decisions = self.decisions.wrapping_add(1);
        if self.decisions.is_multiple_of(TIDY_EVERY) {
            self.tidy(TIDY_TOGETHER, self.latest);
        }
    }

    /// Forgets what a key has spent; true if there was anything.
    pub(super) fn forget(&mut self, hash: u64, key: &[u8]) -> bool {
        let found = self.find(hash, key);
        if let Some(number) = found {
            self.remove(number);
            self.shrink();
        }
        self.rest.ledger.forget(key);
        found.is_some()
    }

    /// Takes in a key from a snapshot, unless it is there already, has expired, or does not fit.
    pub(super) fn restore(&mut self, hash: u64, entry: Entry, now: Timestamp) -> bool {
        let is_wanted = entry.expires() > now && self.find(hash, entry.key()).is_none();
        let fits = is_wanted && self.make_room_for(&entry, now);
        if fits {
            if entry.is_unclamped() {
                // Those that are here already have been charged before now, too.
                self.rest.rewound = self.rest.rewound.max(now);
            }
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
            bytes: self.bytes() + self.block_bytes(),
            ledger_bytes: self.rest.ledger.bytes(),
            blocks: self.block_count(),
            ..self.rest.counts
        }
    }

    pub(super) fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        self.entries.find(hash, key)
    }

    fn insert(&mut self, hash: u64, entry: Entry) {
        self.rest.heap_bytes += entry.heap_bytes();
        let hasher = &self.rest.hasher;
        let hash_of = |entry: &Entry| hash_with(hasher, entry.key());
        self.entries.insert(hash, entry, hash_of);
    }

    pub(super) fn remove(&mut self, number: usize) {
        if let Some(removed) = self.entries.remove(number) {
            self.rest.heap_bytes -= removed.heap_bytes();
        }
    }

    /// Gives memory back after a removal that no insertion follows.
    fn shrink(&mut self) {
        let hasher = &self.rest.hasher;
        self.entries
            .shrink_if_empty(|entry| hash_with(hasher, entry.key()));
    }

    /// Looks at the next `count` slots and drops the entries in them that have expired.
    fn tidy(&mut self, count: usize, now: Timestamp) {
        for _ in 0..count {
            let number = self.rest.cursor;
            match self.entries.get(number) {
                Some(entry) if entry.expires() <= now => {
                    self.remove(number);
                    self.shrink();
                    self.rest.counts.expired += 1;
                }
                _ if number < self.entries.slots() => self.rest.cursor += 1,
                _ => self.rest.cursor = 0,
            }
        }
    }

    /// Bytes on the heap, but for the blocks, which are bounded on their own.
    pub(super) fn bytes(&self) -> usize {
        self.entries.heap_bytes() + self.rest.heap_bytes
    }
}

/// The hash of a key, keyed at random for each store.
///
/// foldhash does not claim to resist an attacker who can observe the hash, or the time that a decision takes. One
/// that makes the claim was measured: SipHash-1-3 takes 9.0 ns for a key of 22 bytes where this takes 2.5 ns, of
/// some 50 ns for a whole decision. The table bounds what colliding keys can do instead
/// ([`table::FARTHEST`]), which holds whatever the attacker knows.
#[inline]
pub(super) fn hash_with(hasher: &RandomState, key: &[u8]) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(key);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Algorithm, AlgorithmName, Charge, Cost, Limit, LimitSpec, Limits, MemoryBounds,
        MemoryStore, Receipt, Retry, Settlement, Span, WhenFull, notation,
    };

    fn limits() -> Vec<Limits> {
        use AlgorithmName::{FixedWindow, Gcra, SlidingWindowCounter, SlidingWindowLog};
        let limit = |text, name| {
            let rate = notation::rate(text).unwrap();
            LimitSpec::shorthand(rate, name).build().unwrap()
        };
        [
            vec![limit("5/s", Gcra)],
            vec![limit("77777777777/min", FixedWindow)],
            vec![limit("900/s", SlidingWindowLog)],
            vec![
                limit("5/s", SlidingWindowCounter),
                limit("9/min", SlidingWindowLog),
            ],
            vec![
                Limit::new(Algorithm::Concurrency {
                    limit: 90,
                    lease: Span::from_secs(60),
                })
                .unwrap(),
            ],
        ]
        .map(|limits| Limits::new(limits).unwrap())
        .into()
    }

    proptest! {
        /// The bytes that are kept count of are those that there are, whatever came, went, grew and changed its limits.
        #[test]
        fn bytes_are_counted_as_they_are(
            operations in prop::collection::vec((0..40_u8, 0..5_usize, 1..60_u64, 0..7_u8, 0..400_000_u64), 1..300),
            when_full in prop::sample::select(vec![WhenFull::Evict, WhenFull::Deny, WhenFull::Allow]),
        ) {
            let store = MemoryStore::new(MemoryBounds { max_keys: 30, max_bytes: 1, when_full });
            let (limits, mut now, mut outcomes) = (limits(), 1_000_000, Vec::new());
            let mut held: Vec<(Vec<u8>, usize, Cost, Receipt)> = Vec::new();
            for (key, limit, cost, effect, wait) in operations {
                now += wait;
                let at = Timestamp::from_micros(now);
                let long = vec![key; 1 + usize::from(key) * 3];
                let cost = Cost::new(cost).unwrap();
                let charges = [
                    Charge::new(&long, &limits[limit], cost).unwrap(),
                    Charge::new(b"other", &limits[4 - limit], cost).unwrap(),
                ];
                match effect {
                    4 => {
                        let receipt = store.reserve(&charges[..1], at, &mut outcomes).1;
                        held.push((long.clone(), limit, cost, receipt));
                    }
                    5 => for (key, limit, cost, receipt) in &mut held {
                        store.renew(&[Charge::new(key, &limits[*limit], *cost).unwrap()], receipt, at);
                    },
                    6 => for (key, limit, cost, receipt) in held.drain(..) {
                        let charge = Charge::new(&key, &limits[limit], cost).unwrap();
                        store.settle(&[charge], receipt, &[Settlement { unused: 1 }], at);
                    },
                    _ => {
                        let effect = [Effect::Charge, Effect::Charge, Effect::Peek, Effect::Refund][usize::from(effect)];
                        store.check(&charges, at, effect, &mut outcomes);
                    }
                }
                let shard = store.shards[0].0.lock();
                let counted: usize = shard.entries().map(Entry::heap_bytes).sum();
                prop_assert_eq!(shard.rest.heap_bytes, counted);
                prop_assert_eq!(shard.entries().count(), shard.entries.len());
            }
        }
    }

    fn shard() -> Shard {
        let room = Room {
            keys: 100_000,
            bytes: 1 << 30,
            when_full: WhenFull::Evict,
        };
        Shard::new(RandomState::default(), room)
    }

    /// A peek copied the log: 800 kB of a limit of 100,000, while the shard was locked.
    #[test]
    fn a_peek_works_on_the_log_itself_and_puts_it_back() {
        let (mut shard, limits, now) = (shard(), limits(), Timestamp::from_micros(1_000_000));
        let limits = &limits[2];
        let cost = Cost::new(10).unwrap();
        let charge = Charge::new(b"key", limits, cost).unwrap();
        let alone = std::slice::from_ref(&charge);
        let decide = |shard: &mut Shard, effect| {
            let located = shard.locate((&charge, alone), 7, now, effect).unwrap();
            let mut pending = shard.open(&charge, Place { hash: 7, located }, now, effect);
            let taken = shard.entries().any(Entry::is_taken);
            let admitted = pending.ask(now);
            pending.settle(admitted, now);
            let mut outcomes = Vec::new();
            let pressed = pending.report(now, &mut outcomes);
            if effect.writes() {
                if let Some(newcomer) = shard.put_back(pending, pressed) {
                    shard.insert_pending(newcomer, pressed);
                }
            } else {
                shard.put_back_lent(pending, now);
            }
            shard.finish(effect);
            (taken, outcomes[0])
        };
        decide(&mut shard, Effect::Charge);
        for left in (0..=88).rev() {
            let bytes = shard.bytes();
            let cell = shard.entries().next().and_then(Entry::cell);
            let (taken, peeked) = decide(&mut shard, Effect::Peek);
            assert!(taken && peeked.allowed && peeked.remaining == left * 10);
            assert_eq!(shard.entries().next().and_then(Entry::cell), cell);
            assert_eq!(shard.bytes(), bytes, "no more than before");
            assert_eq!(decide(&mut shard, Effect::Charge).1, peeked);
        }
        let (taken, denied) = decide(&mut shard, Effect::Peek);
        assert!(taken && !denied.allowed);
    }

    /// Keys whose hashes lie together make the table refuse more of them, and no others.
    #[test]
    fn a_crowded_place_is_a_full_one() {
        let (mut shard, limits, now) = (shard(), limits(), Timestamp::from_micros(1_000_000));
        let key = |number: usize| number.to_le_bytes();
        // Slots enough for all, and then one home for most.
        let spread = |number: usize| (number as u64) << 17;
        let cell = || limits[0].fresh();
        for number in 0..30_000 {
            let entry = Entry::new(&key(number), cell(), 0, false);
            let hash_of = |entry: &Entry| {
                let bytes = entry.key().first_chunk().copied().unwrap_or_default();
                spread(usize::from_le_bytes(bytes))
            };
            shard.entries.insert(spread(number), entry, hash_of);
        }
        for number in 0..30_000 {
            let found = shard.find(spread(number), &key(number)).unwrap();
            shard.remove(found);
        }
        let charge = Charge::new(b"new", &limits[0], Cost::ONE).unwrap();
        let alone = std::slice::from_ref(&charge);
        let mut inserted = 0;
        let denied = loop {
            match shard.locate((&charge, alone), 7, now, Effect::Charge) {
                Ok(_) => {
                    shard.finish(Effect::Peek);
                    let entry = Entry::new(&key(inserted), cell(), 0, false);
                    shard.entries.insert(7, entry, |_| 7);
                    inserted += 1;
                }
                Err(full) => break full,
            }
        };
        assert_eq!(inserted, table::FARTHEST);
        assert_eq!(denied.retry_after, Retry::After(Span::from_secs(1)));
        assert_eq!(shard.rest.counts.newcomers_denied, 1);
        let elsewhere = shard.locate((&charge, alone), 1 << 31, now, Effect::Charge);
        assert!(elsewhere.is_ok());
        shard.finish(Effect::Peek);
        let there = Charge::new(&[0; 8], &limits[0], Cost::ONE).unwrap();
        let alone = std::slice::from_ref(&there);
        let found = shard.locate((&there, alone), 7, now, Effect::Charge);
        assert!(
            matches!(found, Ok(Located::At { .. })),
            "who is in stays in"
        );
    }
}
