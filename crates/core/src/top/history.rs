//! The history: the counts from the last day, in time slices of 1 minute, 5 minutes and 1 hour.

use std::collections::{BTreeMap, BTreeSet};

use super::{GroupSummaries, Level, LiveSlice, Period, Summary, Tally};

/// A completed time slice, merged from the slices of all workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClosedSlice {
    /// The exact totals over all rules. The totals count each request once.
    pub total: Tally,
    /// The counts of each rule, by the rule's [scope](crate::Rule::key_scope).
    pub groups: BTreeMap<u64, GroupSummaries>,
}

/// The time slices from the last day, by [`Level`] and index. A slice's index is its start (the
/// time since 1970), divided by its length.
#[derive(Debug)]
pub struct History {
    keep: usize,
    max_bytes: usize,
    levels: [BTreeMap<u64, ClosedSlice>; Level::ALL.len()],
}

impl History {
    /// Creates an empty history. Each summary keeps up to `keep` keys, or fewer if all summaries
    /// together would exceed `max_bytes`.
    #[must_use]
    pub fn new(keep: usize, max_bytes: usize) -> Self {
        Self {
            keep,
            max_bytes,
            levels: Default::default(),
        }
    }

    /// Adds the workers' completed minutes to the time slices that contain these minutes, one slice
    /// at each level. `minute` is the current minute. Returns the level and the index of each
    /// changed slice.
    pub fn add(&mut self, slices: &[LiveSlice], minute: u64) -> BTreeSet<(Level, u64)> {
        let mut changed = BTreeSet::new();
        self.expire(minute);
        for slice in slices {
            let groups = slice.groups.iter();
            let groups = groups.filter(|group| group.tally.requests > 0);
            let closed = ClosedSlice {
                total: slice.total,
                groups: groups
                    .map(|group| (group.scope, group.summaries()))
                    .collect(),
            };
            for level in Level::ALL {
                let number = slice.minute / level.minutes();
                if minute / level.minutes() < number + level.slices() {
                    let slices = &mut self.levels[level.index()];
                    slices.entry(number).or_default().merge(&closed, self.keep);
                    changed.insert((level, number));
                }
            }
        }
        self.bound();
        changed
    }

    /// Drops the time slices that are too old for any [`Period`] ending in `minute`.
    pub fn expire(&mut self, minute: u64) {
        for level in Level::ALL {
            let current = minute / level.minutes();
            let slices = &mut self.levels[level.index()];
            slices.retain(|number, _| current < number + level.slices());
        }
    }

    /// Drops a rule's counts if `is_listed` returns false for the rule's scope. Does not change the
    /// totals over all rules.
    pub fn retain(&mut self, is_listed: impl Fn(u64) -> bool) {
        for slice in self.levels.iter_mut().flat_map(BTreeMap::values_mut) {
            slice.groups.retain(|scope, _| is_listed(*scope));
        }
    }

    /// Returns the time slice of `level` with the index `number`.
    #[must_use]
    pub fn slice(&self, level: Level, number: u64) -> Option<&ClosedSlice> {
        self.levels[level.index()].get(&number)
    }

    /// Returns the time slices of the period ending in `minute`.
    pub fn slices(&self, over: Period, minute: u64) -> impl Iterator<Item = &ClosedSlice> {
        let slices = self.levels[over.level().index()].range(over.first_slice(minute)..);
        slices.map(|(_, slice)| slice)
    }

    /// Returns the scopes of all rules with counts in the period ending in `minute`.
    #[must_use]
    pub fn scopes(&self, over: Period, minute: u64) -> BTreeSet<u64> {
        let slices = self.slices(over, minute);
        slices
            .flat_map(|slice| slice.groups.keys().copied())
            .collect()
    }

    /// Returns the heap memory of the summaries in bytes.
    #[must_use]
    pub fn summary_bytes(&self) -> usize {
        let slices = self.levels.iter().flat_map(BTreeMap::values);
        slices.map(ClosedSlice::summary_bytes).sum()
    }

    /// Drops keys from the longest summaries if all summaries together take too much memory.
    fn bound(&mut self) {
        while self.summary_bytes() > self.max_bytes {
            let slices = self.levels.iter().flat_map(BTreeMap::values);
            let longest = slices.map(ClosedSlice::longest).max().unwrap_or(0);
            let slices = self.levels.iter_mut().flat_map(BTreeMap::values_mut);
            slices.for_each(|slice| slice.shrink_to(longest / 2));
        }
    }
}

impl ClosedSlice {
    /// Drops keys from the longest summaries until all summaries together take at most `max_bytes`.
    pub fn bound(&mut self, max_bytes: usize) {
        while self.summary_bytes() > max_bytes {
            self.shrink_to(self.longest() / 2);
        }
    }

    /// Returns the heap memory of the summaries in bytes.
    #[must_use]
    pub fn summary_bytes(&self) -> usize {
        self.summaries().map(Summary::heap_bytes).sum()
    }

    fn longest(&self) -> usize {
        self.summaries().map(Summary::len).max().unwrap_or(0)
    }

    fn shrink_to(&mut self, keep: usize) {
        let groups = self.groups.values_mut();
        let summaries = groups.flat_map(|group| group.streams.iter_mut().flatten());
        summaries.for_each(|summary| summary.shrink_to(keep));
    }

    fn summaries(&self) -> impl Iterator<Item = &Summary> {
        let groups = self.groups.values();
        groups.flat_map(|group| group.streams.iter().flatten())
    }

    /// Adds the counts of `other`. Each merged summary keeps at most `keep` keys.
    pub fn merge(&mut self, other: &Self, keep: usize) {
        self.total += other.total;
        for (scope, group) in &other.groups {
            self.groups.entry(*scope).or_default().merge(group, keep);
        }
    }
}
