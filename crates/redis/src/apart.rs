//! Charges that lie in several slots of a cluster, or in one that is moving, where no script can decide them at once.
//!
//! ```text
//!            every slot charges ─▶ all admit:   admitted, after one round trip
//!                               └▶ one denies:  denied; the others give back what they charged, in one more
//! ```
//!
//! **Never too much.** What is admitted was charged in every slot, and each slot admits no more than its limits say. A slot brings
//! back a receipt of what it charged, and gives back this and nothing of anybody else's, as far as it is still there: core's
//! `receipt.rs` says what is sound about that. A ledger in the value, which is kept for a minute, knows what others have given back.
//!
//! **Denied by what is given back.** What is charged and will be given back denies others for a round trip. Were it so with every
//! request that is denied, a client far over its own limit would keep taking from a limit that it shares with others. So where
//! the same limits have denied one of the last sixteen requests, the slots are asked first, and charged if none denies: two round
//! trips, and what is denied by the first takes from nobody. Where a limit counts what is denied they are always asked first, because
//! only then is it known whether it is.
//!
//! **Unknown fates.** Nothing is sent twice. A charge or a give-back whose answer never came may leave its cost charged in its
//! slot. The others give back, and so they do when whoever asked has stopped waiting.
//!
//! **Lost states.** A receipt knows its place, not its owner. Where a failover or a reset took the charge away before it was given back,
//! and others have charged the same place since, it is theirs that is given back: as much too much as the charge, once.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;
use tidegate_core::{Charge, Decision, Effect, Outcome, Timestamp};

use crate::{
    RedisReceipt, RedisStore, StoreError,
    call::Intent,
    connect::slot,
    decode::Checked,
    encode,
    reserve::Asked,
    store::{Conversions, MAX_TRIES, OVERTAKEN},
};

/// The charges of one slot, and their numbers among all.
#[derive(Debug)]
pub(crate) struct Part<'c> {
    numbers: Vec<usize>,
    charges: Vec<Charge<'c>>,
}

/// What a slot answered: the instant, the values that it found, and receipts if it reserved; or that a key is blocked.
#[derive(Debug)]
enum Found {
    Values(Timestamp, Vec<Vec<u8>>, Vec<Vec<u8>>),
    Blocked(Decision),
}

/// A part's numbers, its decision, and its outcomes.
type Answer<'p> = (&'p [usize], Decision, Vec<Outcome>);

impl<'c> Part<'c> {
    /// Of its charges, among all.
    pub(crate) fn numbers(self) -> Vec<usize> {
        self.numbers
    }

    /// A part for each charge: those of one slot while it moves, some of whose keys are at another node already.
    pub(crate) fn each(charges: &[Charge<'c>]) -> Vec<Self> {
        let parts = charges.iter().enumerate().map(|(number, charge)| Self {
            numbers: vec![number],
            charges: vec![*charge],
        });
        parts.collect()
    }
}

impl RedisStore {
    /// The charges of each slot.
    pub(crate) fn parts<'c>(&self, charges: &[Charge<'c>]) -> Vec<Part<'c>> {
        let mut parts: BTreeMap<u16, Part<'c>> = BTreeMap::new();
        for (number, charge) in charges.iter().enumerate() {
            let part = parts.entry(slot(&self.key(charge.key))).or_insert(Part {
                numbers: Vec::new(),
                charges: Vec::new(),
            });
            part.numbers.push(number);
            part.charges.push(*charge);
        }
        parts.into_values().collect()
    }

    /// Decides the charges of several slots.
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
            // What is charged with the others at once cannot be given back by a limit that counts denials.
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

    /// The values that were found in other terms than those of the charges.
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

    /// Asks every slot; where one has no answer yet, because a state has to be converted or a calendar went on, all are asked again.
    /// Nothing where that does not help.
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

    /// The decision that the slots' answers come to.
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
        // Those that would have admitted it learn that others deny.
        for ((part, found), (_, decision, own)) in parts.iter().zip(found).zip(&mut answers) {
            if *decision == Decision::Admitted {
                *own = self.answer(part, found, Intent::Deny)?.1;
            }
        }
        Ok(sum_up(charges, &answers, outcomes))
    }

    /// What a slot has said, with every number that a caller sees.
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

/// The receipts of all slots, in the order of the charges.
fn receipts_of(parts: &[Part<'_>], found: Vec<Found>) -> Vec<Vec<u8>> {
    let mut by_charge: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (part, found) in parts.iter().zip(found) {
        if let Found::Values(_, _, receipts) = found {
            by_charge.extend(part.numbers.iter().copied().zip(receipts));
        }
    }
    by_charge.into_values().collect()
}

/// The decision that the parts come to, with their outcomes in the order of the charges. The block that stands longest
/// answers for all, as in one script.
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
    fn outcomes_come_in_the_order_of_the_charges_and_the_longest_block_answers() {
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
