//! The interface of a store. A store keeps its state in this process, or in a remote database that
//! several servers share.
//!
//! [`Store`] separates the callers from the state. A store always returns a decision. A store that
//! can become unreachable has a fallback policy for that, and [`StoreDecision`] says how the
//! decision was made.

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
    /// The charges of the request: either all of them are made, or none. If two charges have the
    /// same key, nothing is charged and the decision is [`Decision::REPEATED_KEY`]. If the fallback
    /// policy of a rule admits or denies without checking the rule's limits, the store removes the
    /// rule's charge from the list, so that the outcomes always belong to the remaining charges.
    pub charges: &'q mut Vec<Charge<'c>>,
    /// The current time, as read by the caller. A remote store uses its own clock.
    pub now: Timestamp,
    /// The effect on the state.
    pub effect: Effect,
    /// The time limit for a remote store, if it is shorter than the store's own.
    pub within: Option<Duration>,
    /// Whether a remote store searches its denial cache.
    pub cache_search: CacheSearch,
    /// Whether this is the rest of the cost of a request that has been decided before. A store that
    /// counts requests does not count it again.
    pub is_excess: bool,
}

/// Whether a remote store searches its denial cache for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheSearch {
    /// The store searches its denial cache.
    #[default]
    Due,
    /// The store does not search its denial cache. Either the store has just returned a pending
    /// result for the same request, so there is no cached denial; or the caller needs the current
    /// state of the limits.
    Skip,
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
            cache_search: CacheSearch::Due,
            is_excess: false,
        }
    }

    /// Creates a request that charges the rest of the cost of a request that has been decided
    /// before.
    #[must_use]
    pub fn excess(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Self {
        Self {
            is_excess: true,
            ..Self::new(charges, now, Effect::Charge)
        }
    }

    /// Creates a request that reads the current state of `charges` and charges nothing.
    #[must_use]
    pub fn look(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Self {
        Self::new(charges, now, Effect::Look)
    }
}

/// A decision, its exactness, and the component that made the decision.
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
    /// Returns `decision` as an exact decision of a memory store that is the only store.
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
/// A decision charges all charges of a request or none. A decision clears `outcomes` and then fills
/// it with one outcome for each limit, in the order of the charges and their limits. `outcomes`
/// stays empty if no limit was evaluated.
///
/// The result of an operation is [ready](MaybeReady::Ready) if no remote store had to be called. If
/// the result is [pending](MaybeReady::Pending), nothing has changed yet: neither the state, nor
/// the arguments. Dropping a future that was never polled changes nothing either. If a future is
/// dropped while it waits, the operation may or may not have been made.
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

    /// Decides and charges, and returns a receipt. With the receipt, the charges that remain in
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
    /// with one settlement each. The leases of these charges end, and unused units are refunded if
    /// the state still contains them. The call takes the receipt out of the option. Without a
    /// receipt there is nothing to settle.
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
            let now = Timestamp::from_micros(1);
            let request = StoreRequest::new(&mut charges, now, Effect::Charge);
            let decided = store.decide(request, &mut outcomes);
            assert_eq!(decided.into_inner(), StoreDecision::in_memory(expected));
        }
        assert_eq!(outcomes.len(), 1);
    }
}
