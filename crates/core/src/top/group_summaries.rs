//! The summaries of a rule.

use super::{Measure, Stream, SumBounds, Summary, Tally, merge};

/// A rule's counts in a closed time slice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupSummaries {
    /// The exact totals.
    pub tally: Tally,
    /// The summary of each stream, in the order of [`Stream`]. `None` for an empty stream.
    pub streams: [Option<Summary>; Stream::COUNT],
}

impl GroupSummaries {
    /// Returns the summaries of the streams whose counts add up to the measure `by`.
    pub fn of(&self, by: Measure) -> impl Iterator<Item = &Summary> {
        let streams = by.streams().iter();
        streams.filter_map(|stream| self.streams[stream.index()].as_ref())
    }

    /// Returns the lower and upper bound of the measure `by` for `key`. `key` does not include the
    /// rule's scope.
    #[must_use]
    pub fn bounds_of(&self, by: Measure, key: &[u8]) -> SumBounds {
        let mut bounds = SumBounds::default();
        self.of(by)
            .for_each(|summary| bounds += summary.bounds_of(key));
        bounds
    }

    pub(super) fn merge(&mut self, other: &Self, keep: usize) {
        self.tally += other.tally;
        for (own, other) in self.streams.iter_mut().zip(&other.streams) {
            let Some(other) = other else { continue };
            let merged = match own {
                Some(own) => merge([&*own, other], keep),
                None => merge([other], keep),
            };
            *own = Some(merged);
        }
    }
}
