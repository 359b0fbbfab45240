//! Operations on manual blocks.

use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_config::EventType;
use tidegate_core::{
    Block, BlockNote, Rule, RuleSet, Span, Timestamp,
    bounds::{MAX_BLOCKS, MAX_REASON_BYTES},
    notation,
};
use tidegate_limiter::{ServerLimiter, blocks::BlockedKey, date::date, entries::Spelling};
use tidegate_net::{
    Problem,
    input::{advice, shown},
    json::{Json, Members, object},
    response::{Answer, json},
};

use super::{
    audit::Auditor,
    end::end_document,
    path::{KeyTarget, Purpose, with_hints},
    query::Query,
    read_problem, store_problem,
};

const NO_BLOCK: &str = "this key is not blocked";

/// The minimum default duration of a block. The default duration is the longest window of the
/// rule's limits, but the longest window can be shorter than a second.
const MIN_DEFAULT_BLOCK: Span = Span::from_secs(60);

/// The parsed body of a request to block a key.
#[derive(Debug)]
struct BlockRequest<'b> {
    /// The duration of the block; `None` blocks the key until an operator removes the block.
    span: Option<Span>,
    reason: Option<&'b str>,
    spelling: Spelling,
    /// Whether the new block is allowed to end earlier than the key's current block.
    may_shorten: bool,
}

/// Serves `GET /v1/blocks`. With `n`, the response contains only the first `n` blocks.
pub(super) async fn list(limiter: &ServerLimiter, query: Option<&str>) -> Result<Answer, Problem> {
    let most = Query::parse(query, &["n"], None)?.count(MAX_BLOCKS, MAX_BLOCKS)?;
    let rules = limiter.rules();
    let mut blocks = limiter.blocks().await.map_err(read_problem)?;
    let count = blocks.len();
    blocks.sort_by(|a, b| a.key.cmp(&b.key));
    blocks.truncate(most);
    let view = BlockView {
        rules: &rules,
        now: limiter.block_clock().await.map_err(read_problem)?,
        is_persistent: limiter.are_blocks_persistent(),
    };
    let documents: Vec<Value> = blocks.iter().map(|block| view.document(block)).collect();
    let mut list = json!({"blocks": documents, "count": count});
    if let Some(problem) = limiter
        .snapshots()
        .problem(limiter.now())
        .filter(|_| !blocks.is_empty())
    {
        list["hint"] =
            format!("the latest blocks are lost when the server restarts: {problem}").into();
    }
    Ok(json(StatusCode::OK, &list))
}

pub(super) async fn show(
    limiter: &ServerLimiter,
    target: KeyTarget<'_>,
) -> Result<Answer, Problem> {
    let rules = limiter.rules();
    let (rule, key) = target.find_or_former(&rules);
    let block = limiter.block_on(&key).await.map_err(read_problem)?;
    let block = match (block, rule) {
        (Some(block), _) => block,
        (None, Ok(rule)) => return Err(target.nothing(NO_BLOCK, rule)),
        (None, Err(problem)) => return Err(problem),
    };
    let now = limiter.block_clock().await.map_err(read_problem)?;
    let document = document(limiter, &rules, &block, now);
    Ok(json(StatusCode::OK, &document))
}

