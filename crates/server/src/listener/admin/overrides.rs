//! Operations on overrides.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_config::EventType;
use tidegate_core::{
    Limits, Override, OverrideError, OverrideTarget, Overrides, Replacement, Rule, RuleSet,
    Timestamp, bounds::MAX_REASON_BYTES,
};
use tidegate_limiter::{
    ServerLimiter,
    entries::Spelling,
    overrides::{
        ChangeOverrideError, DESCRIPTOR_RULE_PREFIX, ListedOverride, OverridableRule,
        OverrideFilter,
    },
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
    on_other_thread, override_limits,
    path::{KeyTarget, Purpose, no_rule, with_hints},
    query::{Query, invalid_position},
};

/// The maximum of `n`, the number of overrides on a page.
const MAX_ON_PAGE: usize = 1_000;
/// The default of `n`.
const DEFAULT_ON_PAGE: usize = 100;

/// The parsed body of a request to set an override.
struct OverrideRequest {
    new: Override,
    spelling: Spelling,
}

/// Serves `GET /v1/overrides`: lists overrides page by page. The scan for a page visits all
/// overrides, so it runs on another thread.
pub(super) async fn list(
    limiter: &Arc<ServerLimiter>,
    query: Option<&str>,
) -> Result<Answer, Problem> {
    let (limiter, query) = (Arc::clone(limiter), query.map(str::to_owned));
    on_other_thread(move || list_now(&limiter, query.as_deref())).await?
}

fn list_now(limiter: &ServerLimiter, query: Option<&str>) -> Result<Answer, Problem> {
    let query = Query::parse(query, &["rule", "search", "after", "n"], None)?;
    let rules = limiter.rules();
    if let Some(name) = query.get("rule")
        && limiter.overridable_rule(&rules, name).is_none()
        && !has_overrides(limiter, name)
    {
        return Err(no_overridable_rule(&rules, name, &[]));
    }
    let filter = OverrideFilter {
        rule: query.get("rule"),
        search: query.get("search"),
        after: query.get("after"),
        most: query.count(MAX_ON_PAGE, DEFAULT_ON_PAGE)?,
    };
    let page = limiter.list_overrides(&rules, filter);
    let page = page.ok_or_else(invalid_position)?;
    let view = OverrideView::new(limiter);
    let listed = page.overrides.iter();
    let documents: Vec<Value> = listed.map(|listed| view.document(listed)).collect();
    let document = json!({
        "overrides": documents,
        "count": page.count,
        "next": page.next,
    });
    Ok(json(StatusCode::OK, &document))
}

/// Returns whether there are overrides for a rule with this name, which may no longer exist.
fn has_overrides(limiter: &ServerLimiter, rule: &str) -> bool {
    let by_name = limiter.overrides().by_name();
    by_name.iter().any(|(name, _)| **name == *rule)
}

/// Serves `GET /v1/overrides/{rule}/{key}`. The rule does not have to exist.
pub(super) fn show(limiter: &ServerLimiter, target: KeyTarget<'_>) -> Result<Answer, Problem> {
    let rules = limiter.rules();
    let of = OverrideTarget::of(target.key);
    let found = limiter.overrides().get(target.rule, &of);
    let found = found.filter(|found| found.is_unexpired(limiter.now()));
    let Some(found) = found else {
        let rule = find_rule(limiter, &rules, target)?;
        return Err(none(limiter, &rule, target));
    };
    let rule = limiter.overridable_rule(&rules, target.rule);
    let listed = ListedOverride {
        inactive: limiter.inactive_reason(rule.as_deref(), target.rule, &of, &found),
        rule: target.rule.into(),
        target: of,
        found,
    };
    Ok(json(
        StatusCode::OK,
        &OverrideView::new(limiter).document(&listed),
    ))
}

