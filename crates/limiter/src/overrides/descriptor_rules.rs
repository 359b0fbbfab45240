//! The rules of Envoy's rate limit service, for which overrides can also be set.

use std::sync::Arc;

use tidegate_core::RuleSet;

use crate::{
    ServerLimiter,
    override_state::{DESCRIPTOR_RULE_PREFIX, DescriptorRules, OverridableRule},
};

impl ServerLimiter {
    /// Replaces the rules of Envoy's rate limit service.
    pub fn set_descriptor_rules(&self, rules: DescriptorRules) {
        self.override_state
            .descriptor_rules
            .store(Some(Arc::new(rules)));
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
        let found = self.override_state.descriptor_rules.load();
        found
            .as_deref()?
            .find(name)
            .map(OverridableRule::OfDescriptors)
    }

    /// Returns whether the rule with this name may be found later, because the configuration of
    /// Envoy's rate limit service has not been loaded yet.
    pub(super) fn is_rule_pending(&self, name: &str) -> bool {
        name.starts_with(DESCRIPTOR_RULE_PREFIX)
            && self.override_state.descriptor_rules.load().is_none()
    }
}
