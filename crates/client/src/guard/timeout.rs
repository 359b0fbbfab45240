//! How long an answer may take.

use tidegate_core::Span;

use super::{Call, Guard, TimeoutLayer};
use crate::{Advice, Clock, Error, retry::Seen};

/// Lets everything pass, and waits for its answer for so long.
///
/// It belongs innermost: what waits for its turn further out is not late yet, and what is late here is a failure to a
/// breaker further out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeoutGuard(Span);

impl TimeoutLayer {
    /// Waits for `longest` until an answer begins.
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