/// Serves `PUT /v1/overrides/{rule}/{key}`.
pub(super) async fn put(
    auditor: &Auditor<'_>,
    target: KeyTarget<'_>,
    body: &[u8],
) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let rules = limiter.rules();
    let rule = find_rule(limiter, &rules, target)?;
    let of = OverrideTarget::of(target.key);
    let now = limiter.now();
    let OverrideRequest { new, spelling } = read(&object(body)?, now)?;
    target.check_count(&rule)?;
    // Envoy's values are not normalised.
    let spelling = match rule.is_of_descriptors() {
        true => Spelling::Raw,
        false => spelling,
    };
    if of.is_pattern() {
        target.check_pattern(&rule, spelling)?;
    } else {
        rule.encode_key(target.key)?;
        target.check(&rule, spelling, Purpose::Override)?;
    }
    let former = applied_replacement(limiter, &rule, &of);
    let replaced = limiter.set_override(&rule, &of, new.clone()).await;
    let replaced = replaced.map_err(change_problem)?;
    let replaced = replaced.filter(|replaced| replaced.is_unexpired(now));
    // Another server may have set the replaced override after `former` was looked up.
    let former = replaced
        .as_ref()
        .map(|replaced| replaced.replacement.clone())
        .or(former);
    let view = OverrideView::new(limiter);
    let mut document = view.document(&ListedOverride {
        rule: rule.name().into(),
        target: of,
        found: new.clone(),
        inactive: None,
    });
    let before = replaced.as_ref().map(|replaced| view.change(replaced));
    if let Some(before) = &before {
        document["replaced"] = before.clone();
    }
    let change = json!({"before": before, "after": view.change(&new)});
    auditor.record_key(EventType::OverrideSet, target, change);
    let lost = (!limiter.are_overrides_persistent()).then(|| {
        "this override is lost when the server restarts: its memory store has no snapshot; set \
         `store.memory.snapshot` to keep overrides and counters"
            .to_owned()
    });
    let hints = [
        fewer_limits(&rule, &new.replacement),
        without_burst(&rule, &new.replacement),
        factor_after_plan(&rule, &new.replacement, former.as_ref()),
        lost,
    ];
    let document = with_hints(document, hints.into_iter().flatten());
    Ok(json(StatusCode::OK, &document))
}

/// Returns the limits of the override that applies to `target` now: its own override or, if it has
/// none, the override of a pattern that covers it.
fn applied_replacement(
    limiter: &ServerLimiter,
    rule: &Rule,
    target: &OverrideTarget,
) -> Option<Replacement> {
    let (overrides, now) = (limiter.overrides().of_rule(rule.name()), limiter.now());
    let own = overrides.get(target);
    if let Some(own) = own.filter(|own| own.is_unexpired(now)) {
        return Some(own.replacement);
    }
    // A pattern that matches the text of `target`, which may be a pattern itself, matches all keys
    // of `target`.
    let values: Vec<&str> = target.values().collect();
    let key = rule.encode_key(&values).ok()?;
    let (_, found) = overrides.find(rule, &key, now)?;
    Some(found.replacement)
}

/// Returns a hint if an override lists fewer limits than its rule has. The override replaces all
/// limits of the rule.
fn fewer_limits(rule: &Rule, replacement: &Replacement) -> Option<String> {
    let Replacement::Limits(limits) = replacement else {
        return None;
    };
    let own = rule.limits();
    (limits.len() < own.len()).then(|| {
        format!(
            "this override replaces all {} limits of the rule ({}) with {}; list every limit that must stay",
            own.len(),
            policies(own),
            limits.join(", ")
        )
    })
}

/// Returns a hint if a limit of an override has no burst or capacity, although the limit of the
/// rule at its position has one. The override does not keep it.
fn without_burst(rule: &Rule, replacement: &Replacement) -> Option<String> {
    let Replacement::Limits(limits) = replacement else {
        return None;
    };
    let own = rule.limits().iter().map(|limit| limit.policy());
    own.zip(limits).find_map(|(own, limit)| {
        let fields = [" burst ", " capacity "].into_iter();
        let mut sizes = fields.filter_map(|field| Some((field, own.split_once(field)?.1)));
        // A limit without a burst has the burst 0.
        let (field, size) =
            sizes.find(|(field, size)| *size != "0" && !limit.contains(field))?;
        Some(format!(
            "`{limit}` does not keep the{field}of the rule's limit `{own}`; to keep it, write `{limit}{field}{size}`"
        ))
    })
}

