//! The locks of a decision over several keys. The decision holds the locks of all shards at once.

use super::{
    MemoryStore, ShardGuard,
    pending::{KeyLocation, PendingCharge},
    shard::{Full, Shard},
};
use crate::{
    eval::{Charge, ChargeRecords, Decision, Effect},
    hash_table::{hash_with, prefetch},
    time::Timestamp,
};

/// The charges of a decision, and the locks of all their shards. Locks are acquired in ascending
/// order of the shard index, so that decisions cannot deadlock.
pub(super) struct LockedShards<'s, 'c> {
    store: &'s MemoryStore,
    charges: &'c [Charge<'c>],
    /// The hash of each charge's key.
    hashes: Vec<u64>,
    numbers: Vec<usize>,
    guards: Vec<ShardGuard<'s>>,
}

impl<'s, 'c> LockedShards<'s, 'c> {
    pub(super) fn lock(store: &'s MemoryStore, charges: &'c [Charge<'c>]) -> Self {
        let hashes: Vec<u64> = charges
            .iter()
            .map(|charge| hash_with(&store.hasher, charge.key))
            .collect();
        let mut numbers: Vec<usize> = hashes.iter().map(|hash| store.shard_of(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for number in &numbers {
            prefetch(&store.shards[*number]);
        }
        let guards: Vec<ShardGuard<'s>> = numbers
            .iter()
            .map(|number| store.shards[*number].0.lock())
            .collect();
        let locked = Self {
            store,
            charges,
            hashes,
            numbers,
            guards,
        };
        for hash in &locked.hashes {
            locked.guards[locked.guard_index(*hash)].prefetch(*hash);
        }
        locked
    }

    /// Returns whether at least two of the charges have keys in the same shard.
    pub(super) fn share_a_shard(&self) -> bool {
        self.numbers.len() < self.charges.len()
    }

    /// Returns whether another process has taken over at least one of the shards.
    pub(super) fn is_any_sealed(&self) -> bool {
        self.guards.iter().any(|shard| shard.is_sealed)
    }

    pub(super) fn latest(&mut self, now: Timestamp) -> Timestamp {
        // Each shard knows only the latest instant that it has seen itself, so use the latest of
        // all shards' instants.
        let latest = self
            .guards
            .iter_mut()
            .fold(now, |latest, shard| latest.max(shard.latest(now)));
        for shard in &mut self.guards {
            shard.advance(latest);
        }
        latest
    }

    /// Returns the denial for the block that expires last, or `None` if no key is blocked.
    pub(super) fn blocked(&mut self, now: Timestamp) -> Option<Decision> {
        let mut longest: Option<(usize, Option<Timestamp>)> = None;
        for (index, charge) in self.charges.iter().enumerate() {
            if let Some(until) = self.shard(self.hashes[index]).blocked(charge.key, now) {
                let rank = |until: Option<Timestamp>| until.unwrap_or(Timestamp::MAX);
                if longest.is_none_or(|(_, other)| rank(until) > rank(other)) {
                    longest = Some((index, until));
                }
            }
        }
        longest.map(|(index, until)| Decision::blocked(index, until, now))
    }

    /// Finds the entries of all keys and reserves room for the memory that the charges add. After
    /// this call, entries stay in their slots until [`Self::put_back`].
    pub(super) fn locate(
        &mut self,
        now: Timestamp,
        effect: Effect,
    ) -> Result<Vec<KeyLocation>, Full> {
        let charges = self.charges;
        let located: Result<Vec<_>, Full> = charges
            .iter()
            .enumerate()
            .map(|(index, charge)| {
                let hash = self.hashes[index];
                self.shard(hash).locate(charge, charges, hash, now, effect)
            })
            .collect();
        for shard in &mut self.guards {
            shard.evict_reserved(now, effect, located.is_ok());
        }
        let located = located?.into_iter().enumerate();
        let locations = located.map(|(index, located)| {
            let hash = self.hashes[index];
            let located = self
                .shard(hash)
                .locate_again(hash, charges[index].key, located);
            KeyLocation { hash, located }
        });
        Ok(locations.collect())
    }

    /// Takes the states of all charges out of their entries.
    pub(super) fn open(
        &mut self,
        locations: Vec<KeyLocation>,
        now: Timestamp,
        effect: Effect,
    ) -> Vec<PendingCharge<'c>> {
        let located = self.charges.iter().zip(locations);
        located
            .map(|(charge, location)| {
                self.shard(location.hash)
                    .open(charge, location, now, effect)
            })
            .collect()
    }

    /// Records in the refund ledgers which states were converted to other limits.
    pub(super) fn record_conversions(&mut self, pending: &[PendingCharge<'_>], now: Timestamp) {
        for pending in pending {
            self.shard(pending.location.hash)
                .record_conversion(pending, now);
        }
    }

    /// Returns the charge records for the receipt.
    pub(super) fn charged(
        &mut self,
        pending: &[PendingCharge<'_>],
        now: Timestamp,
    ) -> ChargeRecords {
        let charged = pending.iter().map(|pending| {
            let shard = self.shard(pending.location.hash);
            shard.charge_record(pending, now)
        });
        charged.collect()
    }

    /// Writes the decision's states back. Existing entries are written before new keys are
    /// inserted, because an insertion can move entries.
    pub(super) fn put_back(&mut self, decided: impl Iterator<Item = (PendingCharge<'c>, bool)>) {
        let mut new_keys = Vec::new();
        for (pending, is_hot) in decided {
            let hash = pending.location.hash;
            let new_key = self.shard(hash).put_back(pending, is_hot);
            new_keys.extend(new_key.map(|new_key| (hash, new_key, is_hot)));
        }
        for (hash, new_key, is_hot) in new_keys {
            self.shard(hash).insert_pending(new_key, is_hot);
        }
    }

    /// Puts back the states that a read-only decision has used without a copy.
    pub(super) fn put_back_lent(&mut self, pending: Vec<PendingCharge<'c>>, now: Timestamp) {
        for pending in pending {
            self.shard(pending.location.hash)
                .put_back_lent(pending, now);
        }
    }

    pub(super) fn finish(mut self, effect: Effect) {
        for shard in &mut self.guards {
            shard.finish(effect);
        }
    }

    /// Returns the shard for this hash, which must be one of the locked shards.
    fn shard(&mut self, hash: u64) -> &mut Shard {
        let index = self.guard_index(hash);
        &mut self.guards[index]
    }

    /// Returns the index in `guards` of the shard for this hash.
    fn guard_index(&self, hash: u64) -> usize {
        let number = self.store.shard_of(hash);
        self.numbers.partition_point(|locked| *locked < number)
    }
}
