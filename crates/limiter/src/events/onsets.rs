//! A table of the keys with recent events. The table ensures that a key has at most one event of a
//! type in each window.

use std::sync::{Mutex, PoisonError};

use tidegate_core::{Span, Timestamp};

/// The number of shards. Sharding makes it unlikely that threads wait for each other's locks.
const SHARDS: usize = 16;

/// The associativity: the number of slots in which a given key can be stored.
const WAYS: usize = 4;

/// The number of sets of [`WAYS`] slots in each shard. All shards together take 1 MiB.
const SETS: usize = 1_024;

/// The minimum time between two events about a key. Without a minimum, a key that exhausts a
/// per-second limit could cause an event every second.
const MIN_QUIET: Span = Span::from_secs(60);

/// The maximum quiet period of a key after an event.
pub(super) const MAX_QUIET: Span = Span::from_secs(24 * 3_600);

/// A set-associative table of keys, indexed by hash. If the set of a new key is full, the key in
/// the set whose quiet period ends first is evicted. The evicted key may then have its next event
/// too early.
#[derive(Debug)]
pub(super) struct Onsets(Box<[Mutex<Vec<Slot>>]>);

/// The hash of a key, and the end of its quiet period in microseconds. The hash is 0 in a slot that
/// was never used.
type Slot = [u64; 2];

impl Onsets {
    pub(super) fn new() -> Self {
        let shard = |_| Mutex::new(vec![[0; 2]; SETS * WAYS]);
        Self((0..SHARDS).map(shard).collect())
    }

    /// If the key with this hash is not in a quiet period at `now`, begins a quiet period and
    /// returns true. A quiet period is as long as `window`, but at least [`MIN_QUIET`] and at most
    /// [`MAX_QUIET`]. The hash must depend on a secret, so that clients cannot choose keys that
    /// share a set.
    pub(super) fn try_begin(&self, hash: u64, now: Timestamp, window: Span) -> bool {
        let hash = hash.max(1);
        let [shard, set] = split(hash);
        let mut slots = self.0[shard].lock().unwrap_or_else(PoisonError::into_inner);
        let set = &mut slots[set * WAYS..(set + 1) * WAYS];
        let known = set.iter_mut().position(|slot| slot[0] == hash);
        let slot = match known {
            Some(at) if set[at][1] > now.as_micros() => return false,
            Some(at) => &mut set[at],
            None => {
                let oldest = set.iter_mut().min_by_key(|slot| slot[1]);
                oldest.expect("a set has slots")
            }
        };
        let quiet = window.clamp(MIN_QUIET, MAX_QUIET);
        *slot = [hash, now.after(quiet).as_micros()];
        true
    }
}

/// Returns the shard and the set of a hash.
fn split(hash: u64) -> [usize; 2] {
    let bits =
        |number: u64, count: usize| usize::try_from(number % count as u64).unwrap_or_default();
    [bits(hash, SHARDS), bits(hash / SHARDS as u64, SETS)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(secs * 1_000_000)
    }

    #[test]
    fn a_key_has_one_event_in_each_window() {
        let onsets = Onsets::new();
        let hour = Span::from_secs(3_600);
        assert!(onsets.try_begin(7, at(100), hour));
        assert!(!onsets.try_begin(7, at(3_699), hour));
        assert!(onsets.try_begin(8, at(100), hour));
        assert!(onsets.try_begin(7, at(3_700), hour));
        // With a short window, a key has at most one event a minute. With a very long window, it
        // has at most one event a day.
        assert!(onsets.try_begin(9, at(0), Span::from_secs(1)));
        assert!(!onsets.try_begin(9, at(59), Span::from_secs(1)));
        assert!(onsets.try_begin(9, at(60), Span::from_secs(1)));
        assert!(onsets.try_begin(10, at(0), Span::from_secs(30 * 86_400)));
        assert!(onsets.try_begin(10, at(86_400), Span::from_secs(1)));
    }

    #[test]
    fn the_key_whose_quiet_period_ends_first_makes_room() {
        let onsets = Onsets::new();
        // Hashes that differ only in the bits above the shard and the set share one set.
        let hash = |key: u64| (key + 1) * (SHARDS * SETS) as u64;
        for key in 0..WAYS as u64 {
            assert!(onsets.try_begin(hash(key), at(key), MIN_QUIET));
        }
        assert!(onsets.try_begin(hash(100), at(10), MIN_QUIET));
        assert!(onsets.try_begin(hash(0), at(10), MIN_QUIET), "was evicted");
        assert!(
            !onsets.try_begin(hash(2), at(10), MIN_QUIET),
            "is still known"
        );
    }
}
