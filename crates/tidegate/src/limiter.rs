//! [`Limiter`]: the same limits for every key.

use std::{iter, time::Duration};

use tidegate_core::{
    Charge, Cost, Decision, Effect, Limits, MemoryBounds, MemoryStore, Question, RequestError,
    Span, Store, Timestamp, Verdict,
};

#[cfg(feature = "tokio")]
use crate::timer::TokioTimer;
use crate::{
    AcquireError, Clock, Key, WaitBounds,
    timer::{Timer, block_on},
    waiters::{Turn, Waiters},
};

/// A rate limiter: the same limits for every key.
///
/// Share it between tasks and threads by reference or in an [`Arc`](std::sync::Arc).
///
/// - [`check`](Self::check) decides at once. A denial is a [`Verdict`] like any other: it says what
///   remains and when to retry.
/// - [`acquire`](Self::acquire) waits until the request is admitted. Requests on one key are
///   admitted in the order in which they began to wait. A `check` does not wait in line: it takes
///   what is left at that instant. The wait is bounded ([`WaitBounds`]). A request that stops
///   waiting was not charged, so it costs nothing.
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
#[derive(Debug)]
pub struct Limiter<S = MemoryStore> {
    limits: Limits,
    store: S,
    clock: Clock,
    waiters: Waiters,
}

impl Limiter {
    /// Creates a limiter that counts in the memory of this process, with the default
    /// [`MemoryBounds`]. `limits` is one [`Limit`](crate::Limit), or several as [`Limits`].
    #[must_use]
    pub fn in_memory(limits: impl Into<Limits>) -> Self {
        let store = MemoryStore::new(MemoryBounds::default());
        Self::with_store(limits, store, Clock::real())
    }

    /// Decides whether a request on `key` may pass now, and charges it if so.
    ///
    /// A key or a cost that [is too large](Key) for every store is denied, and never admitted.
    #[inline]
    pub fn check(&self, key: impl Key) -> Verdict<'_> {
        self.decide(&key, Effect::Charge)
    }

    /// Returns what [`check`](Self::check) would, and charges nothing.
    pub fn peek(&self, key: impl Key) -> Verdict<'_> {
        self.decide(&key, Effect::Peek)
    }

    #[inline]
    fn decide(&self, key: &impl Key, effect: Effect) -> Verdict<'_> {
        let verdict = Charged::of(key.cost(), effect).and_then(|Charged { cost, effect }| {
            key.with_bytes(|bytes| {
                self.store
                    .verdict(bytes, &self.limits, cost, self.clock.now(), effect)
            })
        });
        verdict.unwrap_or_else(|_| self.undecidable())
    }

    #[cold]
    fn undecidable(&self) -> Verdict<'_> {
        Verdict::on(&Decision::REPEATED_KEY, iter::once(&self.limits), &[])
    }
}

impl<S: Store> Limiter<S> {
    /// Creates a limiter that counts in `store`.
    ///
    /// With a [manual clock](Clock::manual), only decisions follow the clock. A request that waits
    /// sleeps for real time.
    #[must_use]
    pub fn with_store(limits: impl Into<Limits>, store: S, clock: Clock) -> Self {
        Self {
            limits: limits.into(),
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

    /// Returns the limits of every key.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
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

    /// Returns the number of requests that wait now.
    #[must_use]
    pub fn waiters(&self) -> usize {
        self.waiters.count()
    }

    /// Waits until a request on `key` is admitted, at most for [`WaitBounds::longest_wait`].
    ///
    /// If the future is dropped, the request leaves its queue and nothing was charged. Needs a
    /// tokio runtime with a timer, whose resolution is a millisecond: if the limit admits requests
    /// more often than that, give it a burst.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted. An error that is certain from the start is
    /// returned at once.
    #[cfg(feature = "tokio")]
    pub async fn acquire(&self, key: impl Key) -> Result<Verdict<'_>, AcquireError> {
        self.acquire_by(key, self.waiters.bounds.longest_wait, &TokioTimer)
            .await
    }

    /// Waits like [`acquire`](Self::acquire), at most for `longest_wait`. With zero, the request is
    /// admitted now or not at all, and never ahead of requests that wait.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted.
    #[cfg(feature = "tokio")]
    pub async fn acquire_within(
        &self,
        key: impl Key,
        longest_wait: Duration,
    ) -> Result<Verdict<'_>, AcquireError> {
        self.acquire_by(key, longest_wait.into(), &TokioTimer).await
    }

