//! Guards, which admit, delay or reject requests, and learn from their responses.

mod adaptive;
mod breaker;
mod lane;
mod place;
mod queue;
mod throttle;
mod timeout;

use std::{future::Future, sync::Arc};

use tidegate_core::{Cost, MemoryStore, Span};

use crate::{Advice, BoxError, Error, TryTimeout, clock::duration, head::Head, retry::Seen};

pub use adaptive::AdaptiveGuard;
pub use breaker::{BreakerGuard, Trial};
pub use lane::LaneSettings;
pub use queue::{Pacing, QueueGuard};
pub use throttle::{Admission, ThrottleGuard, spaced};
pub use timeout::TimeoutGuard;

/// A layer with a circuit breaker per host. Rejected requests fail with [`Error::CircuitOpen`].
pub type BreakerLayer = Guarded<BreakerGuard>;
/// A layer with adaptive throttling per host. Rejected requests fail with [`Error::Overloaded`].
pub type AdaptiveLayer = Guarded<AdaptiveGuard>;
/// A layer with a timeout until the response begins. Slower requests fail with [`TryTimeout`].
pub type TimeoutLayer = Guarded<TimeoutGuard>;
/// A layer with a queue per host, which delays requests that must not be sent yet.
pub type QueueLayer = Guarded<QueueGuard>;

/// A layer that enforces limits on the client. Requests over the limits wait. They fail with
/// [`Error::WaitTooLong`] or [`Error::QueueFull`] if they cannot wait, and with
/// [`Error::NeverFits`] if waiting would not help.
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
pub type ThrottleLayer<S = MemoryStore> = Guarded<ThrottleGuard<S>>;

/// The part of a request that a guard needs.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The host and port of the server. Guards keep separate state per host.
    pub host: &'a str,
    /// The cost of the request: a [`Cost`] among its extensions, or else one.
    pub cost: Cost,
}

/// Admits requests, and learns from their responses.
///
/// For every admitted request either [`Self::leave`] is called, or its pass is dropped, because it
/// was cancelled or rejected by an inner layer.
pub trait Guard: Send + Sync + 'static {
    /// The state of a request in flight, such as a permit.
    type Pass: Send + 'static;

    /// Admits a request, now or after a wait.
    ///
    /// # Errors
    ///
    /// Why the request is rejected. Nothing is sent then.
    fn enter(&self, call: Call<'_>) -> impl Future<Output = Result<Self::Pass, Error>> + Send;

    /// Returns the timeout from admission until the response begins, if there is one.
    fn longest(&self) -> Option<Span> {
        None
    }

    /// Learns the outcome of an admitted request.
    fn leave(
        &self,
        call: Call<'_>,
        pass: Self::Pass,
        seen: Seen<'_>,
        advice: &Advice,
    ) -> impl Future<Output = ()> + Send;
}

/// A guard as a tower layer, and with the feature `reqwest` as a middleware for reqwest. Clones
/// share the guard.
///
/// Inside of [`Retry`](crate::Retry) it applies to every try, outside of it to whole calls.
#[derive(Debug)]
pub struct Guarded<G> {
    pub(crate) guard: Arc<G>,
    pub(crate) clock: crate::Clock,
}

impl<G> Clone for Guarded<G> {
    fn clone(&self) -> Self {
        Self {
            guard: Arc::clone(&self.guard),
            clock: self.clock,
        }
    }
}

impl<G: Guard> Guarded<G> {
    /// Creates a layer of this guard, which reads the time from `clock`.
    pub fn by(guard: G, clock: crate::Clock) -> Self {
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

    /// Sends a request through the guard.
    pub(crate) async fn pass<A: Head>(
        &self,
        call: Call<'_>,
        sending: impl Future<Output = Result<A, BoxError>> + Send,
    ) -> Result<A, Error> {
        let pass = self.guard.enter(call).await?;
        let sent = match self.guard.longest() {
            None => sending.await,
            Some(longest) => tokio::time::timeout(duration(longest), sending)
                .await
                .unwrap_or_else(|_| Err(TryTimeout { timeout: longest }.into())),
        };
        match sent {
            Ok(answer) => {
                let (status, headers) = (answer.status(), answer.headers());
                let advice = Advice::of(status, headers, self.clock.now());
                let seen = Seen::Answer { status, headers };
                self.guard.leave(call, pass, seen, &advice).await;
                Ok(answer)
            }
            Err(error) => Err(self.failed(call, pass, error).await),
        }
    }

    /// Errors of other layers of this crate say nothing about the server, so the guard does not
    /// learn from them.
    async fn failed(&self, call: Call<'_>, pass: G::Pass, error: BoxError) -> Error {
        let error = Error::of(error);
        if let Error::Inner(_) = error {
            let seen = Seen::NoAnswer;
            self.guard.leave(call, pass, seen, &Advice::default()).await;
        }
        error
    }
}
