//! The decision: every step that one takes, over one key or over several.

use super::{MemoryStore, held::Held, pending::Place, room::Full, shard::hash_with};
use crate::{
    charge::{Charge, Effect, has_repeated_key},
    outcome::{Decision, Outcome},
    receipt::Receipt,
    time::Timestamp,
};

impl MemoryStore {
    /// Decides `charges` at `now`: all are charged, or none.
    ///
    /// `outcomes` is cleared and filled with one outcome a limit, in the order of the charges and their
    /// limits; it stays empty when no limit was asked, because a key is blocked or the store is full. An
    /// instant earlier than one that the keys' shards have seen counts as the latest seen.
    ///
    /// Two charges with one key are not decided: the answer is [`Decision::REPEATED_KEY`] and nothing is
    /// charged. [`RuleSet::charges`] never makes such charges.
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
            self.check_all((charges, now, effect), outcomes, None)
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
            && let Some(schedule) = charge.limits.sole_schedule()
            && (charge.longest_wait.is_none() || !schedule.is_queue())
            && let Some(outcome) = shard.step_in_place(charge, schedule, hash, now)
        {
            drop(shard);
            outcomes.push(outcome);
            return Decision::of_limits(outcome.allowed);
        }
        if effect.asks()
            && let Some(until) = shard.blocked(charge.key, now)
        {
            return Decision::blocked(0, until, now);
        }
        let alone = std::slice::from_ref(charge);
        let located = shard.locate((charge, alone), hash, now, effect);
        let has_moved = shard.carry_out(now, effect);
        let located = match located {
            Ok(located) if has_moved => shard.locate_again(hash, charge.key, located),
            Ok(located) => located,
            Err(Full { retry_after }) => {
                shard.finish(effect);
                return Decision::Full { retry_after };
            }
        };
        let mut pending = shard.open(charge, Place { hash, located }, now, effect);
        let admitted = pending.ask(now);
        if effect.asks() {
            pending.settle(admitted, now);
        }
        let pressed = pending.report(now, outcomes);
        if !effect.writes() {
            shard.put_back_lent(pending, now);
        } else if let Some(newcomer) = shard.put_back(pending, pressed) {
            shard.insert_pending(newcomer, pressed);
        }
        shard.finish(effect);
        Decision::of_limits(admitted)
    }

    /// Decides any number of charges, and writes down what was charged if there is a `receipt`.
    pub(super) fn check_all(
        &self,
        (charges, now, effect): (&[Charge<'_>], Timestamp, Effect),
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut Receipt>,
    ) -> Decision {
        let mut held = Held::lock(self, charges);
        // Two keys can only be equal if they share a shard, so most calls skip the comparison.
        if held.share_a_shard() && has_repeated_key(charges) {
            return Decision::REPEATED_KEY;
        }
        let now = held.latest(now);
        if effect.asks()
            && let Some(decision) = held.blocked(now)
        {
            return decision;
        }
        let places = match held.locate(now, effect) {
            Ok(places) => places,
            Err(Full { retry_after }) => {
                held.finish(effect);
                return Decision::Full { retry_after };
            }
        };
        let mut pending = held.open(places, now, effect);
        let mut admitted = true;
        for pending in &mut pending {
            // Every limit is asked, whatever the others say: each has its own answer.
            admitted &= pending.ask(now);
        }
        if effect.asks() {
            pending
                .iter_mut()
                .for_each(|pending| pending.settle(admitted, now));
        }
        if let Some(receipt) = receipt {
            receipt.charged = held.charged(&pending, now);
        }
        let pressed: Vec<bool> = pending
            .iter()
            .map(|pending| pending.report(now, outcomes))
            .collect();
        if effect.writes() {
            held.put_back(pending.into_iter().zip(pressed));
        } else {
            held.put_back_lent(pending, now);
        }
        held.finish(effect);
        Decision::of_limits(admitted)
    }
}
