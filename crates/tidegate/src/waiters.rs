//! Waiting requests: one queue for each key, in order of arrival.
//!
//! Only the first request in a queue is sent to the store, and the store charges this request when
//! it admits it. A request that stops waiting leaves its queue and does not need a refund.
//!
//! [`Limiter::acquire`](crate::Limiter::acquire) uses [`QueuedRequest`], which waits for any limit.
//! The layers and the listeners use [`SlotTurn`](crate::rate_limiter::SlotTurn), which waits for
//! concurrency slots. `QueuedRequest` and `SlotTurn` use the same queues. The release of a slot
//! wakes the first request in the queue of the slot's key.
//!
//! ```text
//!   acquire ─▶ others wait on the key? ── no ──▶ charge ─▶ admitted
//!                      │ yes                       │ denied
//!                      ▼                           ▼
//!              enter queue ─▶ first in queue ─▶ charge ─▶ admitted: the next one is first
//!                                    ▲             │ denied
//!                                    └─── sleep ◀──┘
//! ```

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    pin::pin,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Poll, Waker},
};

use tidegate_core::{Backoff, Effect, Jitter, RetryAfter, Span, Timestamp, Verdict};

use crate::{
    AcquireError, Clock, holding_times::HoldingTimes, timer::Timer, wait_stats::WaitStats,
};

/// The delay after which the first request in a queue tries again to get a slot. When this process
/// releases a slot, the first request wakes up earlier. The delay matters for slots released by
/// other processes, for expired leases, and for raised limits.
const POLL: Backoff = Backoff::new(Span::from_millis(10), Span::from_millis(500), Jitter::None);

/// Returns the delay after attempt number `attempt`, counted from 0, of the first request in a
/// queue. `hint` is the retry time of the denial, which is at most the time until the next lease
/// expires.
pub(crate) fn poll_delay(attempt: u32, hint: Span) -> Span {
    POLL.longest(attempt).min(hint).max(Span::from_millis(1))
}

/// The maximum number of waiting requests in a limiter, and the maximum wait time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitBounds {
    /// The maximum number of waiting requests on all keys; default 10,000.
    pub max_waiters: usize,
    /// The maximum number of waiting requests on one key; default 1,000.
    pub max_waiters_per_key: usize,
    /// The maximum wait time of a request; default 1 minute.
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

/// The waiting requests of a limiter, and the holding times of its slots.
#[derive(Debug, Default)]
pub struct Waiters {
    pub(crate) bounds: WaitBounds,
    pub(crate) holding_times: HoldingTimes,
    pub(crate) stats: WaitStats,
    /// The number of waiting requests. While the number is 0, callers need not take the lock.
    count: AtomicUsize,
    /// The number of changes of the blocks by entries.
    block_changes: AtomicU64,
    queues: Mutex<Queues>,
}

#[derive(Debug, Default)]
struct Queues {
    /// The number of the next ticket. Tickets are numbered in order of arrival.
    next: u64,
    /// The queue of each key with waiting requests.
    by_key: HashMap<Box<[u8]>, Queue>,
}

/// The waiting requests on one key.
#[derive(Debug, Default)]
struct Queue {
    /// The wakers of the waiting requests, by ticket.
    wakers: BTreeMap<u64, Waker>,
    /// The number of slot releases on the key since the queue was created.
    releases: u64,
}

impl Queue {
    fn first(&self) -> Option<u64> {
        self.wakers.first_key_value().map(|(first, _)| *first)
    }
}

impl Waiters {
    /// Creates empty queues with these bounds.
    #[must_use]
    pub fn new(bounds: WaitBounds) -> Self {
        Self {
            bounds,
            ..Self::default()
        }
    }

    /// Discards the holding times of a rule if `is_known` returns false for the rule's name.
    pub fn retain_rules(&self, is_known: impl Fn(&str) -> bool) {
        self.holding_times.retain(is_known);
    }

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the statistics of waits for concurrency slots.
    #[must_use]
    pub fn stats(&self) -> &WaitStats {
        &self.stats
    }

