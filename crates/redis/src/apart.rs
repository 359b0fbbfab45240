//! Decides charges that no single script call can decide: their keys are in several slots of a
//! cluster, or in one slot that is migrating.
//!
//! ```text
//!   every slot charges ─▶ all admit:   admitted, after one round trip
//!                      └▶ one denies:  denied; a second round trip refunds the others
//! ```
//!
//! **Never over the limit.** An admitted request was charged in every slot, and a slot never admits
//! beyond its limits. Each slot returns a receipt of its charge. A refund with that receipt refunds
//! what remains of this charge, and no charge of another client; core's `receipt.rs` explains why
//! that is sound. The value holds a refund ledger for a minute. It records the refunds of other
//! clients.
//!
//! **Denials by a charge that is refunded.** A charge that will be refunded can deny other requests
//! for one round trip. If every denied request did that, a client far over its own limit would
//! repeatedly occupy units of a limit that it shares with others. So if the same limits have denied
//! one of the last sixteen requests, the slots are peeked first, and charged only if none denies.
//! That takes two round trips, but a request that the peek denies is never charged. Limits that
//! count denied requests are always peeked first, because only the peek shows whether there is a
//! denial to count.
//!
//! **Unknown outcomes.** Nothing is sent twice. If the reply to a charge or a refund is lost, its
//! cost may stay charged in that slot. The other slots are refunded, even if the caller has stopped
//! waiting.
//!
//! **Lost states.** A receipt identifies a position in the state, not its owner. Suppose that a
//! failover or a reset removed a charge before it was refunded, and that other clients have charged
//! the same position since. The refund is then taken from their charge: once, and at most as much
//! as the original charge.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;
use tidegate_core::{Charge, Decision, Effect, Outcome, Timestamp};

use crate::{
    RedisReceipt, RedisStore, StoreError,
    call::Intent,
    client::hash_slot,
    decode::Checked,
    encode,
    reserve::Asked,
    store::{Conversions, MAX_TRIES, OVERTAKEN},
};

/// The charges of one cluster slot, and their indices among all charges of the request.
#[derive(Debug)]
pub(crate) struct Part<'c> {
    numbers: Vec<usize>,
    charges: Vec<Charge<'c>>,
}

/// The reply of one slot: either the instant, the stored values, and the receipts of a reservation,
/// or a blocked key.
#[derive(Debug)]
enum Found {
    Values(Timestamp, Vec<Vec<u8>>, Vec<Vec<u8>>),
    Blocked(Decision),
}

/// The indices of a part's charges, its decision, and its outcomes.
type Answer<'p> = (&'p [usize], Decision, Vec<Outcome>);

impl<'c> Part<'c> {
    /// Returns the indices of the part's charges among all charges.
    pub(crate) fn numbers(self) -> Vec<usize> {
        self.numbers
    }

