//! A byte for every slot of a table: a part of the hash of the entry in it, or zero for none.
//!
//! Eight are compared at once, in the bytes of one word (Lamport 1975; Warren, Hacker's Delight, 6-1).

#[derive(Debug, Default)]
pub(super) struct Tags(Vec<u8>);

/// So many tags are looked at together, and so many beyond the last slot are always vacant.
pub(super) const GROUP: usize = 8;

const LOWEST: u64 = 0x0101_0101_0101_0101;
const HIGHEST: u64 = LOWEST << 7;

impl Tags {
    /// The tags of so many vacant slots.
    pub(super) fn new(slots: usize) -> Self {
        Self(vec![0; slots + GROUP])
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.0.capacity()
    }

    /// The first of the [`GROUP`] slots from `home` on that has `tag`.
    #[inline]
    pub(super) fn first(&self, tag: u8, home: usize) -> Option<usize> {
        let matches = zeros(self.group(home)? ^ repeated(tag));
        (matches != 0).then(|| home + first(matches))
    }

    /// The slot from `home` on to the next vacant one that has `tag` and for which `is` holds, which is asked of a few
    /// others too, vacant ones among them.
    #[inline]
    pub(super) fn find(&self, tag: u8, home: usize, is: impl Fn(usize) -> bool) -> Option<usize> {
        let wanted = repeated(tag);
        let mut at = home;
        loop {
            let group = self.group(at)?;
            let mut matches = zeros(group ^ wanted);
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

    /// The first vacant slot from `home` on, which may be one behind the last.
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

    /// Makes a slot vacant, and answers which tag it had.
    pub(super) fn clear(&mut self, slot: usize) -> u8 {
        std::mem::take(&mut self.0[slot])
    }

    /// Makes sure that there are tags for so many slots.
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

/// The tag in every byte.
#[inline]
fn repeated(tag: u8) -> u64 {
    u64::from(tag) * LOWEST
}

/// The highest bit of each byte that is zero, and perhaps of some above the first that are not: whoever takes another than
/// the first looks again.
#[inline]
fn zeros(word: u64) -> u64 {
    word.wrapping_sub(LOWEST) & !word & HIGHEST
}

/// The number of the lowest byte with a bit set.
#[inline]
fn first(bits: u64) -> usize {
    bits.trailing_zeros() as usize / 8
}
