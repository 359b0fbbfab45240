//! Overrides that do not apply under the current rules.

use std::collections::BTreeMap;

use crate::ServerLimiter;

/// The number of inactive overrides by rule name. An override is inactive in three cases: its rule
/// does not exist, the rule's key has a different number of entries, or the override's limits are
/// invalid for the rule.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct InactiveOverrides(pub BTreeMap<Box<str>, usize>);

/// The maximum number of rules that [`InactiveOverrides::advice`] names.
const MAX_NAMED: usize = 10;

impl InactiveOverrides {
    /// Describes the inactive overrides, and explains how to make them active or to remove them.
    /// Returns `None` if there are no inactive overrides.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let overrides: usize = self.0.values().sum();
        let are = match overrides {
            0 => return None,
            1 => "override is",
            _ => "overrides are",
        };
        let named = self.0.keys().take(MAX_NAMED);
        let named: Vec<String> = named
            .map(|rule| format!("\"{}\"", rule.escape_debug()))
            .collect();
        let mut named = named.join(", ");
        if self.0.len() > MAX_NAMED {
            let more = self.0.len() - MAX_NAMED;
            named = format!("{named} and {more} more");
        }
        Some(format!(
            "{overrides} {are} inactive, because the rule no longer exists, has another key, or does \
             not accept the limits: {named}; list overrides with `tidegate overrides`, and remove \
             them with `tidegate override RULE KEY --remove`, or restore the rule"
        ))
    }
}

impl ServerLimiter {
    /// Counts the overrides that do not apply under the current rules, or only to some plans.
    /// Visits all overrides, and checks each distinct factor of a rule for each of its plans. This
    /// can take minutes for a million factors and many plans, so it must not be called on a thread
    /// that decides requests.
    #[must_use]
    pub fn inactive_overrides(&self) -> InactiveOverrides {
        let rules = self.rules();
        let by_name = self.overrides().by_name().into_iter();
        let inactive = by_name.map(|(name, overrides)| {
            let count = match self.overridable_rule(&rules, &name) {
                Some(rule) => overrides.count_inactive(&rule),
                None if self.is_rule_pending(&name) => 0,
                None => overrides.len(),
            };
            (name, count)
        });
        InactiveOverrides(inactive.filter(|(_, count)| *count > 0).collect())
    }
}
