//! Error messages for the throttle commands. The wording is that of redis-cell and throttlecrab,
//! which introduced the throttle commands.

use std::fmt;

use tidegate_core::LimitError;

use super::quoted;

/// The reason why a throttle command is rejected.
#[derive(Debug)]
pub(super) enum Refusal<'a> {
    NotAnInteger {
        field: &'static str,
        value: &'a [u8],
    },
    ZeroRate,
    OutOfRange {
        field: &'static str,
        least: u64,
        most: u64,
        value: i64,
    },
    Key(String),
    Limit(LimitError),
}

/// Formats a rejection reason with redis-cell's wording.
pub(super) struct CellRefusal<'r, 'a>(pub(super) &'r Refusal<'a>);

impl fmt::Display for CellRefusal<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Refusal::NotAnInteger { value, .. } => {
                write!(f, "Couldn't parse as integer: {}", quoted(value))
            }
            Refusal::ZeroRate => write!(f, "Zero rates are not supported"),
            refusal => refusal.fmt(f),
        }
    }
}

/// Formats a rejection reason with throttlecrab's wording.
pub(super) struct CrabRefusal<'r, 'a>(pub(super) &'r Refusal<'a>);

impl fmt::Display for CrabRefusal<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Refusal::NotAnInteger { field, .. } => write!(f, "invalid {field}"),
            Refusal::Key(problem) => write!(f, "invalid key: {problem}"),
            Refusal::OutOfRange {
                field: "quantity",
                value,
                ..
            } if *value < 0 => {
                write!(f, "Rate limit check failed: negative quantity: {value}")
            }
            refusal => write!(
                f,
                "Rate limit check failed: invalid rate limit parameters: {refusal}"
            ),
        }
    }
}

/// Formats the rejection reasons for which neither redis-cell nor throttlecrab has a message.
impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAnInteger { field, value } => {
                write!(f, "{field}: not an integer: {}", quoted(value))
            }
            Self::ZeroRate => write!(f, "count_per_period: must not be zero"),
            Self::OutOfRange {
                field,
                least,
                most,
                value,
            } => {
                write!(f, "{field}: must be from {least} to {most}, got {value}")
            }
            Self::Key(problem) => write!(f, "key: {problem}"),
            Self::Limit(error) => write!(f, "{}: {}", argument_of(error.field), error.problem),
        }
    }
}

/// Returns the argument that sets the given field of a limit.
fn argument_of(field: &'static str) -> &'static str {
    match field {
        "burst" | "capacity" => "max_burst",
        "rate" | "refill" => "count_per_period",
        other => other,
    }
}
