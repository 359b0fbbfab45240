//! The interface of a store, whether it keeps its state in this process or remotely, shared by
//! several servers.
//!
//! [`Store`] separates the callers from the state. A store always returns a decision. A store that
//! can become unreachable has a fallback policy for that, and [`StoreDecision`] says how the decision was
//! made.

use std::{fmt, time::Duration};

use crate::{
    algorithm::Outcome,
    eval::{
        Charge, Decision, Effect, Exactness, Limits, Receipt, Renewal, Settlement, Source, Verdict,
    },
    maybe_ready::{MaybeReady, Never},
    memory::MemoryStore,
    time::Timestamp,
};

/// The input of a decision.
#[derive(Debug)]
pub struct StoreRequest<'q, 'c> {
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

impl<'q, 'c> StoreRequest<'q, 'c> {
    /// Creates a request with no time limit other than the store's own.
    #[must_use]
    pub fn new(charges: &'q mut Vec<Charge<'c>>, now: Timestamp, effect: Effect) -> Self {
        Self {
            charges,
            now,
            effect,
            within: None,
        }
    }

    /// Creates a request that reads the current state of `charges` and charges nothing.
    #[must_use]
    pub fn look(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Self {
        Self::new(charges, now, Effect::Look)
    }
}

/// A decision, with the component that made it and its exactness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreDecision {
    /// The decision: admitted, limited, blocked or full.
    pub decision: Decision,
    /// How exact the decision is.
    pub exactness: Exactness,
    /// Which component decided.
    pub source: Source,
}

impl StoreDecision {
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

/// A decision, and a receipt if anything was charged.
pub type DecisionAndReceipt<R> = (StoreDecision, Option<R>);

/// A store of limit states with atomic decisions.
///
/// A decision charges all charges of a request or none. It clears `outcomes` and then fills it
/// with one outcome for each limit, in the order of the charges and their limits. `outcomes` stays
/// empty if no limit was evaluated.
///
/// The result of an operation is [ready](MaybeReady::Ready) if no remote store had to be called. If
/// it is [pending](MaybeReady::Pending), nothing has changed yet: neither the state, nor the
/// arguments. Dropping a future that was never polled changes nothing either, but if it is dropped
/// while it waits, the operation may or may not have been made.
pub trait Store: Send + Sync {
    /// The receipt with which charges are settled. Dropping a receipt refunds nothing. That is
    /// safe: the charge stays, and leases expire.
    type Receipt: fmt::Debug + Send + Sync + 'static;

    /// Decides the request.
    fn decide(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send>;

    /// Decides and charges, and returns a receipt. With it, the charges that remain in
    /// `request.charges` can be [settled](Self::settle). There is no receipt if nothing was
    /// charged.
    ///
    /// The limits are always evaluated, whatever the effect of the request.
    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<Self::Receipt>,
        impl Future<Output = DecisionAndReceipt<Self::Receipt>> + Send,
    >;

    /// Settles `charges`, which must be those that [`reserve`](Self::reserve) left in its request,
    /// with one settlement each. Their leases end, and unused units are refunded if they are still
    /// in the state. This takes the receipt out of the option. Without a receipt there is nothing
    /// to settle.
    ///
    /// If a remote store is unreachable, nothing is refunded there.
    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<Self::Receipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send>;

    /// Renews the leases of `charges`, which must be those that [`reserve`](Self::reserve) left in
    /// its request. The new leases start now. A request that runs longer than its
    /// [lease](crate::Limits::lease) must renew the lease before it expires. Charges without
    /// concurrency slots are not affected.
    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Self::Receipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send>;

    /// Clears the denial cache. Callers do this after activating other rules.
    fn forget_denials(&self) {}
}

/// The memory store never waits.
#[expect(
    refining_impl_trait_reachable,
    reason = "callers may rely on a result that is always ready"
)]
impl Store for MemoryStore {
    type Receipt = Receipt;

    #[inline]
    fn decide(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, Never<StoreDecision>> {
        let StoreRequest {
            charges,
            now,
            effect,
            ..
        } = request;
        let decision = self.check(charges, now, effect, outcomes);
        MaybeReady::Ready(StoreDecision::in_memory(decision))
    }

    #[inline]
    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<DecisionAndReceipt<Receipt>, Never<DecisionAndReceipt<Receipt>>> {
        let (decision, receipt) = self.reserve(request.charges, request.now, outcomes);
        let receipt = Some(receipt).filter(|receipt| !receipt.is_empty());
        MaybeReady::Ready((StoreDecision::in_memory(decision), receipt))
    }

    #[inline]
    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<Receipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), Never<()>> {
        if let Some(receipt) = receipt.take() {
            self.settle(charges, receipt, settlements, now);
        }
        MaybeReady::Ready(())
    }

    #[inline]
    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, Never<Renewal>> {
        MaybeReady::Ready(self.renew(charges, receipt, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlgorithmName, Cost, LimitSpec, MemoryBounds, notation};

    #[test]
    fn memory_is_always_ready_and_charges_once() {
        let rate = notation::rate("1/h").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow).build();
        let limits = Limits::new(vec![limit.unwrap()]).unwrap();
        let store = MemoryStore::new(MemoryBounds::default());
        let mut outcomes = Vec::new();
        for expected in [Decision::Admitted, Decision::Limited] {
            let mut charges = vec![Charge::new(b"k", &limits, Cost::ONE).unwrap()];
            let request = StoreRequest {
                charges: &mut charges,
                now: Timestamp::from_micros(1),
                effect: Effect::Charge,
                within: None,
            };
            let decided = store.decide(request, &mut outcomes);
            assert_eq!(decided.into_inner(), StoreDecision::in_memory(expected));
        }
        assert_eq!(outcomes.len(), 1);
    }
}
