//! Who says whether a request may pass.

use std::sync::Arc;

use tidegate_core::{
    Charge, Effect, Question, Request, RequestError, RuleSet, Scratch, Store, Timestamp, Verdict,
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
            let now = self.now();
            let mut charges = rules.charges(request, now, scratch)?;
            if charges.is_empty() {
                return Ok(Verdict::unlimited());
            }
            let mut outcomes = Vec::new();
            stretch(self.store(), rules, &mut charges, now).await;
            let question = Question {
                charges: &mut charges,
                now,
                effect,
                within: None,
            };
            let decided = self.store().decide(question, &mut outcomes).await;
            Ok(decided.verdict(&charges, &outcomes))
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
        let now = self.now();
        let mut charges = rules.charges(request, now, scratch)?;
        if charges.is_empty() {
            return Ok(Some(Verdict::unlimited()));
        }
        let mut outcomes = Vec::new();
        if stretch_now(self.store(), rules, &mut charges, now).is_none() {
            return Ok(None);
        }
        let mut question = Question {
            charges: &mut charges,
            now,
            effect,
            within: None,
        };
        let decided = self.store().decide_now(&mut question, &mut outcomes);
        Ok(decided.map(|decided| decided.verdict(&charges, &outcomes)))
    }

    /// Takes note of the verdict that is about to be carried out.
    fn observe(&self, _verdict: &Verdict<'_>) {}
}

/// Lets those of `charges` stretch that may by what others leave unused, and waits if need be.
pub(crate) async fn stretch<'a, S: Store>(
    store: &S,
    rules: &'a RuleSet,
    charges: &mut [Charge<'a>],
    now: Timestamp,
) {
    if let Some(mut parents) = rules.parents(charges) {
        let mut outcomes = Vec::new();
        let look = Question::look(&mut parents.charges, now);
        store.decide(look, &mut outcomes).await;
        parents.stretch(charges, &outcomes);
    }
}

/// [`stretch`], if nothing has to be waited for.
pub(crate) fn stretch_now<'a, S: Store>(
    store: &S,
    rules: &'a RuleSet,
    charges: &mut [Charge<'a>],
    now: Timestamp,
) -> Option<()> {
    if let Some(mut parents) = rules.parents(charges) {
        let mut outcomes = Vec::new();
        let mut look = Question::look(&mut parents.charges, now);
        store.decide_now(&mut look, &mut outcomes)?;
        parents.stretch(charges, &outcomes);
    }
    Some(())
}
