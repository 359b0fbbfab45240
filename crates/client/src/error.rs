//! Why a request got no answer.

use tidegate_core::Span;

use crate::retry::GiveUp;

/// Whatever went wrong below.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a request got no answer, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sending failed, and trying again is over. The source says what happened the last time.
    #[error("no answer after {tries} {}: {gave_up}", if *.tries == 1 { "try" } else { "tries" })]
    Failed {
        /// How often it was sent.
        tries: u32,
        /// Why no more often.
        gave_up: GiveUp,
        /// What happened the last time.
        source: BoxError,
    },
    /// The time for the whole call is over, while the server was being asked. It may have done what it was asked. Give the call
    /// more time, or ask for less.
    #[error("no answer within the deadline of {deadline}")]
    DeadlineExceeded {
        /// What the policy gives a call.
        deadline: Span,
    },
    /// The circuit breaker is open: the server mostly failed of late. Nothing was sent. Do without, or try again later.
    #[error("not sent: the circuit breaker is open for {retry_after}")]
    CircuitOpen {
        /// When it will let a probe pass; zero where it waits for one.
        retry_after: Span,
    },
    /// Adaptive throttling kept it back: the server refuses most of what it is sent. Nothing was sent. Do without, or ask for less.
    #[error("not sent: the server refuses too much of what it is sent")]
    Overloaded,
    /// As many requests wait for this host as may. Nothing was sent. Slow down, or let more wait.
    #[error("not sent: {most} requests wait for this host already")]
    QueueFull {
        /// How many may wait.
        most: u32,
    },
    /// It would wait for longer than it may. Nothing was sent. Try again later.
    #[error("not sent: the wait of at least {wait} is longer than the {most} that it may take")]
    WaitTooLong {
        /// How long it would be, as far as is known.
        wait: Span,
        /// What it may be.
        most: Span,
    },
    /// It costs more than the limits that the client keeps to could ever hold. Nothing was sent. Ask for less at once.
    #[error("not sent: a cost of {cost} never fits the limits that are kept to")]
    NeverFits {
        /// What it costs.
        cost: u64,
    },
    /// Something below failed, which is no business of this piece.
    #[error(transparent)]
    Inner(BoxError),
}

/// An answer took longer than a [`TimeoutLayer`](crate::TimeoutLayer) gives it.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no answer within {timeout}")]
pub struct TryTimeout {
    /// How long it may take.
    pub timeout: Span,
}

impl Error {
    /// What a service below came back with: this crate's own errors as they are, others inside.
    pub(crate) fn of(error: BoxError) -> Self {
        match error.downcast::<Self>() {
            Ok(own) => *own,
            Err(other) => Self::Inner(other),
        }
    }
}
