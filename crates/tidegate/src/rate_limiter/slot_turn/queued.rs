//! The attempts of a request that waits in a queue.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::*;
use crate::waiters::{SeenCounts, Ticket, Wake, poll_delay};

/// The state of a request between its attempts.
pub(super) struct QueueProgress<'l, L: RateLimiter + ?Sized> {
    wait: Option<QueuedWait<'l, L>>,
    /// Whether a peek has just shown that no limit denies the request, or that a limit denies
    /// it that does not let requests wait.
    has_peeked: bool,
    /// Whether the next attempt is the last one.
    is_last: bool,
    /// The number of changes of the blocks by entries before the charges were determined.
    block_changes: u64,
}

impl<L: RateLimiter + ?Sized> Default for QueueProgress<'_, L> {
    fn default() -> Self {
        Self {
            wait: None,
            has_peeked: false,
            is_last: false,
            block_changes: 0,
        }
    }
}

impl<'l, L: RateLimiter + ?Sized> QueueProgress<'l, L> {
    pub(super) fn begin(&mut self, waiters: &Waiters) {
        self.block_changes = waiters.block_changes();
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.wait.is_some()
    }

    pub(super) fn only_blocks_changed(&self) -> bool {
        let wait = self.wait.as_ref();
        wait.is_some_and(|wait| wait.only_blocks_changed)
    }

    pub(super) fn end_wait(&mut self, end: WaitEnd) {
        if let Some(wait) = self.wait.take() {
            wait.end(end);
        }
    }

    /// Makes an attempt. If the attempt does not decide the request, waits until the next attempt
    /// is due, and returns `None`.
    pub(super) async fn attempt(
        &mut self,
        turn: &SlotTurn<'_>,
        limiter: &'l L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        cache_search: CacheSearch,
    ) -> Option<DecisionAndReceipt<ReceiptOf<L>>> {
        let (store, waiters) = (limiter.store(), limiter.wait_queues());
        let is_blocked = charges.iter().any(|charge| charge.blocked.is_some());
        if let Some(wait) = &mut self.wait
            && std::mem::take(&mut wait.only_blocks_changed)
            && !is_blocked
        {
            self.is_last = !wait.next_attempt(self.block_changes).await;
            return turn.none_unless_cancelled().await;
        }
        let counts_denied = counts_denied(charges);
        let own = self.wait.as_ref().map(|wait| wait.ticket.number());
        let ahead = queue_ahead(waiters, charges, own).filter(|_| !self.is_last);
        let can_charge = (self.has_peeked || !counts_denied) && ahead.is_none();
        let effect = if self.is_last || can_charge {
            Effect::Charge
        } else {
            Effect::Peek
        };
        let releases = self.wait.as_ref().map_or(0, |wait| wait.ticket.releases());
        let original = charges.clone();
        let now = limiter.now();
        let request = attempt(charges, now, effect, cache_search);
        let decided = turn.call(store, request, outcomes).await;
        if turn.is_cancelled() {
            return Some(decided);
        }
        let is_admitted = decided.decision.decision == Decision::Admitted;
        let queue = if is_admitted {
            ahead
        } else {
            queue_of_denial(&decided.decision, charges, outcomes)
        };
        if effect == Effect::Charge && (is_admitted || self.is_last || queue.is_none()) {
            self.end_wait(if is_admitted {
                WaitEnd::Admitted
            } else {
                WaitEnd::Denied
            });
            store.count(now, &original, charges, &decided.decision, outcomes);
            return Some(decided);
        }
        let Some(queue) = queue else {
            // If the peek was admitted, the next attempt charges the request. If the peek was
            // denied, other limits or a block deny the request. The next attempt is then the last
            // one, and charges the request, so that limits with `count_denied` count it.
            self.is_last = !is_admitted;
            self.has_peeked = true;
            return None;
        };
        self.has_peeked = false;
        let entered = QueuedWait::enter(self.wait.take(), limiter, queue, turn.longest_wait);
        let Some(wait) = entered else {
            if effect == Effect::Charge {
                store.count(now, &original, charges, &decided.decision, outcomes);
                return Some(decided);
            }
            self.is_last = true;
            return None;
        };
        let wait = self.wait.insert(wait);
        wait.begin(releases, hint(charges, outcomes));
        self.is_last = !wait.next_attempt(self.block_changes).await;
        turn.none_unless_cancelled().await
    }
}

impl SlotTurn<'_> {
    /// Returns `None`. If the request is cancelled, never returns: the store is not being
    /// called, so the caller drops this future instead of polling it.
    async fn none_unless_cancelled<T>(&self) -> Option<T> {
        if self.is_cancelled() {
            std::future::pending::<()>().await;
        }
        None
    }
}

