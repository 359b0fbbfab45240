//! The state of one key.

use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_core::{Charge, Cost, Effect, Limit, Outcome, RetryAfter};
use tidegate_limiter::Limiter;
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use super::{super::http::millis, blocks, path::KeyTarget, store_problem};

pub(super) async fn show(limiter: &Limiter, target: KeyTarget<'_>) -> Result<Answer, Problem> {
    let (rules, now) = (limiter.rules(), limiter.now());
    let (rule, bytes) = target.find(&rules)?;
    let block = limiter.block_on(&bytes).await.map_err(store_problem)?;
    let charge = Charge::new(&bytes, rule.limits(), Cost::ONE)?;
    let standing = limiter
        .inspect(charge, Effect::Look)
        .await
        .map_err(store_problem)?;
    let next = limiter
        .inspect(charge, Effect::Peek)
        .await
        .map_err(store_problem)?;
    // For a blocked key `Peek` has no outcomes. Nothing is charged under a block, so the limits
    // only recover until it ends.
    let blocked_for = block.as_ref().map(|block| match block.until {
        Some(until) => RetryAfter::After(until.since(now)),
        None => RetryAfter::Never,
    });
    let retries = standing.iter().enumerate().map(|(at, standing)| {
        let after_block = || blocked_for.map(|block| block.max(recovery(standing)));
        next.get(at)
            .map(|outcome| outcome.retry_after)
            .or_else(after_block)
    });
    let limits: Vec<Value> = rule
        .limits()
        .iter()
        .zip(standing.iter().zip(retries))
        .map(|(limit, (standing, retry))| document(limit, standing, retry))
        .collect();
    let document = json!({
        "rule": rule.name(),
        "key": target.key,
        "mode": rule.mode().as_str(),
        "limits": limits,
        "block": block.map(|block| blocks::document(limiter, &rules, &block, now)),
    });
    Ok(json(StatusCode::OK, &target.hinted(document, rule)))
}

pub(super) async fn reset(limiter: &Limiter, target: KeyTarget<'_>) -> Result<Answer, Problem> {
    let rules = limiter.rules();
    let (rule, bytes) = target.find(&rules)?;
    if !limiter.reset(&bytes).await.map_err(store_problem)? {
        return Err(target.nothing("this key has no counters", rule));
    }
    Ok(json(
        StatusCode::OK,
        &json!({"rule": rule.name(), "key": target.key, "reset": true}),
    ))
}

/// Resets the counter for `key` of a limit that is sent with the request, in database 0 of the
/// Redis protocol.
pub(super) async fn reset_throttle(limiter: &Limiter, key: &str) -> Result<Answer, Problem> {
    let mut buffer = Vec::new();
    let bytes = Limiter::throttle_key(key.as_bytes(), &mut buffer)?;
    if !limiter.reset(bytes).await.map_err(store_problem)? {
        let detail =
            "no limit that was sent with a request has counters for this key in database 0";
        return Err(Problem::new(StatusCode::NOT_FOUND, detail));
    }
    Ok(json(StatusCode::OK, &json!({"key": key, "reset": true})))
}

/// Returns a time after which a limit admits a request of cost 1, if it is not charged in the
/// meantime.
fn recovery(standing: &Outcome) -> RetryAfter {
    match standing.remaining {
        0 => RetryAfter::After(standing.reset_after),
        _ => RetryAfter::NOW,
    }
}

/// Serialises a limit's state. `retry_after_ms` is the time until a request of cost 1 would pass: 0
/// means now, null means never. Under a block it is the time until the block ends. If nothing
/// remains now, and the limit is full again only after the end of the block, it is the time until
/// then.
fn document(limit: &Limit, standing: &Outcome, retry: Option<RetryAfter>) -> Value {
    json!({
        "policy": &**limit.policy(),
        "limit": standing.limit,
        "remaining": standing.remaining,
        "reset_after_ms": standing.reset_after.as_millis_ceil(),
        "retry_after_ms": retry.and_then(millis),
    })
}