pub(super) async fn put(
    auditor: &Auditor<'_>,
    target: KeyTarget<'_>,
    body: &[u8],
) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let rules = limiter.rules();
    let (rule, key) = target.find(&rules)?;
    let members = match body {
        [] => Vec::new(),
        body => object(body)?,
    };
    let BlockRequest {
        span,
        reason,
        spelling,
        may_shorten,
    } = read(&members, rule)?;
    target.check(rule, spelling, Purpose::Block)?;
    // Two concurrent requests may both read the same current block. The block that is written last
    // wins.
    let replaced = limiter.block_on(&key).await.map_err(store_problem)?;
    if let Some(current) = &replaced
        && !may_shorten
    {
        refuse_shorter(limiter, current, span).await?;
    }
    // With `shorten`, the request changes the current block and keeps its reason. Without
    // `shorten`, the request replaces the current block.
    let kept = replaced.as_ref().filter(|_| may_shorten);
    let note = BlockNote {
        reason: reason
            .or_else(|| kept.map(|current| &*current.reason))
            .unwrap_or_default(),
        rule: Some(&rule.blocked_rule()),
    };
    if !limiter
        .block(&key, span, note)
        .await
        .map_err(store_problem)?
    {
        let detail =
            format!("the maximum of {MAX_BLOCKS} blocks is reached; lift some blocks first");
        return Err(Problem::new(StatusCode::CONFLICT, detail));
    }
    let block = limiter.block_on(&key).await.map_err(store_problem)?;
    let block = block.ok_or_else(|| target.nothing(NO_BLOCK, rule))?;
    // The clock is read after the block is made, so that `left_ms` does not exceed the requested
    // duration.
    let now = limiter.block_clock().await.map_err(store_problem)?;
    let mut document = document(limiter, &rules, &block, now);
    if let Some(replaced) = replaced {
        let mut former = end_document(replaced.until, now);
        former["reason"] = replaced.reason.into();
        document["replaced"] = former;
    }
    let change = json!({
        "before": document["replaced"],
        "after": {"until_ms": document["until_ms"], "reason": document["reason"]},
    });
    auditor.record_key(EventType::BlockAdded, target, change);
    let lost = (!limiter.are_blocks_persistent()).then(|| not_kept(limiter));
    let hints = [literal_asterisk(target.key), lost];
    let document = with_hints(document, hints.into_iter().flatten());
    Ok(json(StatusCode::OK, &target.hinted_block(document, rule)))
}

/// Refuses a block for `span` if the block `current` lasts longer. The store's clock measures the
/// remaining time of `current`: if this server's clock differed, a repeated request could fail.
async fn refuse_shorter(
    limiter: &ServerLimiter,
    current: &Block,
    span: Option<Span>,
) -> Result<(), Problem> {
    let Some(span) = span else { return Ok(()) };
    let remaining = limiter.time_left(current).await.map_err(store_problem)?;
    if remaining.is_some_and(|remaining| remaining <= span) {
        return Ok(());
    }
    let lasts = match current.until {
        Some(until) => {
            let date = date(until).map(|date| format!(" until {date}"));
            date.unwrap_or_default()
        }
        None => " until it is lifted".to_owned(),
    };
    let detail = format!(
        "the key is already blocked{lasts}, which is longer than requested, so nothing was changed; to let the \
         block end earlier, pass --shorten (`\"shorten\": true`)"
    );
    Err(Problem::new(StatusCode::CONFLICT, detail))
}

fn read<'b>(members: &'b Members<'_>, rule: &Rule) -> Result<BlockRequest<'b>, Problem> {
    let (mut span, mut reason) = (
        Some(rule.longest_window().max(MIN_DEFAULT_BLOCK)),
        None::<&str>,
    );
    let (mut spelling, mut may_shorten) = (Spelling::Normalized, false);
    for (name, value) in members {
        match (&**name, value) {
            ("for", Json::Text(text)) if text == "forever" => span = None,
            ("for", Json::Text(text)) => {
                let read = notation::span(text);
                span = Some(read.map_err(|error| Problem::bad("for", error.to_string()))?);
            }
            ("for", other) => {
                let problem =
                    format!("expected a duration such as \"10min\", or \"forever\", got {other}");
                return Err(Problem::bad("for", problem));
            }
            ("reason", Json::Text(text)) if text.len() > MAX_REASON_BYTES => {
                let problem = format!(
                    "{} bytes exceed the maximum of {MAX_REASON_BYTES}",
                    text.len()
                );
                return Err(Problem::bad("reason", problem));
            }
            ("reason", Json::Text(text)) => reason = Some(text),
            ("reason", other) => {
                return Err(Problem::bad(
                    "reason",
                    format!("expected a string, got {other}"),
                ));
            }
            ("raw", Json::Truth(true)) => spelling = Spelling::Raw,
            ("raw", Json::Truth(false)) => spelling = Spelling::Normalized,
            ("shorten", Json::Truth(truth)) => may_shorten = *truth,
            (field @ ("raw" | "shorten"), other) => {
                let problem = format!("expected true or false, got {other}");
                return Err(Problem::bad(field, problem));
            }
            _ => {
                let known = ["for", "reason", "raw", "shorten"];
                let problem = format!("unknown field; {}", advice(name, &known));
                return Err(Problem::bad(shown(name), problem));
            }
        }
    }
    Ok(BlockRequest {
        span,
        reason,
        spelling,
        may_shorten,
    })
}