    pub(crate) fn has_queue(&self, key: &[u8]) -> bool {
        self.first(key).is_some()
    }

    /// Returns the ticket number of the first request waiting on `key`, if there is one.
    pub(crate) fn first(&self, key: &[u8]) -> Option<u64> {
        if self.count() == 0 {
            return None;
        }
        self.lock().by_key.get(key).and_then(Queue::first)
    }

    /// Returns the number of requests waiting on `key`.
    pub(crate) fn queue_len(&self, key: &[u8]) -> usize {
        if self.count() == 0 {
            return 0;
        }
        let queues = self.lock();
        queues.by_key.get(key).map_or(0, |queue| queue.wakers.len())
    }

    /// Makes all waiting requests check whether a [block by entries](tidegate_core::EntryBlocks)
    /// denies them. Call this method after such a block was set, so that a blocked request is
    /// denied immediately. Without this call, a blocked request is denied only when it is first in
    /// its queue.
    pub fn recheck_entry_blocks(&self) {
        // A request reads the number of changes before it looks up the blocks. If the request does
        // not see a new block, it sees at this point that the number has changed.
        self.block_changes.fetch_add(1, Ordering::AcqRel);
        if self.count() == 0 {
            return;
        }
        let wakers: Vec<Waker> = {
            let queues = self.lock();
            let queues = queues.by_key.values();
            queues
                .flat_map(|queue| queue.wakers.values())
                .cloned()
                .collect()
        };
        for waker in wakers {
            waker.wake();
        }
    }

    /// Returns the number of changes of the blocks by entries.
    pub(crate) fn block_changes(&self) -> u64 {
        self.block_changes.load(Ordering::Acquire)
    }

    /// Wakes the first request waiting on `key`, because slots of the key were released or the key
    /// was blocked.
    pub fn wake(&self, key: &[u8]) {
        if self.count() == 0 {
            return;
        }
        let mut queues = self.lock();
        let Some(queue) = queues.by_key.get_mut(key) else {
            return;
        };
        queue.releases += 1;
        let first = queue
            .wakers
            .first_key_value()
            .map(|(_, waker)| waker.clone());
        drop(queues);
        if let Some(waker) = first {
            waker.wake();
        }
    }

