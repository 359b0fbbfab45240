//! `rules`, `allow` and `defaults`: the rules, the allow list, and settings that rules inherit.

use std::{borrow::Cow, collections::HashMap};

use tidegate_core::{
    Algorithm, Cost, CostSource, Headroom, Limit, Mode, OnFailure, QuotaUnit, ResponseCost, Rule,
    RuleError, RuleSet, Span, UnusedShare, When, Window,
};

use super::{
    body_cost,
    conditions::{self, RawWhen},
    limits::{self, DefaultAlgorithm, Fallback, RawLimit},
    plans::{self, PlanLimits, RawPlans},
    redis,
    report::Report,
    response_cost::{self, ProxyOnlyField},
    source_span::{Scalar, SourceSpan},
    value::{Fields, Shape, Value},
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
    "unit",
    "plan",
];

/// The rules and the settings that rules inherit, as written in the rules file.
#[derive(Debug, Default)]
pub(crate) struct RawRules<'n> {
    /// The position of `defaults.algorithm` in the file.
    pub(crate) default_algorithm: Option<SourceSpan>,
    pub(crate) allow: Vec<RawWhen<'n>>,
    /// The rules. Items that are not maps are omitted.
    pub(crate) rules: Vec<RawRule<'n>>,
}

/// The fields of a rule as written in the rules file. Fields that could not be read are omitted.
#[derive(Debug)]
pub(crate) struct RawRule<'n> {
    pub(crate) span: SourceSpan,
    pub(crate) name: Option<Scalar<'n>>,
    pub(crate) when: RawWhen<'n>,
    pub(crate) allow: Vec<RawWhen<'n>>,
    /// The position of `key`, and the key's entries.
    pub(crate) key: Option<(SourceSpan, Vec<Scalar<'n>>)>,
    pub(crate) cost: RawCost<'n>,
    pub(crate) mode: Mode,
    /// The position of `algorithm`.
    pub(crate) algorithm: Option<SourceSpan>,
    pub(crate) limits: Vec<RawLimit>,
    pub(crate) elastic: RawElastic<'n>,
    /// The name of the entry that contains the plan's name.
    pub(crate) plan: Option<Scalar<'n>>,
    /// Whether the file has limits of a plan for the rule.
    pub(crate) has_plans: bool,
    /// The first field, if any, that makes the cost depend on the response or on the request body.
    pub(crate) proxy_only: Option<ProxyOnlyField>,
}

/// The cost of a request, as written in the rules file.
#[derive(Debug, Default)]
pub(crate) enum RawCost<'n> {
    /// The cost is a fixed number, the default, or a value in the request body.
    #[default]
    Fixed,
    /// The cost is the value of the entry with this name.
    Entry(Scalar<'n>),
}

/// The condition under which a rule's limits are raised (`elastic`), as written in the rules file.
#[derive(Debug, Default)]
pub(crate) struct RawElastic<'n> {
    pub(crate) when: RawWhen<'n>,
    /// `elastic.unused.rule`: the name of the rule whose limits must be partly unused.
    pub(crate) parent: Option<Scalar<'n>>,
}

/// Reads all rules in the file, and returns the rule set. If a rule is invalid, reports the errors
/// and returns an empty rule set.
pub(super) fn rule_set<'n>(file: &Fields<'n>, report: &mut Report) -> (RawRules<'n>, RuleSet) {
    let before = report.count();
    let mut raw = RawRules::default();
    let (default_algorithm, default) = default_algorithm(file, report);
    raw.default_algorithm = default_algorithm;
    let (raw_allow, allow) = file
        .get("allow")
        .map_or_else(Default::default, |value| conditions::allow(value, report));
    raw.allow = raw_allow;
    let plans = plans::plans(file, report);
    let values = file.get("rules").and_then(|rules| {
        // The value may be null because the list was commented out or a template was empty. Reject
        // a null value, so that the server does not accidentally run without any limits.
        if rules.is_null() {
            rules.wrong(report, "has no value; write `rules: []` to limit nothing");
        }
        rules.items(report, "a list of rules")
    });
    let mut names = HashMap::new();
    let mut rules = Vec::new();
    for (at, value) in values.unwrap_or_default().iter().enumerate() {
        let Some((raw_rule, rule)) = rule(value, default, &plans, report) else {
            continue;
        };
        check_name_is_new(&raw_rule, at, &mut names, report);
        raw.rules.push(raw_rule);
        rules.extend(rule);
    }
    for rule in &raw.rules {
        check_parent(rule, &names, report);
    }
    plans.check_rules(&names, report);
    if report.count() > before {
        return (raw, RuleSet::default());
    }
    (raw, build(rules, allow, file, report))
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

/// Reads `defaults.algorithm`. Returns the algorithm and its position in the file.
fn default_algorithm(
    file: &Fields<'_>,
    report: &mut Report,
) -> (Option<SourceSpan>, DefaultAlgorithm) {
    let Some(defaults) = file.get("defaults") else {
        return (None, DefaultAlgorithm::BySize);
    };
    let Some(fields) = defaults.fields(report, "a map such as {algorithm: gcra}", &["algorithm"])
    else {
        return (None, DefaultAlgorithm::Unreadable);
    };
    let algorithm = DefaultAlgorithm::read(&fields, DefaultAlgorithm::BySize, report);
    (span_of(&fields, "algorithm"), algorithm)
}

/// Returns the span of a field, if the file contains the field.
fn span_of(fields: &Fields<'_>, name: &str) -> Option<SourceSpan> {
    fields.get(name).map(|value| value.span().clone())
}

/// Reports a rule that has the same name as an earlier rule, even if one of the two rules has other
/// errors.
fn check_name_is_new<'n>(
    rule: &RawRule<'n>,
    at: usize,
    names: &mut HashMap<&'n str, usize>,
    report: &mut Report,
) {
    let Some(name) = &rule.name else {
        return;
    };
    let first = *names.entry(name.text).or_insert(at);
    if first != at {
        let message = format!("is already the name of rules[{first}]; give each rule its own name");
        name.span.wrong(report, message);
    }
}

