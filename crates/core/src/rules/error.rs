//! What is wrong with a rule.

use std::fmt;

/// A rule that cannot work: which field it is, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// The field by its path in the rules file, such as `key` or `rules[3].name`; empty for the very
    /// value that was given.
    pub field: String,
    /// What is wrong and what to write instead.
    pub problem: String,
}

impl RuleError {
    pub(super) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
        }
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            return f.write_str(&self.problem);
        }
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for RuleError {}
