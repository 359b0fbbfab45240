//! Operations on blocks by entries.

use std::{net::IpAddr, sync::Arc};

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use tidegate_config::EventType;
use tidegate_core::{
    BlockedValue, EntryBlock, EntryBlockTarget, RuleSet, Timestamp, bounds::MAX_REASON_BYTES,
};
use tidegate_identity::Trust;
use tidegate_limiter::{
    KeyMask, ServerLimiter,
    date::date,
    entries::Spelling,
    overrides::{ChangeBlockError, EntryBlockFilter, inactive_reason},
};
use tidegate_net::{
    Problem,
    input::{advice, shown},
    json::{Json, Members, object},
    response::{Answer, json},
};

use super::{
    audit::Auditor,
    end::{RequestedEnd, end_document},
    on_other_thread,
    path::{no_rule, with_hints},
    query::{Query, invalid_position},
};

/// The maximum of `n`, the number of blocks on a page.
const MAX_ON_PAGE: usize = 1_000;
/// The default of `n`.
const DEFAULT_ON_PAGE: usize = 100;

/// The prefix length of a single IPv6 address.
const MAX_IPV6_PREFIX: u8 = 128;

/// The parsed body of a request to set a block.
struct EntryBlockRequest {
    new: EntryBlock,
    spelling: Spelling,
    /// Whether the new block is allowed to end earlier than the current block.
    may_shorten: bool,
    /// Whether the block may contain a wide network.
    may_be_wide: bool,
}

/// Serves `GET /v1/entry-blocks`: lists blocks page by page. The scan for a page visits all blocks,
/// so it runs on another thread.
pub(super) async fn list(
    limiter: &Arc<ServerLimiter>,
    query: Option<&str>,
) -> Result<Answer, Problem> {
    let query = Query::parse(query, &["search", "after", "n"], None)?;
    let most = query.count(MAX_ON_PAGE, DEFAULT_ON_PAGE)?;
    let scanned = Arc::clone(limiter);
    let page = on_other_thread(move || {
        scanned.list_entry_blocks(EntryBlockFilter {
            search: query.get("search"),
            after: query.get("after"),
            most,
        })
    });
    let page = page.await?.ok_or_else(invalid_position)?;
    let rules = limiter.rules();
    let view = EntryBlockView::new(limiter, &rules);
    let listed = page.blocks.iter();
    let documents: Vec<Value> = listed
        .map(|(target, block)| view.document(target, block))
        .collect();
    let document = json!({
        "blocks": documents,
        "count": page.count,
        "next": page.next,
    });
    Ok(json(StatusCode::OK, &document))
}

/// Serves `GET /v1/entry-blocks/{entry}/{value}…`.
pub(super) fn show(
    limiter: &ServerLimiter,
    path: &[&str],
    query: Option<&str>,
) -> Result<Answer, Problem> {
    let target = target(path, query)?;
    let found = limiter.entry_blocks().get(&target);
    let found = found.filter(|block| block.is_unexpired(limiter.now()));
    let found = found.ok_or_else(none)?;
    let rules = limiter.rules();
    let document = EntryBlockView::new(limiter, &rules).document(&target, &found);
    Ok(json(StatusCode::OK, &document))
}

