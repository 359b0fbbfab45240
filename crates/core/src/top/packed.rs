//! The packed form of a closed time slice. Servers that share a Redis publish their slices in this
//! form.
//!
//! ```text
//! | version | number | totals | rules | scope, 8 bytes | totals | stream | stream | stream | … |
//! stream: | 0 |   or   | 1 | floor | keys | length | packed summary |
//! ```
//!
//! All numbers except the scope are in LEB128. `totals` is the number of requests, the number of
//! denials, and the cost.

use super::{
    ClosedSlice, GroupSummaries, Stream, Summary, Tally,
    summary::{put, take},
};

/// The version of the format. A server ignores slices with a different version.
const VERSION: u8 = 1;

impl ClosedSlice {
    /// Returns the packed form of the slice, which has the index `number`.
    #[must_use]
    pub fn pack(&self, number: u64) -> Vec<u8> {
        let mut packed = vec![VERSION];
        put(&mut packed, number);
        put_tally(&mut packed, self.total);
        put(&mut packed, self.groups.len() as u64);
        for (scope, group) in &self.groups {
            packed.extend_from_slice(&scope.to_be_bytes());
            put_tally(&mut packed, group.tally);
            for summary in &group.streams {
                let Some(summary) = summary else {
                    packed.push(0);
                    continue;
                };
                packed.push(1);
                put(&mut packed, summary.floor());
                put(&mut packed, summary.len() as u64);
                put(&mut packed, summary.packed().len() as u64);
                packed.extend_from_slice(summary.packed());
            }
        }
        packed
    }

    /// Reads a packed slice and its index. Returns `None` if the bytes are damaged or in another
    /// version of the format.
    #[must_use]
    pub fn unpack(packed: &[u8]) -> Option<(u64, Self)> {
        let (&VERSION, mut rest) = packed.split_first()? else {
            return None;
        };
        let number = take(&mut rest)?;
        let mut slice = Self {
            total: take_tally(&mut rest)?,
            ..Self::default()
        };
        for _ in 0..take(&mut rest)? {
            let (scope, after) = rest.split_first_chunk::<8>()?;
            rest = after;
            let group = take_group(&mut rest)?;
            slice.groups.insert(u64::from_be_bytes(*scope), group);
        }
        rest.is_empty().then_some((number, slice))
    }
}

fn put_tally(packed: &mut Vec<u8>, tally: Tally) {
    put(packed, tally.requests);
    put(packed, tally.denied);
    put(packed, tally.cost);
}

fn take_tally(rest: &mut &[u8]) -> Option<Tally> {
    Some(Tally {
        requests: take(rest)?,
        denied: take(rest)?,
        cost: take(rest)?,
    })
}

fn take_group(rest: &mut &[u8]) -> Option<GroupSummaries> {
    let tally = take_tally(rest)?;
    let mut streams: [Option<Summary>; Stream::COUNT] = Default::default();
    for stream in &mut streams {
        let (present, after) = rest.split_first()?;
        *rest = after;
        if *present == 0 {
            continue;
        }
        let (floor, len) = (take(rest)?, usize::try_from(take(rest)?).ok()?);
        let bytes = usize::try_from(take(rest)?).ok()?;
        let (packed, after) = rest.split_at_checked(bytes)?;
        *rest = after;
        *stream = Some(Summary::unpack(floor, len, packed)?);
    }
    Some(GroupSummaries { tally, streams })
}

#[cfg(test)]
mod tests {
    use super::{super::top_keys, *};
    use proptest::prelude::*;

    fn slice() -> ClosedSlice {
        let summary = Summary::new(3, vec![(b"acme", 900, 3), (b"globex", 17, 0)]);
        let tally = Tally {
            requests: 1_000,
            denied: 70,
            cost: u64::MAX,
        };
        let group = GroupSummaries {
            tally,
            streams: [Some(summary), None, Some(Summary::default())],
        };
        ClosedSlice {
            total: tally,
            groups: [(0, group.clone()), (u64::MAX, group)].into(),
        }
    }

    #[test]
    fn a_slice_survives_packing() {
        let packed = slice().pack(28_000_000);
        assert_eq!(ClosedSlice::unpack(&packed), Some((28_000_000, slice())));
        for end in 0..packed.len() {
            assert_eq!(ClosedSlice::unpack(&packed[..end]), None, "{end}");
        }
        assert_eq!(
            ClosedSlice::unpack(&[packed.as_slice(), &[0]].concat()),
            None
        );
        let other_version = [&[VERSION + 1], &packed[1..]].concat();
        assert_eq!(ClosedSlice::unpack(&other_version), None);
    }

    proptest! {
        #[test]
        fn damaged_slices_never_panic(at in 0_usize..80, byte: u8, noise: Vec<u8>) {
            let mut packed = slice().pack(7);
            let at = at % packed.len();
            packed[at] = byte;
            let noise = [&[VERSION], noise.as_slice()].concat();
            let slices = [&packed, &noise].into_iter();
            for (_, slice) in slices.filter_map(|packed| ClosedSlice::unpack(packed)) {
                let streams = slice.groups.values().flat_map(|group| &group.streams);
                let _ = top_keys(streams.flatten(), 9);
            }
        }
    }
}
