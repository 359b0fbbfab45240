//! The response timeout as a guard.

use tidegate_core::Span;

use super::{Guard, RequestInfo, TimeoutLayer};
use crate::{Advice, Error, TokioClock, retry::AttemptOutcome};

/// A guard that admits every request, and sets a timeout until the response begins.
///
/// Use this guard as the innermost layer, so that the timeout does not include the time in a queue,
/// and so that an outer circuit breaker counts a timeout as a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeoutGuard(Span);

impl TimeoutLayer {
    /// Creates a layer that waits for `timeout` until a response begins.
    #[must_use]
    pub fn new(timeout: Span) -> Self {
        Self::from_guard(TimeoutGuard(timeout), TokioClock::system())
    }
}

impl Guard for TimeoutGuard {
    type Permit = ();

    async fn admit(&self, _: RequestInfo<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn timeout(&self) -> Option<Span> {
        Some(self.0)
    }

    async fn record(&self, _: RequestInfo<'_>, (): (), _: AttemptOutcome<'_>, _: &Advice) {}
}