pub(super) async fn lift(auditor: &Auditor<'_>, target: KeyTarget<'_>) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let rules = limiter.rules();
    let (rule, bytes) = target.find_or_former(&rules);
    // The block is read only for the audit log, so the request does not fail if it cannot be read.
    let before = limiter.block_on(&bytes).await.ok().flatten();
    let is_lifted = limiter.unblock(&bytes).await.map_err(store_problem)?;
    if is_lifted {
        let before = before.map(|block| {
            json!({
                "until_ms": block.until.map(|until| until.as_micros() / 1_000),
                "reason": block.reason,
            })
        });
        let change = json!({"before": before, "after": null});
        auditor.record_key(EventType::BlockLifted, target, change);
    }
    match rule {
        _ if is_lifted => Ok(json(
            StatusCode::OK,
            &json!({"rule": target.rule, "key": target.key, "unblocked": true}),
        )),
        Ok(rule) => Err(target.nothing(NO_BLOCK, rule)),
        Err(problem) => Err(problem),
    }
}

/// Returns a hint if a value contains a `*`, which is not a pattern in a block.
fn literal_asterisk(key: &[&str]) -> Option<String> {
    let value = key.iter().find(|value| value.contains('*'))?;
    Some(format!(
        "`*` is literal in a block: only the key with exactly `{}` is blocked; to deny a pattern, use `tidegate \
         override RULE PATTERN --limit 0/h`",
        shown(value)
    ))
}

/// Explains why blocks do not survive a server restart, and how to make them persistent.
fn not_kept(limiter: &ServerLimiter) -> String {
    match limiter.snapshots().problem(limiter.now()) {
        Some(problem) => format!("this block is lost when the server restarts: {problem}"),
        None => {
            "this block is lost when the server restarts: its memory store has no snapshot; set \
                 `store.memory.snapshot` to keep blocks and counters"
                .to_owned()
        }
    }
}

/// The context for serialising blocks.
struct BlockView<'a> {
    rules: &'a RuleSet,
    /// The current time, from [`ServerLimiter::block_clock`].
    now: Timestamp,
    is_persistent: bool,
}

impl BlockView<'_> {
    /// Serialises a block. The field `inactive` is present only if the active rules do not enforce
    /// the block.
    fn document(&self, block: &Block) -> Value {
        let BlockedKey {
            rule,
            values,
            inactive,
        } = BlockedKey::of(block, self.rules);
        let mut document = end_document(block.until, self.now);
        document["rule"] = json!(rule);
        document["key"] = json!(values);
        document["reason"] = json!(block.reason);
        document["persistent"] = self.is_persistent.into();
        if let Some(inactive) = inactive {
            document["inactive"] = inactive.into();
        }
        document
    }
}

pub(super) fn document(
    limiter: &ServerLimiter,
    rules: &RuleSet,
    block: &Block,
    now: Timestamp,
) -> Value {
    let is_persistent = limiter.are_blocks_persistent();
    let view = BlockView {
        rules,
        now,
        is_persistent,
    };
    view.document(block)
}

/// Serialises a block without its rule and its key, for a document that already contains both. The
/// document may contain hashed key values.
pub(super) fn document_without_key(
    limiter: &ServerLimiter,
    rules: &RuleSet,
    block: &Block,
    now: Timestamp,
) -> Value {
    let mut document = document(limiter, rules, block, now);
    if let Value::Object(members) = &mut document {
        members.retain(|name, _| name != "rule" && name != "key");
    }
    document
}