/// Serves `PUT /v1/entry-blocks/{entry}/{value}…`.
pub(super) async fn put(
    auditor: &Auditor<'_>,
    path: &[&str],
    query: Option<&str>,
    body: &[u8],
) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let (rules, now) = (limiter.rules(), limiter.now());
    let target = target(path, query)?;
    let EntryBlockRequest {
        mut new,
        spelling,
        may_shorten,
        may_be_wide,
    } = read(&object(body)?, now)?;
    check(limiter, &rules, &target, spelling)?;
    if !may_be_wide {
        let advice = "to block it nevertheless, pass --wide (`\"wide\": true`)";
        let checked = target.check_width();
        checked
            .map_err(|error| Problem::bad(&error.field, format!("{}; {advice}", error.problem)))?;
    }
    // Two concurrent requests may both read the same current block. The block that is written last
    // wins.
    let current = limiter.entry_blocks().get(&target);
    let current = current.filter(|current| current.is_unexpired(now));
    if let Some(current) = &current {
        if !may_shorten {
            refuse_shorter(current, &new)?;
        } else if new.reason.is_empty() {
            new.reason.clone_from(&current.reason);
        }
    }
    let replaced = limiter.set_entry_block(&target, new.clone()).await;
    let replaced = replaced.map_err(change_problem)?;
    let replaced = replaced.filter(|replaced| replaced.is_unexpired(now));
    let view = EntryBlockView::new(limiter, &rules);
    let mut document = view.document(&target, &new);
    let before = replaced
        .as_ref()
        .map(|replaced| view.end_and_reason(replaced));
    if let Some(before) = &before {
        document["replaced"] = before.clone();
    }
    let change = json!({"before": before, "after": view.end_and_reason(&new)});
    record(auditor, EventType::BlockAdded, &target, change);
    let lost = (!limiter.are_overrides_persistent()).then(|| {
        "this block is lost when the server restarts: its memory store has no snapshot; set \
         `store.memory.snapshot` to keep blocks, overrides and counters"
            .to_owned()
    });
    let hints = [literal_asterisk(&target), lost];
    let document = with_hints(document, hints.into_iter().flatten());
    Ok(json(StatusCode::OK, &document))
}

/// Returns a hint if a value contains a `*`, which is not a pattern in a block.
fn literal_asterisk(target: &EntryBlockTarget) -> Option<String> {
    let mut entries = target.entries().iter();
    let (name, text) = entries.find_map(|entry| match &entry.value {
        BlockedValue::Text(text) if text.contains('*') => Some((&entry.name, text)),
        _ => None,
    })?;
    Some(format!(
        "`*` is literal in a block: only requests whose `{}` is exactly `{}` are blocked; to block a pattern, add a \
         rule with `when: {{{}: \"{}\"}}` and `limits: 0/h`",
        shown(name),
        shown(text),
        shown(name),
        shown(text)
    ))
}

/// Serves `DELETE /v1/entry-blocks/{entry}/{value}…`. The rule does not have to exist.
pub(super) async fn lift(
    auditor: &Auditor<'_>,
    path: &[&str],
    query: Option<&str>,
) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let target = target(path, query)?;
    let removed = limiter.remove_entry_block(&target).await;
    let removed = removed.map_err(change_problem)?;
    let removed = removed.filter(|block| block.is_unexpired(limiter.now()));
    let removed = removed.ok_or_else(none)?;
    let rules = limiter.rules();
    let before = EntryBlockView::new(limiter, &rules).end_and_reason(&removed);
    let change = json!({"before": before, "after": null});
    record(auditor, EventType::BlockLifted, &target, change);
    let mut document = target_document(&target, &KeyMask::plain());
    document["unblocked"] = true.into();
    Ok(json(StatusCode::OK, &document))
}

/// Serialises the block by entries that denies a request, for a document about the request. The
/// values are hashed if `mask` requires it.
pub(super) fn denying(
    limiter: &ServerLimiter,
    target: &EntryBlockTarget,
    block: &EntryBlock,
    mask: &KeyMask,
) -> Value {
    let rules = limiter.rules();
    let view = EntryBlockView::new(limiter, &rules);
    let mut document = target_document(target, mask);
    extend(&mut document, view.end_and_reason(block));
    document["persistent"] = view.is_persistent.into();
    document
}

/// Parses the target in the path and the query of a request.
fn target(path: &[&str], query: Option<&str>) -> Result<EntryBlockTarget, Problem> {
    let query = Query::parse(query, &["rule"], None)?;
    if !path.len().is_multiple_of(2) {
        let problem = "expected /v1/entry-blocks/ENTRY/VALUE, such as /v1/entry-blocks/ip/203.0.113.9, \
                       with a value for each entry and a slash in a value encoded as %2F";
        return Err(Problem::bad("path", problem));
    }
    let pairs: Vec<(&str, &str)> = path
        .chunks_exact(2)
        .map(|pair| (pair[0], pair[1]))
        .collect();
    let target = EntryBlockTarget::new(query.get("rule"), &pairs);
    target.map_err(|error| Problem::bad(&error.field, error.problem))
}

