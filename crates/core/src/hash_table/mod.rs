//! The hash table of the memory store's shards and of overrides. It uses open addressing with
//! linear probing. Entries are stored inline, and a separate array has one control byte per slot,
//! as in a Swiss table.
//!
//! The control bytes, here called tags, hold part of each entry's hash. A lookup compares eight
//! tags at a time. The tags of a million keys fit in the CPU caches, so a lookup causes only one
//! cache miss, when it reads the entry itself. A removal shifts the following entries back, so
//! there are no tombstones and no cleanup passes.
//!
//! Slots are allocated in chunks of equal size. When the table grows (by an eighth) or shrinks, it
//! moves all entries to new chunks one by one. Each old chunk is freed as soon as it is empty.
//! Therefore, peak memory is about that of the larger table, and memory is not fragmented. The
//! shard stays locked during the move, which takes time proportional to the shard's number of keys.
//! In a full store of the default size, a shard has about 39,000 keys.
//!
//! The reason for a table of our own is memory. A GCRA key takes 60.1 bytes in this table, with the
//! state that all algorithms need. In `hashbrown`, the key and the instant of GCRA alone take 73.7
//! bytes, and in governor's DashMap 101.4 bytes (`bench/results/memory.md`). The reason is not
//! time: a minimal GCRA limiter on `hashbrown`, without the other functions of the memory store,
//! takes half to two thirds of the store's time (`bench/results/speed.md`).

mod ctrl_bytes;
mod key;
mod prefetch;

use std::hash::{BuildHasher as _, Hasher as _};

// `foldhash::fast` is used instead of `foldhash::quality`. The `quality` variant adds a final round
// that mixes in a publicly known constant. This round does not separate keys with colliding hashes,
// and does not improve the distribution.
#[cfg(loom)]
pub(crate) use foldhash::fast::FixedState as RandomState;
#[cfg(not(loom))]
pub(crate) use foldhash::fast::RandomState;

use self::ctrl_bytes::CtrlBytes;
pub(crate) use self::{
    key::TableKey,
    prefetch::{PREFETCHES, prefetch},
};

/// An entry of a [`HashTable`].
pub(crate) trait TableEntry {
    /// How many eighths of the home slots can have an entry before the table grows. At most seven
    /// keep probe sequences short and finite. With fewer, more entries are in their home slot.
    const MAX_EIGHTHS: usize = 7;

    /// Returns whether this is the entry of `key`.
    fn is_of(&self, key: &[u8]) -> bool;

    /// Returns the distance that was set last; 0 for a new entry.
    fn distance(&self) -> Distance;

    fn set_distance(&mut self, distance: Distance);
}

/// The distance in slots between an entry and its home slot, where its key's probe sequence starts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Distance([u8; 3]);

impl Distance {
    /// The exclusive maximum, so that a distance fits in three bytes.
    const MAX: usize = 1 << 24;

    fn new(slots: usize) -> Self {
        debug_assert!(slots < Self::MAX, "a distance fits in three bytes");
        let [low, middle, high, ..] = slots.to_le_bytes();
        Self([low, middle, high])
    }

    /// Returns whether the entry is in its home slot.
    #[cfg(test)]
    pub(crate) fn is_home(self) -> bool {
        self.slots() == 0
    }

    fn slots(self) -> usize {
        let [low, middle, high] = self.0;
        // Three bytes fit in a `usize`.
        u32::from_le_bytes([low, middle, high, 0]) as usize
    }
}

#[derive(Debug)]
pub(crate) struct HashTable<E> {
    ctrl: CtrlBytes,
    /// The chunks are boxed, so that a chunk does not move when the list grows.
    chunks: Vec<Box<Chunk<E>>>,
    /// The number of home slots, at which the probe sequence of a key can start. The slots after
    /// the last home slot hold entries that overflow from it and its neighbours.
    homes: usize,
    len: usize,
}

type Chunk<E> = [Option<E>; CHUNK];

const CHUNK: usize = 64;

/// The size of a cache line in bytes.
const CACHE_LINE: usize = 64;

/// The number of slots in the last chunk that are not home slots.
const TAIL: usize = 8;

