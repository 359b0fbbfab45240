//! The form of a rule of descriptors for which operators set overrides.

use std::{
    hash::{Hash, Hasher},
    sync::{Arc, PoisonError, RwLock},
};

use tidegate_core::{Limits, Overrides, Rule, RuleOverrides, Timestamp};
use tidegate_limiter::BuildCache;

use super::limits::RuleLimits;

/// The maximum number of different override limits that are cached for one rule.
const CACHED_LIMITS: usize = 64;

/// A rule of Envoy's rate limit service, described as a core rule, with its overrides. Operators
/// set overrides with the name and the key of the core rule.
#[derive(Debug)]
pub(crate) struct Overridable {
    rule: Arc<Rule>,
    overrides: Arc<RuleOverrides>,
    built: RwLock<BuildCache<LimitsId, Arc<RuleLimits>>>,
}

/// Identifies an object, not its content: overrides with equal limits share one object.
#[derive(Debug)]
struct LimitsId(Arc<Limits>);

impl PartialEq for LimitsId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for LimitsId {}

impl Hash for LimitsId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

impl Overridable {
    pub(super) fn new(rule: Rule, overrides: &Overrides) -> Self {
        Self {
            overrides: overrides.of_rule(rule.name()),
            rule: Arc::new(rule),
            built: RwLock::new(BuildCache::new(CACHED_LIMITS)),
        }
    }

    /// Returns the core rule with whose name and key operators set overrides.
    pub(super) fn rule(&self) -> &Arc<Rule> {
        &self.rule
    }

    /// Returns the limits of the override for the key with these `values`, if there is one. `own`
    /// are the limits of the rule.
    pub(crate) fn limits<'v>(
        &self,
        own: &RuleLimits,
        values: impl Iterator<Item = &'v str>,
        now: Timestamp,
    ) -> Option<Arc<RuleLimits>> {
        if self.overrides.is_empty() {
            return None;
        }
        let values: Vec<&str> = values.collect();
        let limits = self.overrides.limits_of_values(&self.rule, &values, now)?;
        let id = LimitsId(limits);
        let built = self.built.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(limits) = built.get(&id) {
            return Some(Arc::clone(limits));
        }
        drop(built);
        let limits = Arc::new(own.overridden_by(Arc::clone(&id.0)));
        let mut built = self.built.write().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(built.insert(id, limits)))
    }
}