/// Reports an elastic rule whose `elastic.unused.rule` is the rule's own name or the name of a rule
/// that does not exist.
fn check_parent(rule: &RawRule<'_>, names: &HashMap<&str, usize>, report: &mut Report) {
    let Some(Scalar {
        span, text: parent, ..
    }) = &rule.elastic.parent
    else {
        return;
    };
    if rule.name.as_ref().is_some_and(|name| name.text == *parent) {
        span.wrong(report, "must name a different rule");
    } else if !names.contains_key(parent) {
        span.wrong(report, format!("there is no rule \"{parent}\""));
    }
}

/// The converted fields of a rule. Invalid fields are omitted.
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
    response_cost: ResponseCost,
    unit: QuotaUnit,
    /// The request entry that contains the plan's name.
    plan: Option<Cow<'n, str>>,
    plans: Vec<PlanLimits<'n>>,
}

/// Reads a rule. Returns the rule as written and, if it is valid, the parsed rule. Returns `None`
/// if the value is not a map.
fn rule<'n>(
    value: &Value<'n>,
    default: DefaultAlgorithm,
    plans: &RawPlans<'n>,
    report: &mut Report,
) -> Option<(RawRule<'n>, Option<Rule>)> {
    let before = report.count();
    let fields = value.fields(report, "a rule with a name and limits", FIELDS)?;
    let (raw, parts) = parts(value, &fields, default, plans, report);
    if report.count() == before
        && let Some(rule) = parts.build()
    {
        let rule = plans::add(rule, parts.plan.as_deref(), &parts.plans, &fields, report);
        return Some((raw, rule));
    }
    for error in parts.errors() {
        fields.wrong(report, &error.field, error.problem);
    }
    Some((raw, None))
}

fn parts<'n>(
    value: &Value<'n>,
    fields: &Fields<'n>,
    default: DefaultAlgorithm,
    plans: &RawPlans<'n>,
    report: &mut Report,
) -> (RawRule<'n>, Parts<'n>) {
    let modes = [Mode::Enforce, Mode::Shadow].map(|mode| (mode.as_str(), mode));
    let (raw_when, when) = fields
        .get("when")
        .map_or_else(Default::default, |when| conditions::when(when, report));
    let key = fields
        .get("key")
        .map(|key| (key.span().clone(), key_entries(key, report)));
    let (raw_cost, cost) = fields
        .get("cost")
        .map_or_else(Default::default, |cost| cost_source(cost, report));
    let (raw_allow, allow) = fields
        .get("allow")
        .map_or_else(Default::default, |allow| conditions::allow(allow, report));
    let mode = fields
        .get("mode")
        .and_then(|mode| mode.choice(report, &modes));
    let name = name(fields, report);
    let fallback = fallback(fields, default, report);
    let (raw_limits, limits) = rule_limits(fields, fallback, report);
    let rule_name = name.as_ref().map(|name| name.text);
    let plans = plans.of_rule(rule_name, fallback, report);
    let raw_plan = fields
        .get("plan")
        .and_then(|plan| plan.text_with_span(report, "the entry that names the plan of a request"));
    let plan = raw_plan.as_ref();
    let plan = plan.map(|plan| conditions::entry_name(plan.text));
    let (raw_elastic, elastic) = fields
        .get("elastic")
        .map_or_else(Default::default, |value| elastic(value, report));
    let entries = key.iter().flat_map(|(_, entries)| entries);
    let response_cost = response_cost::response_cost(fields, report);
    let parts = Parts {
        name: rule_name,
        limits,
        when: when.unwrap_or_default(),
        key: entries
            .map(|entry| conditions::entry_name(entry.text))
            .collect(),
        cost: cost.unwrap_or_default(),
        allow,
        mode: mode.unwrap_or_default(),
        elastic,
        on_failure: redis::on_failure(fields, report),
        unit: unit(fields, &response_cost, report),
        response_cost,
        plan,
        plans,
    };
    let raw = RawRule {
        span: value.span().clone(),
        name,
        when: raw_when,
        allow: raw_allow,
        key,
        cost: raw_cost,
        mode: parts.mode,
        algorithm: span_of(fields, "algorithm"),
        limits: raw_limits,
        elastic: raw_elastic,
        has_plans: !parts.plans.is_empty(),
        plan: raw_plan,
        proxy_only: response_cost::proxy_only_field(fields),
    };
    (raw, parts)
}

