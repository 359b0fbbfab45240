//! Client-side throttling: Tidegate's limits, applied to the client's own requests.

use std::sync::Arc;

use tidegate_core::{
    Algorithm, AlgorithmName, Charge, Cost, Effect, Limit, LimitError, Limits, MemoryBounds,
    MemoryStore, Outcome, Question, Retry, Span, Store,
};
use tokio::time::{sleep, timeout};

use super::{
    Call, Guard, LaneSettings, ThrottleLayer,
    lane::Lane,
    place::{Charged, Place},
};
use crate::{Advice, Clock, Error, Wait, clock::duration, host::PerHost, retry::Seen};

/// Polling interval while waiting for a concurrency slot, which another process may release.
const LOOK_AGAIN: Span = Span::from_millis(100);

/// Limits that a client applies to itself, per host, in a store that several clients may share.
///
/// Requests over the limits wait, in order. If the server refuses a request nevertheless (429, or
/// gRPC's `RESOURCE_EXHAUSTED`), the queue is closed until the time that the server names. The
/// units that the limits would refill until then are spent in the store, so that other clients of
/// the store slow down too.
#[derive(Debug)]
pub struct ThrottleGuard<S> {
    store: Arc<S>,
    name: String,
    limits: Arc<Limits>,
    leases: bool,
    /// Whether there is something to refund: a concurrency slot, or a position in a queue.
    reserves: bool,
    lanes: PerHost<Lane>,
    settings: LaneSettings,
    clock: Clock,
}

/// Returns a limit that spaces requests evenly, which suits a server with any algorithm. With a
/// `rate` of `100/s` it admits one request per hundredth of a second, and at most a hundred in any
/// window of one second.
///
/// # Errors
///
/// If `rate` is not a valid rate.
pub fn spaced(rate: &str) -> Result<Limits, LimitError> {
    Limits::new(vec![Limit::shorthand(AlgorithmName::Gcra, rate)?])
}

impl ThrottleLayer<MemoryStore> {
    /// Applies `limits`, counted in this process.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let store = Arc::new(MemoryStore::new(MemoryBounds::default()));
        Self::on(store, "", limits, LaneSettings::default(), Clock::system())
    }
}

impl<S: Store + 'static> ThrottleLayer<S> {
    /// Applies `limits` together with all clients that use the same `store` and `name`.
    #[must_use]
    pub fn on(
        store: Arc<S>,
        name: &str,
        limits: Limits,
        settings: LaneSettings,
        clock: Clock,
    ) -> Self {
        let lease = |limit: &Limit| matches!(limit.algorithm(), Algorithm::Concurrency { .. });
        let queue = |limit: &Limit| {
            matches!(
                limit.algorithm(),
                Algorithm::LeakyBucket { queue: true, .. }
            )
        };
        let guard = ThrottleGuard {
            reserves: limits.iter().any(|limit| lease(limit) || queue(limit)),
            store,
            name: name.to_owned(),
            leases: limits.iter().any(lease),
            limits: Arc::new(limits),
            lanes: PerHost::new(move || Lane::new(settings)),
            settings,
            clock,
        };
        Self::by(guard, clock)
    }
}

/// How long to delay an admitted request, or when to try again; and the receipt, if there is one.
type Asked<R> = (Result<Span, Retry>, Option<R>);

/// The concurrency slot that an admitted request holds, if the limits are on requests in flight.
#[derive(Debug)]
pub struct Admission<S: Store + 'static>(Option<Place<S>>);

impl<S: Store + 'static> Guard for ThrottleGuard<S> {
    type Pass = Admission<S>;

    async fn enter(&self, call: Call<'_>) -> Result<Self::Pass, Error> {
        let lane = self.lanes.of(call.host);
        let place = lane.pass(&self.clock, self.admitted(&lane, call)).await?;
        Ok(Admission(place.and_then(Place::begun)))
    }

    async fn leave(&self, call: Call<'_>, pass: Self::Pass, seen: Seen<'_>, advice: &Advice) {
        let lane = self.lanes.of(call.host);
        let now = self.clock.now();
        lane.learn(|pace| {
            pace.hear(now);
            if let (Some(wait), false) = (advice.wait, seen.is_accepted()) {
                pace.close(wait, now);
            }
        });
        if pass.0.is_some() {
            drop(pass);
        } else if let (Some(Wait::After(wait)), false) = (advice.wait, seen.is_accepted()) {
            self.spend(call, wait).await;
        }
    }
}