/// The maximum number of entries in one table. The home slot is selected by 32 bits of the hash,
/// and an entry's distance from its home slot is stored in 24 bits.
pub(crate) const MAX_ENTRIES: usize = Distance::MAX;

/// The maximum distance of a new key from its home slot. If all slots within this distance are
/// occupied, the store is treated as full for the new key.
///
/// By chance, a run of slots from one home slot practically never becomes this long. With seven of
/// eight slots occupied, a run of `n` slots without a vacancy has a probability of about `exp(-n /
/// 118)`. For 4,096 slots, the probability is less than 10^-15 per home slot. Therefore, the table
/// practically rejects a new key only if an attacker has found keys with neighbouring hashes. The
/// random seed of the hash function does not rule out this attack: an attacker who can measure how
/// long decisions take can still find such keys.
///
/// The maximum distance limits the damage done by keys that share a home slot. A new key is
/// inserted at most 4,096 slots from its home slot, and is rejected only if all of these slots are
/// occupied. An attacker would have to fill the store to have all new keys rejected.
///
/// This constant does not bound the time of a lookup, which scans the tags from the key's home slot
/// to the next vacant slot. An attacker who knows the hashes can create a long run of occupied
/// slots. A key with a home slot near the end of the run extends the run, although the key is close
/// to its home slot. The attacker needs one live key per slot, and only the shard's capacity limits
/// the length of the run. A lookup in the run compares eight tags at a time, and also compares the
/// key of each entry with a matching tag. Therefore, its time is proportional to the length of the
/// run.
pub(crate) const FARTHEST: usize = 4_096;

impl<E> Default for HashTable<E> {
    fn default() -> Self {
        Self {
            ctrl: CtrlBytes::default(),
            chunks: Vec::new(),
            homes: 0,
            len: 0,
        }
    }
}

impl<E: TableEntry> HashTable<E> {
    /// The size of a chunk in bytes, including its pointer, its tags, and the extra zero tags after
    /// the last slot.
    const CHUNK_BYTES: usize =
        size_of::<Chunk<E>>() + size_of::<Box<Chunk<E>>>() + CHUNK + ctrl_bytes::GROUP;

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn slots(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Returns the heap size in bytes, including one spare chunk that is not allocated yet. Entries
    /// that overflow from the last home slots can need another chunk. The byte limit is not checked
    /// when that chunk is allocated, so it is counted in advance.
    pub(crate) fn heap_bytes(&self) -> usize {
        let spare = chunks_with_spare(self.homes).saturating_sub(self.chunks.len());
        spare * (size_of::<Chunk<E>>() + CHUNK)
            + self.chunks.len() * size_of::<Chunk<E>>()
            + self.chunks.capacity() * size_of::<Box<Chunk<E>>>()
            + self.ctrl.heap_bytes()
    }

    /// Returns the maximum number of bytes that the next `entries` insertions add.
    pub(crate) fn growth_bytes(&self, entries: usize) -> usize {
        let mut homes = self.homes;
        while !Self::has_room(homes, self.len + entries) {
            homes = grown(homes);
        }
        (chunks_with_spare(homes) - chunks_with_spare(self.homes)) * Self::CHUNK_BYTES
    }

    /// Returns the slot of the entry of `key`. It is valid until the next insertion or removal.
    pub(crate) fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        let (tag, home) = (tag(hash), self.home(hash));
        // Most entries are in or near the cache lines of their home slot, so start to load these
        // cache lines before comparing the tags.
        self.prefetch_slot(home);
        // Most often, the entry is in the first slot with a matching tag.
        if let Some(slot) = self.ctrl.first(tag, home)
            && self.is_of(slot, key)
        {
            return Some(slot);
        }
        self.look_for(tag, home, key)
    }

    /// Returns the entry of `key`.
    #[inline]
    pub(crate) fn find_mut(&mut self, hash: u64, key: &[u8]) -> Option<&mut E> {
        let (tag, home) = (tag(hash), self.home(hash));
        // As in `find`.
        self.prefetch_slot(home);
        if let Some(slot) = self.ctrl.first(tag, home)
            && self.is_of(slot, key)
        {
            return self.get_mut(slot);
        }
        let slot = self.look_for(tag, home, key)?;
        self.get_mut(slot)
    }

