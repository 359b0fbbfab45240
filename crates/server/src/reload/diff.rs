//! The differences between two sets of rules.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use tidegate_core::{Mode, Rule, RuleSet};

/// The maximum number of rules in each list of differences in an event.
const MAX_EVENT_RULES: usize = 20;

/// The maximum length of a string in an event, in bytes.
const MAX_EVENT_TEXT_BYTES: usize = 300;

/// The differences between two sets of rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RulesDiff {
    /// The names of new rules.
    pub added: Vec<String>,
    /// The names of rules that no longer exist.
    pub removed: Vec<String>,
    /// The rules that are in both sets and differ.
    pub changed: Vec<RuleChange>,
}

/// The changed properties of a rule. Each pair contains the old value and the new value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleChange {
    /// The name of the rule.
    pub rule: String,
    /// The old and the new mode.
    pub mode: Option<[Mode; 2]>,
    /// The old and the new limits, each in policy notation such as `2/min`.
    pub limits: Option<[Vec<String>; 2]>,
    /// The old and the new conditions.
    pub when: Option<[String; 2]>,
    /// The old and the new names of the key entries.
    pub key: Option<[Vec<String>; 2]>,
    /// Whether other settings differ: the cost, the allow list, elastic limits, plans, the fallback
    /// policy, or limit settings that are not part of the policy.
    pub has_other_changes: bool,
}

impl RulesDiff {
    /// Returns the differences between `old` and `new`.
    #[must_use]
    pub fn between(old: &RuleSet, new: &RuleSet) -> Self {
        let names = |rules: &RuleSet| -> BTreeSet<String> {
            rules.iter().map(|rule| rule.name().to_owned()).collect()
        };
        let (before, after) = (names(old), names(new));
        let change = |rule: &Rule| RuleChange::between(old.rule(rule.name())?, rule);
        Self {
            added: after.difference(&before).cloned().collect(),
            removed: before.difference(&after).cloned().collect(),
            changed: new.iter().filter_map(change).collect(),
        }
    }

    /// Returns the differences as a JSON value for an event. The size is bounded: long lists and
    /// strings are truncated, and the field `not_listed` contains the number of omitted rules.
    #[must_use]
    pub(crate) fn event_document(&self) -> Value {
        let Self {
            added,
            removed,
            changed,
        } = self;
        let names = |names: &[String]| -> Value {
            let names = names.iter().take(MAX_EVENT_RULES);
            names.map(|name| truncated(name)).collect()
        };
        let changes = changed.iter().take(MAX_EVENT_RULES);
        let changes = changes.map(|change| bounded(change.document().into()));
        let mut document = json!({
            "added": names(added),
            "removed": names(removed),
            "changed": changes.collect::<Value>(),
        });
        let lengths = [added.len(), removed.len(), changed.len()];
        let not_listed = lengths.map(|length| length.saturating_sub(MAX_EVENT_RULES));
        let not_listed: usize = not_listed.iter().sum();
        if not_listed > 0 {
            document["not_listed"] = json!(not_listed);
        }
        document
    }
}

impl RuleChange {
    /// Returns whether the rule starts to deny requests, because its mode changes from shadow to
    /// enforce.
    #[must_use]
    pub fn begins_to_deny(&self) -> bool {
        self.mode == Some([Mode::Shadow, Mode::Enforce])
    }

    /// Formats the change as JSON: the old and the new value of each property that differs.
    pub(crate) fn document(&self) -> Map<String, Value> {
        let Self {
            rule,
            mode,
            limits,
            when,
            key,
            has_other_changes,
        } = self;
        let mut members = Map::new();
        let mut insert = |name: &str, values: Option<[Value; 2]>| {
            if let Some([before, after]) = values {
                members.insert(name.to_owned(), json!({"before": before, "after": after}));
            }
        };
        let modes = mode.map(|modes| modes.map(|mode| Value::from(mode.as_str())));
        insert("mode", modes);
        insert("limits", limits.clone().map(|lists| lists.map(Value::from)));
        insert("when", when.clone().map(|texts| texts.map(Value::from)));
        insert("key", key.clone().map(|lists| lists.map(Value::from)));
        members.insert("rule".to_owned(), json!(rule));
        if *has_other_changes {
            members.insert("other".to_owned(), json!(true));
        }
        members
    }

    fn between(old: &Rule, new: &Rule) -> Option<Self> {
        let limits = |rule: &Rule| -> Vec<String> {
            let limits = rule.limits().iter();
            limits.map(|limit| limit.policy().to_string()).collect()
        };
        let key = |rule: &Rule| rule.key().map(str::to_owned).collect::<Vec<String>>();
        let when = |rule: &Rule| rule.applies_when().to_string();
        let limits = changed([old, new].map(limits));
        // The policy notation does not include all settings of a limit. For example, the notation
        // omits `soft` and `count_denied`.
        let has_hidden_changes = limits.is_none() && old.limits().iter().ne(new.limits().iter());
        let change = Self {
            rule: new.name().to_owned(),
            mode: changed([old, new].map(Rule::mode)),
            limits,
            when: changed([old, new].map(when)),
            key: changed([old, new].map(key)),
            has_other_changes: !old.has_same_options(new) || has_hidden_changes,
        };
        let is_changed = change.mode.is_some()
            || change.limits.is_some()
            || change.when.is_some()
            || change.key.is_some()
            || change.has_other_changes;
        is_changed.then_some(change)
    }
}

