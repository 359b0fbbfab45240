//! Decides requests that may wait for concurrency slots.
//!
//! ```text
//!   request ─▶ others wait on the key? ── no ──▶ charge ─▶ admitted, or denied by other limits
//!                   │ yes                          │ denied, and only slots are missing
//!                   ▼                              ▼
//!           peek: other limits admit it? ──▶ enter queue ─▶ first in queue ─▶ charge ─▶ admitted
//!                   │ no                           ▲                             │ denied
//!                   ▼                              └─ a release, or a short delay ◀┘
//!                denied
//! ```
//!
//! Nothing is charged while a request waits. When the request is first in its queue, all its limits
//! are evaluated together, at the current time. When the longest wait of the request has elapsed,
//! the request is decided a last time. This decision is the verdict.

use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_core::{
    Accounting, Algorithm, CacheSearch, Charge, Decision, Effect, Limit, Outcome, RetryAfter,
    SlotEstimate, SlotWait, Span, Store, StoreDecision, StoreRequest, Timestamp, Verdict,
};

use super::{OwnedCharges, RateLimiter};
use crate::Waiters;

/// Whether the caller of a decision wants a receipt for the charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipts {
    /// The store [reserves](Store::reserve), and returns a receipt.
    Wanted,
    /// The store [decides](Store::decide) without a receipt.
    Unwanted,
}

/// Cancels the request of a [`SlotTurn`], and tells the caller whether the store is being called. A
/// caller needs this signal if it must not drop the future during a call to the store.
#[derive(Debug, Default)]
pub struct CancelSignal {
    calls_store: AtomicBool,
    is_cancelled: AtomicBool,
}

impl CancelSignal {
    /// Cancels the request. Returns true if the store is being called. In this case, the caller
    /// must poll the future until it is ready, because the store may make charges whose receipt
    /// would otherwise be lost. The future is ready as soon as the store has replied. If this
    /// method returns false, the caller must drop the future.
    pub fn cancel(&self) -> bool {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.calls_store.load(Ordering::Relaxed)
    }
}

/// The result of a [`SlotTurn`].
#[derive(Debug)]
pub struct TurnDecision<R> {
    /// The decision of the store.
    pub decided: StoreDecision,
    /// The receipt of the charges, if there are any and the caller wants it.
    pub receipt: Option<R>,
}

impl<R> TurnDecision<R> {
    /// Returns the verdict on a request with these `charges`, given the `outcomes` of their limits.
    #[must_use]
    pub fn verdict<'r>(&self, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Verdict<'r> {
        self.decided.verdict(charges, outcomes)
    }
}

/// The settings for deciding a request that may wait for slots.
#[derive(Clone, Copy, Debug)]
pub struct SlotTurn<'s> {
    effect: Effect,
    longest_wait: Span,
    receipts: Receipts,
    signal: Option<&'s CancelSignal>,
}

/// A queue in which a request waits for slots.
#[derive(Clone, Copy, Debug)]
struct SlotQueue<'c> {
    key: &'c [u8],
    slot_wait: SlotWait,
}

impl<'s> SlotTurn<'s> {
    /// Creates the settings for a request that is decided with `effect` and waits at most
    /// `longest_wait`. A request waits only if `effect` is [`Effect::Charge`].
    #[must_use]
    pub fn new(effect: Effect, longest_wait: Span) -> Self {
        Self {
            effect,
            longest_wait,
            receipts: Receipts::Unwanted,
            signal: None,
        }
    }

    /// Creates the settings for a request that is charged and does not wait.
    #[must_use]
    pub fn at_once() -> Self {
        Self::new(Effect::Charge, Span::ZERO)
    }

    /// Sets whether the caller wants a receipt.
    #[must_use]
    pub fn with_receipts(self, receipts: Receipts) -> Self {
        Self { receipts, ..self }
    }

    /// Sets the signal that cancels the request.
    #[must_use]
    pub fn with_signal(self, signal: Option<&'s CancelSignal>) -> Self {
        Self { signal, ..self }
    }

