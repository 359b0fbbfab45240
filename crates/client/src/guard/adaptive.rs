//! [`AdaptiveThrottle`] as a guard.

use std::sync::{Mutex, PoisonError};

use super::{AdaptiveLayer, Call, Guard};
use crate::{AdaptiveThrottle, Advice, Clock, Error, Rng, host::PerHost, retry::Seen};

/// Adaptive throttling per host. A request counts as accepted if the response is not a refusal
/// (429, 503, gRPC's `RESOURCE_EXHAUSTED` and `UNAVAILABLE`).
#[derive(Debug)]
pub struct AdaptiveGuard {
    hosts: PerHost<Mutex<AdaptiveThrottle>>,
    clock: Clock,
    rng: Mutex<Rng>,
}

impl AdaptiveLayer {
    /// Creates a layer with a copy of `throttle` per host.
    #[must_use]
    pub fn new(throttle: AdaptiveThrottle) -> Self {
        Self::on(throttle, Clock::system(), Rng::new())
    }

    /// Does the same with the time from `clock` and random numbers from `rng`.
    #[must_use]
    pub fn on(throttle: AdaptiveThrottle, clock: Clock, rng: Rng) -> Self {
        let guard = AdaptiveGuard {
            hosts: PerHost::new(move || Mutex::new(throttle.clone())),
            clock,
            rng: Mutex::new(rng),
        };
        Self::by(guard, clock)
    }
}

impl Guard for AdaptiveGuard {
    type Pass = ();

    async fn enter(&self, call: Call<'_>) -> Result<(), Error> {
        let throttle = self.hosts.of(call.host);
        // No panic leaves these values inconsistent, so a poisoned lock is safe to use.
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let mut throttle = throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if throttle.admits(self.clock.now(), &mut rng) {
            Ok(())
        } else {
            Err(Error::Overloaded)
        }
    }

    async fn leave(&self, call: Call<'_>, (): (), seen: Seen<'_>, _: &Advice) {
        let (throttle, now) = (self.hosts.of(call.host), self.clock.now());
        let mut throttle = throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_accepted() {
            throttle.accepted(now);
        } else {
            throttle.refused(now);
        }
    }
}
