//! A shard: a part of the store with its own lock, which holds keys and their states.

mod blocks;
mod eviction;

pub(super) use self::{
    blocks::{BlockCount, Blocks},
    eviction::{Capacity, Full},
};

use self::eviction::RoomReservation;
use super::{
    MemoryStats,
    key_entry::{KeyEntry, LoadContext},
    pending::{EntryLocation, KeyLocation, PendingCharge},
    refund_ledger::{KeyRefunds, RefundLedger},
};
use crate::{
    algorithm::{Gcra, Outcome},
    eval::{Charge, ChargeRecord, Effect, Evaluation, FormerState, LoadedState},
    hash_table::{self, HashTable, RandomState, hash_with},
    time::{CLOCK_JUMP, Timestamp},
};

/// The number of slots that a decision scans for expired entries per inserted key. The number is
/// large enough to drop expired entries faster than a stream of new keys adds entries.
const REAP_ON_INSERT: usize = 6;

/// After this number of decisions, a shard scans some slots for expired entries, so that the shard
/// drops expired entries even without insertions.
const REAP_EVERY: u32 = 64;
/// The number of adjacent slots that a shard scans after [`REAP_EVERY`] decisions.
const REAP_TOGETHER: usize = 6;

/// The data protected by a shard's lock. Fields that every decision writes come first, next to the
/// lock, before fields that are only read. With this layout, two threads contending for a shard
/// exchange only a single cache line.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Shard {
    /// The latest instant at which a decision was made. If a decision's time is up to
    /// [`CLOCK_JUMP`] earlier, the decision uses this instant instead.
    latest: Timestamp,
    decisions: u32,
    /// Whether another process has taken over the states of this shard. A sealed shard decides
    /// nothing.
    pub(super) is_sealed: bool,
    /// Manual blocks; usually `None`.
    pub(super) blocks: Option<Box<Blocks>>,
    pub(super) entries: HashTable<KeyEntry>,
    pub(super) cold: Box<ColdFields>,
}

#[cfg(not(loom))]
const _: () = assert!(
    align_of::<Shard>() + std::mem::offset_of!(Shard, entries) <= 64,
    "the lock and the fields that every decision writes share one cache line"
);

/// The fields used only by some decisions. These fields are not in the cache line that every
/// decision writes.
#[derive(Debug)]
pub(super) struct ColdFields {
    pub(super) hasher: RandomState,
    pub(super) capacity: Capacity,
    /// The slot at which the next scan for expired or evictable entries starts.
    pub(super) cursor: usize,
    /// Heap bytes owned by the entries.
    pub(super) heap_bytes: usize,
    pub(super) reservation: RoomReservation,
    pub(super) counts: MemoryStats,
    pub(super) ledger: RefundLedger,
    /// The instant to which time was last set back after a clock jump. Entries marked as unclamped
    /// are clamped to this instant.
    pub(super) rewound: Timestamp,
    /// The number of blocks in all shards.
    pub(super) block_count: BlockCount,
}

impl Shard {
    pub(super) fn new(hasher: RandomState, capacity: Capacity, block_count: BlockCount) -> Self {
        let capacity = Capacity {
            keys: capacity.keys.clamp(1, hash_table::MAX_ENTRIES),
            ..capacity
        };
        let cold = ColdFields {
            hasher,
            capacity,
            cursor: 0,
            heap_bytes: 0,
            reservation: RoomReservation::default(),
            counts: MemoryStats::default(),
            ledger: RefundLedger::default(),
            rewound: Timestamp::default(),
            block_count,
        };
        Self {
            entries: HashTable::default(),
            cold: Box::new(cold),
            latest: Timestamp::default(),
            decisions: 0,
            is_sealed: false,
            blocks: None,
        }
    }

    /// Returns the time for a decision: the latest instant that this shard has seen, or `now` after
    /// a clock jump.
    #[inline]
    pub(super) fn latest(&mut self, now: Timestamp) -> Timestamp {
        self.latest = self.latest.max(now);
        if self.latest.since(now) > CLOCK_JUMP {
            self.rewind(now);
        }
        self.latest
    }

    /// Records an instant that another shard has seen.
    pub(super) fn advance(&mut self, latest: Timestamp) {
        self.latest = self.latest.max(latest);
    }

