//! `quotas`: limits that Envoy's rate limit quota service (RLQS) divides among the Envoy instances
//! that enforce them.

use std::collections::HashSet;

use tidegate_core::notation;

use super::{
    ListenAddresses,
    conditions::RawPattern,
    report::Report,
    value::{Fields, Value},
};
use crate::quota::{QuotaLimit, QuotaRule};

const FIELDS: &[&str] = &["name", "domain", "bucket", "limit"];

/// The maximum number of quotas in a file.
const MAX_QUOTAS: usize = 1_000;

pub(super) fn quotas(
    file: &Fields<'_>,
    listen: &ListenAddresses,
    report: &mut Report,
) -> Vec<QuotaRule> {
    let Some(value) = file.get("quotas") else {
        return Vec::new();
    };
    if listen.grpc.is_none() {
        value.warn(
            report,
            "no client can request quotas, because listen.grpc is off; enable it or remove the quotas",
        );
    }
    let items = value.items(report, "a list of quotas").unwrap_or_default();
    if items.len() > MAX_QUOTAS {
        value.wrong(
            report,
            format!("{} quotas exceed the maximum of {MAX_QUOTAS}", items.len()),
        );
        return Vec::new();
    }
    let mut names = HashSet::new();
    let mut quotas = Vec::with_capacity(items.len());
    for item in &items {
        quotas.extend(quota(item, &mut names, report));
    }
    quotas
}

fn quota<'n>(
    value: &Value<'n>,
    names: &mut HashSet<&'n str>,
    report: &mut Report,
) -> Option<QuotaRule> {
    let fields = value.fields(report, "a quota with a name, a domain and a limit", FIELDS)?;
    for name in ["name", "domain", "limit"] {
        if !fields.tries(name) {
            let message = "is missing; every quota has a name, a domain and a limit";
            fields.wrong(report, name, message);
        }
    }
    let name = text(&fields, "name", report);
    if name.is_some_and(|name| !names.insert(name)) {
        fields.wrong(
            report,
            "name",
            "is already the name of an earlier quota; give each quota its own name",
        );
    }
    let domain = text(&fields, "domain", report);
    let bucket = match fields.get("bucket") {
        Some(value) => bucket(value, report),
        None => Some(Vec::new()),
    };
    let limit = fields.get("limit").and_then(|value| {
        let rate = value.parsed(report, "a rate such as 100/s", notation::rate)?;
        let limit = QuotaLimit::new(rate);
        limit.map_err(|problem| value.wrong(report, problem)).ok()
    });
    Some(QuotaRule {
        name: name?.into(),
        domain: domain?.into(),
        bucket: bucket?,
        limit: limit?,
    })
}

fn text<'n>(fields: &Fields<'n>, name: &str, report: &mut Report) -> Option<&'n str> {
    let value = fields.get(name)?;
    let text = value.text(report, "a string")?;
    if text.is_empty() {
        value.wrong(report, "must not be empty");
        return None;
    }
    Some(text)
}

/// Reads the patterns for the values of a bucket ID, by key.
fn bucket(
    value: &Value<'_>,
    report: &mut Report,
) -> Option<Vec<(Box<str>, tidegate_core::Pattern)>> {
    let what = "a map such as {service: shop, api_key: \"*\"}";
    let before = report.count();
    let mut patterns = Vec::new();
    for (name, value) in value.pairs(report, what)? {
        if let Some(pattern) = RawPattern::read(&value, report).build(report) {
            patterns.push((name.into(), pattern));
        }
    }
    (report.count() == before).then_some(patterns)
}
