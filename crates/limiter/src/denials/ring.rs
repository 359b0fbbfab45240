//! A bounded list of records. New records replace the oldest records.
//!
//! Records are kept in segments of fixed size. When the list is full, its whole oldest segment is
//! dropped. A reader takes references to the full segments, and copies only the last segment. The
//! reader therefore holds the lock only for microseconds, even if the list is large.

use std::{collections::VecDeque, sync::Arc};

use tidegate_core::Timestamp;

/// The size of a segment in bytes.
pub(super) const SEGMENT_BYTES: usize = 8 << 10;

/// The maximum length of a record. A segment has room for at least two records.
pub(super) const MAX_RECORD_BYTES: usize = SEGMENT_BYTES / 2 - LENGTH_BYTES;

/// The maximum number of denied requests per second that a ring keeps.
pub(super) const MAX_PER_SECOND: u32 = 10_000;

/// The size of the length prefix of a record, in bytes.
const LENGTH_BYTES: usize = 2;

#[derive(Debug, Default)]
pub(super) struct DenialRing {
    /// The full segments, oldest first.
    full: VecDeque<Arc<Segment>>,
    last: Segment,
    /// The counts of all denied requests since the start.
    counts: RingCounts,
    /// The number of records dropped to make space.
    dropped: u64,
    /// Each denied request adds the configured log percentage to this sum. When the sum reaches
    /// 100, the request is logged and 100 is subtracted.
    unlogged_percent: u32,
    /// The current second.
    second: u64,
    /// The number of denied requests in the current second.
    in_second: u32,
}

/// A segment of records, oldest first. Each record is preceded by its length.
#[derive(Clone, Debug, Default)]
pub(super) struct Segment {
    bytes: Vec<u8>,
    records: u64,
}

/// The counts of a ring's denied requests since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingCounts {
    /// The number of added records.
    pub(super) added: u64,
    /// The number of denied requests that were not recorded.
    pub(super) unrecorded: u64,
}

/// The records of a ring at one point in time.
#[derive(Debug)]
pub(super) struct RingSnapshot {
    /// The segments, newest first.
    pub(super) segments: Vec<Arc<Segment>>,
    pub(super) lost: u64,
}

impl DenialRing {
    /// Adds the record that `encode` writes. The ring keeps at most `segments` segments.
    pub(super) fn push(&mut self, segments: usize, encode: impl FnOnce(&mut Vec<u8>)) {
        if self.last.bytes.capacity() == 0 {
            self.last.bytes.reserve_exact(SEGMENT_BYTES);
        }
        if SEGMENT_BYTES - self.last.bytes.len() < LENGTH_BYTES + MAX_RECORD_BYTES {
            self.begin_segment(segments);
        }
        let start = self.last.bytes.len();
        self.last.bytes.extend_from_slice(&[0; LENGTH_BYTES]);
        encode(&mut self.last.bytes);
        let length = self.last.bytes.len() - start - LENGTH_BYTES;
        match u16::try_from(length) {
            Ok(short) if length <= MAX_RECORD_BYTES => {
                self.last.bytes[start..start + LENGTH_BYTES].copy_from_slice(&short.to_le_bytes());
                self.last.records += 1;
                self.counts.added += 1;
            }
            _ => {
                debug_assert!(false, "a record of {length} bytes");
                self.last.bytes.truncate(start);
                self.last.bytes.shrink_to(SEGMENT_BYTES);
                self.counts.unrecorded += 1;
            }
        }
    }

    /// Returns whether to keep the next denied request. In each second, the first
    /// [`MAX_PER_SECOND`] denied requests are kept, and all others count as lost. During a flood,
    /// encoding every denial would take longer than the decision, and the list would cover only a
    /// fraction of a second.
    pub(super) fn try_take(&mut self, now: Timestamp) -> bool {
        let second = now.as_micros() / 1_000_000;
        if second != self.second {
            (self.second, self.in_second) = (second, 0);
        }
        self.in_second = self.in_second.saturating_add(1);
        let is_kept = self.in_second <= MAX_PER_SECOND;
        self.counts.unrecorded += u64::from(!is_kept);
        is_kept
    }

    /// Returns whether to log the next denied request. Over many calls, returns true for `percent`
    /// percent of the requests.
    pub(super) fn sample_for_log(&mut self, percent: u32) -> bool {
        self.unlogged_percent += percent;
        let is_due = self.unlogged_percent >= 100;
        if is_due {
            self.unlogged_percent -= 100;
        }
        is_due
    }