    /// Decides a request with these `charges` at `now`. Returns `None` if the store or the request
    /// has to wait. In this case, nothing was charged, and the caller must call
    /// [`decide`](Self::decide).
    #[inline]
    pub fn decide_now<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        now: Timestamp,
    ) -> Option<TurnDecision<ReceiptOf<L>>> {
        if self.can_wait(charges) {
            return self.decide_unless_waiting(limiter, charges, outcomes, now);
        }
        let request = StoreRequest::new(charges, now, self.effect);
        let turn = self.call_now(limiter.store(), request, outcomes)?;
        if turn.decided.decision == Decision::Limited {
            estimate(limiter.wait_queues(), charges, outcomes);
        }
        Some(turn)
    }

    fn decide_unless_waiting<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        now: Timestamp,
    ) -> Option<TurnDecision<ReceiptOf<L>>> {
        if queue_ahead(limiter.wait_queues(), charges, None).is_some() || counts_denied(charges) {
            return None;
        }
        let (original, store) = (charges.clone(), limiter.store());
        let request = attempt(charges, now, Effect::Charge, CacheSearch::Due);
        let turn = self.call_now(store, request, outcomes)?;
        if queue_of_denial(&turn.decided, charges, outcomes).is_some() {
            *charges = original;
            return None;
        }
        store.count(now, &original, charges, &turn.decided, outcomes);
        if turn.decided.decision == Decision::Limited {
            estimate(limiter.wait_queues(), charges, outcomes);
        }
        Some(turn)
    }

    fn call_now<S: Store>(
        &self,
        store: &S,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<TurnDecision<S::Receipt>> {
        let (decided, receipt) = match self.receipts {
            Receipts::Wanted => store.reserve(request, outcomes).ready()?,
            Receipts::Unwanted => (store.decide(request, outcomes).ready()?, None),
        };
        Some(TurnDecision { decided, receipt })
    }

    /// Decides a request with these `charges`. The request waits for concurrency slots if its
    /// limits allow waiting. If the future is dropped while the request waits, nothing was charged,
    /// and the next request moves to the front of the queue.
    pub async fn decide<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        cache_search: CacheSearch,
    ) -> TurnDecision<ReceiptOf<L>> {
        #[cfg(feature = "tokio")]
        let turn = if self.can_wait(charges) {
            // Waiting is rare, and the future of a waiting request is large, so it is boxed.
            Box::pin(self.decide_in_queue(limiter, charges, outcomes, cache_search)).await
        } else {
            self.decide_once(limiter, charges, outcomes, cache_search)
                .await
        };
        #[cfg(not(feature = "tokio"))]
        let turn = self
            .decide_once(limiter, charges, outcomes, cache_search)
            .await;
        if turn.decided.decision == Decision::Limited {
            estimate(limiter.wait_queues(), charges, outcomes);
        }
        turn
    }

    async fn decide_once<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        cache_search: CacheSearch,
    ) -> TurnDecision<ReceiptOf<L>> {
        let request = StoreRequest {
            cache_search,
            ..StoreRequest::new(charges, limiter.now(), self.effect)
        };
        self.call(limiter.store(), request, outcomes).await
    }

    async fn call<S: Store>(
        &self,
        store: &S,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> TurnDecision<S::Receipt> {
        let _calling = self.signal.map(StoreCall::new);
        let (decided, receipt) = if self.receipts == Receipts::Wanted && request.effect.can_write()
        {
            store.reserve(request, outcomes).await
        } else {
            (store.decide(request, outcomes).await, None)
        };
        TurnDecision { decided, receipt }
    }

    fn can_wait(&self, charges: &[Charge<'_>]) -> bool {
        self.longest_wait > Span::ZERO
            && self.effect == Effect::Charge
            && charges.iter().any(|charge| charge.limits.has_slot_wait())
    }

    #[cfg(feature = "tokio")]
    fn is_cancelled(&self) -> bool {
        let is_cancelled = |signal: &CancelSignal| signal.is_cancelled.load(Ordering::Relaxed);
        self.signal.is_some_and(is_cancelled)
    }
}

type ReceiptOf<L> = <<L as RateLimiter>::Store as Store>::Receipt;

/// A guard that marks the store as being called until it is dropped.
struct StoreCall<'s>(&'s CancelSignal);

impl<'s> StoreCall<'s> {
    fn new(signal: &'s CancelSignal) -> Self {
        signal.calls_store.store(true, Ordering::Relaxed);
        Self(signal)
    }
}

