//! [`AdaptiveThrottle`] as a guard.

use std::sync::{Mutex, PoisonError};

use super::{AdaptiveLayer, Guard, RequestInfo};
use crate::{
    AdaptiveThrottle, Advice, Error, Rng, TokioClock, per_host::PerHost, retry::AttemptOutcome,
};

/// Adaptive throttling per host. A request counts as accepted if the response is not a refusal
/// (429, 503, gRPC's `RESOURCE_EXHAUSTED` and `UNAVAILABLE`).
#[derive(Debug)]
pub struct AdaptiveGuard {
    hosts: PerHost<Mutex<AdaptiveThrottle>>,
    clock: TokioClock,
    rng: Mutex<Rng>,
}

impl AdaptiveLayer {
    /// Creates a layer with a copy of `throttle` per host.
    #[must_use]
    pub fn new(throttle: AdaptiveThrottle) -> Self {
        Self::with_clock_and_rng(throttle, TokioClock::system(), Rng::new())
    }

    /// Does the same with the time from `clock` and random numbers from `rng`.
    #[must_use]
    pub fn with_clock_and_rng(throttle: AdaptiveThrottle, clock: TokioClock, rng: Rng) -> Self {
        let guard = AdaptiveGuard {
            hosts: PerHost::new(move || Mutex::new(throttle.clone())),
            clock,
            rng: Mutex::new(rng),
        };
        Self::from_guard(guard, clock)
    }
}

impl Guard for AdaptiveGuard {
    type Permit = ();

    async fn admit(&self, request: RequestInfo<'_>) -> Result<(), Error> {
        let throttle = self.hosts.get(request.host);
        // No panic leaves these values inconsistent, so a poisoned lock is safe to use.
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let mut throttle = throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if throttle.admit(self.clock.now(), &mut rng) {
            Ok(())
        } else {
            Err(Error::Overloaded)
        }
    }

    async fn record(
        &self,
        request: RequestInfo<'_>,
        (): (),
        outcome: AttemptOutcome<'_>,
        _: &Advice,
    ) {
        let (throttle, now) = (self.hosts.get(request.host), self.clock.now());
        let mut throttle = throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if outcome.is_accepted() {
            throttle.record_accepted(now);
        } else {
            throttle.record_refused(now);
        }
    }
}
