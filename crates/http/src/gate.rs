//! Who says whether a request may pass.

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

/// Who says whether a request may pass: an application's [`Limiter`](crate::Limiter), or a server's own.
///
/// A caller takes the [`rules`](Self::rules) of the moment once a request, finds out the entries that they name, and asks
/// under them: first what can be said [at once](Self::check_now), and only if that is nothing, [with a wait](Self::check).
pub trait Gate: Send + Sync {
    /// Where the limits are counted.
    type Store: Store;

    /// The time, which is read once a request.
    fn now(&self) -> Timestamp;

    /// The rules of the moment. A request is decided under one set from beginning to end.
    fn rules(&self) -> Arc<RuleSet>;

    /// Where the limits are counted.
    fn store(&self) -> &Self::Store;

    /// Decides `request` under `rules`, which the caller got from [`Self::rules`], and waits if need be.
    ///
    /// A future that is dropped may have charged the request.
    ///
    /// # Errors
    ///
    /// What [`RuleSet::charges`] refuses.
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

    /// [`Self::check`], if nothing has to be waited for; `None` leaves everything as it was.
    ///
    /// # Errors
    ///
    /// What [`RuleSet::charges`] refuses.
    fn check_now<'a>(
        &self,
        rules: &'a RuleSet,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        effect: Effect,
    ) -> Result<Option<Verdict<'a>>, RequestError> {
        at_once(check(AtOnce, (self, rules, request, effect), scratch))
    }

    /// Takes note of the verdict that is about to be carried out.
    fn observe(&self, _verdict: &Verdict<'_>) {}
}

/// How a store is asked: everything that is asked is written once for both.
pub(crate) trait Asks: Copy + Send + Sync {
    /// Its decision; `None` leaves everything as it was.
    fn decide<S: Store>(
        self,
        store: &S,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Option<Decided>> + Send;

    /// The same, with a receipt for what was charged.
    fn reserve<S: Store>(
        self,
        store: &S,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> impl Future<Output = Option<(Decided, Option<S::Receipt>)>> + Send;
}

/// What has to be waited for is left open.
#[derive(Clone, Copy)]
pub(crate) struct AtOnce;

/// What has to be waited for is, so that there is always an answer.
#[derive(Clone, Copy)]
pub(crate) struct Patient;

/// What holds of whoever is [`Patient`].
pub(crate) const ANSWERED: &str = "who waits is answered";

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

/// What is asked [`AtOnce`] has been answered the first time that anybody looks.
#[inline]
pub(crate) fn at_once<T>(asked: impl Future<Output = T>) -> T {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(asked).poll(&mut context) {
        Poll::Ready(answer) => answer,
        Poll::Pending => unreachable!("nothing of it is waited for"),
    }
}

/// Decides a request under rules, with that effect.
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

/// Lets those of `charges` stretch that may by what others leave unused.
pub(crate) async fn stretch<'a, A: Asks, S: Store>(
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
