//! `/v1/candidate`: how decisions would change under the candidate rules.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use tidegate_config::EventType;
use tidegate_core::Timestamp;
use tidegate_limiter::{
    ServerLimiter,
    candidate::{CandidateReport, CandidateRule, ChangedKey, ChangedKeyList},
    date::date,
};
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use super::{audit::Auditor, on_other_thread, query::Query};
use crate::reload::{PromoteError, Reloader};

/// The maximum of `n`, the number of keys in each list.
const MAX_KEYS: usize = 1_000;
/// The default of `n`.
const DEFAULT_KEYS: usize = 20;

/// The note that the response contains for an omitted rule.
const LEFT_OUT: &str = "not evaluated: the rule has concurrency slots, a queue, or a cost that depends on the response";

pub(super) fn show(limiter: &ServerLimiter, query: Option<&str>) -> Result<Answer, Problem> {
    let most = Query::parse(query, &["n"], None)?.count(MAX_KEYS, DEFAULT_KEYS)?;
    let Some(candidate) = limiter.candidate() else {
        let detail = PromoteError::NoCandidate.to_string();
        return Err(Problem::new(StatusCode::NOT_FOUND, detail));
    };
    let report = candidate.report(limiter.key_mask(), most);
    let has_ended = report.until.is_some_and(|until| limiter.now() >= until);
    Ok(json(StatusCode::OK, &document(&report, has_ended)))
}

pub(super) async fn promote(
    reloader: Option<&Arc<Reloader>>,
    auditor: &Auditor<'_>,
) -> Result<Answer, Problem> {
    let Some(reloader) = reloader.map(Arc::clone) else {
        let detail = PromoteError::NoCandidate.to_string();
        return Err(Problem::new(StatusCode::NOT_FOUND, detail));
    };
    let rules_file = reloader.path().display().to_string();
    // Reading a large file takes some time, and must not block the other connections of this
    // worker.
    let promoted = on_other_thread(move || reloader.promote()).await?;
    let promoted = promoted.map_err(|error| match error {
        PromoteError::NoCandidate => Problem::new(StatusCode::NOT_FOUND, error.to_string()),
        PromoteError::Changed(_) | PromoteError::Unusable(_) => {
            Problem::new(StatusCode::CONFLICT, error.to_string())
        }
    })?;
    let file = promoted.file.display().to_string();
    let change = json!({
        "file": file,
        "before": {"rules": promoted.rules_before},
        "after": {"rules": promoted.rules},
        "changes": promoted.diff.event_document(),
    });
    auditor.record(EventType::CandidatePromoted, change);
    let hint = format!(
        "{rules_file} still has the old rules, which become active again at the next reload or restart; to keep \
         the promoted rules, replace the sections `rules`, `allow` and `defaults` of {rules_file} \
         with those of {file}, and remove `candidate`"
    );
    Ok(json(
        StatusCode::OK,
        &json!({"promoted": file, "rules": promoted.rules, "hint": hint}),
    ))
}

fn document(report: &CandidateReport, has_ended: bool) -> Value {
    let mut document = json!({
        "rules_file": report.file.display().to_string(),
        "since_ms": millis(report.began),
        "ended": has_ended,
        "compared": report.compared,
        "denied": report.denied,
        "newly_denied": report.newly_denied,
        "no_longer_denied": report.no_longer_denied,
        "not_compared": report.not_compared,
        "rejected": report.rejected,
        "lost": report.lost,
        "rules": report.rules.iter().map(rule).collect::<Vec<Value>>(),
        "newly": keys(&report.newly),
        "no_longer": keys(&report.no_longer),
    });
    if let Some(until) = report.until {
        document["until_ms"] = json!(millis(until));
        document["until"] = json!(date(until));
    }
    let uncounted = report.newly.uncounted + report.no_longer.uncounted;
    if uncounted > 0 {
        let hint = format!(
            "{uncounted} changed requests of keys with few changes are not listed, because there were too many keys"
        );
        document["hint"] = hint.into();
    }
    document
}

fn rule(rule: &CandidateRule) -> Value {
    let mut members = Map::new();
    members.insert("rule".to_owned(), json!(rule.rule));
    members.insert("mode".to_owned(), json!(rule.mode.as_str()));
    members.insert("requests".to_owned(), json!(rule.requests));
    members.insert("denied".to_owned(), json!(rule.denied));
    if rule.is_excluded {
        members.insert("note".to_owned(), json!(LEFT_OUT));
    }
    Value::Object(members)
}

fn keys(list: &ChangedKeyList) -> Vec<Value> {
    let key = |changed: &ChangedKey| {
        json!({
            "rule": changed.rule,
            "key": changed.key,
            "requests": changed.requests,
            "first_ms": millis(changed.first),
            "last_ms": millis(changed.last),
        })
    };
    list.keys.iter().map(key).collect()
}

/// Returns `instant` in milliseconds since the Unix epoch.
fn millis(instant: Timestamp) -> u64 {
    instant.as_micros() / 1_000
}
