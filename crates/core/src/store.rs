//! What a store is asked and answers, wherever it keeps its state: in this process, or elsewhere with a fleet.
//!
//! [`Store`] is the seam between who asks and who decides. A store answers always: where one can be out of reach, it has a
//! policy for that, and says so in [`Decided`].

use std::{future, time::Duration};

use crate::{
    charge::{Charge, Effect},
    memory::MemoryStore,
    outcome::{Decision, Outcome},
    time::Timestamp,
    verdict::{Exactness, Source, Verdict},
};

/// What a store is asked.
#[derive(Debug)]
pub struct Question<'q, 'c> {
    /// What is to be charged; no two with one key. Charges for which a policy answers are taken out, so that outcomes are
    /// always those of the charges that are left.
    pub charges: &'q mut Vec<Charge<'c>>,
    /// The time, which the caller read. A store elsewhere decides on its own.
    pub now: Timestamp,
    /// What is done to the state.
    pub effect: Effect,
    /// How long a store elsewhere may take, if less than a decision may.
    pub within: Option<Duration>,
}

/// A decision, by whom it was made, and how exact it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// The decision.
    pub decision: Decision,
    /// How exact it is.
    pub exactness: Exactness,
    /// Who made it.
    pub source: Source,
}

impl Decided {
    /// A decision of the memory store, which is all there is.
    #[must_use]
    pub fn in_memory(decision: Decision) -> Self {
        Self {
            decision,
            exactness: Exactness::Exact,
            source: Source::Memory,
        }
    }

    /// The verdict on `charges`, given their `outcomes`.
    #[must_use]
    pub fn verdict<'r>(&self, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Verdict<'r> {
        let mut verdict = Verdict::of(&self.decision, charges, outcomes);
        verdict.exactness = self.exactness;
        verdict.source = self.source;
        verdict
    }
}

/// Where state lives and decisions are atomic.
///
/// A decision charges all of a question's charges, or none. It fills `outcomes`, which it clears first, with one outcome a
/// limit, in the order of the charges and their limits; there are none when no limit was asked.
pub trait Store: Send + Sync {
    /// Decides, if nothing has to be waited for; `None` leaves everything as it was.
    fn decide_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided>;

    /// Decides what [`Self::decide_now`] has just left open.
    ///
    /// A future that is dropped may have charged what was asked.
    fn decide_later(
        &self,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Decided> + Send;

    /// Forgets what was remembered of earlier answers, because other rules are in force.
    fn forget_denials(&self) {}

    /// Decides, and waits if need be.
    fn decide(
        &self,
        mut question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Decided> + Send {
        async move {
            match self.decide_now(&mut question, outcomes) {
                Some(decided) => decided,
                None => self.decide_later(question, outcomes).await,
            }
        }
    }
}

/// Never suspends.
impl Store for MemoryStore {
    fn decide_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        let Question {
            charges,
            now,
            effect,
            ..
        } = question;
        let decision = self.check(charges, *now, *effect, outcomes);
        Some(Decided::in_memory(decision))
    }

    fn decide_later(
        &self,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Decided> + Send {
        let Question {
            charges,
            now,
            effect,
            ..
        } = question;
        let decision = self.check(charges, now, effect, outcomes);
        future::ready(Decided::in_memory(decision))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;
    use crate::{AlgorithmName, Cost, LimitSpec, Limits, MemoryBounds, notation};

    #[test]
    fn memory_decides_now_and_charges_once() {
        let rate = notation::rate("1/h").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow).build();
        let limits = Limits::new(vec![limit.unwrap()]).unwrap();
        let store = MemoryStore::new(MemoryBounds::default());
        let mut outcomes = Vec::new();
        for expected in [Decision::Admitted, Decision::Limited] {
            let mut charges = vec![Charge::new(b"k", &limits, Cost::ONE).unwrap()];
            let question = Question {
                charges: &mut charges,
                now: Timestamp::from_micros(1),
                effect: Effect::Charge,
                within: None,
            };
            let decided = pin!(store.decide(question, &mut outcomes));
            let decided = decided.poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(decided, Poll::Ready(Decided::in_memory(expected)));
        }
        assert_eq!(outcomes.len(), 1);
    }
}
