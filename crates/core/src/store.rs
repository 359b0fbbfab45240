//! The store interface. A store holds the limit states of every key, in this process or in a remote
//! database that several servers share.
//!
//! A [`Store`] always returns a decision. If a remote database is unreachable, the decision follows
//! the fallback policy. The [`StoreDecision`] reports how the decision was made.

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

/// A request for a store's decision.
#[derive(Debug)]
pub struct StoreRequest<'q, 'c> {
    /// The charges of the request. The store makes either all of the charges or none of them. If
    /// two charges have the same key, nothing is charged and the decision is
    /// [`Decision::UNDECIDABLE`]. If a request is decided by a rule's fallback policy without
    /// checking the rule's limits, the store removes the rule's charge from the list. The returned
    /// outcomes are always for the remaining charges.
    pub charges: &'q mut Vec<Charge<'c>>,
    /// The current time according to the caller's clock. A remote store uses its own clock instead.
    pub now: Timestamp,
    /// The effect of the decision on the state.
    pub effect: Effect,
    /// The timeout for a remote store. The timeout has an effect only if it is shorter than the
    /// store's own timeout.
    pub within: Option<Duration>,
    /// Whether a remote store searches its denial cache.
    pub cache_search: CacheSearch,
    /// Whether and how the decision is counted.
    pub accounting: Accounting,
}

/// How a store records a decision in its metrics, its lists of top keys and its list of denials.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accounting {
    /// The decision is for a client's request, and is counted.
    #[default]
    Request,
    /// The decision is one of several attempts for a waiting request. The store does not count the
    /// decision in the metrics. The caller counts only the last attempt, with [`Store::count`].
    Attempt,
    /// The charges are the remaining cost of a request that has already been decided. The store
    /// does not count the request again.
    Excess,
    /// The decision only reads the state of the limits, for example for an explanation. Such a
    /// decision is not for a client's request, and is not counted.
    Inspection,
}

/// Whether a remote store searches its denial cache for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheSearch {
    /// The store searches its denial cache.
    #[default]
    Due,
    /// The store does not search its denial cache. The caller has just received a pending result
    /// for the same request, so there is no cached denial for the request. The caller can also skip
    /// the search because it needs the current state of the limits.
    Skip,
}

impl<'q, 'c> StoreRequest<'q, 'c> {
    /// Creates a request with the store's own timeout.
    #[must_use]
    pub fn new(charges: &'q mut Vec<Charge<'c>>, now: Timestamp, effect: Effect) -> Self {
        Self {
            charges,
            now,
            effect,
            within: None,
            cache_search: CacheSearch::Due,
            accounting: Accounting::Request,
        }
    }

    /// Creates a request that charges the remaining cost of a request that has already been
    /// decided.
    #[must_use]
    pub fn excess(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Self {
        Self {
            accounting: Accounting::Excess,
            ..Self::new(charges, now, Effect::Charge)
        }
    }

    /// Creates a request that reads the current state of the limits of `charges` and charges
    /// nothing. The request is not counted in the metrics.
    #[must_use]
    pub fn look(charges: &'q mut Vec<Charge<'c>>, now: Timestamp) -> Self {
        Self {
            accounting: Accounting::Inspection,
            ..Self::new(charges, now, Effect::Look)
        }
    }
}

/// A decision, with its exactness and the component that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreDecision {
    /// The decision: admitted, limited, blocked or full.
    pub decision: Decision,
    /// Whether the decision was made with the authoritative state.
    pub exactness: Exactness,
    /// The component that decided the request.
    pub source: Source,
}

impl StoreDecision {
    /// Returns `decision` as an exact decision of the memory store, in a configuration without
    /// Redis.
    #[must_use]
    pub fn in_memory(decision: Decision) -> Self {
        Self {
            decision,
            exactness: Exactness::Exact,
            source: Source::Memory,
        }
    }

    /// Returns the verdict on a request with these `charges`, given the `outcomes` of their limits.
    #[must_use]
    pub fn verdict<'r>(&self, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Verdict<'r> {
        self.verdict_on(charges.iter().map(|charge| charge.limits), outcomes)
    }