impl Drop for StoreCall<'_> {
    fn drop(&mut self) {
        self.0.calls_store.store(false, Ordering::Relaxed);
    }
}

fn attempt<'q, 'c>(
    charges: &'q mut Vec<Charge<'c>>,
    now: Timestamp,
    effect: Effect,
    cache_search: CacheSearch,
) -> StoreRequest<'q, 'c> {
    StoreRequest {
        accounting: Accounting::Attempt,
        cache_search,
        ..StoreRequest::new(charges, now, effect)
    }
}

/// Returns true if one of the limits counts denied requests. The request must then be denied with
/// [`Effect::Charge`] at most once.
fn counts_denied(charges: &[Charge<'_>]) -> bool {
    let mut limits = charges.iter().flat_map(|charge| charge.limits.iter());
    limits.any(Limit::count_denied)
}

/// Returns the first queue in which earlier requests wait for slots that the request needs. `own`
/// is the ticket number of the request, if it is waiting. If the request is not waiting, all
/// waiting requests count as earlier.
fn queue_ahead<'c>(
    waiters: &Waiters,
    charges: &[Charge<'c>],
    own: Option<u64>,
) -> Option<SlotQueue<'c>> {
    if waiters.count() == 0 {
        return None;
    }
    let waited = charges
        .iter()
        .filter(|charge| charge.limits.has_slot_wait());
    let is_ahead = |charge: &&Charge<'c>| match (waiters.first(charge.key), own) {
        (Some(first), Some(own)) => first < own,
        (first, _) => first.is_some(),
    };
    waited.filter(is_ahead).find_map(|charge| {
        let slot_wait = charge.limits.iter().find_map(Limit::slot_wait)?;
        let key = charge.key;
        Some(SlotQueue { key, slot_wait })
    })
}

/// Returns the queue for a request that was denied with these `outcomes`. Returns `None` if the
/// request was admitted. Also returns `None` if a limit that does not let requests wait has denied
/// the request, too, because waiting for slots would not help.
fn queue_of_denial<'c>(
    decided: &StoreDecision,
    charges: &[Charge<'c>],
    outcomes: &[Outcome],
) -> Option<SlotQueue<'c>> {
    if decided.decision != Decision::Limited {
        return None;
    }
    let mut found: Option<SlotQueue<'c>> = None;
    for (charge, limit, outcome) in lines(charges, outcomes) {
        if outcome.allowed || charge.limits.is_shadow() {
            continue;
        }
        if outcome.retry_after == RetryAfter::Never {
            return None;
        }
        let slot_wait = limit.slot_wait()?;
        let queue = found.get_or_insert(SlotQueue {
            key: charge.key,
            slot_wait,
        });
        queue.slot_wait.longest = queue.slot_wait.longest.min(slot_wait.longest);
    }
    found
}

/// Returns each limit with its charge and its outcome.
fn lines<'a, 'c>(
    charges: &'a [Charge<'c>],
    outcomes: &'a [Outcome],
) -> impl Iterator<Item = (&'a Charge<'c>, &'c Limit, &'a Outcome)> {
    let limits = charges
        .iter()
        .flat_map(|charge| charge.limits.iter().map(move |limit| (charge, limit)));
    limits
        .zip(outcomes)
        .map(|((charge, limit), outcome)| (charge, limit, outcome))
}

