//! What another rules file would change.

use std::collections::BTreeSet;

use tidegate_config::{Config, Mistake};
use tidegate_core::{Mode, Rule, RuleSet};

use super::Reloader;

/// The changes that another rules file would make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesPreview {
    /// The number of rules in the file.
    pub rules: usize,
    /// The names of new rules.
    pub added: Vec<String>,
    /// The names of rules that would no longer exist.
    pub removed: Vec<String>,
    /// The rules that would change.
    pub changed: Vec<RuleChange>,
    /// The settings that would need a restart.
    pub restart_required: Vec<&'static str>,
    /// The warnings for the file.
    pub warnings: Vec<Mistake>,
}

/// The properties of a rule that the file would change. Each is the property before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleChange {
    /// The name of the rule.
    pub rule: String,
    /// The mode.
    pub mode: Option<[Mode; 2]>,
    /// The policies of the limits.
    pub limits: Option<[Vec<String>; 2]>,
    /// The conditions.
    pub when: Option<[String; 2]>,
    /// The names of the key entries.
    pub key: Option<[Vec<String>; 2]>,
    /// Whether other settings would change: the cost, the allow list, elastic limits, or the policy
    /// while Redis is unreachable.
    pub has_other_changes: bool,
}

impl RuleChange {
    /// Returns whether the rule would begin to deny requests.
    #[must_use]
    pub fn begins_to_deny(&self) -> bool {
        self.mode == Some([Mode::Shadow, Mode::Enforce])
    }

    fn between(old: &Rule, new: &Rule) -> Option<Self> {
        let limits = |rule: &Rule| -> Vec<String> {
            let limits = rule.limits().iter();
            limits.map(|limit| limit.policy().to_string()).collect()
        };
        let key = |rule: &Rule| rule.key().map(str::to_owned).collect::<Vec<String>>();
        let when = |rule: &Rule| rule.applies_when().to_string();
        let change = Self {
            rule: new.name().to_owned(),
            mode: changed([old, new].map(Rule::mode)),
            limits: changed([old, new].map(limits)),
            when: changed([old, new].map(when)),
            key: changed([old, new].map(key)),
            has_other_changes: !old.has_same_options(new),
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

/// Returns what would change if `text` were the rules file, and `current` are the rules in force.
///
/// # Errors
///
/// Returns one line for each problem because of which a reload would reject the file. The files that
/// `text` names, such as certificates and candidate rules, are not read.
pub fn preview(
    current: &RuleSet,
    reloader: Option<&Reloader>,
    text: &str,
) -> Result<RulesPreview, Vec<String>> {
    let lines = |mistakes: Vec<Mistake>| -> Vec<String> {
        mistakes.iter().map(Mistake::to_string).collect()
    };
    let mut config = Config::parse_file(text).map_err(lines)?;
    let (rules, warnings) = (
        std::mem::take(&mut config.rules),
        std::mem::take(&mut config.warnings),
    );
    let restart_required = match reloader {
        Some(reloader) => reloader.check(&config).map_err(|error| error.problems())?,
        None => Vec::new(),
    };
    Ok(RulesPreview::new(
        current,
        &rules,
        restart_required,
        warnings,
    ))
}

impl RulesPreview {
    fn new(
        old: &RuleSet,
        new: &RuleSet,
        restart_required: Vec<&'static str>,
        warnings: Vec<Mistake>,
    ) -> Self {
        let names = |rules: &RuleSet| -> BTreeSet<String> {
            rules.iter().map(|rule| rule.name().to_owned()).collect()
        };
        let (before, after) = (names(old), names(new));
        let change = |rule: &Rule| RuleChange::between(old.rule(rule.name())?, rule);
        Self {
            rules: new.len(),
            added: after.difference(&before).cloned().collect(),
            removed: before.difference(&after).cloned().collect(),
            changed: new.iter().filter_map(change).collect(),
            restart_required,
            warnings,
        }
    }
}