    /// Appends a request to the queue of `key`. At most `max_per_key` requests may wait in the
    /// queue.
    pub(crate) fn enter(&self, key: &[u8], max_per_key: usize) -> Result<Ticket<'_>, AcquireError> {
        self.enter_as(None, key, max_per_key)
    }

    /// Adds a request to the queue of `key`, like [`enter`](Self::enter). A request from another
    /// queue keeps its ticket `number`, so that its position still depends on its arrival time.
    fn enter_as(
        &self,
        number: Option<u64>,
        key: &[u8],
        max_per_key: usize,
    ) -> Result<Ticket<'_>, AcquireError> {
        let mut queues = self.lock();
        let bounds = &self.bounds;
        if number.is_none() && self.count() >= bounds.max_waiters {
            let max = bounds.max_waiters;
            return Err(AcquireError::TooManyWaiters { max });
        }
        let is_new = number.is_none();
        let number = number.unwrap_or(queues.next);
        let waker = Waker::noop().clone();
        match queues.by_key.get_mut(key) {
            Some(queue) if queue.wakers.len() >= max_per_key => {
                return Err(AcquireError::TooManyWaiters { max: max_per_key });
            }
            Some(queue) => {
                queue.wakers.insert(number, waker);
            }
            None if max_per_key == 0 => {
                return Err(AcquireError::TooManyWaiters { max: 0 });
            }
            None => {
                let mut queue = Queue::default();
                queue.wakers.insert(number, waker);
                queues.by_key.insert(key.into(), queue);
            }
        }
        queues.next += u64::from(is_new);
        self.count.fetch_add(1, Ordering::AcqRel);
        Ok(Ticket {
            waiters: self,
            key: key.into(),
            number,
        })
    }

    /// Removes a request from the queue of `key`. If another request is now first, returns its
    /// waker.
    fn leave(&self, key: &[u8], number: u64) -> Option<Waker> {
        let mut queues = self.lock();
        let queue = queues.by_key.get_mut(key)?;
        let was_first = queue.first() == Some(number);
        queue.wakers.remove(&number);
        self.count.fetch_sub(1, Ordering::AcqRel);
        if queue.wakers.is_empty() {
            queues.by_key.remove(key);
            return None;
        }
        let (_, next) = queue.wakers.first_key_value()?;
        was_first.then(|| next.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        // While the lock is held, only a failed allocation can cause a panic.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request waiting for admission. The caller repeats three steps: decide the request with
/// [`effect`](Self::effect), stop if [`has_passed`](Self::has_passed) returns true, and call
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
    /// The time of the next decision, calculated from the retry time of the latest decision.
    next: Timestamp,
    /// The number of decisions in which the request was denied a concurrency slot.
    slot_denials: u32,
    /// The number of slot releases on the key before the latest decision.
    releases: u64,
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
            slot_denials: 0,
            releases: 0,
        }
    }

    /// Returns the effect to use for deciding the request now.
    ///
    /// A request that has to queue must not be charged yet, so it peeks first. If the request can
    /// never be admitted, or only after its deadline, it is rejected without waiting.
    pub(crate) fn effect(&mut self) -> Effect {
        let must_queue = self.ticket.is_none() && self.waiters.has_queue(self.key);
        self.effect = if must_queue {
            Effect::Peek
        } else {
            Effect::Charge
        };
        self.releases = self.ticket.as_ref().map_or(0, Ticket::releases);
        self.effect
    }

    /// Returns true if the request is admitted, given its verdict at `now`. If the request is not
    /// admitted, puts it into the queue, unless it is already there.
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
            // The retry time is only an estimate, so a retry time after the deadline is no reason
            // to reject the request.
            RetryAfter::After(hint) if verdict.waits_for_slots() => {
                if now >= self.deadline {
                    let retry_after = Some(hint);
                    return Err(AcquireError::Timeout { retry_after });
                }
                let delay = match self.effect {
                    Effect::Peek => Span::ZERO,
                    _ => poll_delay(self.slot_denials, hint),
                };
                self.slot_denials = self.slot_denials.saturating_add(1);
                now.after(delay).min(self.deadline)
            }
            RetryAfter::After(span) if now.after(span) > self.deadline => {
                let retry_after = Some(span);
                return Err(AcquireError::Timeout { retry_after });
            }
            // The request has only peeked so far, so it is decided again as soon as it is first in
            // the queue.
            RetryAfter::After(_) if self.effect == Effect::Peek => now,
            // A denial with a wait time of zero would cause a busy loop.
            RetryAfter::After(span) => now.after(span.max(Span::from_micros(1))),
        };
        if self.ticket.is_none() {
            let max = self.waiters.bounds.max_waiters_per_key;
            self.ticket = Some(self.waiters.enter(self.key, max)?);
        }
        Ok(false)
    }

    /// Waits until the request must be decided again. The first request in the queue waits until
    /// the instant given by the latest decision, or until a slot of its key is released. Any other
    /// request waits until it is the first request in the queue.
    pub(crate) async fn wait<T: Timer>(&mut self, timer: &T) -> Result<(), AcquireError> {
        let Some(ticket) = &self.ticket else {
            return Ok(());
        };
        let seen = |releases| SeenCounts {
            releases,
            block_changes: None,
        };
        if ticket.is_first() {
            if self.next > self.clock.now() {
                let sleep = timer.sleep_until(self.next, self.clock);
                ticket.wake_within(seen(Some(self.releases)), sleep).await;
            }
            return Ok(());
        }
        let timeout = timer.sleep_until(self.deadline, self.clock);
        match ticket.wake_within(seen(None), timeout).await {
            Wake::Timeout => Err(AcquireError::Timeout { retry_after: None }),
            Wake::Turn | Wake::BlocksChanged => Ok(()),
        }
    }
}

