//! The entries of a shard: a hash table with the entries inside, and a byte of every slot's hash beside them.
//!
//! Slots are probed in a line from an entry's home. The bytes, the tags, are looked through eight at once, and lie so close
//! that the caches hold those of a million keys: a decision waits for memory once, for its entry. Those behind an entry
//! that is removed close up, so that there are no tombstones and never a sweep.
//!
//! The slots are in chunks of one size. To grow by an eighth, or to shrink, moves every entry of the shard to new chunks, one
//! after the other, and gives the old ones back on the way: no more room is taken than the larger of the two, and none is left
//! in pieces. It is a pause for that shard, in proportion to its keys, which are some 39,000 in a full store of
//! the default size.

use super::{
    entry::Entry,
    tags::{self, Tags},
};
use crate::prefetch::{PREFETCHES, prefetch};

#[derive(Debug, Default)]
pub(super) struct Table {
    tags: Tags,
    #[expect(
        clippy::vec_box,
        reason = "a chunk stays where it is while their list grows"
    )]
    chunks: Vec<Box<Chunk>>,
    /// How many slots can be a home; those behind them take what runs over the end.
    homes: usize,
    len: usize,
}

type Chunk = [Option<Entry>; CHUNK];

const CHUNK: usize = 64;

/// How many slots of the last chunk are no homes.
const TAIL: usize = 8;

/// Of a chunk, its address and its tags, with those that are looked at behind the last.
const CHUNK_BYTES: usize = size_of::<Chunk>() + size_of::<Box<Chunk>>() + CHUNK + tags::GROUP;

/// The most entries that one table holds: homes are told apart by 32 bits of a hash, and distances from them are kept
/// in 24.
pub(super) const MAX_ENTRIES: usize = 1 << 24;

/// The farthest from its home that a new key is put. Where all slots up to there are taken the key is refused, as in a
/// full store.
///
/// By chance that does not happen. With seven of eight slots taken, a run of `n` slots without a vacancy has a
/// probability of about `exp(-n / 118)`: with this `n`, less than 10^-15 for each home. So somebody
/// has found keys whose hashes lie together, which the hash alone does not rule out: it is keyed at
/// random, but not made to resist whoever can watch how long decisions take. This bounds what such keys do. A decision looks
/// at 4,096 tags, and if those collide too at as many keys, some tens of microseconds; and newcomers are
/// refused only where an attacker keeps as many slots before them taken, so it takes as many keys as to fill the store
/// to keep all newcomers out.
pub(super) const FARTHEST: usize = 4_096;

impl Table {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn slots(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Bytes on the heap, and those of a chunk for what may run over the end: nobody is asked for them when it does.
    pub(super) fn heap_bytes(&self) -> usize {
        let spare = chunks_with_spare(self.homes).saturating_sub(self.chunks.len());
        spare * (size_of::<Chunk>() + CHUNK)
            + self.chunks.len() * size_of::<Chunk>()
            + self.chunks.capacity() * size_of::<Box<Chunk>>()
            + self.tags.heap_bytes()
    }

    /// The most bytes that the next `entries` insertions add.
    pub(super) fn growth_bytes(&self, entries: usize) -> usize {
        let mut homes = self.homes;
        while !has_room(homes, self.len + entries) {
            homes = grown(homes);
        }
        (chunks_with_spare(homes) - chunks_with_spare(self.homes)) * CHUNK_BYTES
    }

    /// The number of the entry of `key`, good until the next insertion or removal.
    pub(super) fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        let home = self.home(hash);
        self.prefetch_slot(home);
        self.look_for(tag(hash), home, key)
    }

