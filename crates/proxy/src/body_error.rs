//! The reasons why a body ends early.

use std::{error::Error, fmt};

/// The reason why a body was not forwarded completely.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// No data arrived within the idle timeout.
    IdleTimeout,
    /// The body exceeds its maximum size.
    TooLarge,
    /// The client reads the response too slowly.
    SlowClient,
    /// The response is complete, so the rest of the request body is not needed.
    Unwanted,
    /// The sender closed or reset the stream early.
    Aborted(Box<dyn Error + Send + Sync>),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IdleTimeout => f.write_str("the body did not arrive in time"),
            Self::TooLarge => f.write_str("the body is too large"),
            Self::SlowClient => f.write_str("the client read the response body too slowly"),
            Self::Unwanted => {
                f.write_str("the response was complete before the request body was sent")
            }
            Self::Aborted(error) => write!(f, "the body ended early: {error}"),
        }
    }
}

impl Error for BodyError {}

/// How an upstream ended a response early, as a metric label and log value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EarlyEnd {
    BrokenOff,
    IdleTimeout,
}

impl EarlyEnd {
    /// All values, in the order of their discriminants.
    pub(crate) const ALL: [Self; 2] = [Self::BrokenOff, Self::IdleTimeout];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::BrokenOff => "broken_off",
            Self::IdleTimeout => "idle_timeout",
        }
    }
}

impl BodyError {
    /// Returns the kind of early end that this error is counted as.
    pub(crate) const fn early_end(&self) -> EarlyEnd {
        match self {
            Self::Aborted(_) | Self::TooLarge | Self::SlowClient | Self::Unwanted => {
                EarlyEnd::BrokenOff
            }
            Self::IdleTimeout => EarlyEnd::IdleTimeout,
        }
    }

    /// Returns the name of this error in the access log.
    pub(crate) const fn reason(&self) -> &'static str {
        match self {
            Self::SlowClient => "client_slow",
            _ => self.early_end().as_str(),
        }
    }
}
