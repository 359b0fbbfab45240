//! Control bytes: one byte per slot of a table, with part of the hash of the slot's entry, or zero
//! if the slot is vacant.
//!
//! Eight bytes are compared simultaneously within one word (Lamport 1975; Warren, Hacker's Delight,
//! 6-1).

#[derive(Debug, Default)]
pub(super) struct CtrlBytes(Vec<u8>);

/// The number of tags that are compared simultaneously. The same number of tags after the last slot
/// are always zero, so that a group can be read from any slot.
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

    /// Returns the first of the [`GROUP`] slots at or after `home` with `tag`.
    #[inline]
    pub(super) fn first(&self, tag: u8, home: usize) -> Option<usize> {
        let matches = zeros(self.group(home)? ^ repeated(tag));
        (matches != 0).then(|| home + first(matches))
    }

    /// Returns the first slot at or after `home` with `tag` for which `is` returns true. The search
    /// stops at the group that contains the next vacant slot. `is` may also be called for a few
    /// other slots, including vacant ones.
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

    /// Returns the first vacant slot at or after `home`; it may be after the last slot.
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

    /// Extends the tags to at least `slots` slots.
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

/// Returns the highest bit of each byte that is zero. Bytes above the first zero byte may be
/// reported falsely, so a caller that uses more than the first match must check it.
#[inline]
fn zeros(word: u64) -> u64 {
    word.wrapping_sub(LOWEST) & !word & HIGHEST
}

/// Returns the index of the lowest byte with a bit set.
#[inline]
fn first(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8
}