    /// The entry of `key`.
    #[inline]
    pub(super) fn find_mut(&mut self, hash: u64, key: &[u8]) -> Option<&mut Entry> {
        let (tag, home) = (tag(hash), self.home(hash));
        // Most entries lie in or beside the lines of their home, which come while the tags are looked through.
        self.prefetch_slot(home);
        // And most are the first with their tag.
        if let Some(slot) = self.tags.first(tag, home)
            && self.is_of(slot, key)
        {
            return self.get_mut(slot);
        }
        let slot = self.look_for(tag, home, key)?;
        self.get_mut(slot)
    }

    // Kept out of the common path, which is then inlined as a whole.
    #[inline(never)]
    fn look_for(&self, tag: u8, home: usize, key: &[u8]) -> Option<usize> {
        self.tags.find(tag, home, |slot| self.is_of(slot, key))
    }

    #[inline]
    fn is_of(&self, slot: usize, key: &[u8]) -> bool {
        self.get(slot).is_some_and(|entry| entry.is_of(key))
    }

    /// Begins to fetch the entry of a key with that hash, which is most probably the first with its tag.
    pub(super) fn prefetch(&self, hash: u64) {
        if !PREFETCHES {
            return;
        }
        let is_any = |_| true;
        if let Some(slot) = self.tags.find(tag(hash), self.home(hash), is_any) {
            self.prefetch_slot(slot);
        }
    }

    /// Begins to fetch what is in a slot, which may lie in two lines.
    #[inline]
    fn prefetch_slot(&self, slot: usize) {
        if let Some(chunk) = self.chunks.get(slot / CHUNK) {
            prefetch(&chunk[slot % CHUNK]);
            // Where the other line begins; of the last slot of a chunk it is left to the decision.
            prefetch(&chunk[(slot + 1) % CHUNK]);
        }
    }

    /// Whether the slots from the home of that hash on are taken for so far that no key is put there, not even the
    /// first of `others` that are inserted together.
    pub(super) fn is_crowded(&self, hash: u64, others: usize) -> bool {
        let home = self.home(hash);
        self.tags.vacant(home) - home + others > FARTHEST
    }

    /// Adds an entry whose key is not in yet; `hash_of` hashes the others if the table has to grow.
    pub(super) fn insert(&mut self, hash: u64, entry: Entry, hash_of: impl Fn(&Entry) -> u64) {
        if !has_room(self.homes, self.len + 1) {
            self.rebuild(grown(self.homes), hash_of);
        }
        self.place(hash, entry);
    }

    /// Removes the entry of that number; those behind it close up.
    pub(super) fn remove(&mut self, number: usize) -> Option<Entry> {
        let removed = self.take(number)?.1;
        self.len -= 1;
        let (mut hole, mut at) = (number, number + 1);
        while let Some(entry) = self.get(at) {
            if let Some(distance) = entry.distance().checked_sub(at - hole)
                && let Some((tag, mut entry)) = self.take(at)
            {
                entry.set_distance(distance);
                self.put(hole, tag, entry);
                hole = at;
            }
            at += 1;
        }
        Some(removed)
    }

    /// Gives memory back once three quarters of it are unused.
    pub(super) fn shrink_if_empty(&mut self, hash_of: impl Fn(&Entry) -> u64) {
        if self.len * 4 < self.homes && self.chunks.len() > 1 {
            let chunks = (self.len * 2 + TAIL).div_ceil(CHUNK).max(1);
            self.rebuild(chunks * CHUNK - TAIL, hash_of);
        }
    }

    /// The entry in that slot, if there is one.
    #[inline]
    pub(super) fn get(&self, slot: usize) -> Option<&Entry> {
        self.chunks.get(slot / CHUNK)?[slot % CHUNK].as_ref()
    }

    #[inline]
    fn get_mut(&mut self, slot: usize) -> Option<&mut Entry> {
        self.chunks.get_mut(slot / CHUNK)?[slot % CHUNK].as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.chunks.iter().flat_map(|chunk| chunk.iter()).flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        let slots = self.chunks.iter_mut().flat_map(|chunk| chunk.iter_mut());
        slots.flatten()
    }

