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
//! the request is decided a last time. This last decision is the verdict.
//!
//! The rules may change while a request waits. [`SlotTurn::decide_request`] therefore determines
//! the charges again before each attempt, from the rules, overrides and blocks of that time. A
//! change of the blocks by entries wakes all waiting requests, so that a blocked request is denied
//! immediately. Any other change takes effect with the next attempt.

#[cfg(feature = "tokio")]
mod queued;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tidegate_core::{
    Accounting, Algorithm, CacheSearch, Charge, Decision, DecisionAndReceipt, Effect, Limit,
    MaybeReady, Outcome, Request, RequestError, RetryAfter, RuleSet, Scratch, SlotEstimate,
    SlotWait, Span, Store, StoreDecision, StoreRequest, Timestamp, Verdict,
};

use super::{OwnedCharges, RateLimiter, stretch};
use crate::{WaitEnd, Waiters};

/// Whether the caller of a decision wants a receipt for the charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipts {
    /// The store [reserves](Store::reserve), and returns a receipt.
    Wanted,
    /// The store reserves if the charges [should be settled](RuleSet::wants_receipt).
    /// [`SlotTurn::decide_request`] knows the rules; without rules, this variant works like
    /// `Unwanted`.
    IfSettled,
    /// The store [decides](Store::decide) without a receipt.
    Unwanted,
}

impl Receipts {
    /// Returns `Wanted` or `Unwanted` for `charges`, which were made under `rules`.
    fn of(self, rules: &RuleSet, charges: &[Charge<'_>]) -> Self {
        match self {
            Self::IfSettled if rules.wants_receipt(charges) => Self::Wanted,
            Self::IfSettled => Self::Unwanted,
            given => given,
        }
    }
}

/// Cancels the request of a [`SlotTurn`], and tells the caller whether the store is being called. A
/// caller needs this signal if it must not drop the future during a call to the store.
#[derive(Debug, Default)]
pub struct CancelSignal {
    calls_store: AtomicBool,
    is_cancelled: AtomicBool,
}

impl CancelSignal {
    /// Cancels the request. Returns true if the store is being called. If the method returns true,
    /// the caller must poll the future until it is ready, because the store may make charges whose
    /// receipt would otherwise be lost. The future is ready as soon as the store has replied. If
    /// the method returns false, the caller must drop the future.
    pub fn cancel(&self) -> bool {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.calls_store.load(Ordering::Relaxed)
    }
}

/// The result of [`SlotTurn::decide_request`].
#[derive(Debug)]
pub struct TurnResult<'t, R> {
    /// The rules under which the request was decided.
    pub rules: &'t Arc<RuleSet>,
    /// The evaluated charges.
    pub charges: &'t [Charge<'t>],
    /// The verdict.
    pub verdict: Verdict<'t>,
    /// The receipt of the charges, if there are any and the caller wants it.
    pub receipt: Option<R>,
}

/// The buffers for deciding a request.
#[derive(Debug)]
pub struct TurnBuffers<'b> {
    /// The buffers for the charges.
    pub scratch: &'b mut Scratch,
    /// The buffer for the outcomes.
    pub outcomes: &'b mut Vec<Outcome>,
}

/// The settings for deciding a request that may wait for slots.
#[derive(Clone, Copy, Debug)]
pub struct SlotTurn<'s> {
    effect: Effect,
    longest_wait: Span,
    longest_delay: Option<Span>,
    receipts: Receipts,
    cache_search: CacheSearch,
    signal: Option<&'s CancelSignal>,
}

