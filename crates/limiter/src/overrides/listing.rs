//! Lists overrides page by page.

use tidegate_core::{Override, OverrideTarget, RuleSet};

use super::{
    OverridableRule,
    id::{self, StoredId},
};
use crate::ServerLimiter;

/// A filter that selects the overrides to list.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverrideFilter<'a> {
    /// The rule; `None` for all rules.
    pub rule: Option<&'a str>,
    /// A string that must occur in one of the override's key values, in its pattern or in its
    /// reason.
    pub search: Option<&'a str>,
    /// The position at which the page begins: [`OverridePage::next`] of the previous page.
    pub after: Option<&'a str>,
    /// The maximum number of overrides on the page.
    pub most: usize,
}

/// A page of overrides, sorted by rule and target.
#[derive(Debug, Default)]
pub struct OverridePage<'r> {
    /// The overrides.
    pub overrides: Vec<ListedOverride<'r>>,
    /// The position of the next page; `None` after the last page.
    pub next: Option<String>,
    /// The overrides whose rule does not exist, and which therefore have no effect: each rule name,
    /// with the number of its overrides.
    pub without_rule: Vec<(Box<str>, usize)>,
}

/// An override with its rule and its target.
#[derive(Debug)]
pub struct ListedOverride<'r> {
    /// The rule.
    pub rule: OverridableRule<'r>,
    /// The keys to which the override applies.
    pub target: OverrideTarget,
    /// The override.
    pub found: Override,
}

impl ServerLimiter {
    /// Returns a page of the active overrides of `rules`. Returns `None` if
    /// [`OverrideFilter::after`] is not a position.
    #[must_use]
    pub fn list_overrides<'r>(
        &self,
        rules: &'r RuleSet,
        filter: OverrideFilter<'_>,
    ) -> Option<OverridePage<'r>> {
        let after = filter.after.map(parse_position);
        let after = match after {
            Some(position) => Some(position?),
            None => None,
        };
        let now = self.now();
        let mut page = OverridePage::default();
        for (name, overrides) in self.overrides().by_name() {
            let Some(rule) = self.overridable_rule(rules, &name) else {
                page.without_rule.push((name, overrides.len()));
                continue;
            };
            let is_other = filter.rule.is_some_and(|wanted| wanted != &*name);
            let is_listed = after.as_ref().is_some_and(|(rule, _)| *name < **rule);
            if is_other || is_listed {
                continue;
            }
            let after = after.as_ref().filter(|(rule, _)| **rule == *name);
            // One more override than fits on the page is requested, to find out whether another
            // page follows.
            let most = filter.most + 1 - page.overrides.len();
            let select = |target: &OverrideTarget, found: &Override| {
                found.is_unexpired(now)
                    && filter
                        .search
                        .is_none_or(|text| contains(target, found, text))
            };
            let found = overrides.page(&rule, after.map(|(_, target)| target), most, select);
            let listed = found.into_iter().map(|(target, found)| ListedOverride {
                rule: rule.clone(),
                target,
                found,
            });
            page.overrides.extend(listed);
            if page.overrides.len() > filter.most {
                page.overrides.truncate(filter.most);
                page.next = page.overrides.last().map(write_position);
                break;
            }
        }
        Some(page)
    }
}

fn contains(target: &OverrideTarget, found: &Override, text: &str) -> bool {
    target.values().any(|value| value.contains(text)) || found.reason.contains(text)
}

fn write_position(last: &ListedOverride<'_>) -> String {
    id::to_position(&id::of_override(last.rule.name(), &last.target))
}

fn parse_position(text: &str) -> Option<(String, OverrideTarget)> {
    match id::parse_position(text)? {
        StoredId::Override(rule, target) => Some((rule, target)),
        StoredId::Block(_) => None,
    }
}
