//! Who says whether a request may pass.

use std::sync::Arc;

use tidegate_core::{Effect, Request, RequestError, RuleSet, Scratch, Timestamp, Verdict};

/// Who says whether a request may pass: an application's [`Limiter`](crate::Limiter), or a server's own.
///
/// A caller takes the [`rules`](Self::rules) of the moment once a request, finds out the entries that they name, and asks
/// under them: first what can be said [at once](Self::check_now), and only if that is nothing, [with a wait](Self::check).
pub trait Gate: Send + Sync {
    /// The time, which is read once a request.
    fn now(&self) -> Timestamp;

    /// The rules of the moment. A request is decided under one set from beginning to end.
    fn rules(&self) -> Arc<RuleSet>;

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
    ) -> impl Future<Output = Result<Verdict<'a>, RequestError>> + Send;

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
    ) -> Result<Option<Verdict<'a>>, RequestError>;

    /// Takes note of the verdict that is about to be carried out.
    fn observe(&self, _verdict: &Verdict<'_>) {}
}
