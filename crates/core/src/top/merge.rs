//! Merges [summaries](Summary).

use std::cmp::Reverse;

use foldhash::{HashMap, HashMapExt as _};

use super::Summary;

/// A key in a list of top talkers. The true sum of the key is between `estimate - error` and
/// `estimate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKey<'s> {
    /// The key, without the scope of its rule.
    pub key: &'s [u8],
    /// The upper bound of the key's true bounds.
    pub estimate: u64,
    /// The difference between the upper and the lower bound of the true bounds.
    pub error: u64,
}

/// A key's bounds, added over all summaries that contain the key.
#[derive(Clone, Copy, Default)]
struct AddedBounds {
    estimate: u64,
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
    let (mut floor, mut added) = (0_u64, HashMap::<&'s [u8], AddedBounds>::new());
    for summary in summaries {
        floor = floor.saturating_add(summary.floor());
        for (key, estimate, error) in summary.iter() {
            let bounds = added.entry(key).or_default();
            bounds.estimate = bounds.estimate.saturating_add(estimate);
            bounds.error = bounds.error.saturating_add(error);
            bounds.floor = bounds.floor.saturating_add(summary.floor());
        }
    }
    let keys = added.into_iter().map(move |(key, bounds)| {
        // If a summary does not contain the key, the key's sum in that part of the stream is
        // between 0 and the summary's floor. `bounds.floor` can exceed `floor`, because a damaged
        // summary can contain a key twice.
        let unseen = floor.saturating_sub(bounds.floor);
        TopKey {
            key,
            estimate: bounds.estimate.saturating_add(unseen),
            error: bounds.error.saturating_add(unseen),
        }
    });
    (floor, keys)
}