    /// Returns the verdict on a request that was charged to these `limits`, given their `outcomes`.
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

/// A decision, with a receipt if anything was charged.
#[derive(Debug)]
pub struct DecisionAndReceipt<R> {
    /// The decision.
    pub decision: StoreDecision,
    /// The receipt of the charges; `None` if nothing was charged or no receipt was wanted.
    pub receipt: Option<R>,
}

impl<R> DecisionAndReceipt<R> {
    /// Returns a decision that charged nothing, or whose caller wants no receipt.
    #[must_use]
    pub fn without_receipt(decision: StoreDecision) -> Self {
        Self {
            decision,
            receipt: None,
        }
    }

    /// Returns the verdict on a request with these `charges`, given the `outcomes` of their limits.
    #[must_use]
    pub fn verdict<'r>(&self, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Verdict<'r> {
        self.decision.verdict(charges, outcomes)
    }

    /// Returns the same decision, with the receipt converted by `wrap`.
    #[must_use]
    pub fn map_receipt<T>(self, wrap: impl FnOnce(R) -> T) -> DecisionAndReceipt<T> {
        let Self { decision, receipt } = self;
        DecisionAndReceipt {
            decision,
            receipt: receipt.map(wrap),
        }
    }
}

/// A store for limit states. Decisions are atomic.
///
/// The store makes either all charges of a request or none. The store replaces the contents of
/// `outcomes` with one outcome for each limit, in the order of the charges and their limits. If no
/// limit was evaluated, `outcomes` is empty.
///
/// The result of an operation is [ready](MaybeReady::Ready) if no remote store had to be called. If
/// the result is [pending](MaybeReady::Pending), neither the state nor the arguments have changed
/// yet. Dropping a future that was never polled changes nothing. If a future is dropped after it
/// was polled, it is unknown whether the operation takes effect.
pub trait Store: Send + Sync {
    /// The receipt of a decision, used to settle its charges. Dropping a receipt is safe: nothing
    /// is refunded, the charges stay counted, and the leases expire.
    type Receipt: fmt::Debug + Send + Sync + 'static;

    /// Decides `request` and makes its charges, depending on its effect.
    fn decide(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send>;

    /// Decides `request`, makes its charges if it is admitted, and returns a receipt. The receipt
    /// is for [settling](Self::settle) the charges that remain in `request.charges`. The receipt is
    /// `None` if nothing was charged.
    ///
    /// This method ignores `request.effect`, and always decides with [`Effect::Charge`].
    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<Self::Receipt>,
        impl Future<Output = DecisionAndReceipt<Self::Receipt>> + Send,
    >;

    /// Settles `charges`, which must be the charges that [`reserve`](Self::reserve) left in the
    /// request. `settlements` contains one settlement for each charge. Settling releases the
    /// concurrency slots of the charges, and refunds the unused units that still count in the
    /// stored state. The method takes the value out of `receipt`, and does nothing if `receipt` is
    /// `None`.
    ///
    /// If a remote store is unreachable, the method refunds nothing.
    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<Self::Receipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send>;

    /// Renews the leases of `charges`, which must be the charges that [`reserve`](Self::reserve)
    /// left in the request. The new leases start at `now`. A request that runs longer than its
    /// [lease](crate::Limits::lease) must renew the lease before it expires. Charges without
    /// concurrency slots are not affected.
    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Self::Receipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send>;

    /// Counts a decision on `charges` in the metrics. The decision must have been made with
    /// [`Accounting::Attempt`]. `evaluated` contains the charges that the decision left in the
    /// request, and `outcomes` contains the outcomes of their limits.
    fn count(
        &self,
        _now: Timestamp,
        _charges: &[Charge<'_>],
        _evaluated: &[Charge<'_>],
        _decided: &StoreDecision,
        _outcomes: &[Outcome],
    ) {
    }

    /// Clears the denial cache. Call this method after activating new rules.
    fn clear_denial_cache(&self) {}
}

/// The memory store never waits.
#[expect(
    refining_impl_trait_reachable,
    reason = "callers may depend on the result being ready immediately"
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
        MaybeReady::Ready(DecisionAndReceipt {
            decision: StoreDecision::in_memory(decision),
            receipt,
        })
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
