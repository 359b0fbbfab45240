//! What stands before a request and learns from its answer: it lets it pass, makes it wait, or keeps it back.

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

/// A circuit breaker for each host, as a layer. What it keeps back fails with [`Error::CircuitOpen`].
pub type BreakerLayer = Guarded<BreakerGuard>;
/// Adaptive throttling for each host, as a layer. What it keeps back fails with [`Error::Overloaded`].
pub type AdaptiveLayer = Guarded<AdaptiveGuard>;
/// A time that an answer may take, as a layer. What takes longer fails with [`TryTimeout`].
pub type TimeoutLayer = Guarded<TimeoutGuard>;
/// A queue for each host, as a layer, which sends later what must not be sent now.
pub type QueueLayer = Guarded<QueueGuard>;

/// Limits that a client keeps to by itself, as a layer. What is over them waits; it fails with [`Error::WaitTooLong`] or
/// [`Error::QueueFull`] where it cannot, and with [`Error::NeverFits`] where there is no sense in it.
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

/// A request, as far as a guard cares.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Whom it is for: host and port. Guards tell hosts apart.
    pub host: &'a str,
    /// What it is worth; a [`Cost`] among the request's extensions, else one.
    pub cost: Cost,
}

/// Stands before requests and learns from their answers.
///
/// Every request that was let in is either left, with what came of it, or its pass is dropped, because it was cancelled or kept back
/// further on.
pub trait Guard: Send + Sync + 'static {
    /// What a request holds while it is on its way.
    type Pass: Send + 'static;

    /// Lets a request in, now or later.
    ///
    /// # Errors
    ///
    /// Why it is kept back; then nothing is sent.
    fn enter(&self, call: Call<'_>) -> impl Future<Output = Result<Self::Pass, Error>> + Send;

    /// How long may pass from then until the answer begins, if there is a bound.
    fn longest(&self) -> Option<Span> {
        None
    }

    /// Learns what came of it.
    fn leave(
        &self,
        call: Call<'_>,
        pass: Self::Pass,
        seen: Seen<'_>,
        advice: &Advice,
    ) -> impl Future<Output = ()> + Send;
}

/// A guard as a layer for tower, and with the feature `reqwest` as a middleware for reqwest. A clone is the same guard.
///
/// Put it inside of [`Retry`](crate::Retry), so that every try passes it, or outside, so that only whole calls do.
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
    /// A layer of this guard, which has the time from `clock` too.
    pub fn by(guard: G, clock: crate::Clock) -> Self {
        Self {
            guard: Arc::new(guard),
            clock,
        }
    }

    /// The guard.
    #[must_use]
    pub fn guard(&self) -> &G {
        &self.guard
    }

    /// Sends something past the guard.
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

    /// What another piece of this crate kept back says nothing about the server.
    async fn failed(&self, call: Call<'_>, pass: G::Pass, error: BoxError) -> Error {
        let error = Error::of(error);
        if let Error::Inner(_) = error {
            let seen = Seen::NoAnswer;
            self.guard.leave(call, pass, seen, &Advice::default()).await;
        }
        error
    }
}
