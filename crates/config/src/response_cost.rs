//! `count` and `settle`: costs that depend on the response.

use tidegate_core::{Pattern, ResponseCost, RuleError, TokenFormula};
use tidegate_net::input::{advice, shown};

use super::{
    conditions::{self, RawCondition, RawPattern, TextComparison},
    report::Report,
    source_span::SourceSpan,
    value::{Fields, Shape, Value},
};

/// The response entries that rules in a rules file can use. Additional entries, from
/// [`tidegate_tower::ResponseEntries`], exist only in applications that embed the limiter.
const RESPONSE_ENTRIES: &[&str] = &["status", "bytes", "grpc-status", "header.NAME"];

/// The response entries whose value can be used as the cost.
const COSTS: &[&str] = &["bytes", "header.NAME", USAGE];

/// The value of `settle` for the tokens used by a language model.
const USAGE: &str = "usage";

/// A field of a rule that has an effect only in the reverse proxy.
#[derive(Debug)]
pub(crate) struct ProxyOnlyField {
    /// The position of the field.
    pub(crate) span: SourceSpan,
    /// The part of the exchange on which the cost depends: "the response" or "the request body".
    pub(crate) source: &'static str,
}

/// Returns the first field that makes a rule's cost depend on the response or on the request body.
pub(super) fn proxy_only_field(fields: &Fields<'_>) -> Option<ProxyOnlyField> {
    fields.iter().find_map(|(name, value)| {
        let source = match *name {
            "count" | "settle" => "the response",
            "cost" if value.shape() == Shape::Map => "the request body",
            _ => return None,
        };
        Some(ProxyOnlyField {
            span: value.span().clone(),
            source,
        })
    })
}

/// Reads a rule's response-based cost from the fields `count` and `settle`.
pub(super) fn response_cost(fields: &Fields<'_>, report: &mut Report) -> ResponseCost {
    let response_cost = match fields.get("count") {
        Some(value) => count(value, report),
        None => ResponseCost::default(),
    };
    match fields.get("settle") {
        Some(value) => settle(value, response_cost, report),
        None => response_cost,
    }
}

fn count(value: &Value<'_>, report: &mut Report) -> ResponseCost {
    let what = "a map of conditions such as {status: [401, 403]}";
    let Some(entries) = value.pairs(report, what) else {
        return ResponseCost::default();
    };
    if entries.is_empty() {
        let advice = "is empty, so every response would count; name at least one condition, such as {status: [401, 403]}";
        value.wrong(report, advice);
    }
    for (entry, value) in &entries {
        if !is_known(entry, RESPONSE_ENTRIES) {
            let advice = advice(entry, RESPONSE_ENTRIES);
            let entry = shown(entry);
            value.wrong_key(
                report,
                format!("a response at the proxy has no entry \"{entry}\"; {advice}"),
            );
        }
    }
    let (raw, answers) = conditions::when_of(entries, report);
    for condition in &raw.conditions {
        check_statuses(condition, report);
    }
    ResponseCost::default().counting(answers.unwrap_or_default())
}

/// Reports an error for a pattern that no HTTP status matches, such as `4xx`.
fn check_statuses(condition: &RawCondition<'_>, report: &mut Report) {
    let entry = condition.entry;
    let (known, example) = match entry {
        "status" => (100..=599, "a number from 100 to 599, or \"4*\""),
        "grpc-status" => (0..=16, "a number from 0 to 16"),
        _ => return,
    };
    let is_met = |pattern: &Pattern| {
        let mut statuses = known.clone();
        statuses.any(|status: u16| pattern.matches(Some(&status.to_string())))
    };
    let problem = |what: &str| format!("no {entry} matches {what}; write {example}");
    let texts = condition.pattern.texts().into_iter();
    for text in texts.filter(|text| text.comparison != TextComparison::Regex) {
        let pattern = Pattern::text(text.scalar.text);
        if pattern.is_ok_and(|pattern| !is_met(&pattern)) {
            let what = text.scalar.describe();
            text.scalar.span.wrong(report, problem(&what));
        }
    }
    // The loop above checks each string separately, and skips regular expressions. Check a map of
    // operators as a whole too, because each operator can match some status although no status
    // matches all of them.
    if let RawPattern::AllOf(_) = &condition.pattern
        && condition
            .pattern
            .convert()
            .is_ok_and(|pattern| !is_met(&pattern))
    {
        condition
            .span
            .wrong(report, problem("this combination of conditions"));
    }
}

fn settle(value: &Value<'_>, response_cost: ResponseCost, report: &mut Report) -> ResponseCost {
    if value.shape() == Shape::Map {
        let formula = formula(value, report);
        return formula.map_or_else(Default::default, |formula| {
            response_cost.costing_usage(formula)
        });
    }
    let what = "the response entry that holds the cost, such as bytes, or a map such as {usage: input + 4*output}";
    let Some(entry) = value.text(report, what) else {
        return response_cost;
    };
    if !is_known(entry, COSTS) {
        let advice = advice(entry, COSTS);
        let entry = shown(entry);
        value.wrong(
            report,
            format!("the response entry \"{entry}\" cannot hold a cost; {advice}"),
        );
        return response_cost;
    }
    if entry == USAGE {
        return response_cost.costing_usage(TokenFormula::SUM);
    }
    response_cost
        .costing(entry)
        .map_err(|error| value.wrong(report, error.problem))
        .unwrap_or_default()
}

/// Reads the token formula of `{usage: FORMULA}`.
fn formula(value: &Value<'_>, report: &mut Report) -> Option<TokenFormula> {
    let fields = value.fields(report, "a map such as {usage: input + 4*output}", &[USAGE])?;
    let Some(usage) = fields.get(USAGE) else {
        if !fields.tries(USAGE) {
            fields.wrong(
                report,
                USAGE,
                "is missing; write a formula such as input + 4*output",
            );
        }
        return None;
    };
    usage.parsed(report, "a formula such as input + 4*output", |text| {
        TokenFormula::parse(text).map_err(|error: RuleError| error.problem)
    })
}

fn is_known(entry: &str, known: &[&str]) -> bool {
    let header = entry.strip_prefix("header.");
    header.map_or_else(
        || known.contains(&entry),
        |name| !name.is_empty() && name != "NAME",
    )
}
