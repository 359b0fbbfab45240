//! Decisions: the sequence of steps, for one key and for several.

use super::{
    MemoryStore, eviction::Full, locked_shards::LockedShards, pending::KeyLocation,
    shard::hash_with,
};
use crate::{
    algorithm::Outcome,
    eval::{Charge, Decision, Effect, Receipt, has_repeated_key},
    time::Timestamp,
};

impl MemoryStore {
    /// Decides `charges` at `now`: charges either all or none of them.
    ///
    /// Clears `outcomes` and fills it with one outcome per limit, in the order of the charges and
    /// their limits. It stays empty if no limit was evaluated because a key is blocked or the store
    /// is full.
    ///
    /// If `now` is up to 10 seconds earlier than the latest instant that the keys' shards have
    /// seen, that instant is used instead. If it is earlier by more, the clock was ahead and has
    /// been set back, and time continues from `now`.
    ///
    /// Two charges with the same key are refused with [`Decision::REPEATED_KEY`], and nothing is
    /// charged. [`RuleSet::charges`] never creates such charges.
    ///
    /// [`RuleSet::charges`]: crate::RuleSet::charges
    pub fn check(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        outcomes.clear();
        if let [charge] = charges {
            self.check_one(charge, now, effect, outcomes)
        } else {
            self.check_all(charges, now, effect, outcomes, None)
        }
    }

    #[inline]
    fn check_one(
        &self,
        charge: &Charge<'_>,
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        let hash = hash_with(&self.hasher, charge.key);
        let mut shard = self.shards[self.shard_of(hash)].0.lock();
        let now = shard.latest(now);
        if effect == Effect::Charge
            && let Some(gcra) = charge.limits.sole_gcra()
            && (charge.longest_wait.is_none() || !gcra.is_queue())
            && let Some(outcome) = shard.step_in_place(charge, gcra, hash, now)
        {
            drop(shard);
            outcomes.push(outcome);
            return Decision::of_limits(outcome.allowed);
        }
        if effect.can_deny()
            && let Some(until) = shard.blocked(charge.key, now)
        {
            return Decision::blocked(0, until, now);
        }
        let alone = std::slice::from_ref(charge);
        let located = shard.locate(charge, alone, hash, now, effect);
        let has_moved = shard.evict_reserved(now, effect, located.is_ok());
        let located = match located {
            Ok(located) if has_moved => shard.locate_again(hash, charge.key, located),
            Ok(located) => located,
            Err(Full { retry_after }) => {
                shard.finish(effect);
                return Decision::Full { retry_after };
            }
        };
        let mut pending = shard.open(charge, KeyLocation { hash, located }, now, effect);
        let admitted = pending.evaluate(now);
        if effect.can_deny() {
            pending.apply(admitted, now);
        }
        shard.record_conversion(&pending, now);
        let is_hot = pending.report(now, outcomes);
        if !effect.can_write() {
            shard.put_back_lent(pending, now);
        } else if let Some(new_key) = shard.put_back(pending, is_hot) {
            shard.insert_pending(new_key, is_hot);
        }
        shard.finish(effect);
        Decision::of_limits(admitted)
    }

    /// Decides any number of charges. If there is a `receipt`, records in it what was charged.
    pub(super) fn check_all(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut Receipt>,
    ) -> Decision {
        let mut locked = LockedShards::lock(self, charges);
        // Equal keys are in the same shard, so most calls skip the comparison.
        if locked.share_a_shard() && has_repeated_key(charges) {
            return Decision::REPEATED_KEY;
        }
        let now = locked.latest(now);
        if effect.can_deny()
            && let Some(decision) = locked.blocked(now)
        {
            return decision;
        }
        let locations = match locked.locate(now, effect) {
            Ok(locations) => locations,
            Err(Full { retry_after }) => {
                locked.finish(effect);
                return Decision::Full { retry_after };
            }
        };
        let mut pending = locked.open(locations, now, effect);
        let mut admitted = true;
        for pending in &mut pending {
            // Evaluate every limit, even after a denial: each reports its own outcome.
            admitted &= pending.evaluate(now);
        }
        if effect.can_deny() {
            pending
                .iter_mut()
                .for_each(|pending| pending.apply(admitted, now));
        }
        locked.record_conversions(&pending, now);
        if let Some(receipt) = receipt {
            receipt.charged = locked.charged(&pending, now);
        }
        let is_hot: Vec<bool> = pending
            .iter()
            .map(|pending| pending.report(now, outcomes))
            .collect();
        if effect.can_write() {
            locked.put_back(pending.into_iter().zip(is_hot));
        } else {
            locked.put_back_lent(pending, now);
        }
        locked.finish(effect);
        Decision::of_limits(admitted)
    }
}
