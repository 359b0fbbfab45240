//! Conditions: when a rule applies.

use super::{Pattern, Request, RuleError};
use crate::bounds;

/// What one entry of a request must be.
#[derive(Clone, Debug)]
pub struct Condition {
    entry: Box<str>,
    pattern: Pattern,
}

impl Condition {
    /// The entry named `entry` matches `pattern`.
    ///
    /// # Errors
    ///
    /// Refuses an empty name and one over [`bounds::MAX_ENTRY_NAME_BYTES`], which no request has.
    pub fn new(entry: &str, pattern: Pattern) -> Result<Self, RuleError> {
        check_name(entry)?;
        Ok(Self {
            entry: entry.into(),
            pattern,
        })
    }

    pub(super) fn holds(&self, request: &Request<'_>) -> bool {
        self.pattern.matches(request.entry(&self.entry))
    }

    pub(super) fn entry(&self) -> &str {
        &self.entry
    }

    pub(super) fn pattern(&self) -> &Pattern {
        &self.pattern
    }
}

/// Conditions that must all hold. None at all always hold.
#[derive(Clone, Debug, Default)]
pub struct When(Box<[Condition]>);

impl When {
    /// All of `conditions` hold.
    #[must_use]
    pub fn all(conditions: Vec<Condition>) -> Self {
        Self(conditions.into())
    }

    /// Whether the conditions hold for `request`.
    #[must_use]
    pub fn holds_for(&self, request: &Request<'_>) -> bool {
        self.0.iter().all(|condition| condition.holds(request))
    }

    /// Whether there are no conditions, so that they hold for every request.
    #[must_use]
    pub fn is_always(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the conditions hold for `request`; adds to `evaluated` how many were looked at.
    pub(super) fn holds(&self, request: &Request<'_>, evaluated: &mut usize) -> bool {
        self.0.iter().all(|condition| {
            *evaluated += 1;
            condition.holds(request)
        })
    }

    pub(super) fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|condition| &*condition.entry)
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Condition> {
        self.0.iter()
    }
}

/// Refuses a name that no entry of a request can have.
pub(super) fn check_name(entry: &str) -> Result<(), RuleError> {
    let most = bounds::MAX_ENTRY_NAME_BYTES;
    if entry.is_empty() {
        return Err(RuleError::new("", "the name of an entry must not be empty"));
    }
    if entry.len() > most {
        let problem = format!(
            "{} bytes of name are over the maximum of {most}",
            entry.len()
        );
        return Err(RuleError::new("", problem));
    }
    Ok(())
}
