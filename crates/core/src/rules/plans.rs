//! Plans: named limits of a rule. A request entry or an override selects the plan for a key.

use std::sync::Arc;

use super::Request;
use crate::eval::Limits;

/// The plans of a rule.
#[derive(Clone, Debug, Default)]
pub(super) struct Plans {
    /// The entry that names a request's plan; `None` if only overrides select plans.
    pub(super) entry: Option<Box<str>>,
    /// The limits of each plan, sorted by plan name.
    limits: Vec<(Box<str>, Arc<Limits>)>,
}

impl Plans {
    pub(super) fn new(entry: Option<Box<str>>, mut limits: Vec<(Box<str>, Arc<Limits>)>) -> Self {
        limits.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        Self { entry, limits }
    }

    /// Returns the limits of the plan `name`.
    pub(super) fn get(&self, name: &str) -> Option<&Arc<Limits>> {
        let at = self.limits.binary_search_by(|(own, _)| (**own).cmp(name));
        at.ok().map(|at| &self.limits[at].1)
    }

    /// Returns the limits of the plan named by `request`. Returns `None` if the request does not
    /// name a plan of the rule.
    pub(super) fn of_request(&self, request: &Request<'_>) -> Option<&Arc<Limits>> {
        let entry = self.entry.as_deref()?;
        self.get(request.entry(entry)?)
    }

    /// Returns the name of the plan that `request` names. Returns `None` if the request does not
    /// name a plan of the rule.
    pub(super) fn name_of_request(&self, request: &Request<'_>) -> Option<&str> {
        let name = request.entry(self.entry.as_deref()?)?;
        let at = self.limits.binary_search_by(|(own, _)| (**own).cmp(name));
        at.ok().map(|at| &*self.limits[at].0)
    }

    /// Returns whether `self` and `other` have the same plans with equal limits, selected by the
    /// same entry.
    pub(super) fn are_equal(&self, other: &Self) -> bool {
        self.entry == other.entry
            && self.limits.len() == other.limits.len()
            && self
                .iter()
                .zip(other.iter())
                .all(|(own, others)| own.0 == others.0 && own.1.iter().eq(others.1.iter()))
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Arc<Limits>)> {
        self.limits.iter().map(|(name, limits)| (&**name, limits))
    }

    pub(super) fn limits_mut(&mut self) -> impl Iterator<Item = (&str, &mut Arc<Limits>)> {
        self.limits
            .iter_mut()
            .map(|(name, limits)| (&**name, limits))
    }
}
