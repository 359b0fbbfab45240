//! Lists overrides page by page.

use tidegate_core::{Override, OverrideTarget, Overrides, Rule, RuleSet};

use crate::{
    ServerLimiter,
    override_state::{StoredId, id},
};

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
pub struct OverridePage {
    /// The overrides.
    pub overrides: Vec<ListedOverride>,
    /// The position of the next page; `None` after the last page.
    pub next: Option<String>,
    /// The number of overrides that the filter selects, on all pages.
    pub count: usize,
}

/// An override with its rule and its target.
#[derive(Debug)]
pub struct ListedOverride {
    /// The name of the rule, which may no longer exist.
    pub rule: Box<str>,
    /// The keys to which the override applies.
    pub target: OverrideTarget,
    /// The override.
    pub found: Override,
    /// Why the override has no effect, or has no effect for some plans; `None` if it is active.
    pub inactive: Option<String>,
}

impl ServerLimiter {
    /// Returns a page of the overrides that have not ended, including those that are inactive under
    /// `rules`. Returns `None` if [`OverrideFilter::after`] is not a position.
    #[must_use]
    pub fn list_overrides(
        &self,
        rules: &RuleSet,
        filter: OverrideFilter<'_>,
    ) -> Option<OverridePage> {
        let after = filter.after.map(parse_position);
        let after = match after {
            Some(position) => Some(position?),
            None => None,
        };
        let now = self.now();
        let mut page = OverridePage::default();
        for (name, overrides) in self.overrides().by_name() {
            if filter.rule.is_some_and(|wanted| wanted != &*name) {
                continue;
            }
            // One more override than fits on the page is requested, to find out whether another
            // page follows. The overrides of the other pages are only counted.
            let most = match &after {
                Some((rule, _)) if *name < **rule => 0,
                _ => filter.most + 1 - page.overrides.len(),
            };
            let after = after.as_ref().filter(|(rule, _)| **rule == *name);
            let select = |target: &OverrideTarget, reason: &str| {
                let search = filter.search;
                let is_found = search.is_none_or(|text| contains(target, reason, text));
                page.count += usize::from(is_found);
                is_found
            };
            let found = overrides.page(after.map(|(_, target)| target), most, now, select);
            let rule = self.overridable_rule(rules, &name);
            let listed = found.into_iter().map(|(target, found)| ListedOverride {
                inactive: self.inactive_reason(rule.as_deref(), &name, &target, &found),
                rule: name.clone(),
                target,
                found,
            });
            page.overrides.extend(listed);
        }
        if page.overrides.len() > filter.most {
            page.overrides.truncate(filter.most);
            page.next = page.overrides.last().map(write_position);
        }
        Some(page)
    }

    /// Returns why the override of `target` has no effect under `rule`, the rule with the name
    /// `name`. A factor that is not valid for one of the rule's plans is inactive for requests with
    /// this plan. Returns `None` if the override is active.
    #[must_use]
    pub fn inactive_reason(
        &self,
        rule: Option<&Rule>,
        name: &str,
        target: &OverrideTarget,
        found: &Override,
    ) -> Option<String> {
        let Some(rule) = rule else {
            return Some(match self.is_rule_pending(name) {
                true => "no rules of Envoy's rate limit service are loaded".to_owned(),
                false => "rule no longer exists".to_owned(),
            });
        };
        if target.values().len() != rule.key().len() {
            return Some("rule has another key now".to_owned());
        }
        let checked = Overrides::check(rule, target, &found.replacement);
        checked.err().map(|error| error.to_string())
    }
}

fn contains(target: &OverrideTarget, reason: &str, text: &str) -> bool {
    target.values().any(|value| value.contains(text)) || reason.contains(text)
}

fn write_position(last: &ListedOverride) -> String {
    id::to_position(&id::of_override(&last.rule, &last.target))
}

fn parse_position(text: &str) -> Option<(String, OverrideTarget)> {
    match id::parse_position(text)? {
        StoredId::Override(rule, target) => Some((rule, target)),
        StoredId::Block(_) => None,
    }
}
