//! Decides requests that no single script call can decide. The keys of a cross-slot request are in
//! several hash slots, or their slot is migrating.
//!
//! ```text
//!   every slot charges ─▶ all admit:   admitted, after one round trip
//!                      └▶ one denies:  denied; a second round trip refunds the others
//! ```
//!
//! **Never over the limit.** An admitted request was charged in every slot, and no slot admits a
//! request beyond its limits. Each slot returns a receipt for its charge. A refund with the receipt
//! returns only units of the charge that still count, and no units that other clients have charged;
//! the core crate's `receipt.rs` explains why. For one minute, the value also contains a refund
//! ledger, which records the refunds of other clients.
//!
//! **Denials caused by a charge that is refunded.** Until the refund arrives, one round trip later,
//! the charge can cause denials of other requests. If every denied request first charged some
//! slots, a client that far exceeds its own limit would repeatedly occupy units of a limit that it
//! shares with other clients. Therefore, the store first peeks if the same limits have denied one
//! of the last sixteen requests. A peek evaluates the limits in all slots without charging them.
//! The store then charges the slots only if no slot denies the request. A peek followed by a charge
//! takes two round trips, but a request that the peek denies is never charged. Limits that count
//! denied requests are always peeked first, because only the peek shows whether there is a denial
//! to count.
//!
//! **Unknown outcomes.** No call is sent twice. If the reply to a charge or a refund is lost, the
//! cost can stay charged in that slot. Every slot that has replied is refunded, even if the caller
//! has stopped waiting.
//!
//! **Lost states.** A receipt identifies a position in the state, not its owner. Suppose that a
//! failover or a reset removed a charge before it was refunded, and that other clients have charged
//! the same position since. The refund then reduces the charges of the other clients, but only
//! once, and at most by the original cost.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;
use tidegate_core::{Charge, Decision, Effect, Outcome, Timestamp};

use super::{CONTENDED, MAX_TRIES, reserve::CheckCall};
use crate::{
    RedisReceipt, RedisStore, StoreError, call::Intent, client::hash_slot, conversion::Conversions,
    decode::CheckReply, encode,
};

/// The charges of one hash slot, and the indices of these charges among all charges of the
/// request.
#[derive(Debug)]
pub(crate) struct HashSlotGroup<'c> {
    indices: Vec<usize>,
    charges: Vec<Charge<'c>>,
}

/// The reply from one hash slot.
#[derive(Debug)]
enum HashSlotReply {
    /// The values that were stored in the slot and, for a reservation, the receipts.
    Values {
        now: Timestamp,
        values: Vec<Vec<u8>>,
        /// The conversions that were used for the decision in this slot.
        conversions: Conversions,
        receipts: Vec<Vec<u8>>,
    },
    /// A key of the slot is blocked.
    Blocked(Decision),
}

/// The decision of one hash slot.
#[derive(Debug)]
struct HashSlotDecision<'g> {
    /// The indices of the slot's charges.
    indices: &'g [usize],
    decision: Decision,
    outcomes: Vec<Outcome>,
}

impl<'c> HashSlotGroup<'c> {
    /// Returns the indices of the group's charges among all charges.
    pub(crate) fn into_indices(self) -> Vec<usize> {
        self.indices
    }

