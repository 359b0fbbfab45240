//! The state of one key, and the list of a rule's keys.

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_config::EventType;
use tidegate_core::{
    Block, Charge, Cost, Effect, Limits, Outcome, Request, RetryAfter, Rule, RuleSet, Timestamp,
};
use tidegate_limiter::{KeyMask, ListError, ServerLimiter};
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use tidegate_redis::StoreError;

use super::{
    super::http::millis,
    audit::Auditor,
    blocks,
    denials::masked,
    entry_blocks, overrides,
    path::{KeyTarget, no_rule},
    query::Query,
    read_problem, store_problem,
};

/// The maximum of `n`, the number of keys on a page.
const MAX_KEYS: usize = 1_000;
/// The default of `n`.
const DEFAULT_KEYS: usize = 100;

/// The number of keys whose state is read concurrently.
const KEYS_AT_ONCE: usize = 32;

pub(super) async fn show(
    limiter: &ServerLimiter,
    target: KeyTarget<'_>,
) -> Result<Answer, Problem> {
    let rules = limiter.rules();
    let (rule, bytes) = target.find(&rules)?;
    let key = ShownKey {
        limiter,
        rules: &rules,
        rule,
        values: target.key,
        bytes: &bytes,
    };
    let block = match key.entry_block(&KeyMask::plain()) {
        Some(block) => Some(block),
        None => key.block(blocks::document).await.map_err(read_problem)?,
    };
    let limits = rules.limits_of_key(rule, &bytes, None, limiter.now());
    let charge = Charge::new(&bytes, &limits, Cost::ONE)?;
    let current = limiter
        .inspect(charge, Effect::Look)
        .await
        .map_err(read_problem)?;
    let next = limiter
        .inspect(charge, Effect::Peek)
        .await
        .map_err(read_problem)?;
    let document = json!({
        "rule": rule.name(),
        "key": target.key,
        "mode": rule.mode().as_str(),
        "limits": key_limit_documents(&limits, &current, &next, block.as_ref()),
        "override": overrides::of_key(limiter, &rules, rule, &bytes),
        "block": block.map(|block| block.document),
    });
    Ok(json(StatusCode::OK, &target.hinted(document, rule)))
}

pub(super) async fn reset(auditor: &Auditor<'_>, target: KeyTarget<'_>) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let rules = limiter.rules();
    let (rule, bytes) = target.find(&rules)?;
    // The state is read only for the audit log, so the request does not fail if it cannot be read.
    let limits = rules.limits_of_key(rule, &bytes, None, limiter.now());
    let charge = Charge::new(&bytes, &limits, Cost::ONE)?;
    let before = limiter.inspect(charge, Effect::Look).await;
    let before = before.map(|current| {
        let states = limits.iter().zip(&current);
        states
            .map(|(limit, current)| state(limit.policy(), current))
            .collect::<Vec<Value>>()
    });
    if !limiter.reset(&bytes).await.map_err(store_problem)? {
        return Err(target.nothing("this key has no counters", rule));
    }
    let change = json!({"before": {"limits": before.ok()}, "after": null});
    auditor.record_key(EventType::KeyReset, target, change);
    Ok(json(
        StatusCode::OK,
        &json!({"rule": rule.name(), "key": target.key, "reset": true}),
    ))
}

/// Resets the counters of `key` for limits that clients send with their requests. The key is in
/// database 0 of the Redis protocol.
pub(super) async fn reset_throttle(auditor: &Auditor<'_>, key: &str) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let mut buffer = Vec::new();
    let bytes = tidegate_limiter::throttle_key(key.as_bytes(), &mut buffer)?;
    if !limiter.reset(bytes).await.map_err(store_problem)? {
        let detail =
            "no limit that was sent with a request has counters for this key in database 0";
        return Err(Problem::new(StatusCode::NOT_FOUND, detail));
    }
    if let Some(events) = limiter.events() {
        let change = json!({"rule": null, "key": events.shown_key(&[key])});
        auditor.record(EventType::KeyReset, change);
    }
    Ok(json(StatusCode::OK, &json!({"key": key, "reset": true})))
}

/// A key whose state is shown.
struct ShownKey<'a> {
    limiter: &'a ServerLimiter,
    rules: &'a RuleSet,
    rule: &'a Rule,
    values: &'a [&'a str],
    /// The encoded key.
    bytes: &'a [u8],
}

/// The block that denies the requests of a key.
struct ShownBlock {
    document: Value,
    /// The time until the block ends.
    ends_after: RetryAfter,
}

/// Serialises a block on a key.
type SerializeBlock = fn(&ServerLimiter, &RuleSet, &Block, Timestamp) -> Value;

impl ShownKey<'_> {
    /// Returns the block by entries that denies all requests of the key. A block by entries takes
    /// precedence over a block on the key.
    fn entry_block(&self, mask: &KeyMask) -> Option<ShownBlock> {
        let values = self.values.iter().copied();
        let entries: Vec<(&str, &str)> = self.rule.key().zip(values).collect();
        let request = Request::new(&entries, Cost::ONE).ok()?;
        let now = self.limiter.now();
        let (target, block) = self.rules.entry_block(&request, Some(self.rule), now)?;
        Some(ShownBlock {
            document: entry_blocks::denying(self.limiter, &target, &block, mask),
            ends_after: blocked_for(block.until, now),
        })
    }

    /// Returns the block on the key.
    async fn block(&self, serialize: SerializeBlock) -> Result<Option<ShownBlock>, StoreError> {
        let Some(block) = self.limiter.block_on(self.bytes).await? else {
            return Ok(None);
        };
        let now = self.limiter.block_clock().await?;
        Ok(Some(ShownBlock {
            document: serialize(self.limiter, self.rules, &block, now),
            ends_after: blocked_for(block.until, now),
        }))
    }
}

