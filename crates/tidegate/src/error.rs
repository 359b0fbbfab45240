//! Errors of waiting for admission by a limit.

use std::{error::Error, fmt};

use tidegate_core::{RequestError, Span};

/// The reason why a waiting request was not admitted. Nothing was charged.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireError {
    /// The request would never be admitted. One of the following is the reason:
    ///
    /// - The cost exceeds the maximum number of units that a limit admits at one instant.
    /// - The key is blocked until an operator removes the block.
    /// - The state of the key would be too large for the store.
    Never,
    /// The longest wait has elapsed, or the request would be admitted only after the longest wait.
    /// In the second case, the error is returned immediately.
    Timeout {
        /// The minimum time from now until the request would be admitted, if it is known.
        retry_after: Option<Span>,
    },
    /// The maximum number of waiting requests is reached, for this key or for the limiter.
    TooManyWaiters {
        /// The maximum that was reached.
        max: usize,
    },
    /// The request is malformed.
    Request(RequestError),
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str(
                "the request can never be admitted: its cost is more than a limit admits at once, \
                 or its key is blocked",
            ),
            Self::Timeout {
                retry_after: Some(span),
            } => write!(
                f,
                "the request would wait at least {span}, which is more than its maximum wait"
            ),
            Self::Timeout { retry_after: None } => {
                f.write_str("the request was not admitted within its maximum wait")
            }
            Self::TooManyWaiters { max } => {
                write!(
                    f,
                    "{max} requests are already waiting, which is the maximum; retry later or raise the maximum"
                )
            }
            Self::Request(error) => error.fmt(f),
        }
    }
}

impl Error for AcquireError {}

impl From<RequestError> for AcquireError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}
