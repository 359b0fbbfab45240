//! The rules of Envoy's rate limit service, for which overrides can be set, too.

use std::{fmt, ops::Deref, sync::Arc};

use tidegate_core::{Rule, RuleSet};

use crate::ServerLimiter;

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

impl ServerLimiter {
    /// Replaces the rules of Envoy's rate limit service.
    pub fn set_descriptor_rules(&self, rules: DescriptorRules) {
        self.descriptor_rules.store(Some(Arc::new(rules)));
    }

    /// Returns the rule with this name for which overrides can be set: a rule of `rules` or, if the
    /// name begins with [`DESCRIPTOR_RULE_PREFIX`], of Envoy's rate limit service.
    #[must_use]
    pub fn overridable_rule<'r>(
        &self,
        rules: &'r RuleSet,
        name: &str,
    ) -> Option<OverridableRule<'r>> {
        if let Some(rule) = rules.rule(name) {
            return Some(OverridableRule::OfFile(rule));
        }
        let found = self.descriptor_rules.load();
        let find = &found.as_deref()?.0;
        find(name).map(OverridableRule::OfDescriptors)
    }

    /// Returns whether the rule with this name may be found later, because the configuration of
    /// Envoy's rate limit service has not been loaded yet.
    pub(super) fn is_rule_pending(&self, name: &str) -> bool {
        name.starts_with(DESCRIPTOR_RULE_PREFIX) && self.descriptor_rules.load().is_none()
    }
}