/// A queue in which a request waits for slots.
#[derive(Clone, Copy, Debug)]
struct SlotQueue<'c> {
    #[cfg_attr(
        not(feature = "tokio"),
        expect(
            dead_code,
            reason = "requests wait for slots only with the feature `tokio`"
        )
    )]
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
            longest_delay: None,
            receipts: Receipts::Unwanted,
            cache_search: CacheSearch::Due,
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

    /// Sets whether the first decision of [`decide`](Self::decide) and
    /// [`decide_request`](Self::decide_request) searches the store's denial cache. The default is
    /// [`CacheSearch::Due`].
    #[must_use]
    pub fn with_cache_search(self, cache_search: CacheSearch) -> Self {
        Self {
            cache_search,
            ..self
        }
    }

    /// Sets the longest time that a queueing limit may [delay](Charge::longest_wait) the request.
    #[must_use]
    pub fn with_longest_delay(self, longest_delay: Span) -> Self {
        let longest_delay = Some(longest_delay);
        Self {
            longest_delay,
            ..self
        }
    }

    /// Sets the signal that cancels the request.
    #[must_use]
    pub fn with_signal(self, signal: Option<&'s CancelSignal>) -> Self {
        Self { signal, ..self }
    }

    /// Decides a request with these `charges` at `now`. Returns `None` if the store or the request
    /// has to wait. If the result is `None`, nothing was charged, and the caller must call
    /// [`decide`](Self::decide).
    #[inline]
    pub fn decide_now<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        now: Timestamp,
    ) -> Option<DecisionAndReceipt<ReceiptOf<L>>> {
        if self.can_wait(charges) {
            return self.decide_unless_waiting(limiter, charges, outcomes, now);
        }
        let request = StoreRequest::new(charges, now, self.effect);
        let decided = self.call_now(limiter.store(), request, outcomes)?;
        estimate(limiter.wait_queues(), &decided.decision, charges, outcomes);
        Some(decided)
    }

    fn decide_unless_waiting<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        now: Timestamp,
    ) -> Option<DecisionAndReceipt<ReceiptOf<L>>> {
        if queue_ahead(limiter.wait_queues(), charges, None).is_some() || counts_denied(charges) {
            return None;
        }
        let (original, store) = (charges.clone(), limiter.store());
        let request = attempt(charges, now, Effect::Charge, CacheSearch::Due);
        let decided = self.call_now(store, request, outcomes)?;
        if queue_of_denial(&decided.decision, charges, outcomes).is_some() {
            *charges = original;
            return None;
        }
        store.count(now, &original, charges, &decided.decision, outcomes);
        estimate(limiter.wait_queues(), &decided.decision, charges, outcomes);
        Some(decided)
    }

    fn call_now<S: Store>(
        &self,
        store: &S,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<DecisionAndReceipt<S::Receipt>> {
        if self.reserves(request.effect) {
            return store.reserve(request, outcomes).ready();
        }
        let decided = store.decide(request, outcomes).ready()?;
        Some(DecisionAndReceipt::without_receipt(decided))
    }

    /// Decides a request with these `charges`. The request waits for concurrency slots if its
    /// limits allow waiting. If the future is dropped while the request waits, nothing was charged,
    /// and the next request moves to the front of the queue.
    pub async fn decide<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
    ) -> DecisionAndReceipt<ReceiptOf<L>> {
        if !self.can_wait(charges) {
            return self
                .decide_once(limiter, charges, outcomes, self.cache_search)
                .await;
        }
        let original = charges.clone();
        let mut attempts = Attempts::new(limiter, self.cache_search);
        loop {
            attempts.begin();
            charges.clone_from(&original);
            if let Some(decided) = attempts.make(self, charges, outcomes).await {
                return decided;
            }
        }
    }

    /// Decides `request` under `rules`, and passes the decision to `finish`. The request waits like
    /// the request of [`decide`](Self::decide). After a wait, the request is decided under the
    /// rules, overrides and blocks that are active after the wait.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    pub async fn decide_request<L: RateLimiter + ?Sized, T>(
        &self,
        limiter: &L,
        rules: &Arc<RuleSet>,
        request: &Request<'_>,
        buffers: TurnBuffers<'_>,
        finish: impl FnOnce(TurnResult<'_, ReceiptOf<L>>) -> T,
    ) -> Result<T, RequestError> {
        let TurnBuffers { scratch, outcomes } = buffers;
        let mut reloaded: Option<Arc<RuleSet>> = None;
        let mut attempts = Attempts::new(limiter, self.cache_search);
        loop {
            let rules = reloaded.as_ref().unwrap_or(rules);
            attempts.begin();
            let now = limiter.now();
            let charges = rules.charges(request, now, scratch);
            let mut charges = charges.inspect_err(|_| attempts.end_wait(WaitEnd::Denied))?;
            if charges.is_empty() {
                attempts.end_wait(WaitEnd::Admitted);
                return Ok(finish(TurnResult {
                    rules,
                    charges: &charges,
                    verdict: Verdict::unlimited(),
                    receipt: None,
                }));
            }
            for charge in &mut charges {
                charge.longest_wait = self.longest_delay;
            }
            if attempts.is_decided_next()
                && let Some(pending) = stretch(limiter.store(), rules, &mut charges, now)
            {
                pending.finish(limiter.store(), &mut charges).await;
            }
            let turn = self.with_receipts(self.receipts.of(rules, &charges));
            if let Some(decided) = attempts.make(&turn, &mut charges, outcomes).await {
                return Ok(finish(TurnResult {
                    rules,
                    charges: &charges,
                    verdict: decided.verdict(&charges, outcomes),
                    receipt: decided.receipt,
                }));
            }
            reloaded = Some(limiter.rules());
        }
    }

    async fn decide_once<L: RateLimiter + ?Sized>(
        &self,
        limiter: &L,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
        cache_search: CacheSearch,
    ) -> DecisionAndReceipt<ReceiptOf<L>> {
        let request = StoreRequest {
            cache_search,
            ..StoreRequest::new(charges, limiter.now(), self.effect)
        };
        let decided = self.call(limiter.store(), request, outcomes).await;
        estimate(limiter.wait_queues(), &decided.decision, charges, outcomes);
        decided
    }

    /// Returns whether a call with `effect` reserves. [`Store::reserve`] would charge with any
    /// effect.
    fn reserves(&self, effect: Effect) -> bool {
        self.receipts == Receipts::Wanted && effect == Effect::Charge
    }

    async fn call<S: Store>(
        &self,
        store: &S,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> DecisionAndReceipt<S::Receipt> {
        let _calling = self.signal.map(StoreCall::new);
        // An `.await` of a ready decision would move it several times.
        if self.reserves(request.effect) {
            return match store.reserve(request, outcomes).boxed() {
                MaybeReady::Ready(reserved) => reserved,
                MaybeReady::Pending(reserving) => reserving.await,
            };
        }
        let decided = match store.decide(request, outcomes).boxed() {
            MaybeReady::Ready(decided) => decided,
            MaybeReady::Pending(deciding) => deciding.await,
        };
        DecisionAndReceipt::without_receipt(decided)
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

/// A guard that marks the store as being called until the guard is dropped.
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

/// Returns true if one of the limits counts denied requests. If a limit counts denied requests, the
/// request must be denied with [`Effect::Charge`] at most once.
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
/// the request as well, because waiting for slots would not help.
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

/// Replaces the retry times of concurrency limits that deny the request with estimates. A retry
/// time is replaced only if the holding times of the limit's slots are known.
fn estimate(
    waiters: &Waiters,
    decided: &StoreDecision,
    charges: &[Charge<'_>],
    outcomes: &mut [Outcome],
) {
    if decided.decision == Decision::Limited {
        estimate_denied(waiters, charges, outcomes);
    }
}

#[cold]
fn estimate_denied(waiters: &Waiters, charges: &[Charge<'_>], outcomes: &mut [Outcome]) {
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

/// The attempts to decide a request that may wait for slots. Without the feature `tokio`, a request
/// cannot wait, and there is only one attempt.
struct Attempts<'l, L: RateLimiter + ?Sized> {
    limiter: &'l L,
    cache_search: CacheSearch,
    #[cfg(feature = "tokio")]
    progress: queued::QueueProgress<'l, L>,
}

#[cfg_attr(
    not(feature = "tokio"),
    expect(
        clippy::unused_self,
        reason = "requests wait for slots only with the feature `tokio`"
    )
)]
impl<'l, L: RateLimiter + ?Sized> Attempts<'l, L> {
    fn new(limiter: &'l L, cache_search: CacheSearch) -> Self {
        Self {
            limiter,
            cache_search,
            #[cfg(feature = "tokio")]
            progress: queued::QueueProgress::default(),
        }
    }

    /// Begins an attempt. Call this method before determining the charges, so that a later change
    /// of the blocks is noticed.
    fn begin(&mut self) {
        #[cfg(feature = "tokio")]
        self.progress.begin(self.limiter.wait_queues());
    }

    /// Returns whether the next attempt calls the store. An attempt does not call the store if the
    /// request waits and only checks whether a changed block by entries denies it.
    fn is_decided_next(&self) -> bool {
        #[cfg(feature = "tokio")]
        return !self.progress.only_blocks_changed();
        #[cfg(not(feature = "tokio"))]
        true
    }

    /// Makes an attempt to decide the request. Returns `None` after the request has waited. The
    /// caller must then determine the charges again for the next attempt.
    async fn make(
        &mut self,
        turn: &SlotTurn<'_>,
        charges: &mut Vec<Charge<'_>>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<DecisionAndReceipt<ReceiptOf<L>>> {
        let (limiter, search) = (self.limiter, self.cache_search);
        self.cache_search = CacheSearch::Due;
        #[cfg(feature = "tokio")]
        if self.progress.is_waiting() || turn.can_wait(charges) {
            // Waiting is rare, and the future of a waiting request is large, so it is boxed.
            let attempt = self
                .progress
                .attempt(turn, limiter, charges, outcomes, search);
            let decided = Box::pin(attempt).await?;
            estimate(limiter.wait_queues(), &decided.decision, charges, outcomes);
            return Some(decided);
        }
        Some(turn.decide_once(limiter, charges, outcomes, search).await)
    }

    /// Records that the wait of the request, if it is waiting, has ended without a decision of the
    /// store.
    fn end_wait(&mut self, end: WaitEnd) {
        #[cfg(feature = "tokio")]
        self.progress.end_wait(end);
        #[cfg(not(feature = "tokio"))]
        let _ = end;
    }
}
