//! `POST /v1/rules/preview`: the changes that another rules file would make.

use std::sync::Arc;

use hyper::{StatusCode, body::Incoming};
use serde_json::{Value, json};
use tidegate_config::MAX_FILE_BYTES;
use tidegate_core::top::{Measure, Period, Tally};
use tidegate_limiter::{ServerLimiter, top::TopQuery};
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use super::{
    super::{http::read_body_up_to, top},
    on_other_thread,
    reload::{MAX_WARNINGS, refused},
};
use crate::reload::{Reloader, RuleChange, RulesDiff, RulesPreview, preview as preview_rules};

/// For at most this number of rules, the requests in the last hour are counted. With Redis, the
/// count for each rule needs the counts of all servers.
const MAX_QUERIES: usize = 20;

/// Returns the changes that the rules file in the body would make. For each rule that would start
/// to deny requests, the response contains the number of requests that this rule would have denied
/// in the last hour.
pub(super) async fn preview(
    limiter: &Arc<ServerLimiter>,
    reloader: Option<&Arc<Reloader>>,
    body: Incoming,
) -> Result<Answer, Problem> {
    let body = read_body_up_to(body, MAX_FILE_BYTES).await?;
    let text = String::from_utf8(body.to_vec());
    let text =
        text.map_err(|_| Problem::bad("body", "is not UTF-8; send the contents of a rules file"))?;
    let (rules, reloader) = (limiter.rules(), reloader.map(Arc::clone));
    // Reading a large file takes some time, and must not block the other connections of this
    // worker.
    let read = on_other_thread(move || preview_rules(&rules, reloader.as_deref(), &text));
    let preview = read
        .await?
        .map_err(|problems| refused("the file cannot be used as the rules file", problems))?;
    let RulesPreview {
        rules,
        diff,
        restart_required,
        warnings,
    } = &preview;
    let RulesDiff {
        added,
        removed,
        changed: changes,
    } = diff;
    let mut changed = Vec::new();
    let mut queries = 0;
    for change in changes {
        let would_deny = if change.begins_to_deny() && queries < MAX_QUERIES {
            queries += 1;
            shadow_denials(limiter, &change.rule).await
        } else {
            None
        };
        changed.push(change_document(change, would_deny));
    }
    let warnings = warnings.iter().take(MAX_WARNINGS).map(ToString::to_string);
    let document = json!({
        "rules": rules,
        "added": added,
        "removed": removed,
        "changed": changed,
        "restart_required": restart_required,
        "warnings": warnings.collect::<Vec<String>>(),
    });
    Ok(json(StatusCode::OK, &document))
}

/// Counts the requests in the last hour to which this rule applied, and how many of these requests
/// the rule would have denied. Returns `None` if top talkers are disabled or the rule has no top
/// talkers.
async fn shadow_denials(limiter: &Arc<ServerLimiter>, rule: &str) -> Option<Tally> {
    let query = TopQuery {
        rule: Some(rule.to_owned()),
        by: Measure::Denied,
        over: Period::Hour,
        count: 1,
    };
    Some(top::answer(limiter, query).await.ok()?.total)
}

fn change_document(change: &RuleChange, would_deny: Option<Tally>) -> Value {
    let mut members = change.document();
    if let Some(tally) = would_deny {
        let tally = json!({"requests": tally.requests, "would_deny": tally.denied});
        members.insert("last_hour".to_owned(), tally);
    }
    Value::Object(members)
}