    /// Creates one group per charge. Separate groups are needed if the slot is migrating and some
    /// of its keys are already on another node.
    pub(crate) fn one_per_charge(charges: &[Charge<'c>]) -> Vec<Self> {
        let groups = charges.iter().enumerate().map(|(index, charge)| Self {
            indices: vec![index],
            charges: vec![*charge],
        });
        groups.collect()
    }
}

impl RedisStore {
    /// Groups `charges` by hash slot.
    pub(crate) fn hash_slot_groups<'c>(&self, charges: &[Charge<'c>]) -> Vec<HashSlotGroup<'c>> {
        let mut groups: BTreeMap<u16, HashSlotGroup<'c>> = BTreeMap::new();
        for (index, charge) in charges.iter().enumerate() {
            let group = groups
                .entry(hash_slot(&self.key(charge.key)))
                .or_insert(HashSlotGroup {
                    indices: Vec::new(),
                    charges: Vec::new(),
                });
            group.indices.push(index);
            group.charges.push(*charge);
        }
        groups.into_values().collect()
    }

    /// Decides a request whose keys are in several hash slots.
    pub(crate) async fn check_across_hash_slots(
        &self,
        charges: &[Charge<'_>],
        effect: Effect,
        groups: &[HashSlotGroup<'_>],
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut RedisReceipt>,
    ) -> Result<Decision, StoreError> {
        match effect {
            Effect::Refund => {
                let mut decisions: Vec<HashSlotDecision<'_>> = Vec::with_capacity(groups.len());
                for group in groups {
                    let mut outcomes = Vec::new();
                    let decision = self.refund(&group.charges, &mut outcomes).await?;
                    decisions.push(HashSlotDecision {
                        indices: &group.indices,
                        decision,
                        outcomes,
                    });
                }
                Ok(combine(charges, &decisions, outcomes))
            }
            Effect::Peek | Effect::Look => {
                let intent = Intent::from_effect(effect);
                let Some(replies) = self.query_hash_slots(groups, intent, Vec::new()).await? else {
                    return Ok(CONTENDED);
                };
                self.decide_from_replies(charges, groups, &replies, intent, outcomes)
            }
            Effect::Charge => {
                let hint = self.denial_hints.hint_for(charges);
                let decided = self
                    .charge_across_hash_slots(charges, groups, outcomes, receipt)
                    .await;
                hint.record(decided == Ok(Decision::Admitted));
                decided
            }
        }
    }

    async fn charge_across_hash_slots(
        &self,
        charges: &[Charge<'_>],
        groups: &[HashSlotGroup<'_>],
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut RedisReceipt>,
    ) -> Result<Decision, StoreError> {
        let counts_denials = charges.iter().any(encode::counts_denials);
        let mut conversions = Vec::new();
        if counts_denials || self.denial_hints.hint_for(charges).should_peek() {
            let intent = Intent::Precheck;
            let Some(replies) = self.query_hash_slots(groups, intent, Vec::new()).await? else {
                return Ok(CONTENDED);
            };
            let decision = self.decide_from_replies(charges, groups, &replies, intent, outcomes)?;
            // A charge to a limit that counts denied requests cannot be refunded, so the store
            // charges this limit only after the replies for all other limits have arrived.
            conversions = self.conversions_per_hash_slot(groups, &replies)?;
            // The request is denied, but the store still writes the states that were converted
            // without loss, as for a request whose keys are all in one slot.
            let keeps_conversions = conversions.iter().any(Conversions::is_any_kept);
            if decision == Decision::Limited && (counts_denials || keeps_conversions) {
                let written = self
                    .query_hash_slots(groups, Intent::Deny, conversions)
                    .await;
                // The request is denied whether or not the values were written. Therefore a failed
                // write is an error only if a limit had to count the denial.
                return match written {
                    Err(error) if counts_denials => Err(error),
                    _ => Ok(decision),
                };
            }
            if decision != Decision::Admitted {
                return Ok(decision);
            }
        }
        let intent = Intent::Reserve;
        let Some(replies) = self.query_hash_slots(groups, intent, conversions).await? else {
            return Ok(CONTENDED);
        };
        let decision = self.decide_from_replies(charges, groups, &replies, intent, outcomes)?;
        if let Some(receipt) = receipt
            && decision == Decision::Admitted
        {
            receipt.charges = receipts_in_order(groups, replies);
        }
        Ok(decision)
    }

    /// Converts the values whose stored parameters differ from the parameters of the charges.
    fn conversions_per_hash_slot(
        &self,
        groups: &[HashSlotGroup<'_>],
        replies: &[HashSlotReply],
    ) -> Result<Vec<Conversions>, StoreError> {
        let of_group = |(group, reply): (&HashSlotGroup<'_>, &HashSlotReply)| match reply {
            HashSlotReply::Blocked(_) => Ok(Conversions::default()),
            HashSlotReply::Values { now, values, .. } => {
                self.conversions(&group.charges, values.clone(), *now, Intent::Reserve)
            }
        };
        groups.iter().zip(replies).map(of_group).collect()
    }

    /// Calls the script in every slot. The script cannot decide if a state must be converted or if
    /// a calendar window has ended. The store then calls the script again in all slots, up to
    /// `MAX_TRIES` times. Returns `None` if, in any slot, the script still cannot decide after the
    /// last try.
    async fn query_hash_slots(
        &self,
        groups: &[HashSlotGroup<'_>],
        intent: Intent,
        mut conversions: Vec<Conversions>,
    ) -> Result<Option<Vec<HashSlotReply>>, StoreError> {
        conversions.resize_with(groups.len(), Conversions::default);
        for _ in 0..MAX_TRIES {
            let calls = groups.iter().zip(&conversions);
            let calls = calls.map(|(group, conversions)| CheckCall {
                call: self.check_call(&group.charges, intent, conversions),
                charges: group.charges.len(),
            });
            let calls: Vec<CheckCall> = calls.collect();
            let checked = if intent == Intent::Reserve {
                self.reserve_all(calls).await?
            } else {
                try_join_all(calls.iter().map(|call| call.run(self))).await?
            };
            let is_blocked = |reply: &CheckReply| matches!(reply, CheckReply::Blocked { .. });
            let converts = intent.can_store_conversion() && !checked.iter().any(is_blocked);
            let mut replies = Vec::with_capacity(groups.len());
            for ((group, reply), conversions) in groups.iter().zip(checked).zip(&mut conversions) {
                match reply {
                    CheckReply::Outdated { now, values } if converts => {
                        *conversions = self.conversions(&group.charges, values, now, intent)?;
                    }
                    CheckReply::OutsideCalendar { .. } => {}
                    CheckReply::SplitHashSlot => return Err(StoreError::hash_slot_migrating()),
                    CheckReply::Blocked { now, charge, until } => {
                        replies.push(HashSlotReply::Blocked(Decision::blocked(
                            charge, until, now,
                        )));
                    }
                    CheckReply::Decided {
                        now,
                        values,
                        receipts,
                        ..
                    } => replies.push(HashSlotReply::Values {
                        now,
                        values,
                        conversions: conversions.clone(),
                        receipts,
                    }),
                    CheckReply::Outdated { now, values } => replies.push(HashSlotReply::Values {
                        now,
                        values,
                        conversions: Conversions::default(),
                        receipts: Vec::new(),
                    }),
                }
            }
            if replies.len() == groups.len() {
                return Ok(Some(replies));
            }
        }
        Ok(None)
    }

    /// Combines the replies of all slots into one decision.
    fn decide_from_replies(
        &self,
        charges: &[Charge<'_>],
        groups: &[HashSlotGroup<'_>],
        replies: &[HashSlotReply],
        intent: Intent,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decision, StoreError> {
        let mut decisions: Vec<HashSlotDecision<'_>> = Vec::with_capacity(groups.len());
        for (group, reply) in groups.iter().zip(replies) {
            decisions.push(self.decide_hash_slot(group, reply, intent)?);
        }
        let decision = combine(charges, &decisions, outcomes);
        if decision != Decision::Limited {
            return Ok(decision);
        }
        // For slots that would have admitted the request, the limits are reported as if another
        // limit of the slot had denied the request.
        for ((group, reply), slot) in groups.iter().zip(replies).zip(&mut decisions) {
            if slot.decision == Decision::Admitted {
                slot.outcomes = self.decide_hash_slot(group, reply, Intent::Deny)?.outcomes;
            }
        }
        Ok(combine(charges, &decisions, outcomes))
    }

    /// Computes the decision of one slot from its reply, including every number that a caller sees.
    fn decide_hash_slot<'g>(
        &self,
        group: &'g HashSlotGroup<'_>,
        reply: &HashSlotReply,
        intent: Intent,
    ) -> Result<HashSlotDecision<'g>, StoreError> {
        let mut outcomes = Vec::new();
        let decision = match reply {
            HashSlotReply::Blocked(decision) => decision.clone(),
            HashSlotReply::Values {
                now,
                values,
                conversions,
                ..
            } => {
                let replayed = self.replay(&group.charges, values, *now, intent)?;
                let decision = replayed.report(*now, &mut outcomes);
                conversions.report_drain_times(&group.charges, values, &mut outcomes);
                decision
            }
        };
        Ok(HashSlotDecision {
            indices: &group.indices,
            decision,
            outcomes,
        })
    }
}

/// Returns the receipts of all slots, in the order of the charges.
fn receipts_in_order(groups: &[HashSlotGroup<'_>], replies: Vec<HashSlotReply>) -> Vec<Vec<u8>> {
    let mut by_charge: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (group, reply) in groups.iter().zip(replies) {
        if let HashSlotReply::Values { receipts, .. } = reply {
            by_charge.extend(group.indices.iter().copied().zip(receipts));
        }
    }
    by_charge.into_values().collect()
}

/// Combines the decisions of the slots, with their outcomes in the order of the charges. If several
/// keys are blocked, the block that ends last is reported. A single script call would report the
/// same block.
fn combine(
    charges: &[Charge<'_>],
    slots: &[HashSlotDecision<'_>],
    outcomes: &mut Vec<Outcome>,
) -> Decision {
    outcomes.clear();
    let ends = |until: Option<Timestamp>| until.unwrap_or(Timestamp::MAX);
    let blocks = slots.iter().filter_map(|slot| match &slot.decision {
        Decision::Blocked {
            charge,
            until,
            retry_after,
        } => Some((slot.indices.get(*charge).copied()?, *until, *retry_after)),
        _ => None,
    });
    if let Some((charge, until, retry_after)) = blocks.max_by_key(|(_, until, _)| ends(*until)) {
        return Decision::Blocked {
            charge,
            until,
            retry_after,
        };
    }
    let mut by_charge: BTreeMap<usize, &[Outcome]> = BTreeMap::new();
    for slot in slots {
        let mut rest = slot.outcomes.as_slice();
        for index in slot.indices {
            let (own, others) = rest.split_at(charges[*index].limits.len().min(rest.len()));
            by_charge.insert(*index, own);
            rest = others;
        }
    }
    outcomes.extend(by_charge.into_values().flatten());
    let full = slots.iter().find_map(|slot| match slot.decision {
        Decision::Full { retry_after } => Some(retry_after),
        _ => None,
    });
    match full {
        Some(retry_after) => Decision::Full { retry_after },
        None if slots.iter().any(|slot| slot.decision == Decision::Limited) => Decision::Limited,
        None => Decision::Admitted,
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{
        AlgorithmName, Cost, LimitSpec, Limits, MemoryBounds, MemoryStore, RetryAfter, notation,
    };

    use super::*;

    #[test]
    fn outcomes_keep_the_order_of_charges_and_the_longest_block_wins() {
        let limits = |rate: &str| {
            let rate = notation::rate(rate).unwrap();
            let limit = LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)
                .build()
                .unwrap();
            Limits::new(vec![limit]).unwrap()
        };
        let (one, two, three) = (limits("1/h"), limits("2/h"), limits("3/h"));
        let charge =
            |limits, key: &'static str| Charge::new(key.as_bytes(), limits, Cost::ONE).unwrap();
        let charges = [charge(&one, "a"), charge(&two, "b"), charge(&three, "c")];
        let outcome = |number: usize| {
            let (store, mut outcomes) = (MemoryStore::new(MemoryBounds::default()), Vec::new());
            store.check(
                &charges[number..=number],
                Timestamp::default(),
                Effect::Charge,
                &mut outcomes,
            );
            outcomes.remove(0)
        };
        let first_slot = HashSlotDecision {
            indices: &[1],
            decision: Decision::Limited,
            outcomes: vec![outcome(1)],
        };
        let second_slot = HashSlotDecision {
            indices: &[0, 2],
            decision: Decision::Admitted,
            outcomes: vec![outcome(0), outcome(2)],
        };
        let mut outcomes = Vec::new();
        let slots = [first_slot, second_slot];
        assert_eq!(combine(&charges, &slots, &mut outcomes), Decision::Limited);
        assert_eq!(
            outcomes
                .iter()
                .map(|outcome| outcome.limit)
                .collect::<Vec<_>>(),
            [1, 2, 3]
        );

        let block = |charge, until| Decision::Blocked {
            charge,
            until,
            retry_after: RetryAfter::Never,
        };
        let early = Some(Timestamp::from_micros(1));
        let first_slot = HashSlotDecision {
            indices: &[1],
            decision: block(0, early),
            outcomes: Vec::new(),
        };
        let second_slot = HashSlotDecision {
            indices: &[0, 2],
            decision: block(1, None),
            outcomes: Vec::new(),
        };
        let slots = [first_slot, second_slot];
        assert_eq!(combine(&charges, &slots, &mut outcomes), block(2, None));
        assert!(outcomes.is_empty());
    }
}
