//! The rate limiter interface that the HTTP layers use, and code that they share with it.

use std::sync::Arc;

use tidegate_core::{
    Charge, Effect, MaybeReady, Request, RequestError, RuleSet, Scratch, Store, StoreRequest,
    Timestamp, Verdict,
};

/// A rate limiter: an application's [`Limiter`](crate::Limiter), or a server's own.
///
/// For each request, a caller takes the current [`rules`](Self::rules) once, extracts the entries
/// that they use, and asks for a [decision](Self::check).
pub trait RateLimiter: Send + Sync {
    /// The store of the limits.
    type Store: Store;

    /// Returns the current time. Callers read it once for each request.
    fn now(&self) -> Timestamp;

    /// Returns the current rules. A request is decided under one rule set from beginning to end.
    fn rules(&self) -> Arc<RuleSet>;

    /// Returns the store of the limits.
    fn store(&self) -> &Self::Store;

    /// Decides `request` under `rules`, which must come from [`Self::rules`]. The result is ready
    /// unless the store has to wait.
    ///
    /// If the future is dropped while it waits, the request may or may not have been charged.
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
        let is_stretched = stretch(store, rules, &mut charges, now).is_ready();
        if is_stretched {
            let store_request = StoreRequest::new(&mut charges, now, effect);
            if let Some(decided) = store.decide(store_request, &mut outcomes).ready() {
                return MaybeReady::Ready(Ok(decided.verdict(&charges, &outcomes)));
            }
        }
        MaybeReady::Pending(async move {
            if !is_stretched {
                stretch(store, rules, &mut charges, now).await;
            }
            let store_request = StoreRequest::new(&mut charges, now, effect);
            let decided = store.decide(store_request, &mut outcomes).await;
            Ok(decided.verdict(&charges, &outcomes))
        })
    }

    /// Records a verdict that is about to be applied, for metrics.
    fn observe(&self, _verdict: &Verdict<'_>) {}
}

/// Raises the limits of those elastic `charges` whose parent rules have a sufficient unused share.
#[inline]
pub fn stretch<'a, S: Store>(
    store: &S,
    rules: &'a RuleSet,
    charges: &mut [Charge<'a>],
    now: Timestamp,
) -> MaybeReady<(), impl Future<Output = ()> + Send> {
    let Some(mut parents) = rules.parents(charges) else {
        return MaybeReady::Ready(());
    };
    let mut outcomes = Vec::new();
    let look = StoreRequest::look(&mut parents.charges, now);
    if store.decide(look, &mut outcomes).is_ready() {
        parents.stretch(charges, &outcomes);
        return MaybeReady::Ready(());
    }
    MaybeReady::Pending(async move {
        let look = StoreRequest::look(&mut parents.charges, now);
        store.decide(look, &mut outcomes).await;
        parents.stretch(charges, &outcomes);
    })
}
