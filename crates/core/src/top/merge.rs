//! Merges [summaries](Summary).

use std::cmp::Reverse;

use foldhash::{HashMap, HashMapExt as _};

use super::Summary;

/// A key in a list of top talkers. Its true sum is in `estimate - error ..= estimate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKey<'s> {
    /// The key, without the scope of its rule.
    pub key: &'s [u8],
    /// The upper bound of the key's true sum.
    pub estimate: u64,
    /// The difference between the upper and the lower bound of the true sum.
    pub error: u64,
}

/// A key's sums over all summaries that contain the key.
#[derive(Clone, Copy, Default)]
struct Sums {
    count: u64,
    error: u64,
    floor: u64,
}

/// Merges summaries of disjoint parts of a stream, and keeps at most `keep` keys.
#[must_use]
pub fn merge<'s>(summaries: impl IntoIterator<Item = &'s Summary>, keep: usize) -> Summary {
    let (floor, keys) = merged(summaries);
    let rows = keys.map(|top| (top.key, top.estimate, top.error));
    let mut merged = Summary::new(floor, rows.collect());
    merged.shrink_to(keep);
    merged
}

/// Merges summaries of disjoint parts of a stream, and returns the `count` keys with the highest
/// estimates, in descending order.
#[must_use]
pub fn top_keys<'s>(
    summaries: impl IntoIterator<Item = &'s Summary>,
    count: usize,
) -> Vec<TopKey<'s>> {
    let (_, keys) = merged(summaries);
    let mut keys: Vec<TopKey<'s>> = keys.collect();
    let rank = |top: &TopKey<'s>| (Reverse(top.estimate), top.error, top.key);
    if count < keys.len() {
        keys.select_nth_unstable_by_key(count, rank);
        keys.truncate(count);
    }
    keys.sort_unstable_by_key(rank);
    keys
}

/// Returns the floor of the merged summaries, and their keys in no particular order. The floor is
/// the upper bound for a key that is in none of the summaries.
fn merged<'s>(
    summaries: impl IntoIterator<Item = &'s Summary>,
) -> (u64, impl Iterator<Item = TopKey<'s>>) {
    let (mut floor, mut sums) = (0_u64, HashMap::<&'s [u8], Sums>::new());
    for summary in summaries {
        floor = floor.saturating_add(summary.floor());
        for (key, count, error) in summary.iter() {
            let sum = sums.entry(key).or_default();
            sum.count = sum.count.saturating_add(count);
            sum.error = sum.error.saturating_add(error);
            sum.floor = sum.floor.saturating_add(summary.floor());
        }
    }
    let keys = sums.into_iter().map(move |(key, sum)| {
        // If a summary does not contain the key, the key's sum in that part of the stream is
        // between 0 and the summary's floor. `sum.floor` can exceed `floor`, because a damaged
        // summary can contain a key twice.
        let unseen = floor.saturating_sub(sum.floor);
        TopKey {
            key,
            estimate: sum.count.saturating_add(unseen),
            error: sum.error.saturating_add(unseen),
        }
    });
    (floor, keys)
}
