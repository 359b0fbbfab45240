//! What a rate limit service answers, and why it sometimes cannot.

use std::sync::Arc;

use tidegate_core::Span;

use super::{Metadata, Unit};

/// Whether the request, or one of its descriptors, is within its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// It is.
    Ok,
    /// It is not.
    OverLimit,
}

impl Code {
    /// The code as it stands in answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::OverLimit => "OVER_LIMIT",
        }
    }
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct RateLimitAnswer {
    /// What the proxy acts upon.
    pub overall_code: Code,
    /// One status a descriptor, in the order of the request.
    pub statuses: Vec<DescriptorStatus>,
    /// Headers for the proxy to add to its own answer; empty unless the settings ask for them.
    pub response_headers: Vec<ResponseHeader>,
    /// What was asked, and the metadata of the rules that let it pass; `None` unless the settings ask for it.
    pub dynamic_metadata: Option<Metadata>,
}

/// How one descriptor stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorStatus {
    /// Whether it is within its limit.
    pub code: Code,
    /// The limit; `None` if none applies.
    pub current_limit: Option<CurrentLimit>,
    /// How many hits are left; [`u32::MAX`] under a rule without a limit.
    pub limit_remaining: u32,
    /// How long until the limit is whole again, in whole seconds and rounded up; `None` where none applies.
    pub duration_until_reset: Option<Span>,
}

impl DescriptorStatus {
    /// The status where no limit applies.
    pub(super) const UNLIMITED: Self = Self {
        code: Code::Ok,
        current_limit: None,
        limit_remaining: 0,
        duration_until_reset: None,
    };
}

/// The limit that a status speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentLimit {
    /// How many hits pass in each unit.
    pub requests_per_unit: u32,
    /// The unit; [`Unit::Unknown`] where the limit's window is none of them.
    pub unit: Unit,
    /// The rule's name, if it has one.
    pub name: Option<Arc<str>>,
}

/// A header for the proxy to add.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Its name, as configured.
    pub name: Arc<str>,
    /// Its value.
    pub value: String,
}

/// Why a request could not be decided. A denial is none: it is an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RateLimitError {
    /// The caller named no domain.
    #[error("rate limit domain must not be empty")]
    EmptyDomain,
    /// The caller described nothing.
    #[error("rate limit descriptor list must not be empty")]
    EmptyDescriptors,
    /// No configuration was ever loaded: the operator's.
    #[error("no rate limit configuration loaded")]
    NoConfiguration,
    /// The store did not answer, and the settings want no other answer: the operator's. What the request asked of several
    /// limits may have been charged to some of them.
    #[error("the store is out of reach")]
    Store,
    /// The caller's: a field that is out of bounds, by its name in the request.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field, such as `descriptors[2].limit.unit`.
        field: String,
        /// What is wrong and what to send instead.
        problem: String,
    },
}

impl RateLimitError {
    /// Whether it is not the caller's fault.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        match self {
            Self::NoConfiguration | Self::Store => true,
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
