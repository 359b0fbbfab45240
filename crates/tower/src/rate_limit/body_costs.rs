//! Request costs that are read from the body before the layer evaluates the rules.
//!
//! The layer itself does not read bodies. An outer service, such as the reverse proxy, reads the
//! body and inserts the costs into the request extensions.

use std::{cell::RefCell, sync::Arc};

use http::request::Parts;
use smallvec::SmallVec;
use tidegate::RateLimiter;
use tidegate_core::{BodyCost, BodyNumbers, Cost, CostSource, Request, Rule, RuleSet, Scratch};
use tidegate_identity::RequestEntries;

use super::{
    RateLimitLayer,
    used_entries::{Few, used_entries},
};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The costs read from the body of a request, as a request extension. If a rule's cost depends on
/// the body, and the list does not contain the rule, the rule's default cost is charged.
#[derive(Clone, Debug, Default)]
pub struct BodyCosts(SmallVec<[(u64, Cost); 1]>);

impl BodyCosts {
    /// Adds the cost of a rule, as returned by [`RuleBodyCost::cost_of`].
    #[must_use]
    pub fn with(mut self, rule: &RuleBodyCost, cost: Cost) -> Self {
        self.0.push((rule.scope, cost));
        self
    }

    /// Returns the costs of a request with this head under `rules`.
    pub(super) fn of(head: &Parts, rules: &RuleSet) -> Self {
        if !rules.has_body_costs() {
            return Self::default();
        }
        head.extensions.get().cloned().unwrap_or_default()
    }

    pub(super) fn as_slice(&self) -> &[(u64, Cost)] {
        &self.0
    }
}

/// A rule whose cost depends on the body of a request.
#[derive(Clone, Debug)]
pub struct RuleBodyCost {
    rules: Arc<RuleSet>,
    name: Box<str>,
    scope: u64,
    cost: Arc<BodyCost>,
}

impl RuleBodyCost {
    /// Creates the value for `rule`, which must be in `rules`. Returns `None` if the cost of the
    /// rule does not depend on the body.
    fn new(rule: &Rule, rules: &Arc<RuleSet>) -> Option<Self> {
        let CostSource::Body(cost) = rule.cost() else {
            return None;
        };
        Some(Self {
            rules: Arc::clone(rules),
            name: rule.name().into(),
            scope: rule.key_scope(),
            cost: Arc::clone(cost),
        })
    }

    /// Returns the description of the numbers to read from the body.
    #[must_use]
    pub fn body_cost(&self) -> &BodyCost {
        &self.cost
    }

    /// Returns the cost of a request whose body contains these numbers.
    #[must_use]
    pub fn cost_of(&self, numbers: BodyNumbers) -> Cost {
        let rule = self.rules.rule(&self.name);
        // The rule is always found, because `new` took it from this rule set.
        rule.map_or(Cost::ONE, |rule| {
            rule.expected_cost(self.cost.expected(numbers))
        })
    }
}

impl<L: RateLimiter + 'static> RateLimitLayer<L> {
    /// Returns the rules that apply to the request with this head and whose cost depends on the
    /// body of the request. Returns no rules for a request that the layer rejects.
    #[must_use]
    pub fn body_cost_rules(&self, head: &Parts) -> Vec<RuleBodyCost> {
        let rules = self.limiter.rules();
        if !rules.has_body_costs() {
            return Vec::new();
        }
        let entries = RequestEntries::new(head, &self.settings.sources);
        let Ok(values) = used_entries(&entries, &rules) else {
            return Vec::new();
        };
        let entries: Few<(&str, &str)> = values
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        let Ok(request) = Request::new(&entries, Cost::ONE) else {
            return Vec::new();
        };
        SCRATCH.with_borrow_mut(|scratch| {
            let found = rules.rules_with_body_cost(&request, self.limiter.now(), scratch);
            let described = found.into_iter();
            described
                .filter_map(|rule| RuleBodyCost::new(rule, &rules))
                .collect()
        })
    }
}