    async fn acquire_by(
        &self,
        key: impl Key,
        longest_wait: Span,
        timer: &impl Timer,
    ) -> Result<Verdict<'_>, AcquireError> {
        let Charged { cost, effect } = Charged::of(key.cost(), Effect::Charge)?;
        let key: Box<[u8]> = key.with_bytes(|bytes| bytes.into());
        let longest_wait = longest_wait.min(self.waiters.bounds.longest_wait);
        let deadline = self.clock.now().after(longest_wait);
        let charge = Charge {
            // A queue limit must not delay the request as well.
            longest_wait: Some(Span::ZERO),
            ..Charge::new(&key, &self.limits, cost)?
        };
        if effect == Effect::Look {
            return Ok(self.ask(charge, effect, deadline).await.0);
        }
        let mut turn = Turn::new(&self.waiters, &self.clock, &key, deadline);
        loop {
            let effect = turn.effect();
            let (verdict, now) = self.ask(charge, effect, deadline).await;
            if turn.has_passed(&verdict, now)? {
                return Ok(verdict);
            }
            turn.wait(timer).await?;
        }
    }

    /// Asks the store, and returns its verdict with the instant from which its waits count. A
    /// remote store has to answer by `deadline`.
    async fn ask(
        &self,
        charge: Charge<'_>,
        effect: Effect,
        deadline: Timestamp,
    ) -> (Verdict<'_>, Timestamp) {
        let now = self.clock.now();
        let (mut charges, mut outcomes) = (vec![charge], Vec::new());
        let mut question = Question {
            charges: &mut charges,
            now,
            effect,
            within: Some(deadline.since(now).into()),
        };
        let (decided, now) = match self.store.decide_now(&mut question, &mut outcomes) {
            Some(decided) => (decided, now),
            None => {
                let decided = match effect {
                    // If the caller stops waiting for the answer, a reservation is refunded.
                    Effect::Charge => self.store.reserve(&mut question, &mut outcomes).await.0,
                    _ => self.store.decide_later(question, &mut outcomes).await,
                };
                (decided, self.clock.now())
            }
        };
        // A fallback policy may have removed the charge.
        let verdict = decided.verdict_on(charges.iter().map(|_| &self.limits), &outcomes);
        (verdict, now)
    }
}

impl Limiter {
    /// Blocks the thread until a request on `key` is admitted, at most for
    /// [`WaitBounds::longest_wait`]. It stands in the same line as requests that
    /// [`acquire`](Self::acquire). Do not call it in a task: it would block its worker thread.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted. An error that is certain from the start is
    /// returned at once.
    pub fn acquire_blocking(&self, key: impl Key) -> Result<Verdict<'_>, AcquireError> {
        let longest_wait = self.waiters.bounds.longest_wait;
        self.acquire_blocking_within(key, longest_wait.into())
    }

    /// Blocks the thread like [`acquire_blocking`](Self::acquire_blocking), at most for
    /// `longest_wait`.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted.
    pub fn acquire_blocking_within(
        &self,
        key: impl Key,
        longest_wait: Duration,
    ) -> Result<Verdict<'_>, AcquireError> {
        block_on(&self.clock, async |timer| {
            self.acquire_by(key, longest_wait.into(), timer).await
        })
    }
}

/// What a request with a cost in units is charged.
struct Charged {
    cost: Cost,
    effect: Effect,
}

impl Charged {
    /// A request of 0 units only looks at the state.
    #[inline]
    fn of(units: u64, effect: Effect) -> Result<Self, RequestError> {
        Ok(match units {
            0 => Self {
                cost: Cost::ONE,
                effect: Effect::Look,
            },
            1 => Self {
                cost: Cost::ONE,
                effect,
            },
            units => Self {
                cost: Cost::new(units)?,
                effect,
            },
        })
    }
}
