//! Charges that lie in several slots of a cluster, where no script can decide them at once.
//!
//! ```text
//! charge ─▶ what would each slot say? ─▶ one denies:  denied, charged nowhere
//!                                     └▶ none does:   every slot is charged
//! ```
//!
//! The slots of a step are asked at the same time. Another request may come in between the two steps, and one slot may deny
//! after all what the others have charged. That stays charged: to give it back without knowing what came in between could
//! admit too much. So never more passes than the limits say; at worst, in such a race, a denied request has spent some of them.
//! Limits that count denied requests do not count those that are denied here.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;
use tidegate_core::{Charge, Decision, Effect, Outcome, Timestamp};

use crate::{RedisStore, StoreError, connect::slot};

/// What one slot answered: which of the charges are its own, its decision, and its outcomes.
type Part = (Vec<usize>, Decision, Vec<Outcome>);

impl RedisStore {
    /// The charges of each slot, by their numbers.
    pub(crate) fn slots(&self, charges: &[Charge<'_>]) -> Vec<Vec<usize>> {
        let mut slots: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
        for (number, charge) in charges.iter().enumerate() {
            slots
                .entry(slot(&self.key(charge.key)))
                .or_default()
                .push(number);
        }
        slots.into_values().collect()
    }

    /// Decides the charges of several slots.
    pub(crate) async fn check_apart(
        &self,
        (slots, charges): (&[Vec<usize>], &[Charge<'_>]),
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decision, StoreError> {
        if effect == Effect::Charge {
            let mut parts = self.ask_slots(slots, charges, Effect::Peek).await?;
            let decision = sum_up(charges, &parts, outcomes);
            if decision == Decision::Limited {
                self.look_again(&mut parts, charges).await?;
                return Ok(sum_up(charges, &parts, outcomes));
            }
            if decision != Decision::Admitted {
                return Ok(decision);
            }
        }
        let parts = self.ask_slots(slots, charges, effect).await?;
        Ok(sum_up(charges, &parts, outcomes))
    }

    /// How the slots stand that would have admitted what others deny: they were asked as if they were to be charged.
    async fn look_again(
        &self,
        parts: &mut Vec<Part>,
        charges: &[Charge<'_>],
    ) -> Result<(), StoreError> {
        let admitted = parts.extract_if(.., |(_, decision, _)| *decision == Decision::Admitted);
        let slots: Vec<Vec<usize>> = admitted.map(|(numbers, _, _)| numbers).collect();
        parts.extend(self.ask_slots(&slots, charges, Effect::Look).await?);
        Ok(())
    }

    async fn ask_slots(
        &self,
        slots: &[Vec<usize>],
        charges: &[Charge<'_>],
        effect: Effect,
    ) -> Result<Vec<Part>, StoreError> {
        let asked = slots.iter().map(async |numbers| {
            let own: Vec<Charge<'_>> = numbers.iter().map(|number| charges[*number]).collect();
            let mut outcomes = Vec::new();
            let decision = self.check_together(&own, effect, &mut outcomes).await?;
            Ok((numbers.clone(), decision, outcomes))
        });
        try_join_all(asked).await
    }
}

/// The decision that the parts come to, with their outcomes in the order of the charges. The block that stands longest
/// answers for all, as in one script.
fn sum_up(charges: &[Charge<'_>], parts: &[Part], outcomes: &mut Vec<Outcome>) -> Decision {
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
        for number in numbers {
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
        let together: Part = (vec![0, 2], Decision::Admitted, vec![outcome(0), outcome(2)]);
        let mut outcomes = Vec::new();
        let parts = [(vec![1], Decision::Limited, vec![outcome(1)]), together];
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
        let parts = [
            (vec![1], block(0, early), Vec::new()),
            (vec![0, 2], block(1, None), Vec::new()),
        ];
        assert_eq!(sum_up(&charges, &parts, &mut outcomes), block(2, None));
        assert!(outcomes.is_empty());
    }
}