    /// Handles a clock that was ahead: time continues from `now`, and states with later instants
    /// are clamped to `now`.
    ///
    /// To clamp a state, the shard would need the limits of the key, which it does not have.
    /// Therefore, this function only marks the entries, and the next load of each entry clamps the
    /// state. A marked key that is never used again stays in the store until its recorded expiry.
    /// The recorded expiry is later than the correct expiry, by the time by which the clock was
    /// ahead.
    #[cold]
    fn rewind(&mut self, now: Timestamp) {
        self.latest = now;
        self.cold.rewound = now;
        self.entries.iter_mut().for_each(KeyEntry::mark_unclamped);
        if let Some(blocks) = &mut self.blocks {
            blocks.clamp(now);
        }
    }

    /// Starts to load the entry of a key with this hash into the CPU cache.
    pub(super) fn prefetch(&self, hash: u64) {
        self.entries.prefetch(hash);
    }

    /// Finds the entry of `charge` and reserves room for the memory that the charge adds. `all`
    /// contains the charges that are decided together; their entries are not evicted.
    #[inline]
    pub(super) fn locate(
        &mut self,
        charge: &Charge<'_>,
        all: &[Charge<'_>],
        hash: u64,
        now: Timestamp,
        effect: Effect,
    ) -> Result<EntryLocation, Full> {
        let found = self.find(hash, charge.key);
        let growth = self.growth(charge, found, effect);
        let has_room = growth.is_nothing() || self.reserve_for(growth, hash, all, now, effect)?;
        Ok(match found {
            Some(number) => EntryLocation::At { number, has_room },
            None => EntryLocation::Absent { has_room },
        })
    }

    /// Finds an entry again after evictions, which can change its slot.
    pub(super) fn locate_again(
        &self,
        hash: u64,
        key: &[u8],
        located: EntryLocation,
    ) -> EntryLocation {
        match (located, self.find(hash, key)) {
            (EntryLocation::At { has_room, .. }, Some(number)) => {
                EntryLocation::At { number, has_room }
            }
            (EntryLocation::At { .. }, None) => EntryLocation::Absent { has_room: false },
            (absent @ EntryLocation::Absent { .. }, _) => absent,
        }
    }

    /// Makes the decision on a charge whose only limit is `gcra`, and updates the state in the
    /// key's entry.
    ///
    /// Returns `None`, and changes nothing, if the shard has blocks, if the key has no entry, if
    /// the state was written under other limits, or if the state is not stored inline. The caller
    /// then uses the general path, which gives the same results.
    #[inline]
    pub(super) fn step_in_place(
        &mut self,
        charge: &Charge<'_>,
        gcra: &Gcra,
        hash: u64,
        now: Timestamp,
    ) -> Option<Outcome> {
        if self.blocks.is_some() {
            return None;
        }
        let entry = self.entries.find_mut(hash, charge.key)?;
        let tat = entry.gcra(charge.limits.fingerprint())?;
        let step = gcra.decide(tat, now, charge.cost.units());
        entry.put_gcra(step.tat, step.is_hot);
        self.count();
        Some(step.outcome)
    }

    /// Returns the context for loading the state of the charge's key at `now`.
    pub(super) fn load_context(&self, charge: &Charge<'_>, now: Timestamp) -> LoadContext {
        LoadContext {
            now,
            cost: charge.cost.units(),
            rewound: self.cold.rewound,
        }
    }

    /// Takes the state of the charge's key out of its entry. If `effect` is read-only, takes a
    /// copy, unless the decision can use the state itself (see [`KeyEntry::can_be_lent`]).
    #[inline]
    pub(super) fn open<'c>(
        &mut self,
        charge: &'c Charge<'c>,
        KeyLocation { hash, located }: KeyLocation,
        now: Timestamp,
        effect: Effect,
    ) -> PendingCharge<'c> {
        let limits = charge.limits;
        let context = self.load_context(charge, now);
        let (mut is_lent, mut converted_until) = (false, Timestamp::default());
        let loaded = match located {
            EntryLocation::Absent { .. } => LoadedState {
                key_state: limits.fresh(),
                former: None,
            },
            EntryLocation::At {
                number,
                has_room: true,
            } if effect.can_write() => {
                let entry = &mut self.entries[number];
                self.cold.heap_bytes -= entry.heap_bytes();
                if !entry.was_left_under(limits.fingerprint()) {
                    converted_until = entry.units_expire();
                }
                entry.take(limits, context)
            }
            EntryLocation::At { number, .. } => {
                let entry = &mut self.entries[number];
                is_lent = !effect.can_write() && entry.can_be_lent(limits);
                if is_lent {
                    self.cold.heap_bytes -= entry.heap_bytes();
                    entry.take(limits, context)
                } else {
                    entry.copy(limits, context)
                }
            }
        };
        PendingCharge {
            charge,
            location: KeyLocation { hash, located },
            evaluation: Evaluation::open(charge, loaded.key_state, now, effect),
            former: if effect == Effect::Refund {
                loaded.former.and_then(FormerState::after_refund)
            } else {
                loaded.former
            },
            converted_until,
            is_changed: false,
            lent: is_lent.then(Vec::new),
        }
    }

    /// Records the conversion of the state of `pending` in the refund ledger, if the converted
    /// state is written back and had units that could be refunded. Call this function before
    /// creating the receipt, because the receipt contains the ID of the conversion.
    #[inline]
    pub(super) fn record_conversion(&mut self, pending: &PendingCharge<'_>, now: Timestamp) {
        if pending.converted_until > now && pending.former.is_none() {
            let ledger = &mut self.cold.ledger;
            ledger.enter_conversion(pending.charge.key, now, pending.converted_until);
        }
    }

    /// Returns the charge record for the receipt: the information that a refund needs to find the
    /// charge in its key's state. Returns `None` if the charge was not made or not stored.
    pub(super) fn charge_record(
        &self,
        pending: &PendingCharge<'_>,
        now: Timestamp,
    ) -> Option<ChargeRecord> {
        if !pending.location.located.has_room() {
            return None;
        }
        let KeyRefunds { shifts, conversion } = self.cold.ledger.of_key(pending.charge.key);
        pending.evaluation.charge_record(now, shifts, conversion)
    }

    /// Puts the state, which [`Self::open`] took out of its entry, back into the entry. Returns
    /// `pending` if its key has no entry yet and must be inserted.
    #[inline]
    pub(super) fn put_back<'c>(
        &mut self,
        pending: PendingCharge<'c>,
        is_hot: bool,
    ) -> Option<PendingCharge<'c>> {
        let EntryLocation::At { number, has_room } = pending.location.located else {
            return Some(pending);
        };
        if !has_room {
            return None;
        }
        let entry = &mut self.entries[number];
        if let Some(former) = pending.former {
            entry.put(former.key_state, former.fingerprint, is_hot);
        } else {
            let fingerprint = pending.charge.limits.fingerprint();
            entry.put(pending.evaluation.key_state, fingerprint, is_hot);
        }
        self.cold.heap_bytes += entry.heap_bytes();
        None
    }

    /// Undoes the charge of a read-only decision that uses the state itself, and puts the state
    /// back into its entry.
    pub(super) fn put_back_lent(&mut self, pending: PendingCharge<'_>, now: Timestamp) {
        let EntryLocation::At { number, .. } = pending.location.located else {
            return;
        };
        let fingerprint = pending.charge.limits.fingerprint();
        let Some(key_state) = pending.undone(now) else {
            return;
        };
        let entry = &mut self.entries[number];
        let is_hot = entry.is_hot;
        entry.put(key_state, fingerprint, is_hot);
        self.cold.heap_bytes += entry.heap_bytes();
    }

    /// Inserts a new key with its state, if the decision changed the state and the key has a
    /// reservation.
    pub(super) fn insert_pending(&mut self, pending: PendingCharge<'_>, is_hot: bool) {
        if pending.is_changed
            && pending.location.located == (EntryLocation::Absent { has_room: true })
        {
            let fingerprint = pending.charge.limits.fingerprint();
            self.insert(
                pending.location.hash,
                KeyEntry::new(
                    pending.charge.key,
                    pending.evaluation.key_state,
                    fingerprint,
                    is_hot,
                ),
            );
        }
    }

    /// Finishes a decision and scans a few slots for expired entries. Must not be called between
    /// [`Self::open`] and the last [`Self::put_back`], because dropping entries moves other
    /// entries.
    #[inline]
    pub(super) fn finish(&mut self, effect: Effect) {
        let new_keys = self.cold.reservation.clear();
        if effect.can_write() {
            self.reap_expired(new_keys * REAP_ON_INSERT, self.latest);
            self.count();
        }
    }

    /// Counts a decision. After every [`REAP_EVERY`] decisions, scans a few slots for expired
    /// entries.
    #[inline]
    fn count(&mut self) {
        self.decisions = self.decisions.wrapping_add(1);
        if self.decisions.is_multiple_of(REAP_EVERY) {
            self.reap_expired(REAP_TOGETHER, self.latest);
        }
    }

    /// Drops a key's state and its entry in the refund ledger. Returns true if the key had a state.
    pub(super) fn reset(&mut self, hash: u64, key: &[u8]) -> bool {
        let found = self.find(hash, key);
        if let Some(number) = found {
            self.remove(number);
            self.shrink();
        }
        self.cold.ledger.remove(key);
        found.is_some()
    }

    /// Inserts a key from a snapshot, unless it is already in the shard, has expired, or does not
    /// fit. Returns whether the key was inserted.
    pub(super) fn restore(&mut self, hash: u64, entry: KeyEntry, now: Timestamp) -> bool {
        let is_wanted = entry.expires() > now && self.find(hash, entry.key()).is_none();
        let fits = is_wanted && self.make_room_for(hash, &entry, now);
        if fits {
            if entry.is_unclamped() {
                // The marked entry will be clamped to `rewound`. Setting `rewound` to `now` for the
                // whole shard is safe, because all other entries of the shard were charged at or
                // before `now`.
                self.cold.rewound = self.cold.rewound.max(now);
            }
            self.insert(hash, entry);
        }
        fits
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &KeyEntry> {
        self.entries.iter()
    }

    pub(super) fn stats(&self) -> MemoryStats {
        MemoryStats {
            keys: self.entries.len(),
            bytes: self.bytes() + self.block_bytes(),
            ledger_bytes: self.cold.ledger.bytes(),
            blocks: self.block_count(),
            ..self.cold.counts
        }
    }

    pub(super) fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        self.entries.find(hash, key)
    }

    fn insert(&mut self, hash: u64, entry: KeyEntry) {
        self.cold.heap_bytes += entry.heap_bytes();
        let hasher = &self.cold.hasher;
        let hash_of = |entry: &KeyEntry| hash_with(hasher, entry.key());
        self.entries.insert(hash, entry, hash_of);
    }

    pub(super) fn remove(&mut self, number: usize) {
        if let Some(removed) = self.entries.remove(number) {
            self.cold.heap_bytes -= removed.heap_bytes();
        }
    }

    /// Shrinks the hash table if it has become mostly empty. Call this function after a removal
    /// that is not followed by an insertion.
    fn shrink(&mut self) {
        let hasher = &self.cold.hasher;
        self.entries
            .shrink_if_empty(|entry| hash_with(hasher, entry.key()));
    }

    /// Scans the next `count` slots and drops expired entries.
    fn reap_expired(&mut self, count: usize, now: Timestamp) {
        for _ in 0..count {
            let number = self.cold.cursor;
            match self.entries.get(number) {
                Some(entry) if entry.expires() <= now => {
                    // Keep the cursor at this slot, because the removal can shift another entry
                    // into it.
                    self.remove(number);
                    self.shrink();
                    self.cold.counts.expired += 1;
                }
                _ if number < self.entries.slots() => self.cold.cursor += 1,
                _ => self.cold.cursor = 0,
            }
        }
    }

    /// Returns the heap size in bytes, excluding manual blocks, which have a separate limit.
    pub(super) fn bytes(&self) -> usize {
        self.entries.heap_bytes() + self.cold.heap_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Algorithm, AlgorithmName, Charge, Cost, Limit, LimitSpec, Limits, MemoryBounds,
        MemoryStore, Receipt, RetryAfter, Settlement, Span, WhenFull,
        algorithm::{ExactMicros, KernelState},
        notation,
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
        /// The heap byte count equals the sum over all entries after any sequence of insertions,
        /// removals, growth and changed limits.
        #[test]
        fn the_byte_count_is_exact(
            operations in prop::collection::vec(
                (0..40_u8, 0..5_usize, 1..60_u64, 0..7_u8, 0..400_000_u64),
                1..300,
            ),
            when_full in prop::sample::select(vec![
                WhenFull::Evict,
                WhenFull::Deny,
                WhenFull::Allow,
            ]),
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
                        let charge = Charge::new(key, &limits[*limit], *cost).unwrap();
                        store.renew(&[charge], receipt, at);
                    },
                    6 => for (key, limit, cost, receipt) in held.drain(..) {
                        let charge = Charge::new(&key, &limits[limit], cost).unwrap();
                        store.settle(&[charge], receipt, &[Settlement { unused: 1 }], at);
                    },
                    _ => {
                        let effect = [
                            Effect::Charge,
                            Effect::Charge,
                            Effect::Peek,
                            Effect::Refund,
                        ][usize::from(effect)];
                        store.check(&charges, at, effect, &mut outcomes);
                    }
                }
                let shard = store.shards[0].0.lock();
                let counted: usize = shard.entries().map(KeyEntry::heap_bytes).sum();
                prop_assert_eq!(shard.cold.heap_bytes, counted);
                prop_assert_eq!(shard.entries().count(), shard.entries.len());
            }
        }
    }

    fn shard() -> Shard {
        let capacity = Capacity {
            keys: 100_000,
            bytes: 1 << 30,
            when_full: WhenFull::Evict,
        };
        Shard::new(RandomState::default(), capacity, BlockCount::default())
    }

    /// Regression test: a peek (a read-only decision) copied the sliding window log while holding
    /// the shard's lock. The log takes 800 kB for a limit of 100,000.
    #[test]
    fn a_peek_leaves_the_log_unchanged() {
        let (mut shard, limits, now) = (shard(), limits(), Timestamp::from_micros(1_000_000));
        let limits = &limits[2];
        let cost = Cost::new(10).unwrap();
        let charge = Charge::new(b"key", limits, cost).unwrap();
        let alone = std::slice::from_ref(&charge);
        let decide = |shard: &mut Shard, effect| {
            let located = shard.locate(&charge, alone, 7, now, effect).unwrap();
            let mut pending = shard.open(&charge, KeyLocation { hash: 7, located }, now, effect);
            let taken = shard.entries().any(KeyEntry::is_checked_out);
            let admitted = pending.evaluate(now);
            pending.apply(admitted, now);
            let mut outcomes = Vec::new();
            let is_hot = pending.report(now, &mut outcomes);
            if effect.can_write() {
                if let Some(new_key) = shard.put_back(pending, is_hot) {
                    shard.insert_pending(new_key, is_hot);
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
            let key_state = shard.entries().next().and_then(KeyEntry::key_state);
            let (taken, peeked) = decide(&mut shard, Effect::Peek);
            assert!(taken && peeked.allowed && peeked.remaining == left * 10);
            assert_eq!(
                shard.entries().next().and_then(KeyEntry::key_state),
                key_state
            );
            assert_eq!(shard.bytes(), bytes, "no more than before");
            assert_eq!(decide(&mut shard, Effect::Charge).1, peeked);
        }
        let (taken, denied) = decide(&mut shard, Effect::Peek);
        assert!(taken && !denied.allowed);
    }

    /// If keys with neighbouring hashes fill a run of slots, the table rejects further keys in this
    /// run, but not elsewhere.
    #[test]
    fn a_crowded_table_counts_as_full() {
        let (mut shard, limits, now) = (shard(), limits(), Timestamp::from_micros(1_000_000));
        let key = |number: usize| number.to_le_bytes();
        // First insert and remove keys with spread-out hashes, so that the table has enough slots.
        // All later keys share one home slot.
        let spread = |number: usize| (number as u64) << 17;
        let key_state = || limits[0].fresh();
        for number in 0..30_000 {
            let entry = KeyEntry::new(&key(number), key_state(), 0, false);
            let hash_of = |entry: &KeyEntry| {
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
            match shard.locate(&charge, alone, 7, now, Effect::Charge) {
                Ok(_) => {
                    shard.finish(Effect::Peek);
                    let entry = KeyEntry::new(&key(inserted), key_state(), 0, false);
                    shard.entries.insert(7, entry, |_| 7);
                    inserted += 1;
                }
                Err(full) => break full,
            }
        };
        assert_eq!(inserted, hash_table::FARTHEST);
        assert_eq!(denied.retry_after, RetryAfter::After(Span::from_secs(1)));
        assert_eq!(shard.cold.counts.denied_when_full, 1);
        // A key from a snapshot is also not added to the run.
        let restored = || {
            let mut key_state = key_state();
            for state in key_state.states_mut() {
                *state = KernelState::Gcra(ExactMicros {
                    whole: now.as_micros() + 1,
                    part: 0,
                });
            }
            KeyEntry::new(b"restored", key_state, 0, false)
        };
        assert!(!shard.restore(7, restored(), now));
        assert!(shard.restore(1 << 30, restored(), now));
        let elsewhere = shard.locate(&charge, alone, 1 << 31, now, Effect::Charge);
        assert!(elsewhere.is_ok());
        shard.finish(Effect::Peek);
        let there = Charge::new(&[0; 8], &limits[0], Cost::ONE).unwrap();
        let alone = std::slice::from_ref(&there);
        let found = shard.locate(&there, alone, 7, now, Effect::Charge);
        assert!(
            matches!(found, Ok(EntryLocation::At { .. })),
            "an existing key is still found"
        );
    }

    /// An eviction that must free heap memory does not evict entries without heap memory.
    #[test]
    fn an_eviction_for_bytes_keeps_entries_without_bytes() {
        let log = Limits::new(vec![
            Limit::new(Algorithm::SlidingWindowLog {
                limit: 100_000,
                window: Span::from_secs(3_600),
            })
            .unwrap(),
        ])
        .unwrap();
        // A small count under a large limit. The state of this count takes no heap memory, and the
        // key is not hot.
        let small = &limits()[1];
        // Repeat the test, because the order of the entries is random, and an eviction does not
        // inspect the entries after the evicted entry.
        for _ in 0..4 {
            let (store, mut outcomes) = (
                MemoryStore::new(MemoryBounds {
                    max_keys: 30,
                    max_bytes: MemoryBounds::MIN_BYTES,
                    when_full: WhenFull::Evict,
                }),
                Vec::new(),
            );
            let mut now = Timestamp::from_micros(1_000_000);
            let mut charge = |key: &[u8], limits: &Limits, times: u64| {
                let charge = Charge::new(key, limits, Cost::ONE).unwrap();
                for _ in 0..times {
                    now = now.after(Span::from_micros(1));
                    let decision = store.check(&[charge], now, Effect::Charge, &mut outcomes);
                    assert_eq!(decision, crate::Decision::Admitted);
                }
            };
            charge(b"victim", &log, 2_000);
            charge(b"grows", &log, 3_000);
            for key in 0..6 {
                charge(&[key], small, 1);
            }
            assert_eq!((store.stats().keys, store.stats().evicted), (8, 0));
            charge(b"grows", &log, 4_000);
            assert_eq!((store.stats().keys, store.stats().evicted), (7, 1));
        }
    }

    /// A key that was hot only because of a charge is not hot after the charge is refunded.
    #[test]
    fn a_settlement_makes_a_key_evictable_again() {
        let (store, limits) = (MemoryStore::new(MemoryBounds::default()), limits());
        let (now, mut outcomes) = (Timestamp::from_micros(1_000_000), Vec::new());
        for unused in [0, 800] {
            let charge = Charge::new(b"key", &limits[2], Cost::new(800).unwrap()).unwrap();
            let (_, receipt) = store.reserve(&[charge], now, &mut outcomes);
            store.settle(&[charge], receipt, &[Settlement { unused }], now);
            let is_hot = store.shards.iter().any(|shard| {
                let shard = shard.0.lock();
                shard.entries().any(KeyEntry::is_hot)
            });
            assert_eq!(is_hot, unused == 0, "{unused}");
            store.reset(b"key");
        }
    }
}
