//! `rules`, `allow` and `defaults`: the rules and their limits.

use std::{borrow::Cow, collections::HashMap};

use tidegate_core::{
    Algorithm, Cost, CostSource, Headroom, Limit, Mode, OnFailure, ResponseCost, Rule, RuleError,
    RuleSet, Span, UnusedShare, When, Window,
};
use tidegate_identity::DerivedEntry;

use super::{
    conditions,
    limits::{self, DefaultAlgorithm, Fallback},
    lint::bypass,
    redis,
    report::Report,
    response_cost,
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
    "elastic",
    "count_denied",
    "on_failure",
    "count",
    "settle",
];

/// Reads the rules of the whole file. If there is a mistake, reports it and returns an empty rule
/// set.
pub(super) fn rule_set(
    file: &Fields<'_>,
    parts: &[(Box<str>, DerivedEntry)],
    report: &mut Report,
) -> RuleSet {
    let before = report.count();
    let default = default_algorithm(file, report);
    let allow = file
        .get("allow")
        .map_or_else(Vec::new, |value| conditions::allow(value, report));
    let values = file.get("rules").and_then(|rules| {
        // A list that was commented out, or an empty template, must not remove every limit.
        if rules.is_null() {
            rules.wrong(report, "has no value; write `rules: []` to limit nothing");
        }
        rules.items(report, "a list of rules")
    });
    let values = values.unwrap_or_default();
    let mut names = HashMap::new();
    let mut rules = Vec::with_capacity(values.len());
    for (at, value) in values.iter().enumerate() {
        rules.extend(rule(value, default, report));
        check_name_is_new(value, at, &mut names, report);
    }
    for value in &values {
        check_parent(value, &names, report);
    }
    if report.count() > before {
        return RuleSet::default();
    }
    let set = build(rules, allow, file, report);
    bypass::warn(&set, &values, parts, report);
    set
}

fn build(rules: Vec<Rule>, allow: Vec<When>, file: &Fields<'_>, report: &mut Report) -> RuleSet {
    match RuleSet::build(rules, allow) {
        Ok(set) => set,
        Err(errors) => {
            for error in &errors {
                file.wrong(report, "rules", error.to_string());
            }
            RuleSet::default()
        }
    }
}

fn default_algorithm(file: &Fields<'_>, report: &mut Report) -> DefaultAlgorithm {
    let Some(defaults) = file.get("defaults") else {
        return DefaultAlgorithm::BySize;
    };
    let fields = defaults.fields(report, "a map of defaults", &["algorithm"]);
    fields.map_or(DefaultAlgorithm::Unreadable, |fields| {
        DefaultAlgorithm::read(&fields, DefaultAlgorithm::BySize, report)
    })
}

/// Reports every rule with the name of an earlier one, even if either has other mistakes.
fn check_name_is_new<'n>(
    value: &Value<'n>,
    at: usize,
    names: &mut HashMap<&'n str, usize>,
    report: &mut Report,
) {
    // The other fields and their mistakes are handled elsewhere.
    let fields = value.fields(&mut Report::default(), "", FIELDS);
    let name = fields.as_ref().and_then(|fields| fields.get("name"));
    let Some((field, name)) = name.and_then(|field| Some((field, field.scalar()?))) else {
        return;
    };
    let first = *names.entry(name).or_insert(at);
    if first != at {
        let message = format!("is already the name of rules[{first}]; give each rule its own name");
        field.wrong(report, message);
    }
}

/// Reports an elastic rule that depends on the unused share of a rule that does not exist, or of
/// itself.
fn check_parent(value: &Value<'_>, names: &HashMap<&str, usize>, report: &mut Report) {
    // Other mistakes are reported elsewhere.
    let quiet = &mut Report::default();
    let Some(fields) = value.fields(quiet, "", FIELDS) else {
        return;
    };
    let elastic = fields
        .get("elastic")
        .and_then(|elastic| elastic.fields(quiet, "", ELASTIC));
    let unused = elastic.as_ref().and_then(|elastic| elastic.get("unused"));
    let unused = unused.and_then(|unused| unused.fields(quiet, "", UNUSED));
    let Some((field, parent)) = unused
        .as_ref()
        .and_then(|unused| unused.get("rule"))
        .and_then(|field| Some((field, field.scalar()?)))
    else {
        return;
    };
    let own = fields.get("name").and_then(|name| name.scalar());
    if own == Some(parent) {
        field.wrong(report, "must name a different rule");
    } else if !names.contains_key(parent) {
        field.wrong(report, format!("there is no rule \"{parent}\""));
    }
}

