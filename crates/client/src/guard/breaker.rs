//! The circuit breaker as a guard: see [`CircuitBreaker`].

use std::sync::{Arc, Mutex};

use super::{BreakerLayer, Guard, RequestInfo};
use crate::{
    Advice, BreakerPermit, BreakerSettings, CircuitBreaker, Error, HealthSignal, TokioClock,
    per_host::PerHost, retry::AttemptOutcome, sync::lock,
};

/// A guard with a separate circuit breaker for each host.
///
/// A request counts as failed if it has no response, a status of 500 or above, or a gRPC status
/// that indicates a server error. A refusal with 429 is not a failure, because a server that
/// enforces its rate limit is healthy.
#[derive(Debug)]
pub struct BreakerGuard {
    hosts: PerHost<Mutex<CircuitBreaker>>,
    clock: TokioClock,
}

/// The permit of an admitted request. If the permit is dropped, the request is counted as neither a
/// success nor a failure.
#[derive(Debug)]
pub struct HeldPermit {
    breaker: Arc<Mutex<CircuitBreaker>>,
    permit: Option<BreakerPermit>,
    clock: TokioClock,
}

impl BreakerLayer {
    /// Creates a layer with these settings.
    #[must_use]
    pub fn new(settings: BreakerSettings) -> Self {
        Self::with_clock(settings, TokioClock::system())
    }

    /// Creates a layer with these settings, which reads the time from `clock`.
    #[must_use]
    pub fn with_clock(settings: BreakerSettings, clock: TokioClock) -> Self {
        let hosts = PerHost::new(move || Mutex::new(CircuitBreaker::new(settings)));
        Self::from_guard(BreakerGuard { hosts, clock }, clock)
    }
}

impl Guard for BreakerGuard {
    type Permit = HeldPermit;

    async fn admit(&self, request: RequestInfo<'_>) -> Result<HeldPermit, Error> {
        let breaker = self.hosts.get(request.host);
        let acquired = lock(&breaker).acquire(self.clock.now());
        let permit = acquired.map_err(|retry_after| Error::CircuitOpen { retry_after })?;
        Ok(HeldPermit {
            breaker,
            permit: Some(permit),
            clock: self.clock,
        })
    }

    async fn record(
        &self,
        _: RequestInfo<'_>,
        mut permit: HeldPermit,
        outcome: AttemptOutcome<'_>,
        _: &Advice,
    ) {
        permit.release(outcome.health_signal());
    }
}

impl HeldPermit {
    /// Returns the permit to the breaker with `signal` as the result, unless the permit has already
    /// been returned.
    fn release(&mut self, signal: HealthSignal) {
        if let Some(permit) = self.permit.take() {
            lock(&self.breaker).record(permit, signal, self.clock.now());
        }
    }
}

impl Drop for HeldPermit {
    fn drop(&mut self) {
        self.release(HealthSignal::Unknown);
    }
}