fn changed<T: PartialEq>(values: [T; 2]) -> Option<[T; 2]> {
    (values[0] != values[1]).then_some(values)
}

/// Truncates every string in `value`.
fn bounded(value: Value) -> Value {
    match value {
        Value::String(text) => truncated(&text),
        Value::Array(values) => values.into_iter().map(bounded).collect(),
        Value::Object(members) => {
            let members = members.into_iter();
            members
                .map(|(name, value)| (name, bounded(value)))
                .collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
    }
}

fn truncated(text: &str) -> Value {
    if text.len() <= MAX_EVENT_TEXT_BYTES {
        return text.into();
    }
    let kept = &text[..text.floor_char_boundary(MAX_EVENT_TEXT_BYTES)];
    format!("{kept}…").into()
}

#[cfg(test)]
mod tests {
    use tidegate_config::Config;

    use super::*;

    fn rules(text: &str) -> RuleSet {
        Config::parse(text).unwrap().rules
    }

    #[test]
    fn rules_that_were_read_again_do_not_differ() {
        let text = "
plans: {pro: {api: 100/min}}
rules:
  - name: api
    key: [user]
    limits: [10/min]
    plan: plan
    when: {path: [/a, /b, /c, /d, /e, /f, /g, /h], method: {not: [GET, HEAD, OPTIONS]}}
    allow:
      - {user: [a, b, c, d, e, f], ip: 10.0.0.1}
      - {agent: [u, v, w, x, y, z]}
      - {host: a}
      - {tenant: b}
";
        // Each hash table has a different seed, so the iteration order varies.
        for _ in 0..50 {
            let diff = RulesDiff::between(&rules(text), &rules(text));
            assert!(diff.changed.is_empty(), "{:?}", diff.changed);
        }
    }

    #[test]
    fn every_setting_of_a_rule_is_compared() {
        let plan = "{algorithm: fixed_window, limit: 100, window: 1h}";
        let rule = |settings: &str| {
            rules(&format!(
                "plans: {{pro: {{api: {plan}}}}}\nrules: [{{name: api, key: [user], {settings}}}]\n"
            ))
        };
        let plain = "limits: [{algorithm: fixed_window, limit: 10, window: 1h}]";
        let old = rule(plain);
        assert!(RulesDiff::between(&old, &rule(plain)).changed.is_empty());
        for settings in [
            "limits: [{algorithm: fixed_window, limit: 10, window: 1h, soft: 10%}]",
            "limits: [{algorithm: fixed_window, limit: 10, window: 1h, count_denied: true}]",
            "limits: [{algorithm: fixed_window, limit: 10, window: 1h}], cost: 2",
            "limits: [{algorithm: fixed_window, limit: 10, window: 1h}], allow: [{user: root}]",
            "limits: [{algorithm: fixed_window, limit: 10, window: 1h}], plan: plan",
            "limits: [{algorithm: fixed_window, limit: 10, window: 1h}], on_failure: closed",
        ] {
            let diff = RulesDiff::between(&old, &rule(settings));
            let change = diff.changed.first().expect(settings);
            assert!(change.has_other_changes, "{settings}: {change:?}");
            assert_eq!(change.limits, None, "{settings}");
        }
    }

    #[test]
    fn the_document_of_an_event_is_bounded() {
        let rule = |number: usize, limit: &str| {
            let path = "p".repeat(400);
            format!(
                "  - {{name: r{number}, when: {{path: {{is: /{path}}}}}, key: [ip], limits: [{limit}]}}\n"
            )
        };
        let set = |count: usize, limit: &str| {
            let rules_of_file: String = (0..count).map(|number| rule(number, limit)).collect();
            rules(&format!("rules:\n{rules_of_file}"))
        };
        let diff = RulesDiff::between(&set(30, "1/h"), &set(55, "2/h"));
        let document = diff.event_document();
        assert_eq!(document["added"].as_array().unwrap().len(), 20);
        assert_eq!(document["changed"].as_array().unwrap().len(), 20);
        assert_eq!(document["removed"], json!([]));
        assert_eq!(document["not_listed"], 5 + 10);
        let diff = RulesDiff::between(
            &set(1, "1/h"),
            &rules("rules:\n  - {name: r0, key: [ip], limits: [1/h]}\n"),
        );
        let when = &diff.event_document()["changed"][0]["when"];
        let before = when["before"].as_str().unwrap();
        assert!(before.ends_with('…') && before.len() < 310, "{before}");
    }
}