/// The fields of a rule, as far as they could be read.
struct Parts<'n> {
    name: Option<&'n str>,
    limits: Vec<Limit>,
    when: When,
    key: Vec<Cow<'n, str>>,
    cost: CostSource,
    allow: Vec<When>,
    mode: Mode,
    elastic: Option<(u32, Headroom)>,
    on_failure: Option<OnFailure>,
    bill: ResponseCost,
}

fn rule(value: &Value<'_>, default: DefaultAlgorithm, report: &mut Report) -> Option<Rule> {
    let before = report.count();
    let fields = value.fields(report, "a rule with a name and limits", FIELDS)?;
    let parts = parts(&fields, default, report);
    if report.count() == before
        && let Some(rule) = parts.build()
    {
        return Some(rule);
    }
    for error in parts.errors() {
        fields.wrong(report, &error.field, error.problem);
    }
    None
}

fn parts<'n>(fields: &Fields<'n>, default: DefaultAlgorithm, report: &mut Report) -> Parts<'n> {
    let modes = [Mode::Enforce, Mode::Shadow].map(|mode| (mode.as_str(), mode));
    let when = fields
        .get("when")
        .and_then(|when| conditions::when(when, report));
    let key = fields.get("key").map(|key| key_entries(key, report));
    let cost = fields
        .get("cost")
        .and_then(|cost| cost_source(cost, report));
    let allow = fields
        .get("allow")
        .map(|allow| conditions::allow(allow, report));
    let mode = fields
        .get("mode")
        .and_then(|mode| mode.choice(report, &modes));
    Parts {
        name: name(fields, report),
        limits: rule_limits(fields, default, report),
        when: when.unwrap_or_default(),
        key: key.unwrap_or_default(),
        cost: cost.unwrap_or_default(),
        allow: allow.unwrap_or_default(),
        mode: mode.unwrap_or_default(),
        elastic: fields
            .get("elastic")
            .and_then(|value| elastic(value, report)),
        on_failure: redis::on_failure(fields, report),
        bill: response_cost::response_cost(fields, report),
    }
}

impl Parts<'_> {
    fn build(&self) -> Option<Rule> {
        let rule = Rule::new(self.name?, self.limits.clone());
        let rule = rule.and_then(|rule| rule.keyed_by(&self.key()));
        let rule = rule.and_then(|rule| rule.costing(self.cost.clone()));
        let rule = rule
            .and_then(|rule| rule.with_response_cost(self.bill.clone()))
            .ok()?;
        let rule = rule.when(self.when.clone()).allowing(self.allow.clone());
        let rule = match self.elastic.clone() {
            Some((percent, room)) => rule.elastic(percent, room).ok()?,
            None => rule,
        };
        let rule = rule.in_mode(self.mode);
        Some(match self.on_failure {
            Some(policy) => rule.failing(policy),
            None => rule,
        })
    }

    fn key(&self) -> Vec<&str> {
        self.key.iter().map(|entry| &**entry).collect()
    }

    /// Builds an otherwise valid rule with these limits and their elastic headroom, to get only
    /// their errors.
    fn stretched(&self) -> Option<Result<Rule, RuleError>> {
        let (percent, room) = self.elastic.clone()?;
        let rule = Rule::new("sound", self.limits.clone()).ok()?;
        Some(rule.elastic(percent, room))
    }

    /// Builds an otherwise valid rule with these limits and their response-based cost, to get only
    /// their errors.
    fn billed(&self) -> Option<Result<Rule, RuleError>> {
        let rule = Rule::new("sound", self.limits.clone()).ok()?;
        Some(rule.with_response_cost(self.bill.clone()))
    }

    /// Returns the errors that core reports for each field, with valid values in place of the other
    /// fields. A missing field could not be read and is already reported.
    fn errors(&self) -> Vec<RuleError> {
        let second = Span::from_secs(1);
        let sound = Limit::new(Algorithm::FixedWindow {
            limit: 1,
            window: Window::Epoch(second),
        });
        let sound: Vec<Limit> = sound.into_iter().collect();
        let rule = || Rule::new("sound", sound.clone());
        let tried = [
            self.name.map(|name| Rule::new(name, sound.clone())),
            (!self.limits.is_empty()).then(|| Rule::new("sound", self.limits.clone())),
            Some(rule().and_then(|rule| rule.keyed_by(&self.key()))),
            Some(rule().and_then(|rule| rule.costing(self.cost.clone()))),
            self.stretched(),
            self.billed(),
        ];
        tried
            .into_iter()
            .flatten()
            .filter_map(Result::err)
            .collect()
    }
}