/// Returns the earliest retry time of the limits that deny a request.
fn hint(charges: &[Charge<'_>], outcomes: &[Outcome]) -> Span {
    let denied = lines(charges, outcomes).filter(|(_, _, outcome)| !outcome.allowed);
    let hints = denied.filter_map(|(_, _, outcome)| outcome.retry_after.span());
    hints.min().unwrap_or(Span::ZERO)
}

/// A waiting request. Dropping this value moves the next request to the front of the queue.
struct QueuedWait<'l, L: RateLimiter + ?Sized> {
    ticket: Ticket<'l>,
    /// When the request entered the queue.
    entered: Instant,
    /// The end of the request's longest wait.
    deadline: Instant,
    /// The number of attempts since the request became first in the queue, or since slots were
    /// last released.
    attempts: u32,
    /// Whether the request has just entered the queue. A new request that is also the first in the
    /// queue is decided again without a delay, because slots may have been released before it was
    /// in the queue.
    is_new: bool,
    /// The number of slot releases on the key before the latest decision.
    releases: u64,
    /// The time of the next attempt if the request is first in the queue and no slots are
    /// released.
    poll_at: Instant,
    /// Whether the wait was interrupted only because blocks by entries have changed.
    only_blocks_changed: bool,
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

impl<'l, L: RateLimiter + ?Sized> QueuedWait<'l, L> {
    /// Enters `queue`. If the request is waiting in another queue, it leaves the other queue. The
    /// deadline of the request is never extended. Returns `None` if `queue` is full. The request
    /// still leaves its former queue, because it would delay the requests behind it, which may have
    /// other keys.
    fn enter(
        former: Option<Self>,
        limiter: &'l L,
        queue: SlotQueue<'_>,
        longest_wait: Span,
    ) -> Option<Self> {
        let longest = Duration::from(queue.slot_wait.longest.min(longest_wait));
        let max = usize::try_from(queue.slot_wait.queue).unwrap_or(usize::MAX);
        let (waiters, now) = (limiter.wait_queues(), Instant::now());
        let Some(mut wait) = former else {
            let ticket = waiters.enter(queue.key, max).ok()?;
            let record = WaitRecord {
                limiter,
                since: limiter.now(),
                end: WaitEnd::Cancelled,
            };
            return Some(Self {
                ticket,
                entered: now,
                deadline: now + longest,
                attempts: 0,
                is_new: true,
                releases: 0,
                poll_at: now,
                only_blocks_changed: false,
                record,
            });
        };
        if wait.ticket.key() != queue.key {
            let Ok(ticket) = wait.ticket.enter(waiters, queue.key, max) else {
                wait.end(WaitEnd::Denied);
                return None;
            };
            // Replacing the ticket drops the ticket for the other queue, so that the next request
            // there moves to the front.
            wait.ticket = ticket;
            wait.entered = now;
            wait.attempts = 0;
            wait.is_new = true;
        }
        // The longest wait may have changed since the request entered the queue.
        wait.deadline = wait.deadline.min(wait.entered + longest);
        Some(wait)
    }

    /// Begins to wait for the next attempt. `releases` is the number of slot releases on the
    /// key before the latest decision, and `hint` is the earliest retry time of that decision.
    fn begin(&mut self, releases: u64, hint: Span) {
        self.releases = releases;
        self.poll_at = Instant::now() + Duration::from(poll_delay(self.attempts, hint));
    }

    /// Waits until the request should be decided again, or until the blocks by entries have
    /// been changed more often than `block_changes`. Returns false if the longest wait of the
    /// request has elapsed.
    async fn next_attempt(&mut self, block_changes: u64) -> bool {
        self.only_blocks_changed = false;
        let is_first = self.ticket.is_first();
        if std::mem::replace(&mut self.is_new, false) && is_first {
            return true;
        }
        let seen = SeenCounts {
            releases: is_first.then_some(self.releases),
            block_changes: Some(block_changes),
        };
        let end = if is_first {
            self.poll_at.min(self.deadline)
        } else {
            self.deadline
        };
        let wake = self.ticket.wake_within(seen, sleep_until(end));
        match wake.await {
            // Slots are being released, so another slot may soon be free. Therefore, restart the
            // backoff.
            Wake::Turn => self.attempts = 0,
            Wake::BlocksChanged => self.only_blocks_changed = true,
            Wake::Timeout => self.attempts = self.attempts.saturating_add(1),
        }
        Instant::now() < self.deadline
    }

    fn end(mut self, end: WaitEnd) {
        self.record.end = end;
    }
}
