//! Adaptive throttling as a guard: see [`AdaptiveThrottle`].

use std::sync::Mutex;

use super::{AdaptiveLayer, Guard, RequestInfo};
use crate::{
    AdaptiveThrottle, Advice, Error, Rng, TokioClock, per_host::PerHost, retry::AttemptOutcome,
    sync::lock,
};

/// A guard that applies adaptive throttling to each host separately. A request is counted as
/// accepted unless the response is a refusal (429, 503, or gRPC's `RESOURCE_EXHAUSTED` and
/// `UNAVAILABLE`).
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

    /// Creates a layer with a copy of `throttle` per host. The layer reads the time from `clock`,
    /// and takes random numbers from `rng`.
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
        let (mut rng, mut throttle) = (lock(&self.rng), lock(&throttle));
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
        let mut throttle = lock(&throttle);
        if outcome.is_accepted() {
            throttle.record_accepted(now);
        } else {
            throttle.record_refused(now);
        }
    }
}
