//! `GET /v1/denials`: the requests that were denied recently.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use tidegate_core::{Rule, Timestamp};
use tidegate_limiter::{
    KeyMask, ServerLimiter,
    date::date,
    denials::{Denial, DenialFilter, DenialList},
};
use tidegate_net::{
    Problem,
    input::shown,
    response::{Answer, json},
};

use super::{super::http::millis, path::no_rule, query::Query};

/// The maximum and the default of `n`, the number of rows.
const MAX_ROWS: usize = 1_000;
const DEFAULT_ROWS: usize = 100;

pub(super) async fn list(
    limiter: &Arc<ServerLimiter>,
    query: Option<&str>,
) -> Result<Answer, Problem> {
    let query = Query::parse(query, &["rule", "key", "since", "n"], Some("key"))?;
    let most = query.count(MAX_ROWS, DEFAULT_ROWS)?;
    let since = query.span("since")?;
    let since = since.map_or_else(Timestamp::default, |since| limiter.now().before(since));
    let (rules, name) = (limiter.rules(), query.get("rule"));
    let rule = name.and_then(|name| rules.rule(name));
    let key: Vec<String> = query.all("key").map(str::to_owned).collect();
    if let Some(rule) = rule {
        check_key(rule, &key)?;
    }
    let (reader, wanted) = (Arc::clone(limiter), name.map(str::to_owned));
    // The search of a full list takes milliseconds, which would delay the decisions of this worker.
    let listed = tokio::task::spawn_blocking(move || {
        let key: Vec<&str> = key.iter().map(String::as_str).collect();
        let filter = DenialFilter {
            rule: wanted.as_deref(),
            key: &key,
            since,
        };
        reader.denials().list(&filter, most)
    });
    let listed = listed.await.map_err(|_| {
        let detail = "the server is shutting down";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    })?;
    // Denials of a rule that no longer exists are listed until they are overwritten.
    match name {
        Some(name) if rule.is_none() && listed.denials.is_empty() => {
            Err(no_rule(&rules, name, &[]))
        }
        _ => Ok(json(StatusCode::OK, &document(limiter, &listed))),
    }
}

/// Checks that the request has as many values as the rule has key entries.
fn check_key(rule: &Rule, key: &[String]) -> Result<(), Problem> {
    let names: Vec<&str> = rule.key().collect();
    if key.is_empty() || key.len() == names.len() {
        return Ok(());
    }
    let problem = format!(
        "rule \"{}\" has a key of {} values ({}), got {}; repeat `key` for each value, in this order",
        shown(rule.name()),
        names.len(),
        names.join(", "),
        key.len()
    );
    Err(Problem::bad("key", problem))
}

fn document(limiter: &ServerLimiter, list: &DenialList) -> Value {
    let mask = limiter.key_mask();
    let rows = list.denials.iter().map(|denial| row(denial, mask));
    let rows: Vec<Value> = rows.collect();
    let mut document = json!({"rows": rows, "lost": list.lost});
    if !limiter.denials().is_kept() {
        document["hint"] =
            "denials are not kept; remove `denials: off` from the rules file, and restart the server".into();
    }
    document
}

fn row(denial: &Denial, mask: &KeyMask) -> Value {
    let entries = denial.entries.iter();
    let entries: Map<String, Value> = entries
        .map(|(name, value)| (name.clone(), mask.value(value).into()))
        .collect();
    json!({
        "at": date(denial.at),
        "at_ms": denial.at.as_micros() / 1_000,
        "rule": denial.rule,
        "key": masked(&denial.key, mask),
        "policy": denial.policy,
        "reason": denial.reason.as_str(),
        "retry_after_ms": millis(denial.retry_after),
        "listener": denial.listener.as_str(),
        "mode": denial.mode.as_str(),
        "entries": entries,
    })
}

/// Returns the values of a key, hashed if `mask` requires it.
pub(super) fn masked<V: AsRef<str>>(values: &[V], mask: &KeyMask) -> Vec<String> {
    let values = values.iter();
    values
        .map(|value| mask.value(value.as_ref()).into_owned())
        .collect()
}
