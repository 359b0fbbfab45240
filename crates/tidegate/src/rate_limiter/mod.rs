//! The rate limiter interface used by the HTTP layers, and code shared by the layers and the rate
//! limiters.

mod excess;
mod owned_charges;
mod slot_turn;

use std::sync::Arc;

use tidegate_core::{
    CacheSearch, Charge, Effect, MaybeReady, Parents, Request, RequestError, RuleSet, Scratch,
    Span, Store, StoreRequest, Timestamp, Verdict,
};

use crate::Waiters;

pub use self::{
    excess::{charge_excess, excess_costs},
    owned_charges::{ChargesToRenew, OwnedCharge, OwnedCharges, StoredCharge},
    slot_turn::{CancelSignal, Receipts, SlotTurn, TurnBuffers, TurnResult, release_slots},
};

/// A decided request, for [`RateLimiter::observe`].
#[derive(Clone, Copy, Debug)]
pub struct DecidedRequest<'a> {
    /// The request.
    pub request: &'a Request<'a>,
    /// The rules under which the request was decided.
    pub rules: &'a RuleSet,
    /// The time of the decision.
    pub now: Timestamp,
}

impl<'a> DecidedRequest<'a> {
    /// Returns the key values of the rule named `rule`, in the order of the rule's key entries.
    /// Returns an empty list if no rule has the name `rule`. If the request lacks an entry of the
    /// key, the rule does not apply, and the value of that entry is empty.
    #[must_use]
    pub fn key_of(&self, rule: &str) -> Vec<&'a str> {
        let rule = self.rules.rule(rule);
        let names = rule.into_iter().flat_map(tidegate_core::Rule::key);
        names
            .map(|name| self.request.entry(name).unwrap_or_default())
            .collect()
    }
}

/// A rate limiter: an application's [`Limiter`](crate::Limiter), or the server's own
/// implementation.
///
/// For each request, a caller gets the active [`rules`](Self::rules) once, extracts the entries
/// that the rules use, and calls [`check`](Self::check).
pub trait RateLimiter: Send + Sync {
    /// The store of the limits.
    type Store: Store;

    /// Returns the current time. Callers read the time once for each request.
    fn now(&self) -> Timestamp;

    /// Returns the active rules. Each decision uses one rule set from beginning to end. A request
    /// that waits for a concurrency slot is decided again, under the rules that are active after
    /// the wait.
    fn rules(&self) -> Arc<RuleSet>;

    /// Returns the store of the limits.
    fn store(&self) -> &Self::Store;

    /// Returns the queues of the requests waiting for concurrency slots.
    fn wait_queues(&self) -> &Waiters;

