//! Manual blocks.

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_core::{Block, RuleSet, Span, Timestamp, notation};

use super::{
    super::http::{Answer, Problem, json},
    path::rule_and_key,
};
use crate::limiter::Limiter;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Body {
    #[serde(rename = "for")]
    span: Option<String>,
    reason: String,
}

/// The longest reason that is kept, in bytes.
const MAX_REASON_BYTES: usize = 1_024;

pub(super) fn list(limiter: &Limiter) -> Answer {
    let (rules, now) = (limiter.rules(), limiter.now());
    let mut blocks = limiter.store().blocks(now);
    blocks.sort_by(|a, b| a.key.cmp(&b.key));
    let documents: Vec<Value> = blocks
        .iter()
        .map(|block| document(&rules, block, now))
        .collect();
    json(StatusCode::OK, &json!({"blocks": documents}))
}

pub(super) fn show(limiter: &Limiter, rule: &str, key: &[&str]) -> Result<Answer, Problem> {
    let (rules, now) = (limiter.rules(), limiter.now());
    let (_, key) = rule_and_key(&rules, rule, key)?;
    let block = limiter.store().block_on(&key, now).ok_or_else(no_block)?;
    Ok(json(StatusCode::OK, &document(&rules, &block, now)))
}

pub(super) fn put(
    limiter: &Limiter,
    rule: &str,
    key: &[&str],
    body: &[u8],
) -> Result<Answer, Problem> {
    let (rules, now) = (limiter.rules(), limiter.now());
    let (rule, key) = rule_and_key(&rules, rule, key)?;
    let body: Body = match body {
        [] => Body::default(),
        body => serde_json::from_slice(body).map_err(|error| Problem::json(&error))?,
    };
    if body.reason.len() > MAX_REASON_BYTES {
        return Err(Problem::bad(
            "reason",
            format!("over the maximum of {MAX_REASON_BYTES} bytes"),
        ));
    }
    let span = match body.span.as_deref() {
        None => Some(rule.longest_window()),
        Some("forever") => None,
        Some(text) => {
            Some(notation::span(text).map_err(|error| Problem::bad("for", error.to_string()))?)
        }
    };
    if !limiter.store().block(&key, span, &body.reason, now) {
        let most = tidegate_core::bounds::MAX_BLOCKS;
        let detail = format!("{most} blocks stand already; lift some first");
        return Err(Problem::new(StatusCode::CONFLICT, detail));
    }
    let block = limiter.store().block_on(&key, now).ok_or_else(no_block)?;
    Ok(json(StatusCode::OK, &document(&rules, &block, now)))
}

pub(super) fn lift(limiter: &Limiter, rule: &str, key: &[&str]) -> Result<Answer, Problem> {
    let rules = limiter.rules();
    let (rule, bytes) = rule_and_key(&rules, rule, key)?;
    if !limiter.store().unblock(&bytes, limiter.now()) {
        return Err(no_block());
    }
    Ok(json(
        StatusCode::OK,
        &json!({"rule": rule.name(), "key": key, "unblocked": true}),
    ))
}

/// A block as it is shown; `until_ms` and `left_ms` are null while it stands until lifted.
pub(super) fn document(rules: &RuleSet, block: &Block, now: Timestamp) -> Value {
    let (rule, key) = match rules.decode_key(&block.key) {
        Some((rule, values)) => (Some(rule.name()), Some(values)),
        None => (None, None),
    };
    let left = block.until.map(|until| until.since(now));
    json!({
        "rule": rule,
        "key": key,
        "reason": block.reason,
        "until_ms": block.until.map(|until| until.as_micros() / 1_000),
        "left_ms": left.map(Span::as_millis_ceil),
    })
}

fn no_block() -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "no block stands on this key; GET /v1/blocks lists them",
    )
}
