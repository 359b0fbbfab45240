//! Guards. A guard admits, delays or rejects requests, and learns from the responses.

mod adaptive;
mod breaker;
mod permit;
mod queue;
mod throttle;
mod timeout;
mod wait_queue;

use std::{future::Future, sync::Arc};

use tidegate_core::{Cost, MemoryStore, Span};

use crate::{
    Advice, BoxError, Error, TryTimeout, clock::to_duration, response_head::ResponseHead,
    retry::AttemptOutcome,
};

pub use adaptive::AdaptiveGuard;
pub use breaker::{BreakerGuard, HeldPermit};
pub use permit::ThrottlePermit;
pub use queue::{Pacing, QueueGuard};
pub use throttle::{ThrottleGuard, spaced};
pub use timeout::TimeoutGuard;
pub use wait_queue::QueueSettings;

/// A layer with a circuit breaker per host. Rejected requests fail with [`Error::CircuitOpen`].
pub type BreakerLayer = GuardLayer<BreakerGuard>;
/// A layer with adaptive throttling per host. Rejected requests fail with [`Error::Overloaded`].
pub type AdaptiveLayer = GuardLayer<AdaptiveGuard>;
/// A layer with a timeout for the beginning of the response. If the response does not begin in
/// time, the request fails with [`TryTimeout`].
pub type TimeoutLayer = GuardLayer<TimeoutGuard>;
/// A layer with a queue per host. The queue delays requests that must not be sent yet.
pub type QueueLayer = GuardLayer<QueueGuard>;

/// A layer that enforces limits on the client side. Requests over the limits wait. A request that
/// cannot wait fails with [`Error::WaitTooLong`] or [`Error::QueueFull`]. A request that the limits
/// can never admit fails with [`Error::NeverFits`].
///
/// # Examples
///
/// ```
/// use tidegate_client::{ThrottleLayer, spaced};
///
/// let throttle = ThrottleLayer::new(spaced("100/s")?);
/// # drop(throttle);
/// # Ok::<(), tidegate_core::LimitError>(())
/// ```
pub type ThrottleLayer<S = MemoryStore> = GuardLayer<ThrottleGuard<S>>;

/// The properties of a request that a guard needs.
#[derive(Clone, Copy, Debug)]
pub struct RequestInfo<'a> {
    /// The host and port of the server. Guards keep separate state per host.
    pub host: &'a str,
    /// The cost of the request: the [`Cost`] in its extensions, or 1 without this extension.
    pub cost: Cost,
}

/// A policy that admits requests and learns from their responses.
///
/// Each admitted request ends in one of two ways: [`Self::record`] is called, or the permit is
/// dropped because the request was cancelled or an inner layer rejected the request.
pub trait Guard: Send + Sync + 'static {
    /// The state that the guard keeps for a request in flight.
    type Permit: Send + 'static;

    /// Admits a request immediately or after a wait.
    ///
    /// # Errors
    ///
    /// Returns the reason if the guard rejects the request. A rejected request is not sent.
    fn admit(
        &self,
        request: RequestInfo<'_>,
    ) -> impl Future<Output = Result<Self::Permit, Error>> + Send;

    /// Returns the timeout from the admission until the response begins, if there is one.
    fn timeout(&self) -> Option<Span> {
        None
    }

    /// Records the outcome of an admitted request.
    fn record(
        &self,
        request: RequestInfo<'_>,
        permit: Self::Permit,
        outcome: AttemptOutcome<'_>,
        advice: &Advice,
    ) -> impl Future<Output = ()> + Send;
}

/// A guard as a tower layer. With the feature `reqwest`, the layer is also a middleware for
/// reqwest. Clones of the layer share one guard.
///
/// Inside a [`RetryLayer`](crate::RetryLayer), the guard applies to every try. Outside a
/// `RetryLayer`, the guard applies to whole calls.
#[derive(Debug)]
pub struct GuardLayer<G> {
    pub(crate) guard: Arc<G>,
    pub(crate) clock: crate::TokioClock,
}

impl<G> Clone for GuardLayer<G> {
    fn clone(&self) -> Self {
        Self {
            guard: Arc::clone(&self.guard),
            clock: self.clock,
        }
    }
}

impl<G: Guard> GuardLayer<G> {
    /// Creates a layer with this guard, which reads the time from `clock`.
    pub fn from_guard(guard: G, clock: crate::TokioClock) -> Self {
        Self {
            guard: Arc::new(guard),
            clock,
        }
    }

    /// Returns the guard.
    #[must_use]
    pub fn guard(&self) -> &G {
        &self.guard
    }

    /// Sends a request through the guard: admits the request, awaits `response`, and records the
    /// outcome.
    pub(crate) async fn send<R: ResponseHead>(
        &self,
        request: RequestInfo<'_>,
        response: impl Future<Output = Result<R, BoxError>> + Send,
    ) -> Result<R, Error> {
        let permit = self.guard.admit(request).await?;
        match self.in_time(response).await {
            Ok(response) => {
                // Across the `await`, borrow only the head and not the whole response, because the
                // body may not be `Sync`.
                let (status, headers) = (response.status(), response.headers());
                let advice = Advice::from_response(status, headers, self.clock.now());
                let outcome = AttemptOutcome::Response { status, headers };
                self.guard.record(request, permit, outcome, &advice).await;
                Ok(response)
            }
            Err(error) => {
                let error = Error::from_inner(error);
                self.record_error(request, permit, &error).await;
                Err(error)
            }
        }
    }

    /// Awaits `response` within the timeout of the guard.
    async fn in_time<R>(
        &self,
        response: impl Future<Output = Result<R, BoxError>> + Send,
    ) -> Result<R, BoxError> {
        let Some(timeout) = self.guard.timeout() else {
            return response.await;
        };
        let in_time = tokio::time::timeout(to_duration(timeout), response).await;
        in_time.unwrap_or_else(|_| Err(TryTimeout { timeout }.into()))
    }

    async fn record_error(&self, request: RequestInfo<'_>, permit: G::Permit, error: &Error) {
        // Record only errors that come from outside this crate. An error from another layer in this
        // crate usually means that nothing was sent, so the error says nothing about the server.
        if let Error::Inner(_) = error {
            let (outcome, advice) = (AttemptOutcome::NoResponse, Advice::default());
            self.guard.record(request, permit, outcome, &advice).await;
        }
    }
}