impl Parts<'_> {
    fn build(&self) -> Option<Rule> {
        let rule = Rule::new(self.name?, self.limits.clone());
        let rule = rule.and_then(|rule| rule.keyed_by(&self.key()));
        let rule = rule.and_then(|rule| rule.costing(self.cost.clone()));
        let rule = rule
            .and_then(|rule| rule.with_response_cost(self.response_cost.clone()))
            .ok()?;
        let rule = rule.when(self.when.clone()).allowing(self.allow.clone());
        let rule = match self.elastic.clone() {
            Some((percent, headroom)) => rule.elastic(percent, headroom).ok()?,
            None => rule,
        };
        let rule = rule.in_mode(self.mode).counting_in(self.unit);
        Some(match self.on_failure {
            Some(policy) => rule.failing(policy),
            None => rule,
        })
    }

    fn key(&self) -> Vec<&str> {
        self.key.iter().map(|entry| &**entry).collect()
    }

    /// Creates a rule with the limits and the `elastic` setting, to check the latter. Returns
    /// `None` if the limits are invalid. The remaining fields are valid, so an error can only be
    /// about `elastic`.
    fn check_elastic(&self) -> Option<Result<Rule, RuleError>> {
        let (percent, headroom) = self.elastic.clone()?;
        let rule = Rule::new("valid", self.limits.clone()).ok()?;
        Some(rule.elastic(percent, headroom))
    }

    /// Creates a rule with the limits and the cost, to check the cost. If the limits are invalid,
    /// uses valid limits in their place.
    fn check_cost(&self) -> Result<Rule, RuleError> {
        let rule = Rule::new("valid", self.limits.clone()).or_else(|_| valid_rule())?;
        rule.costing(self.cost.clone())
    }

    /// Creates a rule with the limits and the response-based cost, to check the latter. Returns
    /// `None` if the limits are invalid. The remaining fields are valid, so an error can only be
    /// about the response-based cost.
    fn check_response_cost(&self) -> Option<Result<Rule, RuleError>> {
        let rule = Rule::new("valid", self.limits.clone()).ok()?;
        Some(rule.with_response_cost(self.response_cost.clone()))
    }

    /// Returns the errors that `tidegate_core` reports for each field. Each field is checked
    /// together with valid values for the other fields. Fields that could not be read are not
    /// checked. Errors in unread fields have already been reported.
    fn errors(&self) -> Vec<RuleError> {
        let tried = [
            self.name.map(|name| Rule::new(name, valid_limits())),
            (!self.limits.is_empty()).then(|| Rule::new("valid", self.limits.clone())),
            Some(valid_rule().and_then(|rule| rule.keyed_by(&self.key()))),
            Some(self.check_cost()),
            self.check_elastic(),
            self.check_response_cost(),
        ];
        tried
            .into_iter()
            .flatten()
            .filter_map(Result::err)
            .collect()
    }
}

/// Returns arbitrary valid limits.
fn valid_limits() -> Vec<Limit> {
    let limit = Limit::new(Algorithm::FixedWindow {
        limit: 1,
        window: Window::Epoch(Span::from_secs(1)),
    });
    limit.into_iter().collect()
}

/// Creates an arbitrary valid rule.
fn valid_rule() -> Result<Rule, RuleError> {
    Rule::new("valid", valid_limits())
}

fn name<'n>(fields: &Fields<'n>, report: &mut Report) -> Option<Scalar<'n>> {
    let what = "a name for the rule";
    match fields.get("name") {
        Some(name) => name.text_with_span(report, what),
        None => {
            fields.wrong(report, "name", "is missing; give each rule its own name");
            None
        }
    }
}

