//! `GET /v1/denials`: recently denied requests.

use std::{cmp::Reverse, sync::Arc};

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use tidegate_core::{Rule, RuleSet, Timestamp};
use tidegate_identity::Trust;
use tidegate_limiter::{
    KeyMask, ServerLimiter,
    date::date,
    denials::{DenialFilter, DenialList, DenialRecord, OtherDenials},
};
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use super::{
    super::{http::millis, top},
    on_other_thread,
    path::{KeyTarget, no_rule},
    query::Query,
};

/// The maximum of `n`, the number of rows.
const MAX_ROWS: usize = 1_000;
/// The default of `n`.
const DEFAULT_ROWS: usize = 100;

/// The filter in the request, which determines which denials are listed.
#[derive(Clone, Debug)]
struct DenialQuery {
    rule: Option<String>,
    key: Vec<String>,
    since: Timestamp,
    most: usize,
}

impl DenialQuery {
    fn key(&self) -> Vec<&str> {
        self.key.iter().map(String::as_str).collect()
    }

    fn filter<'s>(&'s self, key: &'s [&'s str]) -> DenialFilter<'s> {
        DenialFilter {
            rule: self.rule.as_deref(),
            key,
            since: self.since,
        }
    }
}

pub(super) async fn list(
    limiter: &Arc<ServerLimiter>,
    query: Option<&str>,
    trust: &Trust,
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
    let wanted = DenialQuery {
        rule: name.map(str::to_owned),
        key,
        since,
        most,
    };
    let shutting_down = |failure: top::TopFailure| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, failure.to_string())
    };
    // Reading other servers' denials takes megabytes of memory and several Redis calls. Therefore
    // the number of concurrent reads is limited, as for top talkers.
    let _permit = top::acquire_permit().await.map_err(shutting_down)?;
    let own = own_denials(limiter, wanted.clone()).await?;
    let key = wanted.key();
    let mut filter = wanted.filter(&key);
    // If this server alone has enough denials to fill the list, `merge` would drop all older
    // denials of other servers, so do not read those denials.
    if own.denials.len() >= most
        && let Some(oldest) = own.denials.last()
    {
        filter.since = filter.since.max(oldest.at);
    }
    let others = top::with_timeout(limiter.denials_of_others(&filter, most)).await;
    let others = others.unwrap_or_else(OtherDenials::unknown);
    let listed = merge(own, others.list, most);
    // If a rule no longer exists, the list still contains its denials until newer denials overwrite
    // them.
    match name {
        Some(name) if rule.is_none() && listed.denials.is_empty() => {
            Err(no_rule(&rules, name, &[]))
        }
        _ => {
            let mut document = document(limiter, &listed, others.problem.as_deref());
            if listed.denials.is_empty()
                && let Some(hint) = key_hint(&rules, name, &key, trust)
            {
                document["hint"] = hint.into();
            }
            Ok(json(StatusCode::OK, &document))
        }
    }
}

/// Checks that the request contains one value for each key entry of the rule.
fn check_key(rule: &Rule, key: &[String]) -> Result<(), Problem> {
    let entries = rule.key().len();
    if key.is_empty() || key.len() == entries {
        return Ok(());
    }
    let advice = match entries {
        0 => "omit `key`",
        _ => "repeat `key` for each value, in this order",
    };
    let problem = format!("{}, got {}; {advice}", rule.key_description(), key.len());
    Err(Problem::bad("key", problem))
}

/// Returns a hint if the key cannot occur in any denial, for example because the listeners
/// normalise an address to another form.
fn key_hint(rules: &RuleSet, name: Option<&str>, key: &[&str], trust: &Trust) -> Option<String> {
    if key.iter().any(|value| KeyMask::is_hash(value)) {
        return Some("`key` takes the value itself, and not its hash".to_owned());
    }
    let target = |rule| KeyTarget { rule, key, trust };
    if let Some(rule) = name.and_then(|name| rules.rule(name)) {
        return target(rule.name()).lookup_hint(rule);
    }
    // If no rule is given, the values can belong to any rule that has as many key entries as there
    // are values.
    let possible = rules.iter().filter(|rule| rule.key().len() == key.len());
    possible
        .filter_map(|rule| target(rule.name()).normalized_form_hint(rule))
        .next()
}

/// Lists the selected denials of this server, with hashed values if `privacy` requires it.
async fn own_denials(
    limiter: &Arc<ServerLimiter>,
    wanted: DenialQuery,
) -> Result<DenialList, Problem> {
    let limiter = Arc::clone(limiter);
    // Searching a full list takes milliseconds. On this thread, the search would delay the
    // decisions of the worker.
    let listed = on_other_thread(move || {
        let key = wanted.key();
        let filter = wanted.filter(&key);
        let mut list = limiter.denials().list(&filter, wanted.most);
        let denials = list.denials.into_iter();
        list.denials = denials
            .map(|denial| denial.masked(limiter.key_mask()))
            .collect();
        list
    });
    listed.await
}

/// Returns the newest denials of both lists, up to `most`.
fn merge(own: DenialList, others: DenialList, most: usize) -> DenialList {
    let mut denials = own.denials;
    denials.extend(others.denials);
    denials.sort_by_key(|denial| Reverse(denial.at));
    denials.truncate(most);
    DenialList {
        denials,
        lost: own.lost.saturating_add(others.lost),
    }
}

fn document(limiter: &ServerLimiter, list: &DenialList, problem: Option<&str>) -> Value {
    let rows: Vec<Value> = list.denials.iter().map(row).collect();
    let mut document = json!({"rows": rows, "lost": list.lost});
    if !limiter.denials().is_kept() {
        document["hint"] =
            "denials are not kept; remove `denials: off` from the rules file, and restart the server".into();
    } else if let Some(problem) = problem {
        document["hint"] = format!("denials of other servers are missing: {problem}").into();
    }
    document
}

fn row(denial: &DenialRecord) -> Value {
    let entries = denial.entries.iter();
    let entries: Map<String, Value> = entries
        .map(|(name, value)| (name.clone(), value.as_str().into()))
        .collect();
    json!({
        "at": date(denial.at),
        "at_ms": denial.at.as_micros() / 1_000,
        "rule": denial.rule,
        "key": denial.key,
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