    /// Decides `request` under `rules`, which must come from [`Self::rules`]. The result is ready
    /// immediately, unless the store has to wait for a reply.
    ///
    /// If the future is dropped while it waits, the caller cannot know whether the request was
    /// charged.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    #[inline]
    fn check<'a>(
        &self,
        rules: &'a RuleSet,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        effect: Effect,
    ) -> MaybeReady<
        Result<Verdict<'a>, RequestError>,
        impl Future<Output = Result<Verdict<'a>, RequestError>> + Send,
    > {
        let (store, now) = (self.store(), self.now());
        let mut charges = match rules.charges(request, now, scratch) {
            Ok(charges) if charges.is_empty() => {
                return MaybeReady::Ready(Ok(Verdict::unlimited()));
            }
            Ok(charges) => charges,
            Err(error) => return MaybeReady::Ready(Err(error)),
        };
        let mut outcomes = Vec::new();
        let turn = SlotTurn::new(effect, Span::ZERO);
        let pending_stretch = stretch(store, rules, &mut charges, now);
        if pending_stretch.is_none()
            && let Some(decided) = turn.decide_now(self, &mut charges, &mut outcomes, now)
        {
            return MaybeReady::Ready(Ok(decided.verdict(&charges, &outcomes)));
        }
        MaybeReady::Pending(async move {
            let cache_search = match pending_stretch {
                Some(pending) => {
                    pending.finish(store, &mut charges).await;
                    CacheSearch::Due
                }
                None => CacheSearch::Skip,
            };
            let turn = turn.with_cache_search(cache_search);
            let decided = turn.decide(self, &mut charges, &mut outcomes).await;
            Ok(decided.verdict(&charges, &outcomes))
        })
    }

    /// Decides and charges `request`, and passes the verdict and the rules to `finish`. If the
    /// request is denied only because no concurrency slot is free, and the limit lets requests
    /// [wait](tidegate_core::Limit::slot_wait), the request may wait up to `longest_wait` for a
    /// slot. The result is ready immediately, unless the store has to wait for a reply or the
    /// request has to wait for a slot.
    ///
    /// The request is decided under `rules`, which must come from [`Self::rules`]. After a wait,
    /// the request is decided under the rules that are active after the wait.
    ///
    /// If the future is dropped while the request waits, the next request moves to the front of the
    /// queue.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    fn check_within<T>(
        &self,
        rules: &Arc<RuleSet>,
        scratch: &mut Scratch,
        request: &Request<'_>,
        longest_wait: Span,
        finish: impl FnOnce(&Arc<RuleSet>, &Verdict<'_>) -> T,
    ) -> MaybeReady<Result<T, RequestError>, impl Future<Output = Result<T, RequestError>>> {
        let (store, now) = (self.store(), self.now());
        let mut outcomes = Vec::new();
        let mut turn = SlotTurn::new(Effect::Charge, longest_wait);
        match rules.charges(request, now, scratch) {
            Ok(charges) if charges.is_empty() => {
                return MaybeReady::Ready(Ok(finish(rules, &Verdict::unlimited())));
            }
            Ok(mut charges) => {
                if stretch(store, rules, &mut charges, now).is_none() {
                    if let Some(decided) = turn.decide_now(self, &mut charges, &mut outcomes, now) {
                        let verdict = decided.verdict(&charges, &outcomes);
                        return MaybeReady::Ready(Ok(finish(rules, &verdict)));
                    }
                    turn = turn.with_cache_search(CacheSearch::Skip);
                }
            }
            Err(error) => return MaybeReady::Ready(Err(error)),
        }
        MaybeReady::Pending(async move {
            let buffers = TurnBuffers {
                scratch,
                outcomes: &mut outcomes,
            };
            let finish = |decided: TurnResult<'_, _>| finish(decided.rules, &decided.verdict);
            turn.decide_request(self, rules, request, buffers, finish)
                .await
        })
    }

    /// Decides `request` again. The caller has already called [`check`](Self::check), but could not
    /// keep the pending result. The store's denial cache is not searched again.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    fn check_after_pending<'a>(
        &self,
        rules: &'a RuleSet,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        effect: Effect,
    ) -> impl Future<Output = Result<Verdict<'a>, RequestError>> + Send {
        let (store, now) = (self.store(), self.now());
        let charges = rules.charges(request, now, scratch);
        async move {
            let mut charges = charges?;
            if charges.is_empty() {
                return Ok(Verdict::unlimited());
            }
            if let Some(pending) = stretch(store, rules, &mut charges, now) {
                pending.finish(store, &mut charges).await;
            }
            let mut outcomes = Vec::new();
            let turn = SlotTurn::new(effect, Span::ZERO).with_cache_search(CacheSearch::Skip);
            let decided = turn.decide(self, &mut charges, &mut outcomes).await;
            Ok(decided.verdict(&charges, &outcomes))
        }
    }

    /// Records a verdict that is about to be applied, for metrics.
    fn observe(&self, _decided: DecidedRequest<'_>, _verdict: &Verdict<'_>) {}
}

/// Raises the limits of those elastic `charges` whose parent rules have enough unused capacity. If
/// the store has to wait for the state of the parent rules, no limit is raised yet. If the store
/// has to wait, the caller must [finish](PendingStretch::finish) the returned value.
#[inline]
pub fn stretch<'a, S: Store>(
    store: &S,
    rules: &'a RuleSet,
    charges: &mut [Charge<'a>],
    now: Timestamp,
) -> Option<PendingStretch<'a>> {
    let mut parents = rules.parents(charges)?;
    let mut outcomes = Vec::new();
    let look = StoreRequest::look(&mut parents.charges, now);
    if store.decide(look, &mut outcomes).is_ready() {
        parents.stretch(charges, &outcomes);
        return None;
    }
    Some(PendingStretch { parents, now })
}

/// The parent rules of elastic charges. The store still has to look up the state of these parent
/// rules.
#[derive(Debug)]
#[must_use]
pub struct PendingStretch<'a> {
    parents: Parents<'a>,
    now: Timestamp,
}