    // This function is not inlined, so that the compiler can inline the small common path in
    // `find_mut` as a whole.
    #[inline(never)]
    fn look_for(&self, tag: u8, home: usize, key: &[u8]) -> Option<usize> {
        self.ctrl.find(tag, home, |slot| self.is_of(slot, key))
    }

    #[inline]
    fn is_of(&self, slot: usize, key: &[u8]) -> bool {
        self.get(slot).is_some_and(|entry| entry.is_of(key))
    }

    /// Starts to load the first entry whose tag matches `hash`, which is most likely the entry of
    /// the key with this hash.
    pub(crate) fn prefetch(&self, hash: u64) {
        if !PREFETCHES {
            return;
        }
        let is_any = |_| true;
        if let Some(slot) = self.ctrl.find(tag(hash), self.home(hash), is_any) {
            self.prefetch_slot(slot);
        }
    }

    /// Starts to load the tags and the entry with which a lookup of `hash` begins. Unlike
    /// [`Self::prefetch`], this method waits for neither of them.
    #[inline]
    pub(crate) fn prefetch_home(&self, hash: u64) {
        let home = self.home(hash);
        self.ctrl.prefetch(home);
        self.prefetch_slot(home);
    }

    /// Starts to load a slot, which can span two cache lines.
    #[inline]
    fn prefetch_slot(&self, slot: usize) {
        if let Some(chunk) = self.chunks.get(slot / CHUNK) {
            prefetch(&chunk[slot % CHUNK]);
            if size_of::<Option<E>>() == CACHE_LINE && align_of::<Option<E>>() == CACHE_LINE {
                return;
            }
            // If the slot spans two cache lines, the next slot starts in the second cache line. For
            // the last slot of a chunk, the index wraps around, so the second cache line is not
            // prefetched.
            prefetch(&chunk[(slot + 1) % CHUNK]);
        }
    }

    /// Returns whether the run of occupied slots from the home slot of `hash` on is too long to
    /// insert another key. `new_keys` is the number of keys that one decision inserts, including
    /// this key. Each of them can extend the run by one slot.
    pub(crate) fn is_crowded(&self, hash: u64, new_keys: usize) -> bool {
        let home = self.home(hash);
        self.ctrl.vacant(home) - home + new_keys > FARTHEST
    }

    /// Inserts an entry for a key that is not in the table. If the table must grow, `hash_of`
    /// computes the hashes of its entries.
    pub(crate) fn insert(&mut self, hash: u64, entry: E, hash_of: impl Fn(&E) -> u64) {
        if !Self::has_room(self.homes, self.len + 1) {
            self.rebuild(grown(self.homes), hash_of);
        }
        self.place(hash, entry);
    }

    /// Replaces the entry in this slot by a new entry for the same key, and returns the old entry.
    ///
    /// # Panics
    ///
    /// Panics if the slot is vacant.
    pub(crate) fn replace(&mut self, slot: usize, mut entry: E) -> E {
        entry.set_distance(self[slot].distance());
        std::mem::replace(&mut self[slot], entry)
    }

    /// Removes the entry in this slot, and shifts the following entries back to close the gap.
    pub(crate) fn remove(&mut self, number: usize) -> Option<E> {
        let removed = self.take(number)?.1;
        self.len -= 1;
        let (mut hole, mut at) = (number, number + 1);
        while let Some(entry) = self.get(at) {
            // An entry moves back into the hole unless the hole is before the entry's home slot.
            if let Some(distance) = entry.distance().slots().checked_sub(at - hole)
                && let Some((tag, mut entry)) = self.take(at)
            {
                entry.set_distance(Distance::new(distance));
                self.put(hole, tag, entry);
                hole = at;
            }
            at += 1;
        }
        Some(removed)
    }

    /// Removes the entries for which `keep` returns false.
    pub(crate) fn retain(&mut self, keep: impl Fn(&E) -> bool) {
        let mut slot = 0;
        while slot < self.slots() {
            if self.get(slot).is_some_and(|entry| !keep(entry)) {
                // The removal can shift another entry into this slot.
                self.remove(slot);
            } else {
                slot += 1;
            }
        }
    }

