//! Summaries: packed sketches of completed time slices, sorted by count and mergeable.

use std::cmp::Reverse;

/// A completed sketch. The [module documentation](super) describes the error bound.
///
/// A packed entry consists of the key's length and bytes, the count and the error, with all numbers
/// in LEB128. The entries are sorted by descending count, so that the entries with the lowest
/// counts can be cut off at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    floor: u64,
    len: usize,
    packed: Box<[u8]>,
}

/// An entry of a summary: the key, the count and the error.
pub type SummaryEntry<'s> = (&'s [u8], u64, u64);

/// The bounds of a key's sum. The true sum is in `estimate - error ..= estimate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SumBounds {
    /// The upper bound of the sum.
    pub estimate: u64,
    /// The difference between the upper and the lower bound.
    pub error: u64,
}

/// Adds the bounds of the same key from two disjoint parts of a stream.
impl std::ops::AddAssign for SumBounds {
    fn add_assign(&mut self, other: Self) {
        self.estimate = self.estimate.saturating_add(other.estimate);
        self.error = self.error.saturating_add(other.error);
    }
}

impl Summary {
    /// Creates a summary of `entries`, which must have distinct keys. The sum of any other key is
    /// at most `floor`.
    #[must_use]
    pub fn new(floor: u64, mut entries: Vec<SummaryEntry<'_>>) -> Self {
        entries.sort_unstable_by_key(|&(key, count, _)| (Reverse(count), key));
        let mut packed = Vec::new();
        for &(key, count, error) in &entries {
            put(&mut packed, key.len() as u64);
            packed.extend_from_slice(key);
            put(&mut packed, count);
            put(&mut packed, error);
        }
        Self {
            floor,
            len: entries.len(),
            packed: packed.into(),
        }
    }

    /// Reads a summary packed by another process. Returns `None` if the bytes are damaged.
    #[must_use]
    pub fn unpack(floor: u64, len: usize, packed: &[u8]) -> Option<Self> {
        let (mut rest, mut highest) = (packed, u64::MAX);
        for _ in 0..len {
            let (_, count, error) = entry(&mut rest)?;
            if error > count || count > highest || floor > count {
                return None;
            }
            highest = count;
        }
        rest.is_empty().then(|| Self {
            floor,
            len,
            packed: packed.into(),
        })
    }

    /// Returns the upper bound for the sum of any key without an entry.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the summary has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the packed entries.
    #[must_use]
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// Returns the entries, sorted by descending count.
    pub fn iter(&self) -> impl Iterator<Item = SummaryEntry<'_>> {
        let mut rest = &*self.packed;
        std::iter::from_fn(move || entry(&mut rest))
    }

    /// Returns the bounds of the sum of `key`.
    #[must_use]
    pub fn bounds_of(&self, key: &[u8]) -> SumBounds {
        let found = self.iter().find(|(known, ..)| *known == key);
        let (_, estimate, error) = found.unwrap_or((key, self.floor, self.floor));
        SumBounds { estimate, error }
    }

    /// Drops the keys with the lowest counts until at most `keep` are left.
    pub fn shrink_to(&mut self, keep: usize) {
        if self.len <= keep {
            return;
        }
        let mut rest = &*self.packed;
        for _ in 0..keep {
            entry(&mut rest);
        }
        let kept = self.packed.len() - rest.len();
        if let Some((_, highest_dropped, _)) = entry(&mut rest) {
            self.floor = self.floor.max(highest_dropped);
        }
        self.len = keep;
        self.packed = self.packed[..kept].into();
    }

    /// Returns the heap memory in bytes.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.packed.len()
    }
}

/// Takes the next entry from `rest`. Returns `None` at the end or if the bytes are damaged.
fn entry<'s>(rest: &mut &'s [u8]) -> Option<SummaryEntry<'s>> {
    let len = usize::try_from(take(rest)?).ok()?;
    let (key, after) = rest.split_at_checked(len)?;
    *rest = after;
    Some((key, take(rest)?, take(rest)?))
}

/// Appends `number` in LEB128.
pub(super) fn put(packed: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        packed.push((number & 0x7F) as u8 | 0x80);
        number >>= 7;
    }
    packed.push((number & 0x7F) as u8);
}

/// Takes a number in LEB128 from the front of `packed`.
pub(super) fn take(packed: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = packed.split_first()?;
        *packed = rest;
        let bits = u64::from(byte & 0x7F);
        if shift == 63 && bits > 1 {
            return None;
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{super::top_keys, *};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_survive_packing(number: u64) {
            let mut packed = Vec::new();
            put(&mut packed, number);
            let mut rest = packed.as_slice();
            prop_assert_eq!(take(&mut rest), Some(number));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn damaged_bytes_never_panic(floor: u64, len in 0_usize..9, packed: Vec<u8>) {
            if let Some(summary) = Summary::unpack(floor, len, &packed) {
                prop_assert_eq!(summary.iter().count(), len);
                prop_assert!(top_keys([&summary, &summary], len).len() <= len);
            }
        }

        #[test]
        fn entries_survive_packing(
            entries in prop::collection::btree_map(
                prop::collection::vec(any::<u8>(), 0..200),
                any::<(u64, u64)>(),
                0..20,
            )
        ) {
            let rows = entries.iter().map(|(key, &(a, b))| (key.as_slice(), a.max(b), a.min(b)));
            let summary = Summary::new(0, rows.collect());
            let unpacked = Summary::unpack(0, summary.len(), summary.packed()).unwrap();
            prop_assert_eq!(&unpacked, &summary);
            prop_assert_eq!(unpacked.iter().count(), entries.len());
        }
    }

    #[test]
    fn a_damaged_summary_with_a_repeated_key_merges() {
        let entry = [1, b'a', 5, 0];
        let summary = Summary::unpack(3, 2, &[entry, entry].concat()).unwrap();
        let listed = top_keys([&summary], 2);
        let listed: Vec<_> = listed.iter().map(|top| (top.estimate, top.error)).collect();
        assert_eq!(listed, [(10, 0)]);
    }

    #[test]
    fn dropping_keys_raises_the_floor() {
        let rows: Vec<SummaryEntry<'_>> = vec![(b"c", 3, 0), (b"a", 9, 1), (b"b", 5, 2)];
        let mut summary = Summary::new(2, rows);
        summary.shrink_to(2);
        assert_eq!(summary.floor(), 3);
        let kept: Vec<_> = summary.iter().collect();
        assert_eq!(kept, [(b"a".as_slice(), 9, 1), (b"b".as_slice(), 5, 2)]);
        summary.shrink_to(0);
        assert_eq!(
            (summary.floor(), summary.len(), summary.heap_bytes()),
            (9, 0, 0)
        );
    }
}
