//! Overrides that operators set for the rules of descriptors while the server runs.
//!
//! An override belongs to a rule with a name and a key. For a rule of descriptors, the name is
//! `envoy:`, the domain, a slash, and the rule's levels joined with dots. A level is the key of an
//! entry, followed by `_` and the value if the configuration sets one. The key of the override
//! consists of the values of all entries, by which the rule counts:
//!
//! ```text
//! domain: shop                             envoy:shop/plan_gold.user      key: gold, alice
//! descriptors:
//!   - key: plan
//!     value: gold
//!     descriptors: [{key: user, rate_limit: …}]
//! ```

use std::sync::Arc;

use tidegate_core::{Condition, Overrides, Pattern, Rule, When, bounds::MAX_KEY_ENTRIES};
use tidegate_limiter::DESCRIPTOR_RULE_PREFIX;

use super::{
    Allowance, DescriptorRule, Domain, Domains, RuleLimits, RuleNode, limitador::LimitadorLimit,
    overridable::Overridable,
};

/// A level of a rule: its name in the tree, and its value in the configuration.
struct RuleLevel<'d> {
    name: &'d str,
    node: &'d RuleNode,
}

impl RuleLevel<'_> {
    /// Returns the key of the level's entry.
    fn key(&self) -> &str {
        let value = self.node.value.as_deref();
        let key = value.and_then(|value| self.name.strip_suffix(value)?.strip_suffix('_'));
        key.unwrap_or(self.name)
    }

    /// Returns the condition that the entry has the value in the configuration, unless all values
    /// match that a wildcard matches.
    fn condition(&self) -> Option<Condition> {
        let value = self.node.value.as_deref()?;
        let is_one_value = !value.contains('*') || self.node.share_threshold;
        let pattern = Pattern::exact(value).ok().filter(|_| is_one_value)?;
        Condition::new(self.key(), pattern).ok()
    }
}

impl DescriptorRule {
    /// Returns the core rule for which the overrides of this rule are set; `describe` creates the
    /// core rule on first use. Returns `None` if no overrides can be set for this rule.
    fn overridable(
        &self,
        overrides: &Overrides,
        describe: impl FnOnce(&RuleLimits) -> Option<Rule>,
    ) -> Option<&Overridable> {
        let Allowance::Limited(limits) = &self.allowance else {
            return None;
        };
        let described = self.overridable.get_or_init(|| {
            let rule = describe(limits)?;
            Some(Box::new(Overridable::new(rule, overrides)))
        });
        described.as_deref()
    }
}

/// Creates the core rule for the overrides of a rule with these `levels` and `limits`. Returns
/// `None` if the rule has no level or too many levels.
fn describe(domain: &Domain, levels: &[RuleLevel<'_>], limits: &RuleLimits) -> Option<Rule> {
    if levels.is_empty() || levels.len() > MAX_KEY_ENTRIES {
        return None;
    }
    let path: Vec<&str> = levels.iter().map(|level| level.name).collect();
    let name = format!("{DESCRIPTOR_RULE_PREFIX}{}/{}", domain.name, path.join("."));
    let keys: Vec<&str> = levels.iter().map(RuleLevel::key).collect();
    let conditions = levels.iter().filter_map(RuleLevel::condition).collect();
    let rule = Rule::of_limits(&name, &keys, Arc::clone(&limits.limits));
    Some(rule.when(When::all(conditions)))
}

impl Domains {
    /// Returns the core rule for which the overrides of `rule` are set. `rule` is the rule of
    /// `domain` for `entries`. Returns `None` if there are no overrides at all, or if none can be
    /// set for this rule.
    pub(crate) fn overridable<'d>(
        &self,
        domain: &Domain,
        rule: &'d DescriptorRule,
        entries: &[(String, String)],
    ) -> Option<&'d Overridable> {
        if self.overrides.is_empty() {
            return None;
        }
        rule.overridable(&self.overrides, |limits| {
            describe(domain, &domain.levels(entries)?, limits)
        })
    }

    /// Returns the core rule for which the overrides of `limit` are set. `limit` is a limit of a
    /// Limitador limits file. Returns `None` if there are no overrides at all, or if another limit
    /// of the namespace has the same name.
    pub(crate) fn overridable_limit<'d>(
        &self,
        domain: &Domain,
        limit: &'d LimitadorLimit,
    ) -> Option<&'d Overridable> {
        if self.overrides.is_empty() {
            return None;
        }
        self.describe_limit(domain, limit)
    }

    fn describe_limit<'d>(
        &self,
        domain: &Domain,
        limit: &'d LimitadorLimit,
    ) -> Option<&'d Overridable> {
        limit.rule.overridable(&self.overrides, |limits| {
            let path = limit.path();
            let same = domain.limitador.iter().filter(|one| one.path() == path);
            if same.count() > 1 || limit.variables.len() > MAX_KEY_ENTRIES {
                return None;
            }
            let name = format!("{DESCRIPTOR_RULE_PREFIX}{}/{path}", domain.name);
            let keys: Vec<&str> = limit.variables.iter().map(|one| &*one.source).collect();
            Some(Rule::of_limits(&name, &keys, Arc::clone(&limits.limits)))
        })
    }

    /// Returns the core rule for the overrides of the rule with the name `name`, if there is such a
    /// rule.
    pub(crate) fn find_overridable(&self, name: &str) -> Option<Arc<Rule>> {
        let address = name.strip_prefix(DESCRIPTOR_RULE_PREFIX)?;
        // A domain can contain slashes, too.
        let slashes = address.match_indices('/').map(|(at, _)| at);
        slashes.into_iter().find_map(|at| {
            let domain = self.get(&address[..at])?;
            let path = &address[at + 1..];
            let limit = domain.limitador.iter().find(|limit| limit.path() == path);
            let found = match limit {
                Some(limit) => self.describe_limit(domain, limit)?,
                None => {
                    let mut levels = Vec::new();
                    let rule = find_path(domain, path, &mut levels)?;
                    rule.overridable(&self.overrides, |limits| describe(domain, &levels, limits))?
                }
            };
            Some(Arc::clone(found.rule()))
        })
    }
}

/// Finds the rule whose levels, joined with dots, are `path`. Appends the levels of the rule to
/// `levels`.
fn find_path<'d>(
    domain: &'d Domain,
    path: &str,
    levels: &mut Vec<RuleLevel<'d>>,
) -> Option<&'d DescriptorRule> {
    let level = match levels.last() {
        Some(last) => &last.node.children,
        None => &domain.root,
    };
    if levels.len() == MAX_KEY_ENTRIES {
        return None;
    }
    // The name of a level can contain dots, too.
    let dots = path.match_indices('.').map(|(at, _)| at);
    for end in dots.chain([path.len()]) {
        let Some((name, node)) = level.named(&path[..end]) else {
            continue;
        };
        levels.push(RuleLevel { name, node });
        let found = match path.get(end + 1..) {
            Some(rest) => find_path(domain, rest, levels),
            None => node.rule.as_deref(),
        };
        if found.is_some() {
            return found;
        }
        levels.pop();
    }
    None
}

impl Domain {
    /// Returns the levels of the rule for `entries`.
    fn levels(&self, entries: &[(String, String)]) -> Option<Vec<RuleLevel<'_>>> {
        let (mut level, mut levels) = (&self.root, Vec::with_capacity(entries.len()));
        let mut joined = String::new();
        for (key, value) in entries {
            let (name, node) = level.named_child(key, value, &mut joined)?;
            levels.push(RuleLevel { name, node });
            level = &node.children;
        }
        Some(levels)
    }
}
