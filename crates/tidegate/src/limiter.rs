//! [`Limiter`]: combines limits, a store, a clock and the queues of waiting requests.

use tidegate_core::{
    Charge, Effect, Limit, Limits, MaybeReady, MemoryBounds, MemoryStore, Outcome, Span, Store,
    StoreDecision, StoreRequest, Timestamp,
};

use crate::{Clock, WaitBounds, waiters::Waiters};

/// A rate limiter.
///
/// `S` is the store that contains the counts, in memory or in Redis. `P` is the policy: the same
/// [`Limits`] for every [`Key`](crate::Key), or [`Rules`](crate::Rules).
///
/// A limiter can be shared between tasks and threads, by reference or in an
/// [`Arc`](std::sync::Arc).
///
/// - [`check`](Self::check) decides immediately. A denial is a normal
///   [`Verdict`](tidegate_core::Verdict), which contains the remaining units and the time to retry.
/// - [`acquire`](Self::acquire) waits until the request is admitted. Requests on one key are
///   admitted in the order in which they began to wait. A `check` bypasses the queue: it is charged
///   if enough units remain at that instant. [`WaitBounds`] limits the wait time and the number of
///   waiting requests. A request that stops waiting is not charged.
///
/// # Examples
///
/// ```
/// use tidegate::{Limit, Limiter};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::in_memory("100/s burst 20".parse::<Limit>()?);
/// let verdict = limiter.check("alice");
/// assert_eq!((verdict.allowed, verdict.remaining()), (true, Some(20)));
/// limiter.acquire("alice").await?;
/// # Ok(())
/// # }
/// ```
///
/// Several limits on one key are charged together or not at all:
///
/// ```
/// use tidegate::{Limiter, Limits};
///
/// let limits = ["5/s", "8/min"].map(str::parse).into_iter().collect::<Result<_, _>>()?;
/// let limiter = Limiter::in_memory(Limits::new(limits)?);
/// let verdict = limiter.check("alice");
/// assert_eq!(verdict.lines.len(), 2);
/// assert_eq!(verdict.remaining(), Some(4), "of the tightest limit");
/// # Ok::<(), tidegate::LimitError>(())
/// ```
///
/// Rules choose the limits by the entries of a request. See [`current`](Self::current).
#[derive(Debug)]
pub struct Limiter<S = MemoryStore, P = Limits> {
    pub(crate) policy: P,
    pub(crate) store: S,
    pub(crate) clock: Clock,
    pub(crate) waiters: Waiters,
}

/// The policy of a limiter: a [`Limit`] or [`Limits`] for every key, or a
/// [`RuleSet`](crate::RuleSet).
pub trait IntoPolicy {
    /// The second type parameter of the [`Limiter`].
    type Policy;

    /// Converts the limits or rules into the policy.
    fn into_policy(self) -> Self::Policy;
}

impl IntoPolicy for Limit {
    type Policy = Limits;

    fn into_policy(self) -> Limits {
        self.into()
    }
}

impl IntoPolicy for Limits {
    type Policy = Self;

    fn into_policy(self) -> Self {
        self
    }
}

/// Whether a request waits in a queue until it is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    No,
    InLine,
}

impl<P> Limiter<MemoryStore, P> {
    /// Creates a limiter that counts in the memory of this process, with the default
    /// [`MemoryBounds`].
    #[must_use]
    pub fn in_memory(limits: impl IntoPolicy<Policy = P>) -> Self {
        let store = MemoryStore::new(MemoryBounds::default());
        Self::new(limits, store, Clock::real())
    }
}

impl<S: Store, P> Limiter<S, P> {
    /// Creates a limiter that counts in `store`, for example a memory store with other bounds, or a
    /// Redis store.
    ///
    /// A [manual clock](Clock::manual) affects only decisions. A waiting task sleeps by tokio's
    /// time. To control decisions and waiting tasks in a test, use [`Clock::tokio`].
    #[must_use]
    pub fn new(limits: impl IntoPolicy<Policy = P>, store: S, clock: Clock) -> Self {
        Self {
            policy: limits.into_policy(),
            store,
            clock,
            waiters: Waiters::default(),
        }
    }

    /// Sets how many requests may wait, and for how long.
    #[must_use]
    pub fn with_wait_bounds(mut self, bounds: WaitBounds) -> Self {
        self.waiters.bounds = bounds;
        self
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn waiters(&self) -> usize {
        self.waiters.count()
    }

    /// Returns the deadline of a request that may wait at most `span`.
    pub(crate) fn deadline(&self, span: Span) -> Timestamp {
        let longest = self.waiters.bounds.longest_wait;
        self.clock.now().after(span.min(longest))
    }

    /// Passes `charges` to the store for a decision. Returns the decision, and the instant from
    /// which the decision's wait times are measured. `waits` says whether the request is waiting in
    /// a queue.
    pub(crate) async fn decide(
        &self,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        effect: Effect,
        waits: Waits,
    ) -> (StoreDecision, Timestamp) {
        let now = self.clock.now();
        if waits == Waits::InLine {
            for charge in &mut *charges {
                // The request already waits in this limiter's queue, so a queueing limit must not
                // add a delay.
                charge.longest_wait = Some(Span::ZERO);
            }
        }
        // The store has its own timeout, after which it uses a fallback policy. Do not limit the
        // store call to the request's remaining wait time, because that could shorten the store's
        // timeout.
        let decided = self
            .store
            .decide(StoreRequest::new(charges, now, effect), outcomes);
        if let MaybeReady::Ready(decided) = decided {
            return (decided, now);
        }
        let decided = if waits == Waits::InLine && effect == Effect::Charge {
            drop(decided);
            // If the caller stops waiting for the reply, the reserved units are refunded.
            let request = StoreRequest::new(charges, now, effect);
            self.store.reserve(request, outcomes).await.decision
        } else {
            decided.await
        };
        (decided, self.clock.now())
    }
}
