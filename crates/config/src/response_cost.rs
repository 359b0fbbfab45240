//! `count` and `settle`: response-based cost, and a check that a listener sees the responses.

use tidegate_core::ResponseCost;
use tidegate_net::input::{advice, shown};

use super::{
    Listen,
    conditions::{self, Comparison},
    report::Report,
    value::{Fields, Shape, Value},
};

/// The entries of a response that rules can use. Those of [`tidegate_tower::ResponseEntries`] exist
/// only in applications that embed the limiter.
const RESPONSE_ENTRIES: &[&str] = &["status", "bytes", "grpc-status", "header.NAME"];

/// The entries of a response that can hold a cost.
const COSTS: &[&str] = &["bytes", "header.NAME"];

/// Reads the response-based cost of a rule.
pub(super) fn response_cost(fields: &Fields<'_>, report: &mut Report) -> ResponseCost {
    let bill = match fields.get("count") {
        Some(value) => count(value, report),
        None => ResponseCost::default(),
    };
    match fields.get("settle") {
        Some(value) => settle(value, bill, report),
        None => bill,
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
    for (entry, value) in entries {
        if !is_known(entry, RESPONSE_ENTRIES) {
            let advice = advice(entry, RESPONSE_ENTRIES);
            let entry = shown(entry);
            value.wrong_key(
                report,
                format!("a response at the proxy has no entry \"{entry}\"; {advice}"),
            );
        }
    }
    let answers = conditions::when(value, report);
    check_statuses(value, report);
    ResponseCost::default().counting(answers.unwrap_or_default())
}

/// Rejects patterns that no status matches, such as `4xx`.
fn check_statuses(value: &Value<'_>, report: &mut Report) {
    let quiet = &mut Report::default();
    for (entry, value) in value.pairs(quiet, "").unwrap_or_default() {
        let (known, example) = match entry {
            "status" => (100..=599, "a number from 100 to 599, or \"4*\""),
            "grpc-status" => (0..=16, "a number from 0 to 16"),
            _ => continue,
        };
        let of_map = matches!(value.shape(), Shape::Map).then(|| value.clone());
        // The operators of the map include regular expressions.
        let texts = conditions::texts(&value).into_iter();
        let texts = texts.filter(|text| text.comparison != Comparison::Regex);
        let texts: Vec<Value<'_>> = texts.map(|text| text.value).collect();
        for part in texts.iter().chain(&of_map) {
            let Some(pattern) = conditions::pattern(part, quiet) else {
                continue;
            };
            let is_met = |status: u16| pattern.matches(Some(&status.to_string()));
            if !known.clone().any(is_met) {
                let what = part.describe();
                let problem = format!("no {entry} matches {what}; write {example}");
                part.wrong(report, problem);
            }
        }
    }
}

fn settle(value: &Value<'_>, bill: ResponseCost, report: &mut Report) -> ResponseCost {
    let what = "the entry of a response that holds its cost, such as bytes";
    let Some(entry) = value.text(report, what) else {
        return bill;
    };
    if !is_known(entry, COSTS) {
        let advice = advice(entry, COSTS);
        let entry = shown(entry);
        value.wrong(
            report,
            format!("the entry \"{entry}\" of a response cannot hold a cost; {advice}"),
        );
        return bill;
    }
    bill.costing(entry)
        .map_err(|error| value.wrong(report, error.problem))
        .unwrap_or_default()
}

fn is_known(entry: &str, known: &[&str]) -> bool {
    let header = entry.strip_prefix("header.");
    header.map_or_else(
        || known.contains(&entry),
        |name| !name.is_empty() && name != "NAME",
    )
}

/// Rejects rules that depend on the response if no proxy is configured, because only the proxy sees
/// responses. Warns if other listeners decide by these rules too.
pub(super) fn check_seen(file: &Fields<'_>, listen: &Listen, report: &mut Report) {
    // Other mistakes are reported elsewhere.
    let quiet = &mut Report::default();
    let rules = file.get("rules").and_then(|rules| rules.items(quiet, ""));
    let blind = blind_listeners(listen);
    for rule in rules.unwrap_or_default() {
        let fields = rule.pairs(quiet, "").unwrap_or_default();
        let by_answer = |(name, _): &&(&str, _)| matches!(*name, "count" | "settle");
        let Some((_, field)) = fields.iter().find(by_answer) else {
            continue;
        };
        let why = "depends on the response, which only the reverse proxy sees";
        if file.get("proxy").is_none() {
            let advice = "add a `proxy` section, or remove this field";
            field.wrong_key(report, format!("{why}; {advice}"));
        } else if !blind.is_empty() {
            let listeners = blind.join(" and ");
            let advice =
                "are charged in full and not refunded; disable unused listeners with `off`";
            field.warn_of_key(
                report,
                format!("blind-listener: {why}; requests at {listeners} {advice}"),
            );
        }
    }
}

/// Returns the names of the listeners that decide by rules but never see the response.
fn blind_listeners(listen: &Listen) -> Vec<&'static str> {
    let listeners = [("listen.http", listen.http), ("listen.resp", listen.resp)];
    let open = listeners
        .into_iter()
        .filter(|(_, address)| address.is_some());
    open.map(|(name, _)| name).collect()
}
