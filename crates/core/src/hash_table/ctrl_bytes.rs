//! Control bytes, also called tags: one byte per slot of a hash table. A tag contains some bits of
//! the entry's hash, or is zero if the slot is vacant.
//!
//! Eight tags are compared at once within one 64-bit word (Lamport 1975; Warren, Hacker's Delight,
//! 6-1).

use super::prefetch::prefetch;

#[derive(Debug, Default)]
pub(super) struct CtrlBytes(Vec<u8>);

/// The number of tags that are compared at once. The array ends with [`GROUP`] additional zero
/// tags, so that a group of eight tags can be read at any slot.
pub(super) const GROUP: usize = 8;

const LOWEST: u64 = 0x0101_0101_0101_0101;
const HIGHEST: u64 = LOWEST << 7;

impl CtrlBytes {
    /// Creates the tags of `slots` vacant slots.
    pub(super) fn new(slots: usize) -> Self {
        Self(vec![0; slots + GROUP])
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.0.capacity()
    }

    /// Returns the first slot with `tag` among the [`GROUP`] slots that start at `home`.
    #[inline]
    pub(super) fn first(&self, tag: u8, home: usize) -> Option<usize> {
        let matches = zeros(self.group(home)? ^ repeated(tag));
        (matches != 0).then(|| home + first(matches))
    }

    /// Returns the first slot at or after `home` with `tag` for which `is` returns true. The search
    /// ends after the first group that contains a vacant slot. `is` may also be called for a few
    /// slots with other tags, including vacant slots.
    #[inline]
    pub(super) fn find(&self, tag: u8, home: usize, is: impl Fn(usize) -> bool) -> Option<usize> {
        let growth = repeated(tag);
        let mut at = home;
        loop {
            let group = self.group(at)?;
            let mut matches = zeros(group ^ growth);
            while matches != 0 {
                let slot = at + first(matches);
                if is(slot) {
                    return Some(slot);
                }
                matches &= matches - 1;
            }
            if zeros(group) != 0 {
                return None;
            }
            at += GROUP;
        }
    }

    /// Starts to load the tags from slot `home` on.
    #[inline]
    pub(super) fn prefetch(&self, home: usize) {
        if let Some(tag) = self.0.get(home) {
            prefetch(tag);
        }
    }

    /// Returns the first vacant slot at or after `home`. If there is no vacant slot, returns the
    /// number of slots.
    pub(super) fn vacant(&self, home: usize) -> usize {
        let mut at = home;
        while let Some(group) = self.group(at) {
            let vacant = zeros(group);
            if vacant != 0 {
                return at + first(vacant);
            }
            at += GROUP;
        }
        at
    }

    pub(super) fn set(&mut self, slot: usize, tag: u8) {
        self.0[slot] = tag;
    }

    /// Marks a slot as vacant, and returns its former tag.
    pub(super) fn clear(&mut self, slot: usize) -> u8 {
        std::mem::take(&mut self.0[slot])
    }

    /// Extends the array of tags to at least `slots` slots.
    pub(super) fn grow_to(&mut self, slots: usize) {
        let more = (slots + GROUP).saturating_sub(self.0.len());
        self.0.reserve_exact(more);
        self.0.extend(std::iter::repeat_n(0, more));
    }

    #[inline]
    fn group(&self, at: usize) -> Option<u64> {
        let bytes = self.0.get(at..)?.first_chunk::<GROUP>()?;
        Some(u64::from_le_bytes(*bytes))
    }
}

/// Returns a word with `tag` in every byte.
#[inline]
fn repeated(tag: u8) -> u64 {
    u64::from(tag) * LOWEST
}

/// Returns a word in which the highest bit of each byte is set if that byte of `word` is zero. The
/// bit can also be set in a nonzero byte, if a lower byte is zero. Therefore, a caller that uses
/// more than the lowest set bit must check each match.
#[inline]
fn zeros(word: u64) -> u64 {
    word.wrapping_sub(LOWEST) & !word & HIGHEST
}

/// Returns the index of the lowest byte with a set bit.
#[inline]
fn first(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8
}