    /// Passes each entry to `take`.
    pub(crate) fn into_entries(self, mut take: impl FnMut(E)) {
        for chunk in self.chunks {
            for entry in chunk.into_iter().flatten() {
                take(entry);
            }
        }
    }

    /// Shrinks the table if entries fill less than a quarter of its home slots.
    pub(crate) fn shrink_if_empty(&mut self, hash_of: impl Fn(&E) -> u64) {
        if self.len * 4 < self.homes && self.chunks.len() > 1 {
            let chunks = (self.len * 2 + TAIL).div_ceil(CHUNK).max(1);
            self.rebuild(chunks * CHUNK - TAIL, hash_of);
        }
    }

    /// Returns the entry in `slot`; `None` if the slot is vacant.
    #[inline]
    pub(crate) fn get(&self, slot: usize) -> Option<&E> {
        self.chunks.get(slot / CHUNK)?[slot % CHUNK].as_ref()
    }

    #[inline]
    fn get_mut(&mut self, slot: usize) -> Option<&mut E> {
        self.chunks.get_mut(slot / CHUNK)?[slot % CHUNK].as_mut()
    }

    /// Returns the number of home slots.
    pub(crate) const fn homes(&self) -> usize {
        self.homes
    }

    /// Calls `visit` with each entry whose home slot is among the `count` slots that start at the
    /// home slot of `hash`. Returns the lowest hash (its low 32 bits) of the next home slot, or
    /// `None` if no home slot follows.
    ///
    /// Home slots are in the order of the hashes, whatever the size of the table. Therefore, if the
    /// next call starts at the returned hash, the two calls together visit each entry once, even if
    /// the table was rebuilt between them. There is one exception: an entry with the same home slot
    /// as the returned hash, but a lower hash, can be visited twice.
    pub(crate) fn visit_homes(
        &self,
        hash: u32,
        count: usize,
        mut visit: impl FnMut(&E),
    ) -> Option<u32> {
        let first = self.home(u64::from(hash));
        let end = first.saturating_add(count).min(self.homes);
        let mut slot = first;
        // An entry whose home slot was occupied is in the run of occupied slots after it.
        while slot < self.slots() {
            match self.get(slot) {
                Some(entry) if (first..end).contains(&(slot - entry.distance().slots())) => {
                    visit(entry)
                }
                None if slot >= end => break,
                _ => {}
            }
            slot += 1;
        }
        if end == self.homes {
            return None;
        }
        // The lowest hash that `Self::home` maps to slot `end`.
        let next = ((end as u128) << 32).div_ceil(self.homes as u128);
        u32::try_from(next).ok()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &E> {
        self.chunks.iter().flat_map(|chunk| chunk.iter()).flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut E> {
        let slots = self.chunks.iter_mut().flat_map(|chunk| chunk.iter_mut());
        slots.flatten()
    }

    /// Returns the slot of the first entry at or after `from`, wrapping around at the end.
    pub(crate) fn next_from(&self, from: usize) -> Option<usize> {
        let slots = self.slots();
        let from = from.min(slots);
        (from..slots)
            .chain(0..from)
            .find(|slot| self.get(*slot).is_some())
    }

    /// Puts an entry into the first vacant slot at or after its home slot.
    fn place(&mut self, hash: u64, mut entry: E) {
        let home = self.home(hash);
        let slot = self.ctrl.vacant(home);
        while self.slots() <= slot {
            self.add_chunk();
        }
        entry.set_distance(Distance::new(slot - home));
        self.put(slot, tag(hash), entry);
        self.len += 1;
    }

    fn put(&mut self, slot: usize, tag: u8, entry: E) {
        self.ctrl.set(slot, tag);
        self.chunks[slot / CHUNK][slot % CHUNK] = Some(entry);
    }

    fn take(&mut self, slot: usize) -> Option<(u8, E)> {
        let entry = self.chunks.get_mut(slot / CHUNK)?[slot % CHUNK].take()?;
        Some((self.ctrl.clear(slot), entry))
    }

    /// Returns whether a table with `homes` home slots has room for `entries` entries.
    fn has_room(homes: usize, entries: usize) -> bool {
        entries * 8 <= homes * E::MAX_EIGHTHS
    }

    fn rebuild(&mut self, homes: usize, hash_of: impl Fn(&E) -> u64) {
        let chunks = std::mem::take(&mut self.chunks);
        self.chunks.reserve_exact(chunks_of(homes) + 1);
        self.ctrl = CtrlBytes::new(chunks_of(homes) * CHUNK);
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
        self.ctrl.grow_to(self.slots());
    }

    /// Returns the home slot of a hash. The low 32 bits of the hash are mapped evenly to the home
    /// slots.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & u64::from(u32::MAX)) * self.homes as u64) >> 32) as usize
    }
}

/// Returns the tag of a hash: its bits 32 to 39, but 1 instead of 0, because 0 marks a vacant slot.
/// The low 32 bits of the hash select the home slot, and the top 8 bits select the shard.
#[inline]
fn tag(hash: u64) -> u8 {
    hash.to_le_bytes()[4].max(1)
}

/// Returns the number of home slots after growing by an eighth, rounded to whole chunks.
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

/// Returns the hash of a key. Each store, and each rule's overrides, have a random seed.
///
/// foldhash does not claim to resist an attacker who can observe hashes or decision times.
/// SipHash-1-3 is designed to resist such an attacker, but takes 9.0 ns for a key of 22 bytes;
/// foldhash takes 2.5 ns, and a whole decision takes about 50 ns. To limit the damage of an attack,
/// the hash table therefore limits the distance between a new key and its home slot. See
/// [`FARTHEST`] for what an attacker who knows the hashes can still do.
#[inline]
pub(crate) fn hash_with(hasher: &RandomState, key: &[u8]) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(key);
    hasher.finish()
}