impl<'a> PendingStretch<'a> {
    /// Looks up the state of the parent rules, and raises the limits of `charges`. `charges` must
    /// be the charges that were passed to [`stretch`].
    pub async fn finish<S: Store>(self, store: &S, charges: &mut [Charge<'a>]) {
        let Self { mut parents, now } = self;
        let mut outcomes = Vec::new();
        let look = StoreRequest::look(&mut parents.charges, now);
        store.decide(look, &mut outcomes).await;
        parents.stretch(charges, &outcomes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tidegate_core::{
        Cost, DecisionAndReceipt, Headroom, MemoryBounds, MemoryStore, Outcome, Receipt, Renewal,
        Rule, Settlement, StoreDecision, UnusedShare,
    };

    use super::*;

    /// A memory store whose decisions are pending. Records the requests.
    struct RemoteStore {
        memory: MemoryStore,
        requests: Mutex<Vec<(Effect, CacheSearch)>>,
    }

    impl Store for RemoteStore {
        type Receipt = Receipt;

        fn decide(
            &self,
            request: StoreRequest<'_, '_>,
            outcomes: &mut Vec<Outcome>,
        ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
            let search = (request.effect, request.cache_search);
            self.requests.lock().unwrap().push(search);
            MaybeReady::Pending(async move { self.memory.decide(request, outcomes).into_inner() })
        }

        fn reserve(
            &self,
            request: StoreRequest<'_, '_>,
            outcomes: &mut Vec<Outcome>,
        ) -> MaybeReady<
            DecisionAndReceipt<Receipt>,
            impl Future<Output = DecisionAndReceipt<Receipt>> + Send,
        > {
            Store::reserve(&self.memory, request, outcomes)
        }

        fn settle(
            &self,
            charges: &[Charge<'_>],
            receipt: &mut Option<Receipt>,
            settlements: &[Settlement],
            now: Timestamp,
        ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
            Store::settle(&self.memory, charges, receipt, settlements, now)
        }

        fn renew(
            &self,
            charges: &[Charge<'_>],
            receipt: &mut Receipt,
            now: Timestamp,
        ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
            Store::renew(&self.memory, charges, receipt, now)
        }
    }

    struct RemoteLimiter {
        store: RemoteStore,
        rules: Arc<RuleSet>,
        waiters: Waiters,
    }

    impl RemoteLimiter {
        fn new(rules: Vec<Rule>) -> Self {
            Self {
                store: RemoteStore {
                    memory: MemoryStore::new(MemoryBounds::default()),
                    requests: Mutex::default(),
                },
                rules: Arc::new(RuleSet::build(rules, Vec::new()).unwrap()),
                waiters: Waiters::default(),
            }
        }

        fn take_requests(&self) -> Vec<(Effect, CacheSearch)> {
            std::mem::take(&mut *self.store.requests.lock().unwrap())
        }
    }

    impl RateLimiter for RemoteLimiter {
        type Store = RemoteStore;

        fn now(&self) -> Timestamp {
            Timestamp::from_micros(1)
        }

        fn rules(&self) -> Arc<RuleSet> {
            Arc::clone(&self.rules)
        }

        fn store(&self) -> &RemoteStore {
            &self.store
        }

        fn wait_queues(&self) -> &Waiters {
            &self.waiters
        }
    }

    fn rule(name: &str, limit: &str) -> Rule {
        Rule::new(name, vec![limit.parse().unwrap()]).unwrap()
    }

    fn elastic_rules() -> Vec<Rule> {
        let unused = Headroom::Unused(UnusedShare::new("all", 50).unwrap());
        let each = rule("each", "1/h").elastic(200, unused).unwrap();
        vec![each, rule("all", "4/h")]
    }

    #[tokio::test]
    async fn the_denial_cache_is_searched_once() {
        let limiter = RemoteLimiter::new(vec![rule("each", "3/h")]);
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let request = Request::new(&[], Cost::ONE).unwrap();
        let decided = limiter.check(&rules, &mut scratch, &request, Effect::Charge);
        assert!(decided.await.unwrap().allowed);
        let searched = |cache_search| (Effect::Charge, cache_search);
        let once = [searched(CacheSearch::Due), searched(CacheSearch::Skip)];
        assert_eq!(limiter.take_requests(), once);
        let is_allowed = |_: &_, verdict: &Verdict<'_>| verdict.allowed;
        let decided = limiter.check_within(&rules, &mut scratch, &request, Span::ZERO, is_allowed);
        assert!(decided.await.unwrap());
        assert_eq!(limiter.take_requests(), once);
        let decided = limiter.check_after_pending(&rules, &mut scratch, &request, Effect::Charge);
        assert!(decided.await.unwrap().allowed);
        assert_eq!(limiter.take_requests(), [searched(CacheSearch::Skip)]);
        let decided = limiter.check(&rules, &mut scratch, &request, Effect::Charge);
        assert!(!decided.await.unwrap().allowed);
    }

    /// The first call to the store only reports that the state of the parents is not ready.
    #[tokio::test]
    async fn the_cache_is_searched_after_the_parents_are_looked_up() {
        let limiter = RemoteLimiter::new(elastic_rules());
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let request = Request::new(&[], Cost::ONE).unwrap();
        for _ in 0..2 {
            let decided = limiter.check(&rules, &mut scratch, &request, Effect::Charge);
            assert!(decided.await.unwrap().allowed);
            let due = |effect| (effect, CacheSearch::Due);
            let effects = [Effect::Look, Effect::Look, Effect::Charge];
            assert_eq!(limiter.take_requests(), effects.map(due));
        }
    }
}