/// Reads the unit in which the rule counts. A rule whose final cost is the length of the response
/// counts bytes by default.
fn unit(fields: &Fields<'_>, response_cost: &ResponseCost, report: &mut Report) -> QuotaUnit {
    let units = QuotaUnit::ALL.map(|unit| (unit.as_str(), unit));
    let written = fields
        .get("unit")
        .and_then(|unit| unit.choice(report, &units));
    written.unwrap_or_else(|| match response_cost.is_length() {
        true => QuotaUnit::ContentBytes,
        false => QuotaUnit::Requests,
    })
}

/// Reads the settings that a rule's limits inherit.
fn fallback(fields: &Fields<'_>, default: DefaultAlgorithm, report: &mut Report) -> Fallback {
    Fallback {
        algorithm: DefaultAlgorithm::read(fields, default, report),
        soft: fields
            .get("soft")
            .and_then(|value| limits::percent(value, report)),
        count_denied: fields
            .get("count_denied")
            .and_then(|value| value.flag(report)),
    }
}

fn rule_limits(
    fields: &Fields<'_>,
    fallback: Fallback,
    report: &mut Report,
) -> (Vec<RawLimit>, Vec<Limit>) {
    match fields.get("limits") {
        Some(value) => limits::limits(value, fallback, report),
        None => {
            fields.wrong(
                report,
                "limits",
                "is missing; name at least one limit, such as 20/min",
            );
            (Vec::new(), Vec::new())
        }
    }
}

const ELASTIC: &[&str] = &["extra", "when", "unused"];
const UNUSED: &[&str] = &["rule", "share"];

/// Reads a rule's `elastic` setting: the percentage by which its limits are raised, and the
/// condition under which they are raised.
fn elastic<'n>(
    value: &Value<'n>,
    report: &mut Report,
) -> (RawElastic<'n>, Option<(u32, Headroom)>) {
    let mut raw = RawElastic::default();
    let what = "a map such as {extra: 50%, when: {headroom.app: 'yes'}}";
    let Some(fields) = value.fields(report, what, ELASTIC) else {
        return (raw, None);
    };
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
    raw.parent = fields.get("unused").and_then(parent);
    let headroom = match (fields.get("when"), fields.get("unused")) {
        (Some(when), None) => {
            let (conditions, when) = conditions::when(when, report);
            raw.when = conditions;
            when.map(Headroom::When)
        }
        (None, Some(share)) => unused(share, report).map(Headroom::Unused),
        (Some(_), Some(_)) => {
            let advice = "conflicts with `when`; remove one of the two";
            fields.wrong(report, "unused", advice);
            None
        }
        (None, None) => {
            let advice = "is missing; set `when` or `unused`, or replace `elastic` with `soft`, which needs no condition";
            fields.wrong(report, "when", advice);
            None
        }
    };
    (raw, extra.zip(headroom))
}

/// Returns the name in `elastic.unused.rule`, even if other fields of `unused` have errors.
fn parent<'n>(unused: &Value<'n>) -> Option<Scalar<'n>> {
    unused
        .fields_among(&["rule"])?
        .get("rule")?
        .scalar_with_span()
}

/// Reads `elastic.unused`: another rule, and the percentage of its limits that must be unused.
fn unused(value: &Value<'_>, report: &mut Report) -> Option<UnusedShare> {
    let fields = value.fields(report, "a map such as {rule: team, share: 30%}", UNUSED)?;
    let rule = match fields.get("rule") {
        Some(rule) => rule.text(report, "the name of a rule"),
        None => {
            fields.wrong(
                report,
                "rule",
                "is missing; name the rule whose limits must be partly unused",
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

fn key_entries<'n>(value: &Value<'n>, report: &mut Report) -> Vec<Scalar<'n>> {
    let items = value.one_or_more(report);
    items
        .iter()
        .filter_map(|item| item.text_with_span(report, "the name of an entry"))
        .collect()
}

fn cost_source<'n>(value: &Value<'n>, report: &mut Report) -> (RawCost<'n>, Option<CostSource>) {
    if value.looks_like_number() {
        let cost = value.number(report).and_then(|number| {
            let cost = Cost::new(number).map(CostSource::Fixed);
            cost.map_err(|error| value.wrong(report, error.problem))
                .ok()
        });
        return (RawCost::Fixed, cost);
    }
    if value.shape() == Shape::Map {
        let cost = body_cost::body_cost(value, report);
        return (RawCost::Fixed, cost.map(CostSource::Body));
    }
    let what = "a number, the name of an entry that holds one, or a map such as {json: /max_tokens, default: 1000}";
    let Some(entry) = value.text_with_span(report, what) else {
        return (RawCost::Fixed, None);
    };
    let name = conditions::entry_name(entry.text).into_owned();
    (RawCost::Entry(entry), Some(CostSource::Entry(name.into())))
}