fn name<'n>(fields: &Fields<'n>, report: &mut Report) -> Option<&'n str> {
    let what = "a name for the rule";
    match fields.get("name") {
        Some(name) => name.text(report, what),
        None => {
            fields.wrong(report, "name", "is missing; give each rule its own name");
            None
        }
    }
}

fn rule_limits(fields: &Fields<'_>, default: DefaultAlgorithm, report: &mut Report) -> Vec<Limit> {
    let fallback = Fallback {
        algorithm: DefaultAlgorithm::read(fields, default, report),
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

const ELASTIC: &[&str] = &["extra", "when", "unused"];
const UNUSED: &[&str] = &["rule", "share"];

/// Reads the elastic headroom of a limit, and the condition for its use.
fn elastic(value: &Value<'_>, report: &mut Report) -> Option<(u32, Headroom)> {
    let fields = value.fields(
        report,
        "a map such as {extra: 50%, when: {room.app: 'yes'}}",
        ELASTIC,
    )?;
    let extra = match fields.get("extra") {
        Some(extra) => limits::percent(extra, report),
        None if fields.tries("extra") => None,
        None => {
            fields.wrong(
                report,
                "extra",
                "is missing; set how far the limits may be exceeded, such as 50%",
            );
            None
        }
    };
    let room = match (fields.get("when"), fields.get("unused")) {
        (Some(when), None) => conditions::when(when, report).map(Headroom::When),
        (None, Some(share)) => unused(share, report).map(Headroom::Unused),
        (Some(_), Some(_)) => {
            let advice = "conflicts with `when`; remove one of the two";
            fields.wrong(report, "unused", advice);
            None
        }
        (None, None) => {
            let advice = "is missing; set `when` or `unused`, or use `soft`, which always applies";
            fields.wrong(report, "when", advice);
            None
        }
    };
    Some((extra?, room?))
}

/// Reads the share of another rule that must be unused.
fn unused(value: &Value<'_>, report: &mut Report) -> Option<UnusedShare> {
    let fields = value.fields(report, "a map such as {rule: team, share: 30%}", UNUSED)?;
    let rule = match fields.get("rule") {
        Some(rule) => rule.text(report, "the name of a rule"),
        None => {
            fields.wrong(
                report,
                "rule",
                "is missing; name the rule that must have a share unused",
            );
            None
        }
    };
    let share = match fields.get("share") {
        Some(share) => Some((share, limits::percent(share, report)?)),
        None => {
            let advice = "is missing; set the share that must be unused, such as 30%";
            fields.wrong(report, "share", advice);
            None
        }
    };
    let (rule, (field, share)) = (rule?, share?);
    UnusedShare::new(rule, share)
        .map_err(|error| field.wrong(report, error.problem))
        .ok()
}

fn key_entries<'n>(value: &Value<'n>, report: &mut Report) -> Vec<Cow<'n, str>> {
    let items = value.one_or_more(report);
    items
        .iter()
        .filter_map(|item| item.text(report, "the name of an entry"))
        .map(conditions::entry_name)
        .collect()
}

fn cost_source(value: &Value<'_>, report: &mut Report) -> Option<CostSource> {
    if !value.looks_like_number() {
        let entry = value.text(report, "a number, or the name of an entry that holds one")?;
        let entry = conditions::entry_name(entry).into_owned();
        return Some(CostSource::Entry(entry.into()));
    }
    let cost = Cost::new(value.number(report)?);
    cost.map(CostSource::Fixed)
        .map_err(|error| value.wrong(report, error.problem))
        .ok()
}
