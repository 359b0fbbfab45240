//! A timeout for responses.

use tidegate_core::Span;

use super::{Call, Guard, TimeoutLayer};
use crate::{Advice, Clock, Error, retry::Seen};

/// Admits every request, with a timeout until its response begins.
///
/// It belongs innermost: time in an outer queue does not count, and an outer circuit breaker counts
/// a timeout as a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeoutGuard(Span);

impl TimeoutLayer {
    /// Creates a layer that waits for `longest` until a response begins.
    #[must_use]
    pub fn new(longest: Span) -> Self {
        Self::by(TimeoutGuard(longest), Clock::system())
    }
}

impl Guard for TimeoutGuard {
    type Pass = ();

    async fn enter(&self, _: Call<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn longest(&self) -> Option<Span> {
        Some(self.0)
    }

    async fn leave(&self, _: Call<'_>, (): (), _: Seen<'_>, _: &Advice) {}
}
