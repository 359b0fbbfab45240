//! What a store is asked and answers, wherever it keeps its state: in this process, or elsewhere with a fleet.
//!
//! [`Store`] is the seam between who asks and who decides. A store answers always: where one can be out of reach, it has a
//! policy for that, and says so in [`Decided`].

use std::{fmt, future, time::Duration};

use crate::{
    charge::{Charge, Effect},
    memory::MemoryStore,
    outcome::{Decision, Outcome},
    receipt::{Receipt, Renewal, Settlement},
    time::Timestamp,
    verdict::{Exactness, Source, Verdict},
};

/// What a store is asked.
#[derive(Debug)]
pub struct Question<'q, 'c> {
    /// What is to be charged. If two charges have one key, nothing is decided: the answer is
    /// [`Decision::REPEATED_KEY`]. Charges for which a policy answers are taken out, so that outcomes are
    /// always those of the charges that are left.
    pub charges: &'q mut Vec<Charge<'c>>,
    /// The time, which the caller read. A store elsewhere decides on its own.
    pub now: Timestamp,
    /// What is done to the state.
    pub effect: Effect,
    /// How long a store elsewhere may take, if less than a decision may.
    pub within: Option<Duration>,
}

impl<'q, 'c> Question<'q, 'c> {
    /// How the limits of `charges` stand.
    #[must_use]
    pub fn look(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Self {
        Self {
            charges,
            now,
            effect: Effect::Look,
            within: None,
        }
    }
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
    /// By what a charge is settled. One that is dropped gives nothing back, which is safe: the charge stays, and leases end
    /// by themselves.
    type Receipt: fmt::Debug + Send + Sync + 'static;

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

    /// Charges, and writes a receipt for it, by which what is left of `question.charges` can be [settled](Self::settle); there is
    /// none where nothing was charged.
    ///
    /// Asks the limits, whatever the effect of the question. A future that is dropped may have charged what was asked.
    fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = (Decided, Option<Self::Receipt>)> + Send;

    /// Settles `charges`, those that [`reserve`](Self::reserve) left in its question, one settlement each: their leases end,
    /// and what they did not need comes back, as far as it is still there.
    ///
    /// Where a store elsewhere cannot be asked nothing comes back there. A future that is dropped may have given back or
    /// not.
    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: Self::Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> impl Future<Output = ()> + Send;

    /// Renews the places of `charges`, those that [`reserve`](Self::reserve) left in its question, so that they are held from now on:
    /// who holds one for longer than its [lease](crate::Limits::lease) does so in time. What holds no places is left as it is.
    ///
    /// A future that is dropped may have renewed them or not.
    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Self::Receipt,
        now: Timestamp,
    ) -> impl Future<Output = Renewal> + Send;

    /// [`Self::reserve`], if nothing has to be waited for; `None` leaves everything as it was.
    fn reserve_now(
        &self,
        _question: &mut Question<'_, '_>,
        _outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<Self::Receipt>)> {
        None
    }

    /// [`Self::settle`], if nothing has to be waited for.
    ///
    /// # Errors
    ///
    /// Hands the receipt back where something has; everything is left as it was.
    fn settle_now(
        &self,
        _charges: &[Charge<'_>],
        receipt: Self::Receipt,
        _settlements: &[Settlement],
        _now: Timestamp,
    ) -> Result<(), Self::Receipt> {
        Err(receipt)
    }

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
    type Receipt = Receipt;

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

    fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = (Decided, Option<Receipt>)> + Send {
        future::ready(reserved(self, question, outcomes))
    }

    fn reserve_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<Receipt>)> {
        Some(reserved(self, question, outcomes))
    }

    fn settle_now(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<(), Receipt> {
        self.settle(charges, receipt, settlements, now);
        Ok(())
    }

    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> impl Future<Output = Renewal> + Send {
        future::ready(self.renew(charges, receipt, now))
    }

    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> impl Future<Output = ()> + Send {
        self.settle(charges, receipt, settlements, now);
        future::ready(())
    }
}

fn reserved(
    store: &MemoryStore,
    question: &Question<'_, '_>,
    outcomes: &mut Vec<Outcome>,
) -> (Decided, Option<Receipt>) {
    let (decision, receipt) = store.reserve(question.charges, question.now, outcomes);
    let receipt = Some(receipt).filter(|receipt| !receipt.is_empty());
    (Decided::in_memory(decision), receipt)
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
