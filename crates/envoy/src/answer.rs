//! The responses and errors of the rate limit service.

use std::sync::Arc;

use tidegate_core::Span;

use super::{Metadata, Unit};

/// Whether a request or one of its descriptors is within its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The request or descriptor is within its limit.
    Ok,
    /// The request or descriptor is over its limit.
    OverLimit,
}

impl Code {
    /// Returns the name of the code in responses.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::OverLimit => "OVER_LIMIT",
        }
    }
}

/// The response to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct RateLimitAnswer {
    /// The code that tells Envoy whether to allow or deny the request.
    pub overall_code: Code,
    /// One status per descriptor, in the order of the descriptors in the request.
    pub statuses: Vec<DescriptorStatus>,
    /// The headers that Envoy adds to its response to the client. The list is empty unless the
    /// settings enable the headers.
    pub response_headers: Vec<ResponseHeader>,
    /// Dynamic metadata: the request, and the metadata of the rules that admitted it. `None` unless
    /// the settings enable dynamic metadata.
    pub dynamic_metadata: Option<Metadata>,
}

/// The status of one descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorStatus {
    /// Whether the descriptor is within its limit.
    pub code: Code,
    /// The limit that applies; `None` if no limit applies.
    pub current_limit: Option<CurrentLimit>,
    /// The number of remaining hits; [`u32::MAX`] if the rule is unlimited.
    pub limit_remaining: u32,
    /// The time until the whole limit is available again, rounded up to whole seconds; `None` if no
    /// limit applies.
    pub duration_until_reset: Option<Span>,
}

impl DescriptorStatus {
    /// The status of a descriptor without a limit.
    pub(super) const UNLIMITED: Self = Self {
        code: Code::Ok,
        current_limit: None,
        limit_remaining: 0,
        duration_until_reset: None,
    };
}

/// The limit in the status of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentLimit {
    /// The number of hits per unit.
    pub requests_per_unit: u32,
    /// The unit of time; [`Unit::Unknown`] if the window of the limit has a different length.
    pub unit: Unit,
    /// The rule's name, if it has one.
    pub name: Option<Arc<str>>,
}

/// A header that Envoy adds to its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// The header name, as configured.
    pub name: Arc<str>,
    /// The header value.
    pub value: String,
}

/// The reason why a request could not be decided. A denial is a normal response, not an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RlsError {
    /// The request has no domain.
    #[error("rate limit domain must not be empty")]
    EmptyDomain,
    /// The request has no descriptors.
    #[error("rate limit descriptor list must not be empty")]
    EmptyDescriptors,
    /// No configuration has been loaded yet. The operator must load a configuration.
    #[error("no rate limit configuration loaded")]
    NoConfiguration,
    /// The store is unavailable, and the settings require an error if the store is unavailable. The
    /// operator must fix the store. If several limits applied, some of them may have been charged.
    #[error("the store is unavailable")]
    Store,
    /// A new process has taken over the reservations of this process, during an upgrade. The client
    /// must repeat the call on a new connection.
    #[error("a new process has taken over the reservations; repeat the call on a new connection")]
    Moved,
    /// Reservations are turned off. The operator must turn reservations on.
    #[error(
        "reservations are off; remove `reservations: off` from the rules file, and restart the server"
    )]
    ReservationsOff,
    /// The maximum number of outstanding reservations has been reached. The variant contains the
    /// maximum number of reservations.
    #[error("there are {0} outstanding reservations; commit them, or raise `reservations.max`")]
    TooManyReservations(usize),
    /// A field of the request is out of bounds. The client must correct the field.
    #[error("{field}: {problem}")]
    Invalid {
        /// The path of the field, such as `descriptors[2].limit.unit`.
        field: String,
        /// A description of the problem, with an example of a valid value.
        problem: String,
    },
}

impl RlsError {
    /// Returns whether the error was caused by the server, and not by the request.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        match self {
            Self::NoConfiguration
            | Self::Store
            | Self::Moved
            | Self::ReservationsOff
            | Self::TooManyReservations(_) => true,
            Self::EmptyDomain | Self::EmptyDescriptors | Self::Invalid { .. } => false,
        }
    }

    pub(super) fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }
}