    /// The number of the first entry from slot `from` on, and on from the first slot behind the last.
    pub(super) fn next_from(&self, from: usize) -> Option<usize> {
        let slots = self.slots();
        let from = from.min(slots);
        (from..slots)
            .chain(0..from)
            .find(|slot| self.get(*slot).is_some())
    }

    /// Puts an entry into the first vacant slot from its home on.
    fn place(&mut self, hash: u64, mut entry: Entry) {
        let home = self.home(hash);
        let slot = self.tags.vacant(home);
        while self.slots() <= slot {
            self.add_chunk();
        }
        entry.set_distance(slot - home);
        self.put(slot, tag(hash), entry);
        self.len += 1;
    }

    fn put(&mut self, slot: usize, tag: u8, entry: Entry) {
        self.tags.set(slot, tag);
        self.chunks[slot / CHUNK][slot % CHUNK] = Some(entry);
    }

    fn take(&mut self, slot: usize) -> Option<(u8, Entry)> {
        let entry = self.chunks.get_mut(slot / CHUNK)?[slot % CHUNK].take()?;
        Some((self.tags.clear(slot), entry))
    }

    fn rebuild(&mut self, homes: usize, hash_of: impl Fn(&Entry) -> u64) {
        let chunks = std::mem::take(&mut self.chunks);
        self.chunks.reserve_exact(chunks_of(homes) + 1);
        self.tags = Tags::new(chunks_of(homes) * CHUNK);
        (self.homes, self.len) = (homes, 0);
        for chunk in chunks {
            for entry in chunk.into_iter().flatten() {
                self.place(hash_of(&entry), entry);
            }
        }
        while self.chunks.len() < chunks_of(homes) {
            self.add_chunk();
        }
    }

    fn add_chunk(&mut self) {
        self.chunks.reserve_exact(1);
        self.chunks.push(Box::new([const { None }; CHUNK]));
        self.tags.grow_to(self.slots());
    }

    /// Spreads the low 32 bits of the hash evenly over the homes.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & u64::from(u32::MAX)) * self.homes as u64) >> 32) as usize
    }
}

/// Bits 32 to 40: those below say where the home is, those above which shard.
#[inline]
fn tag(hash: u64) -> u8 {
    hash.to_le_bytes()[4].max(1)
}

/// An eighth stays vacant, so that probing is short and ends.
fn has_room(homes: usize, entries: usize) -> bool {
    entries * 8 <= homes * 7
}

/// By an eighth, in whole chunks.
fn grown(homes: usize) -> usize {
    let chunks = chunks_of(homes);
    (chunks + (chunks / 8).max(1)) * CHUNK - TAIL
}

fn chunks_with_spare(homes: usize) -> usize {
    chunks_of(homes) + usize::from(homes > 0)
}

fn chunks_of(homes: usize) -> usize {
    homes.div_ceil(CHUNK)
}

impl std::ops::Index<usize> for Table {
    type Output = Entry;

    /// # Panics
    ///
    /// If there is no entry of that number.
    #[inline]
    fn index(&self, number: usize) -> &Entry {
        let slot = &self.chunks[number / CHUNK][number % CHUNK];
        slot.as_ref().expect("the number is that of an entry")
    }
}

impl std::ops::IndexMut<usize> for Table {
    #[inline]
    fn index_mut(&mut self, number: usize) -> &mut Entry {
        let slot = &mut self.chunks[number / CHUNK][number % CHUNK];
        slot.as_mut().expect("the number is that of an entry")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        cell::Cell,
        kernel::{Exact, State},
    };

    fn entry(key: u64) -> Entry {
        let cell = Cell::One(State::Schedule(Exact {
            whole: key,
            part: 0,
        }));
        Entry::new(&key.to_le_bytes(), cell, 0, false)
    }

    fn key_of(entry: &Entry) -> u64 {
        u64::from_le_bytes(entry.key().try_into().unwrap())
    }