/// Rejects a target that no request can match: the rule does not exist, the listeners do not
/// extract an entry because no rule uses it, or the listeners never produce the value.
fn check(
    limiter: &ServerLimiter,
    rules: &RuleSet,
    target: &EntryBlockTarget,
    spelling: Spelling,
) -> Result<(), Problem> {
    if let Some(rule) = target.rule()
        && rules.rule(rule).is_none()
    {
        return Err(no_rule(rules, rule, &[]));
    }
    for entry in target.entries() {
        let field = format!("entries.{}", shown(&entry.name));
        if !rules.uses_entry(&entry.name) {
            let known: Vec<&str> = rules.entry_names().collect();
            let problem = format!(
                "no rule uses this entry, so a block would deny nothing; {}",
                advice(&entry.name, &known)
            );
            return Err(Problem::bad(&field, problem));
        }
        let text = entry.value.to_string();
        if KeyMask::is_hash(&text) {
            let problem = "is a hash, which lists show in place of the value; use the value itself";
            return Err(Problem::bad(&field, problem));
        }
        if spelling == Spelling::Normalized
            && let Some(problem) = foreign(limiter, &entry.name, &entry.value)
        {
            let advice = "if services send the given form with `raw`, pass --raw (`\"raw\": true`)";
            return Err(Problem::bad(&field, format!("{problem}; {advice}")));
        }
    }
    Ok(())
}

/// Describes a value that the listeners never produce, because they normalise it.
fn foreign(limiter: &ServerLimiter, name: &str, value: &BlockedValue) -> Option<String> {
    let trust = limiter.trust();
    let text = value.to_string();
    match (name, value) {
        ("ip", BlockedValue::Network(net)) => part_of_count(trust, net.addr(), net.prefix_len()),
        (_, BlockedValue::Network(_)) => None,
        ("ip" | "ip.exact", BlockedValue::Text(_)) => Some(format!(
            "\"{}\" is not an IP address or a network",
            shown(&text)
        )),
        (_, BlockedValue::Text(_)) => match trust.normalize(name, &text) {
            Ok(counted) if counted == text => None,
            Ok(counted) => Some(format!(
                "the listeners count this {name} as `{}`; use the normalised form",
                shown(&counted)
            )),
            Err(_) => Some("the listeners reject a request with this value".to_owned()),
        },
    }
}

/// Describes an IPv6 network of the entry `ip` that is a part of a network whose clients share one
/// count. A block of such a part would deny either none of these clients or all of them.
fn part_of_count(trust: &Trust, address: IpAddr, prefix: u8) -> Option<String> {
    let (bits, counted) = (trust.ipv6_prefix(), trust.counted(address));
    // The listeners write a network as its first address.
    let is_counted = prefix == MAX_IPV6_PREFIX && counted == address;
    let is_part = address.is_ipv6() && prefix > bits && !is_counted;
    is_part.then(|| {
        format!(
            "the listeners count all clients in {counted}/{bits} as one `ip`; block {counted}/{bits}, or the \
             entry `ip.exact`"
        )
    })
}

/// Refuses the block `new` if the block `current` lasts longer.
fn refuse_shorter(current: &EntryBlock, new: &EntryBlock) -> Result<(), Problem> {
    let end = |block: &EntryBlock| block.until.unwrap_or(Timestamp::MAX);
    if end(new) >= end(current) {
        return Ok(());
    }
    let lasts = match current.until {
        Some(until) => date(until).map(|date| format!(" until {date}")),
        None => Some(" until the block is lifted".to_owned()),
    };
    let detail = format!(
        "these requests are already blocked{}, which is longer than requested, so nothing was changed; to let the \
         block end earlier, pass --shorten (`\"shorten\": true`)",
        lasts.unwrap_or_default()
    );
    Err(Problem::new(StatusCode::CONFLICT, detail))
}