    pub(super) fn counts(&self) -> RingCounts {
        self.counts
    }

    fn lost(&self) -> u64 {
        self.counts.unrecorded + self.dropped
    }

    pub(super) fn snapshot(&self) -> RingSnapshot {
        let last = std::iter::once(Arc::new(self.last.clone()));
        RingSnapshot {
            segments: last.chain(self.full.iter().rev().cloned()).collect(),
            lost: self.lost(),
        }
    }

    /// Returns the total size of all segments in bytes.
    #[cfg(test)]
    pub(super) fn heap_bytes(&self) -> usize {
        let full = self.full.iter().map(|segment| segment.bytes.capacity());
        full.sum::<usize>() + self.last.bytes.capacity()
    }

    fn begin_segment(&mut self, segments: usize) {
        let next = Segment {
            bytes: Vec::with_capacity(SEGMENT_BYTES),
            records: 0,
        };
        let full = std::mem::replace(&mut self.last, next);
        self.full.push_back(Arc::new(full));
        while self.full.len() >= segments.max(1) {
            let oldest = self.full.pop_front();
            self.dropped += oldest.map_or(0, |oldest| oldest.records);
        }
    }
}

impl Segment {
    /// Returns the records, newest first.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = &[u8]> {
        let (mut records, mut rest) = (Vec::new(), self.bytes.as_slice());
        while let Some((length, after)) = rest.split_first_chunk::<LENGTH_BYTES>() {
            let Some((record, next)) =
                after.split_at_checked(usize::from(u16::from_le_bytes(*length)))
            else {
                break;
            };
            records.push(record);
            rest = next;
        }
        records.into_iter().rev()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The ring keeps the newest records in order, stays within its size bound, and counts the
        /// records that it drops.
        #[test]
        fn keeps_the_newest_records_and_counts_the_others(
            lengths in prop::collection::vec(4..MAX_RECORD_BYTES, 0..200),
            segments in 2_usize..6,
        ) {
            let mut ring = DenialRing::default();
            for (number, length) in lengths.iter().enumerate() {
                let number = u32::try_from(number).unwrap();
                ring.push(segments, |bytes| {
                    bytes.extend_from_slice(&number.to_le_bytes());
                    bytes.resize(bytes.len() + length - 4, 7);
                });
                prop_assert!(ring.heap_bytes() <= segments * SEGMENT_BYTES);
            }
            let RingSnapshot { segments: kept, lost } = ring.snapshot();
            let kept: Vec<(usize, usize)> = kept
                .iter()
                .flat_map(|segment| segment.newest_first())
                .map(|record| {
                    let number = u32::from_le_bytes(*record.first_chunk().unwrap());
                    (usize::try_from(number).unwrap(), record.len())
                })
                .collect();
            let lost = usize::try_from(lost).unwrap();
            let kept_lengths = lengths.iter().copied().enumerate().skip(lost);
            let expected: Vec<(usize, usize)> = kept_lengths.rev().collect();
            prop_assert_eq!(kept, expected);
            // All but at most two segments are more than half full.
            let kept_at_most = (lengths.len() - lost) * MAX_RECORD_BYTES;
            prop_assert!(lost == 0 || kept_at_most > (segments - 2) * SEGMENT_BYTES / 2);
        }
    }

    #[test]
    fn a_flood_fills_only_the_budget_of_its_second() {
        let mut ring = DenialRing::default();
        let at = |millis: u64| Timestamp::from_micros(millis * 1_000);
        let kept = (0..50_000).filter(|_| ring.try_take(at(5_000))).count();
        assert_eq!((kept, ring.lost()), (10_000, 40_000));
        assert!(!ring.try_take(at(5_999)));
        assert!(ring.try_take(at(6_000)));
        assert_eq!(ring.lost(), 40_001);
    }

    #[test]
    fn one_record_in_a_hundred_is_logged() {
        let mut ring = DenialRing::default();
        let logged = |ring: &mut DenialRing, percent| {
            (0..1_000).filter(|_| ring.sample_for_log(percent)).count()
        };
        assert_eq!(logged(&mut ring, 1), 10);
        assert_eq!(logged(&mut ring, 30), 300);
        assert_eq!(logged(&mut ring, 100), 1_000);
        assert_eq!(logged(&mut ring, 0), 0);
    }
}
