//! `POST /v1/explain`: how a request would be decided, and why.

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use tidegate_core::{EntryBlock, EntryBlockTarget, Request, Rule, RuleSet, Source};
use tidegate_limiter::{
    ExplainError, ExplainedCharge, Explanation, ServerLimiter,
    entries::{normalize, rewritten},
};
use tidegate_net::{
    Problem,
    input::{nearest, shown},
    json::object,
    response::{Answer, json},
};

use super::{
    super::http::{CheckRequest, millis, read_check},
    blocks,
    denials::masked,
    entry_blocks, keys, overrides,
    path::{no_rule, with_hints},
    query::Query,
    store_problem,
};

/// The maximum of `n`, the number of listed rules that do not apply.
const MAX_OTHERS: usize = 1_000;

pub(super) async fn explain(
    limiter: &ServerLimiter,
    query: Option<&str>,
    body: &[u8],
) -> Result<Answer, Problem> {
    let query = Query::parse(query, &["rule", "n"], None)?;
    let others = query.count(MAX_OTHERS, MAX_OTHERS)?;
    let members = object(body)?;
    let CheckRequest {
        entries,
        cost,
        spelling,
    } = read_check(&members)?;
    Request::new(&entries, cost)?;
    let rules = limiter.rules();
    let only = query.get("rule");
    if let Some(name) = only
        && rules.rule(name).is_none()
    {
        return Err(no_rule(&rules, name, &[]));
    }
    let replaced = normalize(limiter.trust(), &rules, spelling, &entries)?;
    let entries = rewritten(&entries, &replaced);
    let request = Request::new(&entries, cost)?;
    let explained = limiter.explain(&rules, &request).await;
    let explanation = explained.map_err(|error| match error {
        ExplainError::Request(error) => Problem::from(error),
        ExplainError::Store(error) => store_problem(error),
    })?;
    let view = ExplanationView {
        limiter,
        rules: &rules,
        request: &request,
        explanation: &explanation,
    };
    let hints = [
        unknown_entries(&request, &rules),
        unknown_plans(&request, &explanation),
    ];
    let document = with_hints(view.document(only, others), hints.into_iter().flatten());
    Ok(json(StatusCode::OK, &document))
}

/// Returns a hint about each entry that names a plan, if none of the rules that apply has this
/// plan. The rules' own limits then apply.
fn unknown_plans(request: &Request<'_>, explanation: &Explanation<'_>) -> Option<String> {
    let rules = || explanation.charges.iter().map(|charge| charge.rule);
    let unknown = request.entries().iter().filter_map(|(entry, plan)| {
        let of_entry = || rules().filter(|rule| rule.plan_entry() == Some(*entry));
        if of_entry().any(|rule| rule.plan(plan).is_ok()) {
            return None;
        }
        let problem = of_entry().next()?.plan(plan).err()?.problem;
        Some(format!(
            "{entry} names the plan `{}`: {problem}",
            shown(plan)
        ))
    });
    let unknown: Vec<String> = unknown.collect();
    (!unknown.is_empty()).then(|| unknown.join("; "))
}

/// Returns a hint about the entries that no rule uses. The hint suggests similar names that the
/// operator may have meant.
fn unknown_entries(request: &Request<'_>, rules: &RuleSet) -> Option<String> {
    let known: Vec<&str> = rules.entry_names().collect();
    let unknown = request.entries().iter().map(|(name, _)| *name);
    let unknown = unknown.filter(|name| !rules.uses_entry(name));
    let meant = unknown.filter_map(|name| {
        let nearest = nearest(name, &known)?;
        let (name, nearest) = (shown(name), shown(nearest));
        Some(format!(
            "no rule uses the entry {name}; did you mean {nearest}?"
        ))
    });
    let meant: Vec<String> = meant.collect();
    (!meant.is_empty()).then(|| meant.join(" "))
}

/// The context for serialising an explanation.
struct ExplanationView<'a> {
    limiter: &'a ServerLimiter,
    rules: &'a RuleSet,
    request: &'a Request<'a>,
    explanation: &'a Explanation<'a>,
}