/// Estimates the retry times of the concurrency limits that deny a request. A retry time is
/// replaced with its estimate only if the holding times of the limit's slots are known.
#[cold]
fn estimate(waiters: &Waiters, charges: &[Charge<'_>], outcomes: &mut [Outcome]) {
    let limits = charges
        .iter()
        .flat_map(|charge| charge.limits.iter().map(move |limit| (charge, limit)));
    for ((charge, limit), outcome) in limits.zip(outcomes) {
        let Algorithm::Concurrency { lease, .. } = limit.algorithm() else {
            continue;
        };
        if outcome.allowed || outcome.retry_after == RetryAfter::Never {
            continue;
        }
        let rule = charge.limits.name().unwrap_or_default();
        let Some(holding_time) = waiters.holding_times.of(rule) else {
            continue;
        };
        let input = SlotEstimate {
            slots: limit.quota().saturating_add(limit.soft_allowance()),
            missing: charge.cost.units().saturating_sub(outcome.remaining),
            ahead: u64::try_from(waiters.queue_len(charge.key)).unwrap_or(u64::MAX),
            longest_wait: limit.slot_wait().map_or(Span::ZERO, |wait| wait.longest),
            lease: *lease,
        };
        if let Some(span) = holding_time.estimate(&input) {
            outcome.retry_after = RetryAfter::After(span);
        }
    }
}

/// Wakes the requests that wait for the released slots of `charges`. `held` is how long the slots
/// were held, if this is known.
pub fn release_slots(waiters: &Waiters, charges: &OwnedCharges, held: Option<Span>) {
    for (charge, rule) in charges.with_rules() {
        let Some(rule) = rule.filter(|rule| rule.has_slots()) else {
            continue;
        };
        if let Some(held) = held {
            waiters.holding_times.observe(rule.name(), held);
        }
        waiters.wake(&charge.key);
    }
}

#[cfg(feature = "tokio")]
mod queued {
    use std::{pin::Pin, time::Duration};

    use futures_util::future::select;
    use tokio::time::{Instant, Sleep, sleep};

    use super::*;
    use crate::{
        WaitEnd,
        waiters::{Ticket, poll_delay},
    };

    impl SlotTurn<'_> {
        /// Decides a request. The request waits in a queue if no slots are free.
        pub(super) async fn decide_in_queue<'c, L: RateLimiter + ?Sized>(
            &self,
            limiter: &L,
            charges: &mut Vec<Charge<'c>>,
            outcomes: &mut Vec<Outcome>,
            first_search: CacheSearch,
        ) -> TurnDecision<ReceiptOf<L>> {
            let (store, original) = (limiter.store(), charges.clone());
            let counts_denied = counts_denied(&original);
            let mut wait: Option<Wait<'_, 'c, L>> = None;
            let mut cache_search = first_search;
            let mut has_peeked = !counts_denied;
            let mut is_last = false;
            loop {
                let own = wait.as_ref().map(|wait| wait.ticket.number());
                let ahead = queue_ahead(limiter.wait_queues(), &original, own);
                let ahead = ahead.filter(|_| !is_last);
                let effect = if is_last || (has_peeked && ahead.is_none()) {
                    Effect::Charge
                } else {
                    Effect::Peek
                };
                let releases = wait.as_ref().map_or(0, |wait| wait.ticket.releases());
                charges.clone_from(&original);
                let now = limiter.now();
                let request = attempt(charges, now, effect, cache_search);
                let turn = self.call(store, request, outcomes).await;
                cache_search = CacheSearch::Due;
                if self.is_cancelled() {
                    return turn;
                }
                let is_admitted = turn.decided.decision == Decision::Admitted;
                let queue = if is_admitted {
                    ahead
                } else {
                    queue_of_denial(&turn.decided, charges, outcomes)
                };
                if effect == Effect::Charge && (is_admitted || is_last || queue.is_none()) {
                    let end = if is_admitted {
                        WaitEnd::Admitted
                    } else {
                        WaitEnd::Denied
                    };
                    if let Some(wait) = wait {
                        wait.end(end);
                    }
                    store.count(now, &original, charges, &turn.decided, outcomes);
                    return turn;
                }
                let Some(queue) = queue else {
                    // If the peek was admitted, the next attempt charges the request. Otherwise,
                    // other limits denied the request. The next attempt is then the last one: it
                    // makes the limits that count denied requests count this request.
                    is_last = !is_admitted;
                    has_peeked = true;
                    continue;
                };
                has_peeked = !counts_denied;
                let entered = Wait::enter(wait.take(), limiter, queue, self.longest_wait);
                let Some(mut waiting) = entered else {
                    if effect == Effect::Charge {
                        store.count(now, &original, charges, &turn.decided, outcomes);
                        return turn;
                    }
                    is_last = true;
                    continue;
                };
                let hint = hint(charges, outcomes);
                is_last = !waiting.next_attempt(releases, hint).await;
                if self.is_cancelled() {
                    // The store is not being called, so the caller drops this future instead of
                    // polling it.
                    std::future::pending::<()>().await;
                }
                wait = Some(waiting);
            }
        }
    }

    /// Returns the earliest retry time of the limits that deny a request.
    fn hint(charges: &[Charge<'_>], outcomes: &[Outcome]) -> Span {
        let denied = lines(charges, outcomes).filter(|(_, _, outcome)| !outcome.allowed);
        let hints = denied.filter_map(|(_, _, outcome)| outcome.retry_after.span());
        hints.min().unwrap_or(Span::ZERO)
    }

    /// A waiting request. Dropping it moves the next request to the front of the queue.
    struct Wait<'l, 'c, L: RateLimiter + ?Sized>
    where
        'c: 'l,
    {
        ticket: Ticket<'l>,
        key: &'c [u8],
        /// The timer that elapses at the end of the request's longest wait.
        deadline: Pin<Box<Sleep>>,
        /// The number of attempts since the request became first in the queue, or since slots were
        /// last released.
        attempts: u32,
        /// Whether the request has just entered the queue. If it is also first, it is decided again
        /// without a delay, because slots may have been released before it was in the queue.
        is_new: bool,
        record: WaitRecord<'l, L>,
    }

    /// When dropped, records the result and the duration of a wait.
    struct WaitRecord<'l, L: RateLimiter + ?Sized> {
        limiter: &'l L,
        since: Timestamp,
        end: WaitEnd,
    }

    impl<L: RateLimiter + ?Sized> Drop for WaitRecord<'_, L> {
        fn drop(&mut self) {
            let waited = self.limiter.now().since(self.since);
            self.limiter.wait_queues().stats.observe(self.end, waited);
        }
    }

    impl<'l, 'c, L: RateLimiter + ?Sized> Wait<'l, 'c, L>
    where
        'c: 'l,
    {
        /// Enters `queue`. If the request is waiting in another queue, it leaves the other queue,
        /// unless `queue` is full. The deadline of the request is never extended. Returns `None` if
        /// `queue` is full and the request was not waiting yet.
        fn enter(
            former: Option<Self>,
            limiter: &'l L,
            queue: SlotQueue<'c>,
            longest_wait: Span,
        ) -> Option<Self> {
            let longest = Duration::from(queue.slot_wait.longest.min(longest_wait));
            let max = usize::try_from(queue.slot_wait.queue).unwrap_or(usize::MAX);
            let waiters = limiter.wait_queues();
            let Some(mut wait) = former else {
                let ticket = waiters.enter(queue.key, max).ok()?;
                let record = WaitRecord {
                    limiter,
                    since: limiter.now(),
                    end: WaitEnd::Cancelled,
                };
                return Some(Self {
                    ticket,
                    key: queue.key,
                    deadline: Box::pin(sleep(longest)),
                    attempts: 0,
                    is_new: true,
                    record,
                });
            };
            if wait.key != queue.key
                && let Ok(ticket) = wait.ticket.enter(waiters, queue.key, max)
            {
                // This drops the ticket for the other queue, so the next request there moves to the
                // front.
                wait.ticket = ticket;
                wait.key = queue.key;
                wait.attempts = 0;
                wait.is_new = true;
                let earliest = Instant::now() + longest;
                if earliest < wait.deadline.deadline() {
                    wait.deadline.as_mut().reset(earliest);
                }
            }
            Some(wait)
        }

        /// Waits until the request should be decided again. Returns false if its longest wait has
        /// elapsed. `releases` is the number of slot releases on the key before the latest
        /// decision.
        async fn next_attempt(&mut self, releases: u64, hint: Span) -> bool {
            let is_new = std::mem::replace(&mut self.is_new, false);
            if !self.ticket.is_first() {
                return self.ticket.turn_comes_within(self.deadline.as_mut()).await;
            }
            if is_new {
                return true;
            }
            let delay = Duration::from(poll_delay(self.attempts, hint));
            self.attempts = self.attempts.saturating_add(1);
            let poll = std::pin::pin!(sleep(delay));
            let timeout = async {
                select(self.deadline.as_mut(), poll).await;
            };
            if self.ticket.slots_released_within(releases, timeout).await {
                // Slots are being released, so another slot may soon be free. Therefore restart the
                // backoff.
                self.attempts = 0;
            }
            !self.deadline.is_elapsed()
        }

        fn end(mut self, end: WaitEnd) {
            self.record.end = end;
        }
    }
}