fn read(members: &Members<'_>, now: Timestamp) -> Result<EntryBlockRequest, Problem> {
    let (mut end, mut reason) = (RequestedEnd::default(), "");
    let mut spelling = Spelling::Normalized;
    let (mut may_shorten, mut may_be_wide) = (false, false);
    for (name, value) in members {
        match (&**name, value) {
            ("for", Json::Text(text)) => end.read_for(text, now)?,
            ("until", Json::Text(text)) => end.read_until(text, now)?,
            ("reason", Json::Text(text)) if text.len() > MAX_REASON_BYTES => {
                let length = text.len();
                let problem = format!("{length} bytes exceed the maximum of {MAX_REASON_BYTES}");
                return Err(Problem::bad("reason", problem));
            }
            ("reason", Json::Text(text)) => reason = text,
            ("raw", Json::Truth(true)) => spelling = Spelling::Raw,
            ("raw", Json::Truth(false)) => spelling = Spelling::Normalized,
            ("shorten", Json::Truth(truth)) => may_shorten = *truth,
            ("wide", Json::Truth(truth)) => may_be_wide = *truth,
            (field @ ("for" | "until" | "reason"), other) => {
                let problem = format!("expected a string, got {other}");
                return Err(Problem::bad(field, problem));
            }
            (field @ ("raw" | "shorten" | "wide"), other) => {
                let problem = format!("expected true or false, got {other}");
                return Err(Problem::bad(field, problem));
            }
            _ => {
                let known = ["for", "until", "reason", "raw", "shorten", "wide"];
                let problem = format!("unknown field; {}", advice(name, &known));
                return Err(Problem::bad(shown(name), problem));
            }
        }
    }
    if end == RequestedEnd::Missing {
        let problem = "is missing; give a duration such as \"1h\", or \"forever\"";
        return Err(Problem::bad("for", problem));
    }
    Ok(EntryBlockRequest {
        new: EntryBlock {
            until: end.until(),
            reason: reason.into(),
        },
        spelling,
        may_shorten,
        may_be_wide,
    })
}

fn none() -> Problem {
    let detail = "there is no block with exactly these entries; `tidegate blocks --search VALUE` finds the blocks \
                  that contain a value or an address";
    Problem::new(StatusCode::NOT_FOUND, detail)
}

fn change_problem(error: ChangeBlockError) -> Problem {
    super::change_problem(error, |error| {
        Problem::new(StatusCode::CONFLICT, error.to_string())
    })
}

/// Sends an event about a change. The values are hashed if the settings require it.
fn record(auditor: &Auditor<'_>, kind: EventType, target: &EntryBlockTarget, change: Value) {
    let mut data = target_document(target, auditor.limiter().key_mask());
    extend(&mut data, change);
    auditor.record(kind, data);
}

fn target_document(target: &EntryBlockTarget, mask: &KeyMask) -> Value {
    let entries = target.entries().iter().map(|entry| {
        let value = entry.value.to_string();
        (entry.name.to_string(), Value::from(mask.value(&value)))
    });
    let entries: Map<String, Value> = entries.collect();
    json!({"rule": target.rule(), "entries": entries})
}

fn extend(document: &mut Value, members: Value) {
    if let (Value::Object(document), Value::Object(members)) = (document, members) {
        document.extend(members);
    }
}

/// The context for serialising blocks.
struct EntryBlockView<'a> {
    rules: &'a RuleSet,
    now: Timestamp,
    is_persistent: bool,
}

impl<'a> EntryBlockView<'a> {
    fn new(limiter: &ServerLimiter, rules: &'a RuleSet) -> Self {
        Self {
            rules,
            now: limiter.now(),
            is_persistent: limiter.are_overrides_persistent(),
        }
    }

    /// Serialises a block. The field `inactive` is present only if no request can match the block
    /// under the active rules.
    fn document(&self, target: &EntryBlockTarget, block: &EntryBlock) -> Value {
        let mut document = target_document(target, &KeyMask::plain());
        extend(&mut document, self.end_and_reason(block));
        document["persistent"] = self.is_persistent.into();
        if let Some(inactive) = inactive_reason(target, self.rules) {
            document["inactive"] = inactive.into();
        }
        document
    }

    fn end_and_reason(&self, block: &EntryBlock) -> Value {
        let mut document = end_document(block.until, self.now);
        document["reason"] = json!(block.reason);
        document
    }
}
