//! An open-addressing index from the hash of a key to the number of its entry, in 4 bytes a slot.
//!
//! A slot holds eight bits of the hash and the entry's number; the hash's other bits say where to look
//! first. Slots are probed in a line and closed up on removal, so that there are no tombstones and never a sweep.
//!
//! To grow by a quarter, or to shrink, is to hash the keys of the shard anew: a pause for that shard, in proportion to its
//! keys, which are some 39,000 in a full store of the default size.

/// The most entries that one index can number.
pub(super) const MAX_ENTRIES: usize = (1 << Slot::NUMBER_BITS) - 2;

#[derive(Debug, Default)]
pub(super) struct Index {
    slots: Vec<Slot>,
    len: usize,
}

/// Zero is vacant; else the number of an entry plus one, under eight bits of its hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slot(u32);

impl Slot {
    const NUMBER_BITS: u32 = 24;
    const VACANT: Self = Self(0);

    fn new(hash: u64, number: usize) -> Self {
        debug_assert!(number <= MAX_ENTRIES, "an entry's number fits its slot");
        let number = u32::try_from(number + 1).unwrap_or(0);
        Self(Self::tag(hash) | number)
    }

    #[inline]
    fn tag(hash: u64) -> u32 {
        // Bits 32 to 40: those below say where to look first, those above which shard.
        ((hash >> 32) as u32) << Self::NUMBER_BITS
    }

    #[inline]
    fn number(self) -> usize {
        (self.0 & ((1 << Self::NUMBER_BITS) - 1)) as usize - 1
    }

    #[inline]
    fn has_tag_of(self, hash: u64) -> bool {
        (self.0 ^ Self::tag(hash)) >> Self::NUMBER_BITS == 0
    }
}

impl Index {
    pub(super) fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    /// Bytes that the next `entries` insertions add.
    pub(super) fn growth_bytes(&self, entries: usize) -> usize {
        let mut slots = self.slots.len();
        while !has_room(slots, self.len + entries) {
            slots = grown(slots);
        }
        (slots - self.slots.len()) * size_of::<Slot>()
    }

    /// The number of the entry of that hash for which `is` holds.
    #[inline]
    pub(super) fn find(&self, hash: u64, is: impl Fn(usize) -> bool) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == Slot::VACANT {
                return None;
            }
            if slot.has_tag_of(hash) && is(slot.number()) {
                return Some(slot.number());
            }
            at = self.next(at);
        }
    }

    /// Adds an entry that is not in yet; `hash_of` hashes the others if the index has to grow.
    pub(super) fn insert(&mut self, hash: u64, number: usize, hash_of: impl Fn(usize) -> u64) {
        if !has_room(self.slots.len(), self.len + 1) {
            self.rebuild(grown(self.slots.len()), hash_of);
        }
        self.place(hash, number);
        self.len += 1;
    }

    /// Removes an entry; `hash_of` hashes those that move up.
    pub(super) fn remove(&mut self, hash: u64, number: usize, hash_of: impl Fn(usize) -> u64) {
        let Some(mut hole) = self.slot_of(hash, number) else {
            return;
        };
        let mut at = self.next(hole);
        while self.slots[at] != Slot::VACANT {
            let home = self.home(hash_of(self.slots[at].number()));
            if self.distance(home, at) >= self.distance(hole, at) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.slots[hole] = Slot::VACANT;
        self.len -= 1;
    }

    /// Gives an entry another number.
    pub(super) fn renumber(&mut self, hash: u64, from: usize, to: usize) {
        if let Some(at) = self.slot_of(hash, from) {
            self.slots[at] = Slot::new(hash, to);
        }
    }

    /// Gives back memory once three quarters of it are unused.
    pub(super) fn shrink_if_empty(&mut self, hash_of: impl Fn(usize) -> u64) {
        if self.len * 4 < self.slots.len() && self.slots.len() > 64 {
            self.rebuild(self.len * 2 + 8, hash_of);
        }
    }

    fn rebuild(&mut self, slots: usize, hash_of: impl Fn(usize) -> u64) {
        self.slots = vec![Slot::VACANT; slots];
        for number in 0..self.len {
            self.place(hash_of(number), number);
        }
    }

    fn place(&mut self, hash: u64, number: usize) {
        let mut at = self.home(hash);
        while self.slots[at] != Slot::VACANT {
            at = self.next(at);
        }
        self.slots[at] = Slot::new(hash, number);
    }

    fn slot_of(&self, hash: u64, number: usize) -> Option<usize> {
        let (wanted, mut at) = (Slot::new(hash, number), self.home(hash));
        while self.slots[at] != wanted {
            if self.slots[at] == Slot::VACANT {
                return None;
            }
            at = self.next(at);
        }
        Some(at)
    }

    /// Spreads the low 32 bits of the hash evenly over slots of any number.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & u64::from(u32::MAX)) * self.slots.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() {
            0
        } else {
            at + 1
        }
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.slots.len() - from
        }
    }
}

/// An eighth stays vacant, so that probing is short and ends.
fn has_room(slots: usize, entries: usize) -> bool {
    entries * 8 <= slots * 7
}

fn grown(slots: usize) -> usize {
    slots * 5 / 4 + 8
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The index finds what a map finds, whatever is inserted and removed, hashes colliding freely.
        #[test]
        fn finds_what_a_map_finds(operations in prop::collection::vec((any::<bool>(), 0_u64..40), 0..300)) {
            let mix = |key: u64| (key / 3).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let (mut index, mut keys, mut model) = (Index::default(), Vec::new(), BTreeMap::new());
            for (add, key) in operations {
                let found = index.find(mix(key), |number| keys[number] == key);
                prop_assert_eq!(found.is_some(), model.contains_key(&key));
                match found {
                    None if add => {
                        index.insert(mix(key), keys.len(), |number| mix(keys[number]));
                        keys.push(key);
                        model.insert(key, ());
                    }
                    Some(number) if !add => {
                        index.remove(mix(key), number, |number| mix(keys[number]));
                        let last = keys.len() - 1;
                        if number != last {
                            index.renumber(mix(keys[last]), last, number);
                        }
                        keys.swap_remove(number);
                        model.remove(&key);
                    }
                    _ => {}
                }
            }
            for key in 0..40 {
                prop_assert_eq!(index.find(mix(key), |number| keys[number] == key).is_some(), model.contains_key(&key));
            }
        }
    }
}
