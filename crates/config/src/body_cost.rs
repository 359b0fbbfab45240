//! `cost: {json: …}`: the cost of a request under a rule, read from the request body.

use std::sync::Arc;

use tidegate_core::{BodyCost, JsonPointer, RuleError, bounds};

use super::{
    proxy::within,
    report::Report,
    value::{Fields, Value},
};

const FIELDS: &[&str] = &["json", "default", "max", "times", "input"];

/// Reads a rule's `cost` map. Returns `None` if the map is invalid.
pub(super) fn body_cost(value: &Value<'_>, report: &mut Report) -> Option<Arc<BodyCost>> {
    let what = "a map such as {json: /max_tokens, default: 1000}";
    let fields = value.fields(report, what, FIELDS)?;
    let output = pointers(&fields, report);
    let times = match fields.get("times") {
        Some(value) => Some(pointer(value, report)?),
        None => None,
    };
    let max = match fields.get("max") {
        Some(value) => within(value.number(report)?, 1..=bounds::MAX_TOKENS, value, report)?,
        None => bounds::MAX_TOKENS,
    };
    let Some(default) = fields.get("default") else {
        if !fields.tries("default") {
            let advice = "is missing; set the number to use if a body has none of these pointers";
            fields.wrong(report, "default", advice);
        }
        return None;
    };
    let default = within(default.number(report)?, 1..=max, default, report)?;
    let estimates_input = match fields.get("input") {
        Some(value) => value.choice(report, &[("estimate", true), ("off", false)])?,
        None => false,
    };
    Some(Arc::new(BodyCost {
        output: output?,
        times,
        default,
        max,
        estimates_input,
    }))
}

fn pointers(fields: &Fields<'_>, report: &mut Report) -> Option<Box<[JsonPointer]>> {
    let Some(value) = fields.get("json") else {
        if !fields.tries("json") {
            let advice =
                "is missing; set it to a JSON pointer to a number in the body, such as /max_tokens";
            fields.wrong(report, "json", advice);
        }
        return None;
    };
    let items = value.one_or_more(report);
    if items.is_empty() {
        value.wrong(report, "is empty; name a JSON pointer such as /max_tokens");
        return None;
    }
    if items.len() > bounds::MAX_BODY_POINTERS {
        let (count, most) = (items.len(), bounds::MAX_BODY_POINTERS);
        value.wrong(
            report,
            format!("{count} pointers exceed the maximum of {most}"),
        );
        return None;
    }
    let pointers = items.iter().map(|item| pointer(item, report));
    // Read all pointers before checking the results, so that all errors are reported.
    let pointers: Vec<Option<JsonPointer>> = pointers.collect();
    pointers.into_iter().collect()
}

fn pointer(value: &Value<'_>, report: &mut Report) -> Option<JsonPointer> {
    value.parsed(report, "a JSON pointer such as /max_tokens", |text| {
        JsonPointer::parse(text).map_err(|error: RuleError| error.problem)
    })
}
