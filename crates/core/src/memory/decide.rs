//! The steps of a decision, for one key and for several keys.

use std::cell::RefCell;

use smallvec::smallvec;

use super::{
    MemoryStore, ShardGuard,
    locked_shards::LockedShards,
    pending::KeyLocation,
    shard::{Full, Shard},
};
use crate::{
    algorithm::Outcome,
    eval::{
        Charge, Cost, Decision, Effect, Limits, Receipt, RequestError, Verdict, has_repeated_key,
    },
    hash_table::hash_with,
    time::Timestamp,
};

thread_local! {
    /// A buffer in which [`MemoryStore::verdict`] collects the outcomes of a decision.
    static OUTCOMES: RefCell<Vec<Outcome>> = const { RefCell::new(Vec::new()) };
}

impl MemoryStore {
    /// Decides whether to make `charges` at `now`. Either all of the charges are made or none.
    ///
    /// Clears `outcomes` and fills it with one outcome per limit, in the order of the charges and
    /// their limits. If a key is blocked or the store is full, no limit is evaluated and `outcomes`
    /// stays empty.
    ///
    /// If `now` is up to 10 seconds before the latest instant seen by the keys' shards, the store
    /// uses the latest instant instead. If the difference is larger, the clock was ahead and has
    /// been set back, and time continues from `now`.
    ///
    /// A call with two charges on the same key is rejected with [`Decision::UNDECIDABLE`], and
    /// nothing is charged. [`RuleSet::charges`] never creates two charges on the same key.
    ///
    /// If [`Self::save_and_seal`] took a key's state, the decision is [`Decision::SEALED`], and
    /// nothing is charged.
    ///
    /// [`RuleSet::charges`]: crate::RuleSet::charges
    pub fn check(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decision {
        self.decide(charges, now, effect, outcomes, None)
    }

    /// Decides like [`Self::check`]. If there is a `receipt`, records the charges in it.
    #[inline]
    pub(super) fn decide(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut Receipt>,
    ) -> Decision {
        outcomes.clear();
        if let Some(blocked) = Decision::of_blocked_charges(charges, effect, now) {
            return blocked;
        }
        let [charge] = charges else {
            return self.check_all(charges, now, effect, outcomes, receipt);
        };
        let (mut shard, hash, now) = self.lock_one(charge, now);
        if shard.is_sealed {
            return Decision::SEALED;
        }
        if receipt.is_none()
            && let Some(outcome) = shard.step_one(charge, hash, now, effect)
        {
            drop(shard);
            outcomes.push(outcome);
            return Decision::of_limits(outcome.allowed);
        }
        shard.check_one(charge, hash, now, effect, outcomes, receipt)
    }

    /// Checks `limits` on `key` and charges `cost`, as [`Self::check`] does, and returns the
    /// verdict.
    ///
    /// The caller does not need a buffer for the outcomes. With a single limit, the verdict takes
    /// no heap memory.
    ///
    /// # Errors
    ///
    /// Rejects the same keys as [`Charge::new`].
    #[inline]
    pub fn verdict<'r>(
        &self,
        key: &[u8],
        limits: &'r Limits,
        cost: Cost,
        now: Timestamp,
        effect: Effect,
    ) -> Result<Verdict<'r>, RequestError> {
        let charge = &Charge::new(key, limits, cost)?;
        let (mut shard, hash, now) = self.lock_one(charge, now);
        if shard.is_sealed {
            return Ok(Verdict::on(&Decision::SEALED, std::iter::once(limits), &[]));
        }
        if let Some(outcome) = shard.step_one(charge, hash, now, effect) {
            drop(shard);
            return Ok(Verdict::of_one(limits, outcome));
        }
        let verdict = OUTCOMES.with_borrow_mut(|outcomes| {
            outcomes.clear();
            let decision = shard.check_one(charge, hash, now, effect, outcomes, None);
            drop(shard);
            Verdict::on(&decision, std::iter::once(limits), outcomes)
        });
        Ok(verdict)
    }

    /// Locks the shard of the charge's key. Returns the shard, the key's hash and the latest
    /// instant.
    #[inline]
    fn lock_one(&self, charge: &Charge<'_>, now: Timestamp) -> (ShardGuard<'_>, u64, Timestamp) {
        let hash = hash_with(&self.hasher, charge.key);
        let mut shard = self.shards[self.shard_of(hash)].0.lock();
        let now = shard.latest(now);
        (shard, hash, now)
    }

    /// Decides whether to make `charges`, whatever their number. If there is a `receipt`, records
    /// the charges in it.
    fn check_all(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut Receipt>,
    ) -> Decision {
        let mut locked = LockedShards::lock(self, charges);
        // Equal keys are in the same shard, so compare the keys only if two keys share a shard.
        if locked.share_a_shard() && has_repeated_key(charges) {
            return Decision::UNDECIDABLE;
        }
        if locked.is_any_sealed() {
            return Decision::SEALED;
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
            // Evaluate every limit, even after a denial, because the outcome of each limit is
            // reported.
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

impl Shard {
    /// Makes the decision on a charge with a single plain GCRA limit, and updates the state in the
    /// key's entry. Returns `None` if [`Self::step_in_place`] cannot decide the charge.
    #[inline]
    fn step_one(
        &mut self,
        charge: &Charge<'_>,
        hash: u64,
        now: Timestamp,
        effect: Effect,
    ) -> Option<Outcome> {
        if effect != Effect::Charge {
            return None;
        }
        let gcra = charge.limits.sole_gcra()?;
        if charge.longest_wait.is_some() && gcra.is_queue() {
            return None;
        }
        self.step_in_place(charge, gcra, hash, now)
    }

    /// Makes the decision on one charge on the general path, step by step. If there is a `receipt`,
    /// records the charge in it.
    #[inline]
    fn check_one(
        &mut self,
        charge: &Charge<'_>,
        hash: u64,
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut Receipt>,
    ) -> Decision {
        if effect.can_deny()
            && let Some(until) = self.blocked(charge.key, now)
        {
            return Decision::blocked(0, until, now);
        }
        let alone = std::slice::from_ref(charge);
        let located = self.locate(charge, alone, hash, now, effect);
        let has_moved = self.evict_reserved(now, effect, located.is_ok());
        let located = match located {
            Ok(located) if has_moved => self.locate_again(hash, charge.key, located),
            Ok(located) => located,
            Err(Full { retry_after }) => {
                self.finish(effect);
                return Decision::Full { retry_after };
            }
        };
        let mut pending = self.open(charge, KeyLocation { hash, located }, now, effect);
        let admitted = pending.evaluate(now);
        if effect.can_deny() {
            pending.apply(admitted, now);
        }
        self.record_conversion(&pending, now);
        if let Some(receipt) = receipt {
            receipt.charged = smallvec![self.charge_record(&pending, now)];
        }
        let is_hot = pending.report(now, outcomes);
        if !effect.can_write() {
            self.put_back_lent(pending, now);
        } else if let Some(new_key) = self.put_back(pending, is_hot) {
            self.insert_pending(new_key, is_hot);
        }
        self.finish(effect);
        Decision::of_limits(admitted)
    }
}