impl ExplanationView<'_> {
    /// Serialises the explanation. Lists every rule that applies, and up to `most` rules that do
    /// not apply. If `only` is given, lists only the rule with that name.
    fn document(&self, only: Option<&str>, most: usize) -> Value {
        let (mut rows, mut others, mut omitted) = (Vec::new(), 0, 0_u64);
        let is_listed = |rule: &&Rule| only.is_none_or(|only| only == rule.name());
        // The charges are in the order of the rules.
        let mut charges = self.explanation.charges.iter().peekable();
        for rule in self.rules.iter() {
            let charge = charges.next_if(|charge| charge.rule.name() == rule.name());
            if !is_listed(&rule) {
                continue;
            }
            match charge {
                Some(charge) => rows.push(self.applied(charge)),
                None if others == most => omitted += 1,
                None => {
                    others += 1;
                    rows.push(self.not_applied(rule));
                }
            }
        }
        let explanation = self.explanation;
        let entries = self.request.entries().iter();
        let entries: Map<String, Value> = entries
            .map(|(name, value)| ((*name).to_owned(), (*value).into()))
            .collect();
        let mut document = json!({
            "allowed": explanation.allowed,
            "retry_after_ms": millis(explanation.retry_after),
            "exactness": explanation.exactness.as_str(),
            "entries": entries,
            "rules": rows,
        });
        if let Some(reason) = explanation.reason {
            document["reason"] = reason.as_str().into();
        }
        // The field is omitted for the memory store, which is the default source.
        if explanation.source != Source::Memory {
            document["source"] = explanation.source.as_str().into();
        }
        if let Some((target, block)) = &explanation.entry_block {
            document["block"] = self.entry_block(target, block);
        }
        if let Some(when) = explanation.allowed_by {
            document["allowed_by"] = when.to_string().into();
        }
        if omitted > 0 {
            document["omitted"] = omitted.into();
        }
        document
    }

    fn applied(&self, charge: &ExplainedCharge<'_>) -> Value {
        let now = self.explanation.block_now;
        let policies = charge.policies.iter().map(|policy| &**policy);
        let until = match (&charge.block, &charge.entry_block) {
            (Some(block), _) => Some(block.until),
            (None, Some((_, block))) => Some(block.until),
            (None, None) => None,
        };
        let blocked_for = until.map(|until| keys::blocked_for(until, now));
        let limits = keys::limit_documents(policies, &charge.current, &charge.next, blocked_for);
        let mut document = json!({
            "rule": charge.rule.name(),
            "applies": true,
            "mode": charge.rule.mode().as_str(),
            "key": masked(&charge.key, self.limiter.key_mask()),
            "cost": charge.cost.units(),
            "allowed": charge.allowed,
            "retry_after_ms": millis(charge.retry_after),
            "limits": limits,
        });
        if let Some(reason) = charge.reason {
            document["reason"] = reason.as_str().into();
        }
        if let Some(block) = &charge.block {
            let block = blocks::document_without_key(self.limiter, self.rules, block, now);
            document["block"] = block;
        } else if let Some((target, block)) = &charge.entry_block {
            document["block"] = self.entry_block(target, block);
        }
        if charge.is_stretched {
            document["elastic"] = true.into();
        }
        if let Some(plan) = charge.plan {
            document["plan"] = plan.into();
        }
        if let Some((target, found)) = &charge.overridden {
            let inactive = charge.inactive_override.as_deref();
            document["override"] = overrides::document(self.limiter, target, found, inactive);
        }
        if charge.source == Source::Policy {
            document["because"] =
                "Redis is unreachable, so the `on_failure` policy decides instead of the limits"
                    .into();
        }
        document
    }

    fn entry_block(&self, target: &EntryBlockTarget, block: &EntryBlock) -> Value {
        entry_blocks::denying(self.limiter, target, block, self.limiter.key_mask())
    }

    fn not_applied(&self, rule: &Rule) -> Value {
        let explanation = self.explanation;
        let failed = rule.failed_condition(self.request, explanation.now);
        let because = match (failed, explanation.allowed_by) {
            (Some(failed), _) => failed.to_string(),
            (None, Some(when)) => format!("the request matches the allow list: {when}"),
            // This case cannot occur. The decision was made with the same rules at the same time,
            // so either a condition failed or the allow list matched.
            (None, None) => "it does not apply".to_owned(),
        };
        json!({"rule": rule.name(), "applies": false, "because": because})
    }
}
