//! The interface of a store, whether it keeps its state in this process or remotely, shared by
//! several servers.
//!
//! [`Store`] separates the callers from the state. A store always returns a decision. A store that
//! can become unreachable has a fallback policy for that, and [`Decided`] says how the decision was
//! made.

use std::{fmt, future, time::Duration};

use crate::{
    algorithm::Outcome,
    eval::{
        Charge, Decision, Effect, Exactness, Limits, Receipt, Renewal, Settlement, Source, Verdict,
    },
    memory::MemoryStore,
    time::Timestamp,
};

/// The input of a decision.
#[derive(Debug)]
pub struct Question<'q, 'c> {
    /// The charges to decide. If two charges have the same key, nothing is charged and the decision
    /// is [`Decision::REPEATED_KEY`]. If a fallback policy decides a charge without its limits, the
    /// store removes that charge from the list, so that the outcomes always belong to the remaining
    /// charges.
    pub charges: &'q mut Vec<Charge<'c>>,
    /// The current time, as read by the caller. A remote store uses its own clock.
    pub now: Timestamp,
    /// The effect on the state.
    pub effect: Effect,
    /// The time limit for a remote store, if it is shorter than the store's own.
    pub within: Option<Duration>,
}

impl<'q, 'c> Question<'q, 'c> {
    /// Creates a question that reads the current state of `charges` and charges nothing.
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

/// A decision, with the component that made it and its exactness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// The decision: admitted, limited, blocked or full.
    pub decision: Decision,
    /// How exact the decision is.
    pub exactness: Exactness,
    /// Which component decided.
    pub source: Source,
}

impl Decided {
    /// Returns `decision` as one of a memory store that is the only store.
    #[must_use]
    pub fn in_memory(decision: Decision) -> Self {
        Self {
            decision,
            exactness: Exactness::Exact,
            source: Source::Memory,
        }
    }

    /// Returns the verdict on `charges`, given their `outcomes`.
    #[must_use]
    pub fn verdict<'r>(&self, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Verdict<'r> {
        self.verdict_on(charges.iter().map(|charge| charge.limits), outcomes)
    }

    /// Returns the verdict on charges with these limits, given their `outcomes`.
    #[must_use]
    pub fn verdict_on<'r>(
        &self,
        limits: impl Iterator<Item = &'r Limits> + Clone,
        outcomes: &[Outcome],
    ) -> Verdict<'r> {
        let mut verdict = Verdict::on(&self.decision, limits, outcomes);
        verdict.exactness = self.exactness;
        verdict.source = self.source;
        verdict
    }
}

/// A store of limit states with atomic decisions.
///
/// A decision charges all charges of a question or none. It clears `outcomes` and then fills it
/// with one outcome for each limit, in the order of the charges and their limits. `outcomes` stays
/// empty if no limit was evaluated.
pub trait Store: Send + Sync {
    /// The receipt with which charges are settled. Dropping a receipt refunds nothing. That is
    /// safe: the charge stays, and leases expire.
    type Receipt: fmt::Debug + Send + Sync + 'static;

    /// Decides without waiting. Returns `None` and changes nothing if the decision requires
    /// waiting.
    fn decide_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided>;

    /// Decides a question for which [`Self::decide_now`] has just returned `None`.
    ///
    /// If the future is dropped, the charges may or may not have been made.
    fn decide_later(
        &self,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Decided> + Send;

    /// Decides and charges, and returns a receipt. With it, the charges that remain in
    /// `question.charges` can be [settled](Self::settle). There is no receipt if nothing was
    /// charged.
    ///
    /// The limits are always evaluated, whatever the effect of the question. If the future is
    /// dropped, the charges may or may not have been made.
    fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = (Decided, Option<Self::Receipt>)> + Send;

    /// Settles `charges`, which must be those that [`reserve`](Self::reserve) left in its question,
    /// with one settlement each. Their leases end, and unused units are refunded if they are still
    /// in the state.
    ///
    /// If a remote store is unreachable, nothing is refunded there. If the future is dropped, the
    /// refund may or may not have been made.
    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: Self::Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> impl Future<Output = ()> + Send;

    /// Renews the leases of `charges`, which must be those that [`reserve`](Self::reserve) left in
    /// its question. The new leases start now. A request that runs longer than its
    /// [lease](crate::Limits::lease) must renew the lease before it expires. Charges without
    /// concurrency slots are not affected.
    ///
    /// If the future is dropped, the leases may or may not have been renewed.
    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Self::Receipt,
        now: Timestamp,
    ) -> impl Future<Output = Renewal> + Send;

    /// Does the same as [`Self::reserve`] without waiting. Returns `None` and changes nothing if
    /// the reservation requires waiting.
    fn reserve_now(
        &self,
        _question: &mut Question<'_, '_>,
        _outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<Self::Receipt>)> {
        None
    }

    /// Does the same as [`Self::settle`] without waiting.
    ///
    /// # Errors
    ///
    /// Returns the receipt and changes nothing if settling requires waiting.
    fn settle_now(
        &self,
        _charges: &[Charge<'_>],
        receipt: Self::Receipt,
        _settlements: &[Settlement],
        _now: Timestamp,
    ) -> Result<(), Self::Receipt> {
        Err(receipt)
    }

    /// Clears the denial cache. Callers do this after activating other rules.
    fn forget_denials(&self) {}

    /// Decides, and waits if necessary.
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

/// The memory store never suspends.
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
    use crate::{AlgorithmName, Cost, LimitSpec, MemoryBounds, notation};

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
