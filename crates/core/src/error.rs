//! The error about an invalid limit.

use std::fmt;

/// An error about a number that is invalid for a limit: the wrong field, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// The field, by its name in the rules file.
    pub field: &'static str,
    /// What is wrong and what to write instead.
    pub problem: String,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for LimitError {}

impl LimitError {
    /// Creates an error about `field`.
    #[must_use]
    pub fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self {
            field,
            problem: problem.into(),
        }
    }
}
