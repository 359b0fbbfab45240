//! Waiting requests: one queue for each key, in order of arrival.
//!
//! Only the first request of a queue is sent to the store, and it is charged when it is admitted. A
//! request that stops waiting leaves its queue, and needs no refund.
//!
//! ```text
//!   acquire ─▶ others wait on the key? ── no ──▶ charge ─▶ admitted
//!                      │ yes                       │ denied
//!                      ▼                           ▼
//!              stand in line ─▶ first in line ─▶ charge ─▶ admitted: the next one is first
//!                                    ▲             │ denied
//!                                    └─── sleep ◀──┘
//! ```

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    pin::pin,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Poll, Waker},
};

use tidegate_core::{Effect, RetryAfter, Span, Timestamp, Verdict};

use crate::{AcquireError, Clock, timer::Timer};

/// The maximum number of waiting requests in a limiter, and the maximum duration of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitBounds {
    /// The maximum number of requests that wait at the same time, on all keys; default 10,000.
    pub max_waiters: usize,
    /// The maximum number of requests that wait on one key; default 1,000.
    pub max_waiters_per_key: usize,
    /// The longest wait of a request; default 1 minute.
    pub longest_wait: Span,
}

impl Default for WaitBounds {
    fn default() -> Self {
        Self {
            max_waiters: 10_000,
            max_waiters_per_key: 1_000,
            longest_wait: Span::from_secs(60),
        }
    }
}

/// The requests that wait in a limiter.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    pub(crate) bounds: WaitBounds,
    /// The number of waiting requests. While it is 0, the lock is not needed.
    count: AtomicUsize,
    queues: Mutex<Queues>,
}

#[derive(Debug, Default)]
struct Queues {
    /// The number of the next ticket. Tickets are numbered in order of arrival.
    next: u64,
    /// The wakers of the waiting requests by ticket, for each key on which requests wait.
    by_key: HashMap<Box<[u8]>, BTreeMap<u64, Waker>>,
}

