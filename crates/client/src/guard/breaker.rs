//! [`CircuitBreaker`] as a guard.

use std::sync::{Arc, Mutex, PoisonError};

use super::{BreakerLayer, Call, Guard};
use crate::{
    Advice, BreakerSettings, CircuitBreaker, Clock, Error, Health, Permit, host::PerHost,
    retry::Seen,
};

/// A circuit breaker per host.
///
/// Failures are a missing response, a status of 500 or above, and a gRPC status that indicates a
/// server error. A refusal with 429 is not a failure: a server that refuses requests works.
#[derive(Debug)]
pub struct BreakerGuard {
    hosts: PerHost<Mutex<CircuitBreaker>>,
    clock: Clock,
}

/// A request that the breaker has admitted. If it is dropped, it counts as neither success nor
/// failure.
#[derive(Debug)]
pub struct Trial {
    breaker: Arc<Mutex<CircuitBreaker>>,
    permit: Option<Permit>,
    clock: Clock,
}

impl BreakerLayer {
    /// Creates a layer with these settings.
    #[must_use]
    pub fn new(settings: BreakerSettings) -> Self {
        Self::on(settings, Clock::system())
    }

    /// Does the same with the time from `clock`.
    #[must_use]
    pub fn on(settings: BreakerSettings, clock: Clock) -> Self {
        let hosts = PerHost::new(move || Mutex::new(CircuitBreaker::new(settings)));
        Self::by(BreakerGuard { hosts, clock }, clock)
    }
}

impl Guard for BreakerGuard {
    type Pass = Trial;

    async fn enter(&self, call: Call<'_>) -> Result<Trial, Error> {
        let breaker = self.hosts.of(call.host);
        let acquired = lock(&breaker).acquire(self.clock.now());
        let permit = acquired.map_err(|retry_after| Error::CircuitOpen { retry_after })?;
        Ok(Trial {
            breaker,
            permit: Some(permit),
            clock: self.clock,
        })
    }

    async fn leave(&self, _: Call<'_>, mut trial: Trial, seen: Seen<'_>, _: &Advice) {
        trial.record(seen.health());
    }
}

impl Trial {
    fn record(&mut self, health: Health) {
        if let Some(permit) = self.permit.take() {
            lock(&self.breaker).record(permit, health, self.clock.now());
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.record(Health::Unknown);
    }
}

/// Locks the breaker. No panic leaves it inconsistent, so a poisoned lock is safe to use.
fn lock(breaker: &Mutex<CircuitBreaker>) -> std::sync::MutexGuard<'_, CircuitBreaker> {
    breaker.lock().unwrap_or_else(PoisonError::into_inner)
}
