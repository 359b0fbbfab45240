//! Client-side throttling, which applies Tidegate's limits to the client's own requests.

use std::sync::Arc;

use tidegate_core::{
    Algorithm, AlgorithmName, Charge, Cost, DecisionAndReceipt, Effect, Limit, LimitError, Limits,
    MemoryBounds, MemoryStore, Outcome, RetryAfter, Span, Store, StoreRequest,
};
use tokio::time::{sleep, timeout};

use super::{
    Guard, QueueSettings, RequestInfo, ThrottleLayer,
    permit::{ThrottleCharge, ThrottlePermit},
    wait_queue::WaitQueue,
};
use crate::{
    Advice, Error, TokioClock, Wait, clock::to_duration, per_host::PerHost, retry::AttemptOutcome,
};

/// The polling interval while a request waits for a concurrency slot. Polling is necessary, because
/// another process may release a slot.
const SLOT_POLL: Span = Span::from_millis(100);

/// A guard with limits that a client applies to its own requests. The limits apply to each host
/// separately. The counters are in a store that several clients may share.
///
/// Requests that exceed the limits wait in order of arrival. The server may still refuse a request
/// (429, or gRPC's `RESOURCE_EXHAUSTED`). The queue then stays closed until the time that the
/// response specifies. In addition, the guard charges the units that the limits would refill before
/// that time, so that other clients of the store slow down too.
#[derive(Debug)]
pub struct ThrottleGuard<S> {
    store: Arc<S>,
    name: String,
    limits: Arc<Limits>,
    /// Whether an admitted request holds something that must be released: a concurrency slot, or a
    /// position in a leaky bucket's queue.
    needs_receipt: bool,
    queues: PerHost<WaitQueue>,
    settings: QueueSettings,
    clock: TokioClock,
}

/// Returns a limit that spaces requests evenly, which suits any server algorithm. For example, with
/// a `rate` of `100/s`, the limit admits one request every 10 ms, and therefore at most a hundred
/// requests in any window of one second.
///
/// # Errors
///
/// Returns an error if `rate` is not a valid rate.
pub fn spaced(rate: &str) -> Result<Limits, LimitError> {
    Limits::new(vec![Limit::shorthand(AlgorithmName::Gcra, rate)?])
}

impl ThrottleLayer<MemoryStore> {
    /// Creates a layer that applies `limits`, counted in this process.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let store = Arc::new(MemoryStore::new(MemoryBounds::default()));
        Self::with_store(
            store,
            "",
            limits,
            QueueSettings::default(),
            TokioClock::system(),
        )
    }
}

impl<S: Store + 'static> ThrottleLayer<S> {
    /// Creates a layer that applies `limits`. All clients with the same `store` and `name` share
    /// the limits.
    #[must_use]
    pub fn with_store(
        store: Arc<S>,
        name: &str,
        limits: Limits,
        settings: QueueSettings,
        clock: TokioClock,
    ) -> Self {
        let has_queue = |limit: &Limit| {
            matches!(
                limit.algorithm(),
                Algorithm::LeakyBucket { queue: true, .. }
            )
        };
        let guard = ThrottleGuard {
            store,
            name: name.to_owned(),
            needs_receipt: limits.has_slots() || limits.iter().any(has_queue),
            limits: Arc::new(limits),
            queues: PerHost::new(move || WaitQueue::new(settings, clock)),
            settings,
            clock,
        };
        Self::from_guard(guard, clock)
    }
}

/// The result of evaluating the limits for one request.
struct LimitDecision<R> {
    /// The delay of the admitted request. If the limits denied the request, the time after which
    /// they must be evaluated again.
    delay: Result<Span, RetryAfter>,
    /// The receipt of the charge, if the request was charged and holds a slot or a position in a
    /// queue.
    receipt: Option<R>,
}

impl<S: Store + 'static> Guard for ThrottleGuard<S> {
    /// The concurrency slot that an admitted request holds; `None` unless the limits bound the
    /// requests in flight.
    type Permit = Option<ThrottlePermit<S>>;

    async fn admit(&self, request: RequestInfo<'_>) -> Result<Self::Permit, Error> {
        let queue = self.queues.get(request.host);
        let permit = queue.wait(self.wait_for_limits(&queue, request)).await?;
        Ok(permit.and_then(ThrottlePermit::spend))
    }

    async fn record(
        &self,
        request: RequestInfo<'_>,
        permit: Self::Permit,
        outcome: AttemptOutcome<'_>,
        advice: &Advice,
    ) {
        let now = self.clock.now();
        let refused = advice.wait.filter(|_| !outcome.is_accepted());
        self.queues.get(request.host).update_pacer(|pacer| {
            pacer.record_response(now);
            if let Some(wait) = refused {
                pacer.close(wait, now);
            }
        });
        match (permit, refused) {
            (Some(permit), _) => drop(permit),
            (None, Some(Wait::After(wait))) => self.drain(request, wait).await,
            (None, Some(Wait::Never) | None) => {}
        }
    }
}

