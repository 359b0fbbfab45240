//! The rate limiter interface that the HTTP layers use, and code that they share with it.

use std::{
    future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tidegate_core::{
    Charge, Decided, Effect, Outcome, Question, Request, RequestError, RuleSet, Scratch, Store,
    Timestamp, Verdict,
};

/// A rate limiter: an application's [`Limiter`](crate::Limiter), or a server's own.
///
/// For each request, a caller takes the current [`rules`](Self::rules) once, extracts the entries
/// that they use, and asks for a decision. The caller first tries to decide [without
/// waiting](Self::check_now). Only if that is not possible, it [waits](Self::check).
pub trait Gate: Send + Sync {
    /// The store of the limits.
    type Store: Store;

    /// Returns the current time. Callers read it once for each request.
    fn now(&self) -> Timestamp;

    /// Returns the current rules. A request is decided under one rule set from beginning to end.
    fn rules(&self) -> Arc<RuleSet>;

    /// Returns the store of the limits.
    fn store(&self) -> &Self::Store;

    /// Decides `request` under `rules`, which must come from [`Self::rules`]. Waits if necessary.
    ///
    /// If the future is dropped, the request may or may not have been charged.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    fn check<'a>(
        &self,
        rules: &'a RuleSet,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        effect: Effect,
    ) -> impl Future<Output = Result<Verdict<'a>, RequestError>> + Send {
        async move {
            let asked = (self, rules, request, effect);
            let verdict = check(Patient, asked, scratch).await?;
            Ok(verdict.expect(ANSWERED))
        }
    }

    /// Does the same as [`Self::check`] without waiting. Returns `None` and changes nothing if the
    /// decision requires waiting.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    fn check_now<'a>(
        &self,
        rules: &'a RuleSet,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        effect: Effect,
    ) -> Result<Option<Verdict<'a>>, RequestError> {
        at_once(check(AtOnce, (self, rules, request, effect), scratch))
    }

    /// Records a verdict that is about to be applied, for metrics.
    fn observe(&self, _verdict: &Verdict<'_>) {}
}

/// The way to call a store: with or without waiting. The callers are generic over it.
pub trait Asks: Copy + Send + Sync {
    /// Returns the decision of the store, or `None`, in which case nothing has changed.
    fn decide<S: Store>(
        self,
        store: &S,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Option<Decided>> + Send;

    /// Does the same, and returns a receipt for the charges.
    fn reserve<S: Store>(
        self,
        store: &S,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Option<(Decided, Option<S::Receipt>)>> + Send;
}

/// Does not wait. A call that would have to wait returns `None`.
#[derive(Clone, Copy, Debug)]
pub struct AtOnce;

/// Waits if necessary, so that there is always a result.
#[derive(Clone, Copy, Debug)]
pub struct Patient;

/// The panic message if a [`Patient`] call returns no result, which cannot happen.
pub const ANSWERED: &str = "a call that may wait always returns a result";

impl Asks for AtOnce {
    fn decide<S: Store>(
        self,
        store: &S,
        mut question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Option<Decided>> + Send {
        future::ready(store.decide_now(&mut question, outcomes))
    }

    fn reserve<S: Store>(
        self,
        store: &S,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Option<(Decided, Option<S::Receipt>)>> + Send {
        future::ready(store.reserve_now(question, outcomes))
    }
}

impl Asks for Patient {
    async fn decide<S: Store>(
        self,
        store: &S,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        Some(store.decide(question, outcomes).await)
    }

    async fn reserve<S: Store>(
        self,
        store: &S,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<S::Receipt>)> {
        Some(store.reserve(question, outcomes).await)
    }
}

/// Polls a future that uses only [`AtOnce`]. Such a future is ready when it is first polled.
#[inline]
pub fn at_once<T>(asked: impl Future<Output = T>) -> T {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(asked).poll(&mut context) {
        Poll::Ready(answer) => answer,
        Poll::Pending => unreachable!("a call that does not wait is ready at once"),
    }
}

/// Decides a request under rules, with the given effect.
async fn check<'a, A: Asks, G: Gate + ?Sized>(
    asks: A,
    (gate, rules, request, effect): (&G, &'a RuleSet, &Request<'_>, Effect),
    scratch: &'a mut Scratch,
) -> Result<Option<Verdict<'a>>, RequestError> {
    let now = gate.now();
    let mut charges = rules.charges(request, now, scratch)?;
    if charges.is_empty() {
        return Ok(Some(Verdict::unlimited()));
    }
    let store = gate.store();
    if stretch(asks, (store, rules), &mut charges, now)
        .await
        .is_none()
    {
        return Ok(None);
    }
    let mut outcomes = Vec::new();
    let question = Question {
        charges: &mut charges,
        now,
        effect,
        within: None,
    };
    let decided = asks.decide(store, question, &mut outcomes).await;
    Ok(decided.map(|decided| decided.verdict(&charges, &outcomes)))
}

/// Raises the limits of those elastic `charges` whose parent rules have a sufficient unused share.
pub async fn stretch<'a, A: Asks, S: Store>(
    asks: A,
    (store, rules): (&S, &'a RuleSet),
    charges: &mut [Charge<'a>],
    now: Timestamp,
) -> Option<()> {
    if let Some(mut parents) = rules.parents(charges) {
        let mut outcomes = Vec::new();
        let look = Question::look(&mut parents.charges, now);
        asks.decide(store, look, &mut outcomes).await?;
        parents.stretch(charges, &outcomes);
    }
    Some(())
}
