//! The sketch for the current time slice: Space-Saving with a filter.

use super::Summary;
use crate::limit::bounds::MAX_KEY_BYTES;

/// The assumed average key length, in bytes. This assumption determines how many bytes of keys a
/// sketch can hold. If keys are longer on average, a sketch holds fewer keys.
const AVERAGE_KEY_BYTES: usize = 64;

/// The minimum capacity for key bytes in a sketch.
const MIN_KEY_BYTES: usize = 2 * MAX_KEY_BYTES;

/// An unused slot of the hash table.
const UNUSED: SketchSlot = SketchSlot {
    hash: 0,
    entry: u32::MAX,
};

/// The number of bounds in the [filter](Sketch::filter) per kept key, before this number is rounded
/// up to a power of two.
const BOUNDS_PER_KEY: usize = 4;

/// A Space-Saving sketch: the keys with the largest total weights, each with an error. The [module
/// documentation](super) describes the error bound.
#[derive(Clone, Debug)]
pub struct Sketch {
    entries: Vec<SketchEntry>,
    /// The concatenated bytes of all keys.
    keys: Vec<u8>,
    /// A hash table of the entries, with linear probing. The table is at most half full, and its
    /// length is a power of two.
    slots: Vec<SketchSlot>,
    /// The upper bound for the sum of any key without an entry.
    floor: u64,
    /// The filter: upper bounds for the sums of the keys without an entry. All keys whose hashes
    /// have the same first bits share a bound. A bound is at most `floor`. The length is a power of
    /// two, or 0 if there is no filter. Then `floor` is the only bound.
    filter: Vec<u64>,
    /// The number of entries that are kept when a full sketch drops keys.
    keep: u32,
}

#[derive(Clone, Copy, Debug)]
struct SketchEntry {
    count: u64,
    error: u64,
    hash: u32,
    start: u32,
    len: u32,
}

#[derive(Clone, Copy, Debug)]
struct SketchSlot {
    hash: u32,
    entry: u32,
}

impl Sketch {
    /// Creates an empty sketch for at least `keep` keys. The sketch allocates memory only for the
    /// keys that it contains.
    #[must_use]
    pub fn new(keep: usize) -> Self {
        Self {
            entries: Vec::new(),
            keys: Vec::new(),
            slots: Vec::new(),
            floor: 0,
            filter: Vec::new(),
            keep: u32::try_from(keep.max(1)).unwrap_or(u32::MAX >> 2),
        }
    }

