//! `rules`, `allow` and `defaults`: what is decided.

use std::collections::HashMap;

use tidegate_core::{AlgorithmName, Cost, CostSource, Mode, Rule, RuleError, RuleSet, When};

use super::{
    conditions,
    limits::{self, Fallback},
    report::Report,
    value::{Fields, Value},
};

const FIELDS: &[&str] = &[
    "name",
    "when",
    "key",
    "limits",
    "algorithm",
    "mode",
    "cost",
    "allow",
    "soft",
    "count_denied",
];

/// The rules of the whole file; empty ones if there is a mistake in them, which is then reported.
pub(super) fn rule_set(file: &Fields<'_>, report: &mut Report) -> RuleSet {
    let before = report.count();
    let default = default_algorithm(file, report);
    let allow = file
        .get("allow")
        .map_or_else(Vec::new, |value| conditions::allow(value, report));
    let values = file
        .get("rules")
        .and_then(|rules| rules.items(report, "a list of rules"));
    let values = values.unwrap_or_default();
    let mut names = HashMap::new();
    let mut rules = Vec::with_capacity(values.len());
    for (at, value) in values.iter().enumerate() {
        rules.extend(rule(value, default, report));
        check_name_is_new(value, at, &mut names, report);
    }
    if report.count() > before {
        return RuleSet::default();
    }
    build(rules, allow, file, report)
}

fn build(rules: Vec<Rule>, allow: Vec<When>, file: &Fields<'_>, report: &mut Report) -> RuleSet {
    match RuleSet::build(rules, allow) {
        Ok(set) => set,
        Err(errors) => {
            for error in errors {
                file.wrong(report, "rules", error.to_string());
            }
            RuleSet::default()
        }
    }
}

fn default_algorithm(file: &Fields<'_>, report: &mut Report) -> AlgorithmName {
    let defaults = file.get("defaults");
    let fields =
        defaults.and_then(|value| value.fields(report, "a map of defaults", &["algorithm"]));
    let algorithm = fields.as_ref().and_then(|fields| fields.get("algorithm"));
    let algorithm = algorithm.and_then(|value| limits::algorithm(value, report));
    algorithm.unwrap_or(AlgorithmName::TokenBucket)
}

/// Every rule with a name that an earlier one has, whatever else may be wrong with either.
fn check_name_is_new<'n>(
    value: &Value<'n>,
    at: usize,
    names: &mut HashMap<&'n str, usize>,
    report: &mut Report,
) {
    // The other fields, and what is wrong with them, are read elsewhere.
    let fields = value.fields(&mut Report::default(), "", FIELDS);
    let name = fields.as_ref().and_then(|fields| fields.get("name"));
    let Some((field, name)) = name.and_then(|field| Some((field, field.scalar()?))) else {
        return;
    };
    let first = *names.entry(name).or_insert(at);
    if first != at {
        let message = format!("is the name of rules[{first}] already; give every rule its own");
        field.wrong(report, message);
    }
}

fn rule(value: &Value<'_>, default: AlgorithmName, report: &mut Report) -> Option<Rule> {
    let before = report.count();
    let fields = value.fields(report, "a rule with a name and limits", FIELDS)?;
    let name = name(&fields, report);
    let limits = rule_limits(&fields, default, report);
    let when = fields
        .get("when")
        .map(|when| conditions::when(when, report).unwrap_or_default());
    let key = fields
        .get("key")
        .map_or_else(Vec::new, |key| key_entries(key, report));
    let cost = fields
        .get("cost")
        .and_then(|cost| cost_source(cost, report));
    let allow = fields
        .get("allow")
        .map_or_else(Vec::new, |allow| conditions::allow(allow, report));
    let modes = [Mode::Enforce, Mode::Shadow].map(|mode| (mode.as_str(), mode));
    let mode = fields
        .get("mode")
        .and_then(|mode| mode.choice(report, &modes));
    // A rule without a usable name is checked under another one, so that all its mistakes are found.
    let rule = Rule::new(name.unwrap_or("unnamed"), limits)
        .and_then(|rule| rule.keyed_by(&key))
        .and_then(|rule| rule.costing(cost.unwrap_or_default()))
        .map(|rule| {
            rule.when(when.unwrap_or_default())
                .allowing(allow)
                .in_mode(mode.unwrap_or_default())
        });
    match rule {
        Ok(rule) => (report.count() == before).then_some(rule),
        Err(error) => {
            refuse(&error, &fields, before, report);
            None
        }
    }
}

/// Reports what core refused, unless it is a mere consequence of what is reported already.
fn refuse(error: &RuleError, fields: &Fields<'_>, before: usize, report: &mut Report) {
    let no_limit_was_left = error.field == "limits" && report.count() > before;
    if !no_limit_was_left {
        fields.wrong(report, &error.field, error.problem.as_str());
    }
}

fn name<'n>(fields: &Fields<'n>, report: &mut Report) -> Option<&'n str> {
    let what = "a name for the rule";
    match fields.get("name") {
        Some(name) => name.text(report, what),
        None => {
            fields.wrong(
                report,
                "name",
                "is missing; give the rule a name of its own",
            );
            None
        }
    }
}

fn rule_limits(
    fields: &Fields<'_>,
    default: AlgorithmName,
    report: &mut Report,
) -> Vec<tidegate_core::Limit> {
    let algorithm = fields
        .get("algorithm")
        .and_then(|value| limits::algorithm(value, report));
    let fallback = Fallback {
        algorithm: algorithm.unwrap_or(default),
        soft: fields
            .get("soft")
            .and_then(|value| limits::percent(value, report)),
        count_denied: fields
            .get("count_denied")
            .and_then(|value| value.flag(report)),
    };
    match fields.get("limits") {
        Some(value) => limits::limits(value, fallback, report),
        None => {
            fields.wrong(
                report,
                "limits",
                "is missing; name at least one limit, such as 20/min",
            );
            Vec::new()
        }
    }
}

fn key_entries<'n>(value: &Value<'n>, report: &mut Report) -> Vec<&'n str> {
    let items = value.one_or_more(report);
    items
        .iter()
        .filter_map(|item| item.text(report, "the name of an entry"))
        .collect()
}

fn cost_source(value: &Value<'_>, report: &mut Report) -> Option<CostSource> {
    if !value.looks_like_number() {
        let entry = value.text(report, "a number, or the name of an entry that holds one")?;
        return Some(CostSource::Entry(entry.into()));
    }
    let cost = Cost::new(value.number(report)?);
    cost.map(CostSource::Fixed)
        .map_err(|error| value.wrong(report, error.problem))
        .ok()
}