impl Waiters {
    /// Returns the number of requests that wait now.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    fn has_queue(&self, key: &[u8]) -> bool {
        self.count() > 0 && self.lock().by_key.contains_key(key)
    }

    /// Puts a request at the end of the queue of `key`.
    fn enter<'a>(&'a self, key: &'a [u8]) -> Result<Ticket<'a>, AcquireError> {
        let mut queues = self.lock();
        let bounds = &self.bounds;
        if self.count() >= bounds.max_waiters {
            let max = bounds.max_waiters;
            return Err(AcquireError::TooManyWaiters { max });
        }
        let number = queues.next;
        match queues.by_key.get_mut(key) {
            Some(queue) if queue.len() >= bounds.max_waiters_per_key => {
                let max = bounds.max_waiters_per_key;
                return Err(AcquireError::TooManyWaiters { max });
            }
            Some(queue) => {
                queue.insert(number, Waker::noop().clone());
            }
            None if bounds.max_waiters_per_key == 0 => {
                return Err(AcquireError::TooManyWaiters { max: 0 });
            }
            None => {
                let queue = BTreeMap::from([(number, Waker::noop().clone())]);
                queues.by_key.insert(key.into(), queue);
            }
        }
        queues.next += 1;
        self.count.fetch_add(1, Ordering::AcqRel);
        Ok(Ticket {
            waiters: self,
            key,
            number,
        })
    }

    /// Removes a request from the queue of `key`. If another request is now first, returns its
    /// waker.
    fn leave(&self, key: &[u8], number: u64) -> Option<Waker> {
        let mut queues = self.lock();
        let queue = queues.by_key.get_mut(key)?;
        let was_first = queue
            .first_key_value()
            .is_some_and(|(first, _)| *first == number);
        queue.remove(&number);
        self.count.fetch_sub(1, Ordering::AcqRel);
        if queue.is_empty() {
            queues.by_key.remove(key);
            return None;
        }
        let (_, next) = queue.first_key_value()?;
        was_first.then(|| next.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        // The only panic that is possible while the lock is held is a failed allocation.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that waits until it is admitted. The caller repeats these steps until
/// [`has_passed`](Self::has_passed): decide the request with [`effect`](Self::effect), then
/// [`wait`](Self::wait).
#[derive(Debug)]
pub(crate) struct QueuedRequest<'a> {
    waiters: &'a Waiters,
    clock: &'a Clock,
    /// The key of the queue.
    key: &'a [u8],
    /// The latest instant at which the request may be admitted.
    deadline: Timestamp,
    /// The ticket of the request, once it is in the queue.
    ticket: Option<Ticket<'a>>,
    /// The effect of the latest decision.
    effect: Effect,
    /// When to decide again, according to the latest decision.
    next: Timestamp,
}

impl<'a> QueuedRequest<'a> {
    pub(crate) fn new(
        waiters: &'a Waiters,
        clock: &'a Clock,
        key: &'a [u8],
        deadline: Timestamp,
    ) -> Self {
        Self {
            waiters,
            clock,
            key,
            deadline,
            ticket: None,
            effect: Effect::Charge,
            next: Timestamp::default(),
        }
    }

    /// Returns the effect with which to decide the request now.
    ///
    /// A request that has to wait in the queue must not be charged yet. Such a request peeks first.
    /// If it can never be admitted, or only after its deadline, it is rejected without waiting.
    pub(crate) fn effect(&mut self) -> Effect {
        let must_stand_in_line = self.ticket.is_none() && self.waiters.has_queue(self.key);
        self.effect = if must_stand_in_line {
            Effect::Peek
        } else {
            Effect::Charge
        };
        self.effect
    }

    /// Returns true if the request is admitted, given the verdict on it at `now`. Otherwise, the
    /// request is in the queue from now on.
    pub(crate) fn has_passed(
        &mut self,
        verdict: &Verdict<'_>,
        now: Timestamp,
    ) -> Result<bool, AcquireError> {
        if verdict.allowed && self.effect == Effect::Charge {
            return Ok(true);
        }
        self.next = match verdict.retry_after {
            RetryAfter::Never => return Err(AcquireError::Never),
            RetryAfter::After(span) if now.after(span) > self.deadline => {
                let retry_after = Some(span);
                return Err(AcquireError::Timeout { retry_after });
            }
            // The request has only peeked so far, so it asks to be charged as soon as it is first
            // in the queue.
            RetryAfter::After(_) if self.effect == Effect::Peek => now,
            // A denial without a wait would make this a busy loop.
            RetryAfter::After(span) => now.after(span.max(Span::from_micros(1))),
        };
        if self.ticket.is_none() {
            self.ticket = Some(self.waiters.enter(self.key)?);
        }
        Ok(false)
    }

    /// Waits until it is time to decide again. A request that is first in the queue waits until the
    /// instant given by the latest decision. Any other request waits until it is first.
    pub(crate) async fn wait<T: Timer>(&mut self, timer: &T) -> Result<(), AcquireError> {
        let Some(ticket) = &self.ticket else {
            return Ok(());
        };
        if ticket.is_first() {
            if self.next > self.clock.now() {
                timer.sleep_until(self.next, self.clock).await;
            }
            return Ok(());
        }
        let timeout = timer.sleep_until(self.deadline, self.clock);
        if ticket.turn_comes_within(timeout).await {
            Ok(())
        } else {
            Err(AcquireError::Timeout { retry_after: None })
        }
    }
}

/// The position of a request in the queue of its key. Dropping the ticket removes the request from
/// the queue.
#[derive(Debug)]
struct Ticket<'a> {
    waiters: &'a Waiters,
    key: &'a [u8],
    number: u64,
}

impl Ticket<'_> {
    /// Returns true if no request on the same key is ahead of this one.
    fn is_first(&self) -> bool {
        self.is_first_or_wakes(None)
    }

    /// Returns true if the request is first. Otherwise, `waker` is woken when the request becomes
    /// first.
    fn is_first_or_wakes(&self, waker: Option<&Waker>) -> bool {
        let mut queues = self.waiters.lock();
        let Some(queue) = queues.by_key.get_mut(self.key) else {
            debug_assert!(false, "the queue of a key exists while requests wait in it");
            return true;
        };
        if queue
            .first_key_value()
            .is_some_and(|(first, _)| *first == self.number)
        {
            return true;
        }
        if let (Some(waker), Some(known)) = (waker, queue.get_mut(&self.number)) {
            known.clone_from(waker);
        }
        false
    }

    /// Waits until the request is first. Returns false if `timeout` elapses before the request is
    /// first.
    async fn turn_comes_within(&self, timeout: impl Future<Output = ()>) -> bool {
        let mut timeout = pin!(timeout);
        poll_fn(|context| {
            if self.is_first_or_wakes(Some(context.waker())) {
                return Poll::Ready(true);
            }
            timeout.as_mut().poll(context).map(|()| false)
        })
        .await
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if let Some(next) = self.waiters.leave(self.key, self.number) {
            next.wake();
        }
    }
}
