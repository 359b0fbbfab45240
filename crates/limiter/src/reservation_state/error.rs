//! The reasons why a reservation is not made, settled or renewed.

use std::fmt;

use tidegate_core::{RequestError, Timestamp};
use tidegate_redis::StoreError;

/// The message if reservations are off.
const OFF: &str =
    "reservations are off; remove `reservations: off` from the rules file, and restart the server";

/// The reason why a reservation is not made.
#[derive(Debug)]
pub enum ReserveError {
    /// The request is invalid.
    Request(RequestError),
    /// There are too many outstanding reservations. The variant contains the maximum.
    TooMany(usize),
}

impl From<RequestError> for ReserveError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

/// The reason why a reservation is not settled or renewed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReservationError {
    /// The token is malformed, was not sealed with a key of this server, or belongs to a
    /// reservation of counters.
    Invalid,
    /// Reservations are off on this server.
    Off,
    /// The reservation is not outstanding.
    NotOutstanding(NotOutstanding),
    /// Redis did not respond. The caller may repeat the call.
    Unavailable(StoreError),
    /// A new process has taken over the reservations of this process. The caller may repeat the
    /// call on a new connection.
    Moved,
}

/// Why a reservation is not outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotOutstanding {
    /// The reservation is not known to this server, or has other counters than the request.
    Unknown,
    /// The reservation is not known to this server, and the token's time to live has passed. The
    /// server forgets a reservation when it is settled, and when it expires.
    ExpiredOrSettled,
    /// The reservation has expired.
    Expired,
    /// The reservation was already settled.
    Settled,
    /// The reservation has lost its concurrency slot.
    SlotLost,
}

impl NotOutstanding {
    fn reason(self) -> &'static str {
        match self {
            Self::Unknown => {
                "was already settled, or was made by another server or before a restart of this server"
            }
            Self::ExpiredOrSettled => "has expired, or was already settled",
            Self::Expired => "has expired",
            Self::Settled => {
                "was already settled; only a settlement at the same cost can be repeated"
            }
            Self::SlotLost => {
                "has lost its concurrency slot: it was renewed too late, its key was reset, or the \
                 limits of the rule have changed"
            }
        }
    }
}

impl ReservationError {
    /// Returns the same error, or a more precise one if the token was valid until `expires`.
    pub(crate) fn narrowed_by_expiry(self, expires: Timestamp, now: Timestamp) -> Self {
        match self {
            Self::NotOutstanding(NotOutstanding::Unknown) if expires <= now => {
                NotOutstanding::ExpiredOrSettled.into()
            }
            error => error,
        }
    }
}

impl From<NotOutstanding> for ReservationError {
    fn from(why: NotOutstanding) -> Self {
        Self::NotOutstanding(why)
    }
}

impl ReservationError {
    /// Describes why the token is invalid or why the call failed, and what to do.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid => {
                "is not a token of this server; servers that share a Redis need the same \
                 `reservations.secret_env`"
            }
            Self::Off => OFF,
            Self::NotOutstanding(why) => why.reason(),
            Self::Unavailable(_) => {
                "Redis did not execute the call, or did not answer in time; repeat the call"
            }
            Self::Moved => {
                "a new process has taken over the reservations of this server; repeat the call on a \
                 new connection"
            }
        }
    }
}

impl fmt::Display for ReservationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid | Self::NotOutstanding(_) => write!(f, "reservation: {}", self.reason()),
            Self::Off | Self::Unavailable(_) | Self::Moved => f.write_str(self.reason()),
        }
    }
}

impl std::error::Error for ReservationError {}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(error) => error.fmt(f),
            Self::TooMany(0) => f.write_str(OFF),
            Self::TooMany(max) => write!(
                f,
                "the maximum of {max} outstanding reservations is reached; settle some, or raise `reservations.max`"
            ),
        }
    }
}

impl std::error::Error for ReserveError {}
