//! Errors of requests without a response.

use tidegate_core::Span;

use crate::GiveUpReason;

/// An error of any type from an inner service.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The reason why a request has no response. Each variant says what the caller can do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The last try failed, and the request is not sent again. [`std::error::Error::source`]
    /// returns the error of the last try.
    #[error("no response after {tries} {}: {gave_up}", if *.tries == 1 { "try" } else { "tries" })]
    Failed {
        /// The number of times that the request was sent.
        tries: u32,
        /// The reason why the request was not sent again.
        gave_up: GiveUpReason,
        /// The error of the last try.
        source: BoxError,
    },
    /// The deadline of the whole call has passed while a request was in flight. The server may have
    /// processed the request. Raise the deadline, or make a smaller request.
    #[error("no response within the deadline of {deadline}")]
    DeadlineExceeded {
        /// The deadline that the policy sets.
        deadline: Span,
    },
    /// The circuit breaker is open, because most recent requests failed. Nothing was sent. Use a
    /// fallback, or try again later.
    #[error("not sent: the circuit breaker is open for {retry_after}")]
    CircuitOpen {
        /// The time until the breaker admits a probe. The time is zero while the breaker is waiting
        /// for the results of probes.
        retry_after: Span,
    },
    /// Adaptive throttling rejected the request, because the server refuses most requests. Nothing
    /// was sent. Use a fallback, or send fewer requests.
    #[error("not sent: the server rejects too many requests (adaptive throttling)")]
    Overloaded,
    /// The queue for this host is full. Nothing was sent. Send more slowly, or enlarge the queue.
    #[error("not sent: the queue for this host is full with {most} requests")]
    QueueFull {
        /// The maximum number of waiting requests.
        most: u32,
    },
    /// The wait time would exceed the maximum. Nothing was sent. Try again later.
    #[error("not sent: the wait of at least {wait} exceeds the maximum of {most}")]
    WaitTooLong {
        /// The time that the request would have to wait, at least.
        wait: Span,
        /// The maximum wait time.
        most: Span,
    },
    /// The cost of the request exceeds the maximum cost that the client's own limits can ever
    /// admit. Nothing was sent. Split the request.
    #[error("not sent: the cost of {cost} is more than the client's own limits can admit at once")]
    NeverFits {
        /// The cost of the request.
        cost: u64,
    },
    /// An inner service failed with an error that is not from this crate.
    #[error(transparent)]
    Inner(BoxError),
}

/// The error for a response that takes longer than a [`TimeoutLayer`](crate::TimeoutLayer) allows.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no response within {timeout}")]
pub struct TryTimeout {
    /// The timeout that has expired.
    pub timeout: Span,
}

impl Error {
    /// Converts an error of an inner service. Returns an error of this crate unchanged, and wraps
    /// any other error.
    pub(crate) fn from_inner(error: BoxError) -> Self {
        match error.downcast::<Self>() {
            Ok(own) => *own,
            Err(other) => Self::Inner(other),
        }
    }
}
