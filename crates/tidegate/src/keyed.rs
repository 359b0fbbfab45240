//! Methods of limiters that have the same limits for every key.

use std::{iter, time::Duration};

use tidegate_core::{
    Charge, Cost, Decision, Effect, Limits, RequestError, Store, Timestamp, Verdict,
};

#[cfg(feature = "tokio")]
use crate::timer::TokioTimer;
use crate::{
    AcquireError, BlockingStore, Key, Limiter,
    limiter::Waits,
    timer::{Timer, block_on},
    waiters::QueuedRequest,
};

impl Limiter {
    /// Decides whether a request on `key` is admitted now, and charges the request if it is.
    ///
    /// If the key or the cost [is too large](Key) for every store, the request is denied.
    #[inline]
    pub fn check(&self, key: impl Key) -> Verdict<'_> {
        self.verdict(&key, Effect::Charge)
    }

    /// Returns the same verdict as [`check`](Self::check), without charging the request.
    pub fn peek(&self, key: impl Key) -> Verdict<'_> {
        self.verdict(&key, Effect::Peek)
    }

    #[inline]
    fn verdict(&self, key: &impl Key, effect: Effect) -> Verdict<'_> {
        let verdict = ask(key.cost(), effect).and_then(|(cost, effect)| {
            key.with_bytes(|bytes| {
                let now = self.clock.now();
                self.store.verdict(bytes, &self.policy, cost, now, effect)
            })
        });
        verdict.unwrap_or_else(|_| undecidable(&self.policy))
    }
}

impl<S: Store> Limiter<S> {
    /// Returns the limits, which are the same for every key.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.policy
    }

    /// Decides like [`check`](Limiter::check), but works with any store. Waits for a remote store
    /// to reply, but does not wait for the limit to admit the request.
    ///
    /// If the future is dropped, the request may or may not have been charged.
    pub async fn check_async(&self, key: impl Key) -> Verdict<'_> {
        self.decide_once(key, Effect::Charge).await
    }

    /// Returns the same verdict as [`check_async`](Self::check_async), without charging the
    /// request.
    pub async fn peek_async(&self, key: impl Key) -> Verdict<'_> {
        self.decide_once(key, Effect::Peek).await
    }

    async fn decide_once(&self, key: impl Key, effect: Effect) -> Verdict<'_> {
        let cost = key.cost();
        let bytes: Box<[u8]> = key.with_bytes(|bytes| bytes.into());
        drop(key);
        let charge = ask(cost, effect).and_then(|(cost, effect)| {
            let charge = Charge::new(&bytes, &self.policy, cost)?;
            Ok((charge, effect))
        });
        match charge {
            Ok((charge, effect)) => self.decide_key(charge, effect, Waits::No).await.0,
            Err(_) => undecidable(&self.policy),
        }
    }

    /// Waits until a request on `key` is admitted, at most for [`WaitBounds::longest_wait`].
    ///
    /// If the future is dropped, the request leaves its queue and nothing is charged. This method
    /// needs a tokio runtime with a timer. The timer has a resolution of a millisecond. If a limit
    /// must admit more than one request per millisecond, give the limit a burst.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted. Returns the error immediately if the
    /// request can certainly not be admitted in time.
    ///
    /// [`WaitBounds::longest_wait`]: crate::WaitBounds::longest_wait
    #[cfg(feature = "tokio")]
    pub async fn acquire(&self, key: impl Key) -> Result<Verdict<'_>, AcquireError> {
        self.acquire_within(key, Duration::MAX).await
    }

    /// Waits like [`acquire`](Self::acquire), but at most for `longest_wait`. With a `longest_wait`
    /// of zero, the request is admitted now or not at all, and never ahead of waiting requests.
    /// With a remote store, the call may exceed `longest_wait` by up to the store's timeout.
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
        let deadline = self.deadline(longest_wait.into());
        self.acquire_by(key, deadline, &TokioTimer).await
    }

    pub(crate) async fn acquire_by(
        &self,
        key: impl Key,
        deadline: Timestamp,
        timer: &impl Timer,
    ) -> Result<Verdict<'_>, AcquireError> {
        let (cost, effect) = ask(key.cost(), Effect::Charge)?;
        let bytes: Box<[u8]> = key.with_bytes(|bytes| bytes.into());
        drop(key);
        let charge = Charge::new(&bytes, &self.policy, cost)?;
        if effect == Effect::Look {
            return Ok(self.decide_key(charge, effect, Waits::InLine).await.0);
        }
        let mut turn = QueuedRequest::new(&self.waiters, &self.clock, &bytes, deadline);
        loop {
            let effect = turn.effect();
            let (verdict, now) = self.decide_key(charge, effect, Waits::InLine).await;
            if turn.has_passed(&verdict, now)? {
                return Ok(verdict);
            }
            turn.wait(timer).await?;
        }
    }

    async fn decide_key(
        &self,
        charge: Charge<'_>,
        effect: Effect,
        waits: Waits,
    ) -> (Verdict<'_>, Timestamp) {
        let (mut charges, mut outcomes) = (vec![charge], Vec::new());
        let decided = self.decide(&mut charges, &mut outcomes, effect, waits);
        let (decided, now) = decided.await;
        // A fallback policy may have removed the charge.
        let limits = charges.iter().map(|_| &self.policy);
        (decided.verdict_on(limits, &outcomes), now)
    }
}

/// The methods in this block block the thread. Do not call these methods in an async task, because
/// they would block the runtime's worker thread.
impl<S: BlockingStore> Limiter<S> {
    /// Decides like [`check_async`](Limiter::check_async).
    pub fn check_blocking(&self, key: impl Key) -> Verdict<'_> {
        let _entered = self.store.enter();
        block_on(&self.clock, async |_| self.check_async(key).await)
    }

    /// Waits until a request on `key` is admitted, at most for [`WaitBounds::longest_wait`]. The
    /// request waits in the same queue as the requests of [`acquire`](Limiter::acquire).
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted. Returns the error immediately if the
    /// request can certainly not be admitted in time.
    ///
    /// [`WaitBounds::longest_wait`]: crate::WaitBounds::longest_wait
    pub fn acquire_blocking(&self, key: impl Key) -> Result<Verdict<'_>, AcquireError> {
        self.acquire_blocking_within(key, Duration::MAX)
    }

    /// Waits like [`acquire_blocking`](Self::acquire_blocking), but at most for `longest_wait`.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted.
    pub fn acquire_blocking_within(
        &self,
        key: impl Key,
        longest_wait: Duration,
    ) -> Result<Verdict<'_>, AcquireError> {
        let deadline = self.deadline(longest_wait.into());
        self.acquire_blocking_by(key, deadline)
    }

    pub(crate) fn acquire_blocking_by(
        &self,
        key: impl Key,
        deadline: Timestamp,
    ) -> Result<Verdict<'_>, AcquireError> {
        let _entered = self.store.enter();
        block_on(&self.clock, async |timer| {
            self.acquire_by(key, deadline, timer).await
        })
    }
}

/// Returns the cost and the effect of a request for `units`. A request for 0 units only reads the
/// state.
#[inline]
fn ask(units: u64, effect: Effect) -> Result<(Cost, Effect), RequestError> {
    match units {
        0 => Ok((Cost::ONE, Effect::Look)),
        1 => Ok((Cost::ONE, effect)),
        units => Ok((Cost::new(units)?, effect)),
    }
}

/// Returns the verdict on a request whose key or cost is invalid for every store.
#[cold]
fn undecidable(limits: &Limits) -> Verdict<'_> {
    Verdict::on(&Decision::UNDECIDABLE, iter::once(limits), &[])
}