impl<E: TableEntry> std::ops::Index<usize> for HashTable<E> {
    type Output = E;

    /// # Panics
    ///
    /// Panics if the slot is vacant.
    #[inline]
    fn index(&self, number: usize) -> &E {
        let slot = &self.chunks[number / CHUNK][number % CHUNK];
        slot.as_ref().expect("the index is that of an entry")
    }
}

impl<E: TableEntry> std::ops::IndexMut<usize> for HashTable<E> {
    #[inline]
    fn index_mut(&mut self, number: usize) -> &mut E {
        let slot = &mut self.chunks[number / CHUNK][number % CHUNK];
        slot.as_mut().expect("the index is that of an entry")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug)]
    struct Entry {
        key: TableKey,
        distance: Distance,
    }

    impl TableEntry for Entry {
        fn is_of(&self, key: &[u8]) -> bool {
            self.key.is(key)
        }

        fn distance(&self) -> Distance {
            self.distance
        }

        fn set_distance(&mut self, distance: Distance) {
            self.distance = distance;
        }
    }

    fn entry(key: u64) -> Entry {
        Entry {
            key: TableKey::new(&key.to_le_bytes()),
            distance: Distance::default(),
        }
    }

    fn key_of(entry: &Entry) -> u64 {
        u64::from_le_bytes(entry.key.bytes().try_into().unwrap())
    }

    /// The chunks take most of a table's memory. The tags and pointers take less than a quarter of
    /// the memory of the chunks.
    #[test]
    fn the_bytes_of_a_table_are_those_of_its_chunks() {
        let mut table = HashTable::default();
        for key in 0..20_000_u64 {
            table.insert(key, entry(key), key_of);
            let spare = chunks_with_spare(table.homes).saturating_sub(table.chunks.len());
            let chunks = (table.chunks.len() + spare) * size_of::<Chunk<Entry>>();
            let rest =
                table.chunks.capacity() * size_of::<Box<Chunk<Entry>>>() + table.ctrl.heap_bytes();
            let spare_tags = spare * CHUNK;
            assert_eq!(table.heap_bytes(), chunks + rest + spare_tags);
            assert!(rest + spare_tags <= chunks / 4 + 4_096);
        }
    }

    proptest! {
        /// The table behaves like a map under any sequence of insertions and removals, including
        /// keys that share a home slot and keys at either end of the table.
        #[test]
        fn holds_the_same_entries_as_a_map(
            operations in prop::collection::vec((any::<bool>(), 0_u64..400), 0..1_200),
            spread in prop::sample::select(vec![
                0x9E37_79B9_7F4A_7C15_u64,
                1 << 24,
                0xFFFF_FFFF,
                1,
            ]),
        ) {
            let hash = |key: u64| (key / 3).wrapping_mul(spread);
            let find = |table: &HashTable<Entry>, key: u64| {
                table.find(hash(key), &key.to_le_bytes())
            };
            let (mut table, mut model) = (HashTable::default(), BTreeMap::new());
            for (add, key) in operations {
                table.prefetch(hash(key));
                let found = find(&table, key);
                let entry_found = table
                    .find_mut(hash(key), &key.to_le_bytes())
                    .map(|entry| key_of(entry));
                prop_assert_eq!(entry_found, found.map(|_| key));
                prop_assert_eq!(found.is_some(), model.contains_key(&key));
                match found {
                    None if add => {
                        let (more, before) = (table.growth_bytes(1), table.heap_bytes());
                        table.insert(hash(key), entry(key), |entry| hash(key_of(entry)));
                        // In this test, many keys share a home slot, so entries can overflow beyond
                        // the one spare chunk that is counted.
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
                let found = find(&table, key).map(|number| key_of(&table[number]));
                prop_assert_eq!(found, model.get(&key).map(|()| key));
            }
            let mut held: Vec<u64> = table.iter().map(key_of).collect();
            held.sort_unstable();
            prop_assert!(held.iter().eq(model.keys()));
        }

        /// A replaced entry can still be removed, and the entries that are kept can be found.
        #[test]
        fn keeps_exactly_the_chosen_entries(
            count in 1_u64..300,
            divisor in 2_u64..5,
            spread in prop::sample::select(vec![0x9E37_79B9_7F4A_7C15_u64, 1 << 24, 1]),
        ) {
            let mut table = HashTable::default();
            let hash = |key: u64| (key / 3).wrapping_mul(spread);
            let find = |table: &HashTable<Entry>, key: u64| {
                table.find(hash(key), &key.to_le_bytes())
            };
            for key in 0..count {
                table.insert(hash(key), entry(key), |entry| hash(key_of(entry)));
            }
            for key in 0..count {
                let slot = find(&table, key).unwrap();
                prop_assert_eq!(key_of(&table.replace(slot, entry(key))), key);
            }
            table.retain(|entry| !key_of(entry).is_multiple_of(divisor));
            let kept = |key: u64| !key.is_multiple_of(divisor);
            for key in 0..count {
                prop_assert_eq!(find(&table, key).is_some(), kept(key));
            }
            prop_assert_eq!(table.len(), (0..count).filter(|key| kept(*key)).count());
        }

        /// Iterating over the slots visits every entry once.
        #[test]
        fn a_full_round_visits_every_entry(count in 1_u64..300) {
            let mut table = HashTable::default();
            let hash = |key: u64| key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (0..count).for_each(|key| {
                table.insert(hash(key), entry(key), |entry| hash(key_of(entry)));
            });
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

    /// Regression test: an entry more than 65,535 slots from its home slot was dropped silently.
    #[test]
    fn an_entry_far_from_its_home_is_kept() {
        const KEYS: u64 = 70_000;
        // These hashes put more keys into the front part of the table than it has home slots, so
        // that the keys overflow into the rest of the table.
        let hash = |key: u64| {
            if key == KEYS {
                0
            } else {
                key * ((1 << 32) / 95_000)
            }
        };
        let mut table = HashTable::default();
        for key in 0..=KEYS {
            table.insert(hash(key), entry(key), |entry| hash(key_of(entry)));
        }
        let find = |table: &HashTable<Entry>, key: u64| table.find(hash(key), &key.to_le_bytes());
        let last = find(&table, KEYS).unwrap();
        assert!(last > usize::from(u16::MAX), "{last}");
        assert_eq!(table[last].distance.slots(), last);
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