impl<S: Store + 'static> ThrottleGuard<S> {
    /// Waits until the limits admit the request and its delay has passed.
    async fn wait_for_limits(
        &self,
        queue: &Arc<WaitQueue>,
        request: RequestInfo<'_>,
    ) -> Result<Option<ThrottlePermit<S>>, Error> {
        loop {
            let LimitDecision { delay, receipt } = self.decide(request).await?;
            // Create the permit before the wait. If this future is dropped during the wait, the
            // permit releases the slot or queue position of the request.
            let permit = receipt.map(|receipt| self.permit(request, receipt, queue));
            match delay {
                Ok(delay) => {
                    let delay = self.within_max_wait(delay)?;
                    if delay > Span::ZERO {
                        sleep(to_duration(delay)).await;
                    }
                    return Ok(permit);
                }
                Err(RetryAfter::Never) => {
                    let cost = request.cost.units();
                    return Err(Error::NeverFits { cost });
                }
                Err(RetryAfter::After(wait)) => self.wait_for_retry(queue, wait).await?,
            }
            // During the wait, the server may have refused another request, which closes the queue.
            queue.wait_while_closed().await;
        }
    }

    /// Waits until the limits must be evaluated again. `wait` is the retry time from the last
    /// evaluation.
    async fn wait_for_retry(&self, queue: &WaitQueue, wait: Span) -> Result<(), Error> {
        if self.limits.has_slots() {
            // `wait` is the time until a lease expires. Another request may release its slot
            // earlier, so evaluate the limits again after at most `SLOT_POLL`, or after a
            // notification.
            let _ = timeout(to_duration(wait.min(SLOT_POLL)), queue.changed()).await;
        } else {
            let wait = self.within_max_wait(wait)?;
            // Wait for at least 1 µs, so that there is a pause even if the store returns a wait of
            // zero.
            sleep(to_duration(wait.max(Span::from_micros(1)))).await;
        }
        Ok(())
    }

    fn within_max_wait(&self, wait: Span) -> Result<Span, Error> {
        let most = self.settings.max_wait;
        if wait > most {
            Err(Error::WaitTooLong { wait, most })
        } else {
            Ok(wait)
        }
    }

    /// Evaluates the limits, and charges the request if they admit it.
    async fn decide(&self, request: RequestInfo<'_>) -> Result<LimitDecision<S::Receipt>, Error> {
        let key = self.key(request);
        let mut charges = vec![self.charge(&key, request.cost)?];
        let mut outcomes = Vec::new();
        let store_request = StoreRequest::new(&mut charges, self.clock.now(), Effect::Charge);
        let decided = if self.needs_receipt {
            self.store.reserve(store_request, &mut outcomes).await
        } else {
            let decided = self.store.decide(store_request, &mut outcomes).await;
            DecisionAndReceipt::without_receipt(decided)
        };
        let verdict = decided.verdict(&charges, &outcomes);
        let delay = if verdict.allowed {
            Ok(verdict.delay)
        } else {
            Err(verdict.retry_after)
        };
        Ok(LimitDecision {
            delay,
            receipt: decided.receipt,
        })
    }

    fn permit(
        &self,
        request: RequestInfo<'_>,
        receipt: S::Receipt,
        queue: &Arc<WaitQueue>,
    ) -> ThrottlePermit<S> {
        let charge = ThrottleCharge {
            store: Arc::clone(&self.store),
            limits: Arc::clone(&self.limits),
            key: self.key(request),
            cost: request.cost,
        };
        ThrottlePermit::new(charge, receipt, Arc::clone(queue), self.clock)
    }

    /// Charges the units that the limits would refill within `wait`, but at most the remaining
    /// units. The charge slows down all clients of the store.
    async fn drain(&self, request: RequestInfo<'_>, wait: Span) {
        let outcomes = self.evaluate(request, Cost::ONE, Effect::Look).await;
        let available = outcomes.iter().map(|outcome| outcome.remaining).min();
        let refilled = self.limits.iter().map(|limit| refilled(limit, wait)).min();
        let units = available.unwrap_or(0).min(refilled.unwrap_or(0));
        // If no units are refilled, charge nothing: a cost of zero is not valid.
        if let Ok(cost) = Cost::new(units) {
            self.evaluate(request, cost, Effect::Charge).await;
        }
    }

    async fn evaluate(&self, request: RequestInfo<'_>, cost: Cost, effect: Effect) -> Vec<Outcome> {
        let key = self.key(request);
        let mut outcomes = Vec::new();
        if let Ok(charge) = self.charge(&key, cost) {
            let mut charges = vec![charge];
            let store_request = StoreRequest::new(&mut charges, self.clock.now(), effect);
            self.store.decide(store_request, &mut outcomes).await;
        }
        outcomes
    }

    fn charge<'a>(&'a self, key: &'a [u8], cost: Cost) -> Result<Charge<'a>, Error> {
        Charge::new(key, &self.limits, cost).map_err(|wrong| Error::Inner(wrong.into()))
    }

    fn key(&self, request: RequestInfo<'_>) -> Vec<u8> {
        format!("client:{}:{}", self.name, request.host).into_bytes()
    }
}

/// Returns the number of units that `limit` refills within `wait`, but at most the limit's quota.
fn refilled(limit: &Limit, wait: Span) -> u64 {
    let (quota, window) = (limit.quota(), limit.window().as_micros().max(1));
    let refilled = u128::from(quota) * u128::from(wait.as_micros()) / u128::from(window);
    u64::try_from(refilled).unwrap_or(u64::MAX).min(quota)
}
