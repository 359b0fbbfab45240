//! Errors in rules.

use std::fmt;

/// An error in a rule, with the invalid field and a valid alternative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// The path of the field in the rules file, such as `key` or `rules[3].name`. The path is empty
    /// if the error is about the given value itself.
    pub field: String,
    /// The problem, and a valid alternative.
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

/// All errors in a set of rules, at least one. `Display` writes one line for each error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleErrors(pub(super) Vec<RuleError>);

impl RuleErrors {
    /// Iterates over the errors, in the order of the rules.
    pub fn iter(&self) -> std::slice::Iter<'_, RuleError> {
        self.0.iter()
    }
}

impl<'e> IntoIterator for &'e RuleErrors {
    type Item = &'e RuleError;
    type IntoIter = std::slice::Iter<'e, RuleError>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Display for RuleErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, error) in self.iter().enumerate() {
            let between = if at == 0 { "" } else { "\n" };
            write!(f, "{between}{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for RuleErrors {}