/// The position of a request in the queue of its key. Dropping the ticket removes the request from
/// the queue.
#[derive(Debug)]
pub(crate) struct Ticket<'a> {
    waiters: &'a Waiters,
    key: Box<[u8]>,
    number: u64,
}

/// What a waiting request has seen before its latest decision. A change after the decision wakes
/// the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenCounts {
    /// The number of slot releases on the key, if the request was first in its queue. `None` if the
    /// request waits until it is first.
    pub(crate) releases: Option<u64>,
    /// The number of changes of the blocks by entries; `None` if they do not wake the request.
    pub(crate) block_changes: Option<u64>,
}

/// Why a wait of a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The request is now the first in its queue, or slots were released while it was the first.
    Turn,
    /// The blocks by entries have changed.
    BlocksChanged,
    /// The timeout has elapsed.
    Timeout,
}

impl Ticket<'_> {
    /// Returns the ticket number. Earlier requests have smaller numbers.
    #[cfg_attr(
        not(feature = "tokio"),
        expect(
            dead_code,
            reason = "requests wait for slots only with the feature `tokio`"
        )
    )]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the key of the queue.
    #[cfg_attr(
        not(feature = "tokio"),
        expect(
            dead_code,
            reason = "requests wait for slots only with the feature `tokio`"
        )
    )]
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Enters the queue of `key` with the same ticket number, and returns the new ticket.
    #[cfg_attr(
        not(feature = "tokio"),
        expect(
            dead_code,
            reason = "requests wait for slots only with the feature `tokio`"
        )
    )]
    pub(crate) fn enter<'w>(
        &self,
        waiters: &'w Waiters,
        key: &[u8],
        max_per_key: usize,
    ) -> Result<Ticket<'w>, AcquireError> {
        debug_assert_ne!(*self.key, *key, "a request is in a queue only once");
        waiters.enter_as(Some(self.number), key, max_per_key)
    }

    /// Returns true if no request on the same key is ahead of this request.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first_or_wakes(None)
    }

    /// Returns the number of slot releases on the key since the queue was created.
    pub(crate) fn releases(&self) -> u64 {
        let queues = self.waiters.lock();
        queues
            .by_key
            .get(&self.key)
            .map_or(0, |queue| queue.releases)
    }

    /// Waits until the request should be decided again, at most until `timeout` elapses.
    pub(crate) async fn wake_within(
        &self,
        seen: SeenCounts,
        timeout: impl Future<Output = ()>,
    ) -> Wake {
        let mut timeout = pin!(timeout);
        poll_fn(|context| {
            // Register the waker before the comparisons, so that no change is missed.
            let is_first = self.is_first_or_wakes(Some(context.waker()));
            let is_turn = match seen.releases {
                Some(releases) => self.releases() != releases,
                None => is_first,
            };
            if is_turn {
                return Poll::Ready(Wake::Turn);
            }
            let block_changes = self.waiters.block_changes();
            if seen.block_changes.is_some_and(|seen| seen != block_changes) {
                return Poll::Ready(Wake::BlocksChanged);
            }
            timeout.as_mut().poll(context).map(|()| Wake::Timeout)
        })
        .await
    }

    /// Returns true if the request is first. Registers `waker`, which is woken when the request
    /// becomes first, and when slots are released while it is first.
    fn is_first_or_wakes(&self, waker: Option<&Waker>) -> bool {
        let mut queues = self.waiters.lock();
        let Some(queue) = queues.by_key.get_mut(&self.key) else {
            debug_assert!(false, "the queue of a key exists while requests wait in it");
            return true;
        };
        if let (Some(waker), Some(known)) = (waker, queue.wakers.get_mut(&self.number)) {
            known.clone_from(waker);
        }
        queue.first() == Some(self.number)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if let Some(next) = self.waiters.leave(&self.key, self.number) {
            next.wake();
        }
    }
}