    /// Adds `weight` to `key` and returns true, or returns false if the key is not in the sketch.
    /// `hash` is a hash of the key. The caller must use the same hash function for all keys of a
    /// sketch.
    #[inline]
    pub fn increase(&mut self, key: &[u8], hash: u32, weight: u64) -> bool {
        let Some(mask) = self.slots.len().checked_sub(1) else {
            return false;
        };
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot.entry == UNUSED.entry {
                return false;
            }
            if slot.hash == hash {
                let entry = &mut self.entries[slot.entry as usize];
                let (start, len) = (entry.start as usize, entry.len as usize);
                if self.keys[start..start + len] == *key {
                    entry.count = entry.count.saturating_add(weight);
                    return true;
                }
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds `weight` to `key`, which must not be in the sketch. If the sum of the key may exceed
    /// `floor`, the key gets an entry, for which other keys may be dropped.
    #[inline]
    pub fn insert(&mut self, key: &[u8], hash: u32, weight: u64) {
        if !self.count_in_filter(hash, weight) {
            self.insert_entry(key, hash, weight);
        }
    }

    /// Adds `weight` to the bound in the filter and returns true, or returns false if the bound
    /// would exceed `floor`.
    #[inline]
    fn count_in_filter(&mut self, hash: u32, weight: u64) -> bool {
        let Some(index) = filter_index(&self.filter, hash) else {
            return false;
        };
        let sum = self.filter[index].saturating_add(weight);
        let is_rare = sum <= self.floor;
        if is_rare {
            self.filter[index] = sum;
        }
        is_rare
    }

    fn insert_entry(&mut self, key: &[u8], hash: u32, weight: u64) {
        let key = &key[..key.len().min(MAX_KEY_BYTES)];
        // The count of an entry is never below `floor`, which rises if keys are dropped.
        if self.make_room(key.len()) && self.count_in_filter(hash, weight) {
            return;
        }
        let (most, most_bytes) = (self.capacity(), self.max_key_bytes());
        reserve(&mut self.entries, 1, most);
        reserve(&mut self.keys, key.len(), most_bytes);
        // The total length of the keys is at most `max_key_bytes`, which is below 2³².
        let start = u32::try_from(self.keys.len()).unwrap_or(u32::MAX);
        self.keys.extend_from_slice(key);
        let index = filter_index(&self.filter, hash);
        let error = index.map_or(self.floor, |index| self.filter[index]);
        self.entries.push(SketchEntry {
            count: error.saturating_add(weight),
            error,
            hash,
            start,
            len: u32::try_from(key.len()).unwrap_or(u32::MAX),
        });
        if self.entries.len() * 2 > self.slots.len() {
            self.index(self.slots.len().max(4) * 2);
        } else {
            self.index_entry(self.entries.len() - 1);
        }
    }

    /// Makes room for an entry with a key of this length. Returns whether keys were dropped.
    fn make_room(&mut self, key_bytes: usize) -> bool {
        let has_room = |sketch: &Self| {
            sketch.entries.len() < sketch.capacity()
                && sketch.keys.len() + key_bytes <= sketch.max_key_bytes()
        };
        if has_room(self) {
            return false;
        }
        if self.filter.is_empty() {
            let len = (self.keep as usize * BOUNDS_PER_KEY).next_power_of_two();
            self.filter = vec![self.floor; len];
        }
        self.shrink_to(self.keep as usize);
        while !has_room(self) {
            self.shrink_to(self.entries.len() / 2);
        }
        true
    }

    /// Adds `weight` to `key`.
    pub fn add(&mut self, key: &[u8], hash: u32, weight: u64) {
        if !self.increase(key, hash, weight) {
            self.insert(key, hash, weight);
        }
    }

    /// Drops the keys with the lowest counts until at most `keep` are left.
    pub fn shrink_to(&mut self, keep: usize) {
        if self.entries.len() <= keep {
            return;
        }
        let by_count = |a: &SketchEntry, b: &SketchEntry| b.count.cmp(&a.count);
        let (_, highest_dropped, _) = self.entries.select_nth_unstable_by(keep, by_count);
        self.floor = self.floor.max(highest_dropped.count);
        for dropped in self.entries.drain(keep..) {
            if let Some(index) = filter_index(&self.filter, dropped.hash) {
                self.filter[index] = self.filter[index].max(dropped.count);
            }
        }
        let mut keys = Vec::with_capacity(self.keys.capacity());
        for entry in &mut self.entries {
            let (start, len) = (entry.start as usize, entry.len as usize);
            entry.start = u32::try_from(keys.len()).unwrap_or(u32::MAX);
            keys.extend_from_slice(&self.keys[start..start + len]);
        }
        self.keys = keys;
        self.index(self.slots.len());
    }

    /// Halves the number of keys, and releases unused memory and the filter.
    pub fn halve(&mut self) {
        self.filter = Vec::new();
        self.shrink_to(self.entries.len() / 2);
        self.entries.shrink_to_fit();
        self.keys.shrink_to_fit();
        self.slots = Vec::new();
        if !self.entries.is_empty() {
            self.index((self.entries.len() * 2).next_power_of_two().max(8));
        }
    }

    /// Returns the sketch as a [`Summary`].
    #[must_use]
    pub fn summary(&self) -> Summary {
        let rows = self.entries.iter().map(|entry| {
            let (start, len) = (entry.start as usize, entry.len as usize);
            (&self.keys[start..start + len], entry.count, entry.error)
        });
        Summary::new(self.floor, rows.collect())
    }

    /// Returns the heap memory in bytes.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<SketchEntry>()
            + self.keys.capacity()
            + self.slots.capacity() * size_of::<SketchSlot>()
            + self.filter.capacity() * size_of::<u64>()
    }

    /// Returns the maximum number of entries: twice the number of entries that are kept when a full
    /// sketch drops keys. Dropping keys takes a pass over all entries, so it should be rare.
    fn capacity(&self) -> usize {
        2 * self.keep as usize
    }

    fn max_key_bytes(&self) -> usize {
        (self.capacity() * AVERAGE_KEY_BYTES).max(MIN_KEY_BYTES)
    }

    /// Rebuilds the hash table with `len` slots. `len` must be a power of two.
    fn index(&mut self, len: usize) {
        self.slots.clear();
        self.slots.reserve_exact(len);
        self.slots.resize(len, UNUSED);
        for entry in 0..self.entries.len() {
            self.index_entry(entry);
        }
    }

    fn index_entry(&mut self, entry: usize) {
        let hash = self.entries[entry].hash;
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        while self.slots[at].entry != UNUSED.entry {
            at = (at + 1) & mask;
        }
        let entry = u32::try_from(entry).unwrap_or(UNUSED.entry);
        self.slots[at] = SketchSlot { hash, entry };
    }
}

/// Returns the index of the bound for a key with this hash; `None` if there is no filter. The first
/// bits of the hash are used, because the hash table uses the last bits.
fn filter_index(filter: &[u64], hash: u32) -> Option<usize> {
    let bits = filter.len().checked_ilog2()?;
    let index = u64::from(hash) << bits >> u32::BITS;
    usize::try_from(index).ok()
}

/// Reserves capacity for `more` items. Like `Vec`, doubles the capacity, but not beyond `most`.
fn reserve<T>(items: &mut Vec<T>, more: usize, most: usize) {
    let needed = items.len() + more;
    if needed > items.capacity() {
        let capacity = (items.capacity() * 2).max(8).min(most).max(needed);
        items.reserve_exact(capacity - items.len());
    }
}