impl<S: Store + 'static> ThrottleGuard<S> {
    /// Waits until the limits admit the request and its delay is over.
    async fn admitted(&self, lane: &Arc<Lane>, call: Call<'_>) -> Result<Option<Place<S>>, Error> {
        let most = self.settings.max_wait;
        loop {
            let (answer, receipt) = self.asked(call).await?;
            let wait = match answer {
                Ok(delay) => {
                    // If the future is dropped from here on, the request leaves the queue.
                    let place = receipt.map(|receipt| self.place(call, receipt, lane));
                    if delay > most {
                        return Err(Error::WaitTooLong { wait: delay, most });
                    }
                    if delay > Span::ZERO {
                        sleep(duration(delay)).await;
                    }
                    return Ok(place);
                }
                Err(Retry::Never) => {
                    return Err(Error::NeverFits {
                        cost: call.cost.units(),
                    });
                }
                Err(Retry::After(wait)) if self.leases => wait.min(LOOK_AGAIN),
                Err(Retry::After(wait)) if wait > most => {
                    return Err(Error::WaitTooLong { wait, most });
                }
                Err(Retry::After(wait)) => wait.max(Span::from_micros(1)),
            };
            if self.leases {
                // Whether the time has passed or a slot may be free, try again.
                let _ = timeout(duration(wait), lane.changed()).await;
            } else {
                sleep(duration(wait)).await;
            }
            // Another request may have been refused in the meantime.
            lane.left_alone(&self.clock).await;
        }
    }

    /// Returns how long to delay an admitted request, or when to try again.
    async fn asked(&self, call: Call<'_>) -> Result<Asked<S::Receipt>, Error> {
        let key = self.key(call);
        let mut charges = vec![self.charge(&key, call.cost)?];
        let mut outcomes = Vec::new();
        let mut question = Question {
            charges: &mut charges,
            now: self.clock.now(),
            effect: Effect::Charge,
            within: None,
        };
        let (decided, receipt) = if self.reserves {
            self.store.reserve(&mut question, &mut outcomes).await
        } else {
            (self.store.decide(question, &mut outcomes).await, None)
        };
        let verdict = decided.verdict(&charges, &outcomes);
        let answer = if verdict.allowed {
            Ok(verdict.delay)
        } else {
            Err(verdict.retry_after)
        };
        Ok((answer, receipt))
    }

    fn place(&self, call: Call<'_>, receipt: S::Receipt, lane: &Arc<Lane>) -> Place<S> {
        let charged = Charged {
            store: Arc::clone(&self.store),
            limits: Arc::clone(&self.limits),
            key: self.key(call),
            cost: call.cost,
        };
        Place::new(charged, receipt, (Arc::clone(lane), self.clock))
    }

    /// Spends the units that the limits would refill within `wait`, as far as they are available.
    async fn spend(&self, call: Call<'_>, wait: Span) {
        let standing = self.decided(call, Cost::ONE, Effect::Look).await;
        let room = standing.iter().map(|outcome| outcome.remaining).min();
        let earned = self.limits.iter().map(|limit| earned(limit, wait)).min();
        let units = room.unwrap_or(0).min(earned.unwrap_or(0));
        if let Ok(cost) = Cost::new(units) {
            self.decided(call, cost, Effect::Charge).await;
        }
    }

    async fn decided(&self, call: Call<'_>, cost: Cost, effect: Effect) -> Vec<Outcome> {
        let key = self.key(call);
        let mut outcomes = Vec::new();
        if let Ok(charge) = self.charge(&key, cost) {
            let question = Question {
                charges: &mut vec![charge],
                now: self.clock.now(),
                effect,
                within: None,
            };
            self.store.decide(question, &mut outcomes).await;
        }
        outcomes
    }

    fn charge<'a>(&'a self, key: &'a [u8], cost: Cost) -> Result<Charge<'a>, Error> {
        Charge::new(key, &self.limits, cost).map_err(|wrong| Error::Inner(wrong.into()))
    }

    fn key(&self, call: Call<'_>) -> Vec<u8> {
        format!("client:{}:{}", self.name, call.host).into_bytes()
    }
}

/// Returns how many units of `limit` are refilled within `wait`, at most its quota.
fn earned(limit: &Limit, wait: Span) -> u64 {
    let (quota, window) = (limit.quota(), limit.window().as_micros().max(1));
    let earned = u128::from(quota) * u128::from(wait.as_micros()) / u128::from(window);
    u64::try_from(earned).unwrap_or(u64::MAX).min(quota)
}