    /// Makes one part per charge, for a slot that is migrating and has some of its keys on another
    /// node already.
    pub(crate) fn each(charges: &[Charge<'c>]) -> Vec<Self> {
        let parts = charges.iter().enumerate().map(|(number, charge)| Self {
            numbers: vec![number],
            charges: vec![*charge],
        });
        parts.collect()
    }
}

impl RedisStore {
    /// Groups `charges` by cluster slot.
    pub(crate) fn parts<'c>(&self, charges: &[Charge<'c>]) -> Vec<Part<'c>> {
        let mut parts: BTreeMap<u16, Part<'c>> = BTreeMap::new();
        for (number, charge) in charges.iter().enumerate() {
            let part = parts
                .entry(hash_slot(&self.key(charge.key)))
                .or_insert(Part {
                    numbers: Vec::new(),
                    charges: Vec::new(),
                });
            part.numbers.push(number);
            part.charges.push(*charge);
        }
        parts.into_values().collect()
    }

    /// Decides charges in several cluster slots.
    pub(crate) async fn check_apart(
        &self,
        (charges, effect): (&[Charge<'_>], Effect),
        parts: &[Part<'_>],
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut RedisReceipt>,
    ) -> Result<Decision, StoreError> {
        match effect {
            Effect::Refund => {
                let mut answers: Vec<Answer<'_>> = Vec::with_capacity(parts.len());
                for part in parts {
                    let mut own = Vec::new();
                    let decision = self.refund(&part.charges, &mut own).await?;
                    answers.push((&part.numbers, decision, own));
                }
                Ok(sum_up(charges, &answers, outcomes))
            }
            Effect::Peek | Effect::Look => {
                let intent = Intent::of(effect);
                let Some(found) = self.ask_apart(parts, intent, Vec::new()).await? else {
                    return Ok(OVERTAKEN);
                };
                self.weigh((charges, parts), &found, intent, outcomes)
            }
            Effect::Charge => {
                let wary = self.wariness.of(charges);
                let decided = self.charge_apart(charges, parts, outcomes, receipt).await;
                wary.note(decided == Ok(Decision::Admitted));
                decided
            }
        }
    }

    async fn charge_apart(
        &self,
        charges: &[Charge<'_>],
        parts: &[Part<'_>],
        outcomes: &mut Vec<Outcome>,
        receipt: Option<&mut RedisReceipt>,
    ) -> Result<Decision, StoreError> {
        let counts_denials = charges.iter().any(encode::counts_denials);
        let mut conversions = Vec::new();
        if counts_denials || self.wariness.of(charges).asks_first() {
            let foreseen = self.ask_apart(parts, Intent::Foresee, Vec::new()).await?;
            let Some(found) = foreseen else {
                return Ok(OVERTAKEN);
            };
            let decision = self.weigh((charges, parts), &found, Intent::Foresee, outcomes)?;
            // A limit that counts denied requests cannot refund a charge, so it is charged only
            // after all other limits have replied.
            conversions = self.conversions_apart(parts, &found)?;
            if decision == Decision::Limited && counts_denials {
                self.ask_apart(parts, Intent::Deny, conversions).await?;
                return Ok(decision);
            }
            if decision != Decision::Admitted {
                return Ok(decision);
            }
        }
        let reserved = self.ask_apart(parts, Intent::Reserve, conversions).await?;
        let Some(found) = reserved else {
            return Ok(OVERTAKEN);
        };
        let decision = self.weigh((charges, parts), &found, Intent::Reserve, outcomes)?;
        if let Some(receipt) = receipt
            && decision == Decision::Admitted
        {
            receipt.of_charges = receipts_of(parts, found);
        }
        Ok(decision)
    }

    /// Converts the values that were stored under other parameters than those of the charges.
    fn conversions_apart(
        &self,
        parts: &[Part<'_>],
        found: &[Found],
    ) -> Result<Vec<Conversions>, StoreError> {
        let of_part = |(part, found): (&Part<'_>, &Found)| match found {
            Found::Blocked(_) => Ok(Conversions::default()),
            Found::Values(now, values, _) => {
                self.conversions(&part.charges, values.clone(), *now, Intent::Reserve)
            }
        };
        parts.iter().zip(found).map(of_part).collect()
    }

    /// Queries every slot. If a slot cannot decide yet, because a state has to be converted or a
    /// calendar window has ended, all slots are queried again, up to `MAX_TRIES` times. Returns
    /// `None` if a slot still cannot decide.
    async fn ask_apart(
        &self,
        parts: &[Part<'_>],
        intent: Intent,
        mut conversions: Vec<Conversions>,
    ) -> Result<Option<Vec<Found>>, StoreError> {
        conversions.resize_with(parts.len(), Conversions::default);
        for _ in 0..MAX_TRIES {
            let questions = parts.iter().zip(&conversions);
            let questions = questions.map(|(part, conversions)| Asked {
                call: self.question(&part.charges, intent, conversions),
                charges: part.charges.len(),
            });
            let questions: Vec<Asked> = questions.collect();
            let checked = if intent == Intent::Reserve {
                self.reserve_all(questions).await?
            } else {
                let put = questions.iter().map(|asked| asked.put(self));
                try_join_all(put).await?
            };
            let is_blocked = |checked: &Checked| matches!(checked, Checked::Blocked { .. });
            let converts = intent.converts() && !checked.iter().any(is_blocked);
            let mut found = Vec::with_capacity(parts.len());
            for ((part, checked), conversions) in parts.iter().zip(checked).zip(&mut conversions) {
                match checked {
                    Checked::Outdated { now, values } if converts => {
                        *conversions = self.conversions(&part.charges, values, now, intent)?;
                    }
                    Checked::Lost { .. } => {}
                    Checked::Split => return Err(StoreError::split()),
                    Checked::Blocked { now, charge, until } => {
                        found.push(Found::Blocked(Decision::blocked(charge, until, now)));
                    }
                    Checked::Decided {
                        now,
                        values,
                        receipts,
                        ..
                    } => found.push(Found::Values(now, values, receipts)),
                    Checked::Outdated { now, values } => {
                        found.push(Found::Values(now, values, Vec::new()));
                    }
                }
            }
            if found.len() == parts.len() {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Combines the replies of all slots into one decision.
    fn weigh(
        &self,
        (charges, parts): (&[Charge<'_>], &[Part<'_>]),
        found: &[Found],
        intent: Intent,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decision, StoreError> {
        let mut answers: Vec<Answer<'_>> = Vec::with_capacity(parts.len());
        for (part, found) in parts.iter().zip(found) {
            let (decision, own) = self.answer(part, found, intent)?;
            answers.push((&part.numbers, decision, own));
        }
        let decision = sum_up(charges, &answers, outcomes);
        if decision != Decision::Limited {
            return Ok(decision);
        }
        // Slots that would have admitted the request report their limits as if another limit had
        // denied it.
        for ((part, found), (_, decision, own)) in parts.iter().zip(found).zip(&mut answers) {
            if *decision == Decision::Admitted {
                *own = self.answer(part, found, Intent::Deny)?.1;
            }
        }
        Ok(sum_up(charges, &answers, outcomes))
    }

    /// Computes the decision of one slot from its reply, including every number that a caller sees.
    fn answer(
        &self,
        part: &Part<'_>,
        found: &Found,
        intent: Intent,
    ) -> Result<(Decision, Vec<Outcome>), StoreError> {
        let mut own = Vec::new();
        let decision = match found {
            Found::Blocked(decision) => decision.clone(),
            Found::Values(now, values, _) => {
                let settled = self.replay(&part.charges, values, *now, intent)?;
                settled.report(*now, &mut own)
            }
        };
        Ok((decision, own))
    }
}

/// Returns the receipts of all slots, in the order of the charges.
fn receipts_of(parts: &[Part<'_>], found: Vec<Found>) -> Vec<Vec<u8>> {
    let mut by_charge: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (part, found) in parts.iter().zip(found) {
        if let Found::Values(_, _, receipts) = found {
            by_charge.extend(part.numbers.iter().copied().zip(receipts));
        }
    }
    by_charge.into_values().collect()
}

/// Combines the decisions of the parts, with their outcomes in the order of the charges. If several
/// keys are blocked, the block that ends last is reported, as a single script call would.
fn sum_up(charges: &[Charge<'_>], parts: &[Answer<'_>], outcomes: &mut Vec<Outcome>) -> Decision {
    outcomes.clear();
    let ends = |until: Option<Timestamp>| until.unwrap_or(Timestamp::MAX);
    let blocks = parts
        .iter()
        .filter_map(|(numbers, decision, _)| match decision {
            Decision::Blocked {
                charge,
                until,
                retry_after,
            } => Some((numbers.get(*charge).copied()?, *until, *retry_after)),
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
    for (numbers, _, found) in parts {
        let mut rest = found.as_slice();
        for number in *numbers {
            let (own, others) = rest.split_at(charges[*number].limits.len().min(rest.len()));
            by_charge.insert(*number, own);
            rest = others;
        }
    }
    outcomes.extend(by_charge.into_values().flatten());
    let full = parts.iter().find_map(|(_, decision, _)| match decision {
        Decision::Full { retry_after } => Some(*retry_after),
        _ => None,
    });
    match full {
        Some(retry_after) => Decision::Full { retry_after },
        None if parts
            .iter()
            .any(|(_, decision, _)| *decision == Decision::Limited) =>
        {
            Decision::Limited
        }
        None => Decision::Admitted,
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{
        AlgorithmName, Cost, LimitSpec, Limits, MemoryBounds, MemoryStore, Retry, notation,
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
        let together: Answer<'_> = (&[0, 2], Decision::Admitted, vec![outcome(0), outcome(2)]);
        let mut outcomes = Vec::new();
        let alone: Answer<'_> = (&[1], Decision::Limited, vec![outcome(1)]);
        let parts = [alone, together];
        assert_eq!(sum_up(&charges, &parts, &mut outcomes), Decision::Limited);
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
            retry_after: Retry::Never,
        };
        let early = Some(Timestamp::from_micros(1));
        let alone: Answer<'_> = (&[1], block(0, early), Vec::new());
        let together: Answer<'_> = (&[0, 2], block(1, None), Vec::new());
        let parts = [alone, together];
        assert_eq!(sum_up(&charges, &parts, &mut outcomes), block(2, None));
        assert!(outcomes.is_empty());
    }
}
