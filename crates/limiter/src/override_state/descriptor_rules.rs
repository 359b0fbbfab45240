//! The rules of Envoy's rate limit service, for which overrides can be set, too.

use std::{fmt, ops::Deref, sync::Arc};

use tidegate_core::Rule;

/// The beginning of the names of the rules of Envoy's rate limit service. An override of such a
/// rule is stored under this name.
pub const DESCRIPTOR_RULE_PREFIX: &str = "envoy:";

/// Finds the rules of Envoy's rate limit service by name.
pub struct DescriptorRules(Box<FindRule>);

type FindRule = dyn Fn(&str) -> Option<Arc<Rule>> + Send + Sync;

impl DescriptorRules {
    /// Creates a lookup in which `find` returns the rule with a name.
    #[must_use]
    pub fn new(find: impl Fn(&str) -> Option<Arc<Rule>> + Send + Sync + 'static) -> Self {
        Self(Box::new(find))
    }

    pub(crate) fn find(&self, name: &str) -> Option<Arc<Rule>> {
        (self.0)(name)
    }
}

impl fmt::Debug for DescriptorRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DescriptorRules").finish_non_exhaustive()
    }
}

/// A rule for which overrides can be set.
#[derive(Clone, Debug)]
pub enum OverridableRule<'r> {
    /// A rule of the rules file.
    OfFile(&'r Rule),
    /// A rule of Envoy's rate limit service.
    OfDescriptors(Arc<Rule>),
}

impl Deref for OverridableRule<'_> {
    type Target = Rule;

    fn deref(&self) -> &Rule {
        match self {
            Self::OfFile(rule) => rule,
            Self::OfDescriptors(rule) => rule,
        }
    }
}

impl OverridableRule<'_> {
    /// Returns whether this is a rule of Envoy's rate limit service.
    #[must_use]
    pub fn is_of_descriptors(&self) -> bool {
        matches!(self, Self::OfDescriptors(_))
    }
}