/// Returns a hint for a factor if an override selected the plan `former` before. The factor does
/// not multiply the limits of that plan.
fn factor_after_plan(
    rule: &Rule,
    replacement: &Replacement,
    former: Option<&Replacement>,
) -> Option<String> {
    let (Replacement::Factor(_), Some(Replacement::Plan(plan))) = (replacement, former) else {
        return None;
    };
    let of_plan = policies(rule.plan(plan).ok()?);
    let own = policies(rule.limits());
    Some(format!(
        "an override selected plan {plan} until now; the factor does not multiply its limits ({of_plan}), but those \
         of the plan that a request names, or else those of the rule ({own}); to raise the limits of plan {plan}, \
         list limits instead of a factor"
    ))
}

/// Returns `limits` in short notation, separated by commas.
fn policies(limits: &Limits) -> String {
    let policies: Vec<&str> = limits.iter().map(|limit| &**limit.policy()).collect();
    policies.join(", ")
}

/// Serves `DELETE /v1/overrides/{rule}/{key}`. The rule does not have to exist.
pub(super) async fn remove(
    auditor: &Auditor<'_>,
    target: KeyTarget<'_>,
) -> Result<Answer, Problem> {
    let limiter = auditor.limiter();
    let rules = limiter.rules();
    let of = OverrideTarget::of(target.key);
    let removed = limiter.remove_override(target.rule, &of).await;
    let removed = removed.map_err(change_problem)?;
    // An override that has ended may still be stored.
    let removed = removed.filter(|removed| removed.is_unexpired(limiter.now()));
    let Some(removed) = removed else {
        let rule = find_rule(limiter, &rules, target)?;
        return Err(none(limiter, &rule, target));
    };
    let before = OverrideView::new(limiter).change(&removed);
    let change = json!({"before": before, "after": null});
    auditor.record_key(EventType::OverrideRemoved, target, change);
    Ok(json(
        StatusCode::OK,
        &json!({"rule": target.rule, "key": target.key, "removed": true}),
    ))
}

/// Serialises the override of a key, for a document that already contains the rule and shows the
/// limits of requests without a plan. Returns `None` if the key has no override.
pub(super) fn of_key(
    limiter: &ServerLimiter,
    rules: &RuleSet,
    rule: &Rule,
    key: &[u8],
) -> Option<Value> {
    let (target, found) = rules.overrides(rule)?.find(rule, key, limiter.now())?;
    let inactive = Overrides::check_active(rule, None, &found.replacement).err();
    let inactive = inactive.map(|error| error.to_string());
    Some(document(limiter, &target, &found, inactive.as_deref()))
}

/// Serialises the override of a key, for a document that already contains the rule, the key and the
/// limits that apply. `inactive` is the reason why these are not the limits of the override.
pub(super) fn document(
    limiter: &ServerLimiter,
    target: &OverrideTarget,
    found: &Override,
    inactive: Option<&str>,
) -> Value {
    let mut document = OverrideView::new(limiter).change(found);
    if let Some(inactive) = inactive {
        document["inactive"] = inactive.into();
    }
    if target.is_pattern() {
        document["pattern"] = target.values().collect();
    }
    document
}

fn find_rule<'r>(
    limiter: &ServerLimiter,
    rules: &'r RuleSet,
    target: KeyTarget<'_>,
) -> Result<OverridableRule<'r>, Problem> {
    let rule = limiter.overridable_rule(rules, target.rule);
    rule.ok_or_else(|| no_overridable_rule(rules, target.rule, target.key))
}

/// Reports that neither the rules file nor Envoy's rate limit service has a rule with this name.
fn no_overridable_rule(rules: &RuleSet, name: &str, key: &[&str]) -> Problem {
    match name.starts_with(DESCRIPTOR_RULE_PREFIX) {
        true => no_descriptor_rule(name),
        false => no_rule(rules, name, key),
    }
}

fn no_descriptor_rule(name: &str) -> Problem {
    let detail = format!(
        "Envoy's rate limit service has no rule \"{}\" with a limit; the name is envoy:DOMAIN/LEVEL.LEVEL…, in \
         which a level is a key or KEY_VALUE, such as envoy:shop/api_key",
        shown(name)
    );
    Problem::new(StatusCode::NOT_FOUND, detail)
}