/// Returns the time from `now` until a block ends.
pub(super) fn blocked_for(until: Option<Timestamp>, now: Timestamp) -> RetryAfter {
    match until {
        Some(until) => RetryAfter::After(until.since(now)),
        None => RetryAfter::Never,
    }
}

/// Serialises the limits of a key. `next` contains, for each limit, the outcome that the next
/// request would have; it is empty for a blocked key. In the document, `retry_after_ms` is the time
/// until the limit would admit a request: 0 means now, and null means never.
///
/// For a blocked key, `retry_after_ms` is the time until the block ends. One exception: if an
/// exhausted limit is full only after the block ends, `retry_after_ms` is the time until the limit
/// is full. While the key is blocked, it is not charged, so its limits only refill.
pub(super) fn limit_documents<'p>(
    policies: impl Iterator<Item = &'p str>,
    current: &[Outcome],
    next: &[Outcome],
    blocked_for: Option<RetryAfter>,
) -> Vec<Value> {
    let limits = policies.zip(current).enumerate();
    let documents = limits.map(|(at, (policy, current))| {
        let after_block = || blocked_for.map(|block| block.max(recovery(current)));
        let next = next.get(at).map(|outcome| outcome.retry_after);
        let mut document = state(policy, current);
        document["retry_after_ms"] = json!(next.or_else(after_block).and_then(millis));
        document
    });
    documents.collect()
}

/// Serialises the limits of a key. `block` is the block that denies the key, if there is one.
fn key_limit_documents(
    limits: &Limits,
    current: &[Outcome],
    next: &[Outcome],
    block: Option<&ShownBlock>,
) -> Vec<Value> {
    let policies = limits.iter().map(|limit| &**limit.policy());
    let blocked_for = block.map(|block| block.ends_after);
    // A block by entries is not a part of the store's state, so the store may return outcomes for a
    // blocked key in `next`.
    let next = if block.is_some() { &[] } else { next };
    limit_documents(policies, current, next, blocked_for)
}

/// Serialises the current state of a limit.
fn state(policy: &str, current: &Outcome) -> Value {
    json!({
        "policy": policy,
        "limit": current.limit,
        "remaining": current.remaining,
        "reset_after_ms": current.reset_after.as_millis_ceil(),
    })
}

/// Returns the time until an exhausted limit is full, provided that nothing is charged earlier.
/// Returns zero if the limit is not exhausted.
fn recovery(current: &Outcome) -> RetryAfter {
    match current.remaining {
        0 => RetryAfter::After(current.reset_after),
        _ => RetryAfter::NOW,
    }
}

/// Serves `GET /v1/keys/{rule}`: lists the keys of a rule page by page, with their state.
pub(super) async fn list(
    limiter: &ServerLimiter,
    rule: &str,
    query: &Query,
) -> Result<Answer, Problem> {
    let rules = limiter.rules();
    let rule = rules.rule(rule).ok_or_else(|| no_rule(&rules, rule, &[]))?;
    let most = query.count(MAX_KEYS, DEFAULT_KEYS)?;
    let page = limiter.list_keys(rule, query.get("after"), most).await;
    let page = page.map_err(|error| match error {
        ListError::Position => Problem::bad(
            "after",
            "is not a `next` value of this list, or was returned before a server restart; omit `after` to start again",
        ),
        ListError::Store(error) => read_problem(error),
    })?;
    let documents = stream::iter(&page.keys).map(|key| row(limiter, &rules, rule, key));
    // With Redis, two calls are needed to read a key's state. The calls for several keys are sent
    // in one batch.
    let rows: Vec<Option<Value>> = documents
        .buffered(KEYS_AT_ONCE)
        .try_collect()
        .await
        .map_err(read_problem)?;
    let rows: Vec<Value> = rows.into_iter().flatten().collect();
    let document = json!({
        "rule": rule.name(),
        "mode": rule.mode().as_str(),
        "keys": rows,
        "next": page.next,
    });
    Ok(json(StatusCode::OK, &document))
}

/// Serialises the state of a key. Returns `None` if the rule's key entries have changed since the
/// key was encoded.
async fn row(
    limiter: &ServerLimiter,
    rules: &RuleSet,
    rule: &Rule,
    key: &[u8],
) -> Result<Option<Value>, StoreError> {
    let Some((_, values)) = rules.decode_key(key) else {
        return Ok(None);
    };
    let limits = rules.limits_of_key(rule, key, None, limiter.now());
    let Ok(charge) = Charge::new(key, &limits, Cost::ONE) else {
        return Ok(None);
    };
    let current = limiter.inspect(charge, Effect::Look).await?;
    let next = limiter.inspect(charge, Effect::Peek).await?;
    let shown = ShownKey {
        limiter,
        rules,
        rule,
        values: &values,
        bytes: key,
    };
    let block = match shown.entry_block(limiter.key_mask()) {
        Some(block) => Some(block),
        // `next` is empty only for a blocked key.
        None if next.is_empty() => shown.block(blocks::document_without_key).await?,
        None => None,
    };
    Ok(Some(json!({
        "key": masked(&values, limiter.key_mask()),
        "limits": key_limit_documents(&limits, &current, &next, block.as_ref()),
        "block": block.map(|block| block.document),
    })))
}
