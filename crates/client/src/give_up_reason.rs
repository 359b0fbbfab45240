//! The reasons why a request is not sent again.

use std::fmt;

use tidegate_core::Span;

/// The reason why a request is not sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GiveUpReason {
    /// The server may have processed the request, and the request is not idempotent.
    NotIdempotent,
    /// The server has said that a retry will never succeed.
    Permanent,
    /// The maximum number of tries in the policy is reached.
    Tries,
    /// The request body was too long to be stored for a retry.
    Body,
    /// The server asks for a longer wait than the policy allows.
    MaxWait {
        /// The wait that the server asks for.
        server_wait: Span,
    },
    /// The deadline would pass before the retry could start.
    Deadline,
    /// The retry budget is exhausted.
    Budget,
}

impl fmt::Display for GiveUpReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotIdempotent => {
                f.write_str("the request is not idempotent, and the server could have processed it")
            }
            Self::Permanent => f.write_str("the server would reject the request every time"),
            Self::Tries => f.write_str("the policy allows no more tries"),
            Self::Body => {
                f.write_str("the request body is too long to be buffered for another try")
            }
            Self::MaxWait { server_wait } => write!(
                f,
                "the server asks for a wait of {server_wait}, which is longer than the policy allows"
            ),
            Self::Deadline => f.write_str("the deadline would pass before another try"),
            Self::Budget => f.write_str("the retry budget is exhausted"),
        }
    }
}