/// Builds the 404 response for a key or a pattern that has no override of its own.
fn none(limiter: &ServerLimiter, rule: &Rule, target: KeyTarget<'_>) -> Problem {
    if let Err(problem) = target.check_count(rule) {
        return problem;
    }
    let applied = rule.encode_key(target.key).ok();
    let applied = applied.and_then(|key| {
        let overrides = limiter.overrides().of_rule(rule.name());
        overrides.find(rule, &key, limiter.now())
    });
    match applied {
        Some((pattern, _)) => {
            let pattern = pattern.values().collect::<Vec<_>>().join(" ");
            let detail = format!(
                "this key has no override of its own; the override of the pattern `{}` applies to it",
                shown(&pattern)
            );
            Problem::new(StatusCode::NOT_FOUND, detail)
        }
        None => target.nothing("this key has no override", rule),
    }
}

fn change_problem(error: ChangeOverrideError) -> Problem {
    super::change_problem(error, |error| match error {
        OverrideError::Invalid(error) => Problem::bad(&error.field, error.problem),
        error => Problem::new(StatusCode::CONFLICT, error.to_string()),
    })
}

/// The context for serialising overrides.
struct OverrideView {
    now: Timestamp,
    is_persistent: bool,
}

impl OverrideView {
    fn new(limiter: &ServerLimiter) -> Self {
        Self {
            now: limiter.now(),
            is_persistent: limiter.are_overrides_persistent(),
        }
    }

    /// Serialises an override. The field `inactive` is present only if the limits of the plan or of
    /// the rule apply instead of the override.
    fn document(&self, listed: &ListedOverride) -> Value {
        let mut document = self.change(&listed.found);
        document["rule"] = json!(listed.rule);
        document["key"] = listed.target.values().collect();
        document["is_pattern"] = listed.target.is_pattern().into();
        document["persistent"] = self.is_persistent.into();
        if let Some(inactive) = &listed.inactive {
            document["inactive"] = json!(inactive);
        }
        document
    }

    /// Serialises the content of an override: its limits, its end and its reason.
    fn change(&self, found: &Override) -> Value {
        let mut document = end_document(found.until, self.now);
        let (field, value) = match &found.replacement {
            Replacement::Limits(limits) => ("limits", json!(limits)),
            Replacement::Factor(factor) => ("factor", factor.to_string().into()),
            Replacement::Plan(plan) => ("plan", json!(plan)),
        };
        document[field] = value;
        document["reason"] = json!(found.reason);
        document
    }
}

fn read(members: &Members<'_>, now: Timestamp) -> Result<OverrideRequest, Problem> {
    let (mut replacement, mut end, mut reason) = (None, RequestedEnd::default(), "");
    let mut spelling = Spelling::Normalized;
    let mut set = |new: Replacement| match replacement.replace(new) {
        None => Ok(()),
        Some(_) => Err(Problem::bad(
            "plan",
            "cannot be combined with `limits`; give only one of them",
        )),
    };
    for (name, value) in members {
        match (&**name, value) {
            ("limits", value) => set(override_limits::read(value)?)?,
            ("plan", Json::Text(plan)) => set(Replacement::Plan((**plan).into()))?,
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
            ("raw", other) => {
                return Err(Problem::bad(
                    "raw",
                    format!("expected true or false, got {other}"),
                ));
            }
            (field @ ("plan" | "for" | "until" | "reason"), other) => {
                return Err(Problem::bad(
                    field,
                    format!("expected a string, got {other}"),
                ));
            }
            ("factor", _) => {
                let problem =
                    "unknown field; give the factor as `limits`, such as \"limits\": \"2x\"";
                return Err(Problem::bad("factor", problem));
            }
            _ => {
                let known = ["limits", "plan", "for", "until", "reason", "raw"];
                let problem = format!("unknown field; {}", advice(name, &known));
                return Err(Problem::bad(shown(name), problem));
            }
        }
    }
    let Some(replacement) = replacement else {
        let problem = "is missing; give limits such as [\"200/min\"] or \"2x\", or a plan";
        return Err(Problem::bad("limits", problem));
    };
    Ok(OverrideRequest {
        new: Override {
            replacement,
            until: end.until(),
            reason: reason.into(),
        },
        spelling,
    })
}
