//! The error type for an invalid limit.

use std::fmt;

/// An error about an invalid value in a limit. The error names the invalid field and a valid
/// alternative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// The field's name in the rules file.
    pub field: &'static str,
    /// The description of the problem, with a valid alternative.
    pub problem: String,
    /// The limit that was probably meant; see [`Self::meant`].
    meant: Option<Box<str>>,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for LimitError {}

impl LimitError {
    const MISSING: &'static str = "is missing";

    /// Creates an error about a required field that is absent.
    #[must_use]
    pub fn missing(field: &'static str) -> Self {
        Self::new(field, Self::MISSING)
    }

    /// Returns whether the field is required and absent.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.problem.starts_with(Self::MISSING)
    }

    /// Creates an error about `field`.
    #[must_use]
    pub fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self {
            field,
            problem: problem.into(),
            meant: None,
        }
    }

    /// Adds the limit that was probably meant, as a map such as `{algorithm: concurrency, limit:
    /// 10}`.
    pub(crate) fn meaning(self, meant: String) -> Self {
        Self {
            meant: Some(meant.into()),
            ..self
        }
    }

    /// Returns the limit that was probably meant, as a map in the notation of the rules file, such
    /// as `{algorithm: concurrency, limit: 10}`. The description of the problem names the same
    /// fields in words, for callers with another notation.
    #[must_use]
    pub fn meant(&self) -> Option<&str> {
        self.meant.as_deref()
    }
}
