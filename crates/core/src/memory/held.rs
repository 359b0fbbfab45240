//! The shards of a decision over several keys.

use super::{Guard, MemoryStore, blocked, shard::Shard};
use crate::{charge::Charge, outcome::Decision, time::Timestamp};

/// The locks of all the shards of one decision, taken in order.
pub(super) struct Held<'s> {
    numbers: Vec<usize>,
    guards: Vec<Guard<'s>>,
}

impl<'s> Held<'s> {
    pub(super) fn lock(store: &'s MemoryStore, hashes: &[u64]) -> Self {
        let mut numbers: Vec<usize> = hashes.iter().map(|hash| store.shard_of(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let guards = numbers
            .iter()
            .map(|number| store.shards[*number].0.lock())
            .collect();
        Self { numbers, guards }
    }

    /// The shard of that number, which is one of those that were locked.
    pub(super) fn shard(&mut self, number: usize) -> &mut Shard {
        let at = self.numbers.partition_point(|held| *held < number);
        &mut self.guards[at]
    }

    pub(super) fn latest(&mut self, now: Timestamp) -> Timestamp {
        let latest = self
            .guards
            .iter_mut()
            .fold(now, |latest, shard| shard.latest(latest));
        self.guards
            .iter_mut()
            .fold(latest, |latest, shard| shard.latest(latest))
    }

    /// The block that stands longest, if any key is blocked.
    pub(super) fn blocked(
        &mut self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        hashes: &[u64],
        now: Timestamp,
    ) -> Option<Decision> {
        let mut longest: Option<(usize, Option<Timestamp>)> = None;
        for (index, (charge, hash)) in charges.iter().zip(hashes).enumerate() {
            if let Some(until) = self.shard(store.shard_of(*hash)).blocked(charge.key, now) {
                let rank = |until: Option<Timestamp>| until.unwrap_or(Timestamp::MAX);
                if longest.is_none_or(|(_, other)| rank(until) > rank(other)) {
                    longest = Some((index, until));
                }
            }
        }
        longest.map(|(index, until)| blocked(index, until, now))
    }

    pub(super) fn finish(&mut self) {
        self.guards.iter_mut().for_each(|shard| shard.finish());
    }
}