    proptest! {
        /// The table holds what a map holds, whatever is inserted and removed, homes shared freely, at either end too.
        #[test]
        fn holds_what_a_map_holds(
            operations in prop::collection::vec((any::<bool>(), 0_u64..400), 0..1_200),
            spread in prop::sample::select(vec![0x9E37_79B9_7F4A_7C15_u64, 1 << 24, 0xFFFF_FFFF, 1]),
        ) {
            let hash = |key: u64| (key / 3).wrapping_mul(spread);
            let find = |table: &Table, key: u64| table.find(hash(key), &key.to_le_bytes());
            let (mut table, mut model) = (Table::default(), BTreeMap::new());
            for (add, key) in operations {
                table.prefetch(hash(key));
                let found = find(&table, key);
                let entry_found = table.find_mut(hash(key), &key.to_le_bytes()).map(|entry| key_of(entry));
                prop_assert_eq!(entry_found, found.map(|_| key));
                prop_assert_eq!(found.is_some(), model.contains_key(&key));
                match found {
                    None if add => {
                        let (more, before) = (table.growth_bytes(1), table.heap_bytes());
                        table.insert(hash(key), entry(key), |entry| hash(key_of(entry)));
                        // So many keys of one home as here run over more than the chunk that is set apart.
                        let has_run_over = table.chunks.len() > chunks_with_spare(table.homes);
                        prop_assert!(has_run_over || table.heap_bytes() <= before + more);
                        model.insert(key, ());
                    }
                    Some(number) if !add => {
                        let removed = table.remove(number);
                        prop_assert_eq!(removed.as_ref().map(key_of), Some(key));
                        table.shrink_if_empty(|entry| hash(key_of(entry)));
                        model.remove(&key);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for key in 0..400 {
                prop_assert_eq!(find(&table, key).map(|number| key_of(&table[number])), model.get(&key).map(|()| key));
            }
            let mut held: Vec<u64> = table.iter().map(key_of).collect();
            held.sort_unstable();
            prop_assert!(held.iter().eq(model.keys()));
        }

        /// Going on from slot to slot comes by every entry once.
        #[test]
        fn going_round_meets_every_entry(count in 1_u64..300) {
            let mut table = Table::default();
            let hash = |key: u64| key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (0..count).for_each(|key| table.insert(hash(key), entry(key), |entry| hash(key_of(entry))));
            let (mut met, mut at) = (Vec::new(), 0);
            for _ in 0..count {
                let number = table.next_from(at).unwrap();
                met.push(key_of(&table[number]));
                at = number + 1;
            }
            let first = table.next_from(at);
            prop_assert_eq!(first.map(|number| key_of(&table[number])), Some(met[0]));
            met.sort_unstable();
            prop_assert!(met.into_iter().eq(0..count));
        }
    }

    /// An entry more than 65,535 slots from its home was dropped, and nobody was told.
    #[test]
    fn an_entry_far_from_its_home_is_kept() {
        const KEYS: u64 = 70_000;
        // More keys than homes in the front of the table: they run on into the rest.
        let hash = |key: u64| {
            if key == KEYS {
                0
            } else {
                key * ((1 << 32) / 95_000)
            }
        };
        let mut table = Table::default();
        for key in 0..=KEYS {
            table.insert(hash(key), entry(key), |entry| hash(key_of(entry)));
        }
        let find = |table: &Table, key: u64| table.find(hash(key), &key.to_le_bytes());
        let last = find(&table, KEYS).unwrap();
        assert!(last > usize::from(u16::MAX), "{last}");
        assert_eq!(table[last].distance(), last);
        for key in (0..KEYS).step_by(1_000) {
            let number = find(&table, key).unwrap();
            table.remove(number);
        }
        assert_eq!(
            find(&table, KEYS).map(|number| key_of(&table[number])),
            Some(KEYS)
        );
        assert_eq!(table.len(), table.iter().count());
    }
}
