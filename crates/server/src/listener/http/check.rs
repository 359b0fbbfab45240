//! Serves `POST /v1/check` and `POST /v1/peek`.

use std::{cell::Cell, sync::Arc};

use tidegate::RateLimiter as _;
use tidegate_core::{
    Cost, Effect, MaybeReady, Request, RuleSet, Scratch, Span, Verdict,
    bounds::{MAX_ENTRIES, MAX_SLOT_WAIT},
};
use tidegate_limiter::{
    entries::{Spelling, normalize, rewritten},
    with_scratch,
};
use tidegate_net::{
    Problem,
    input::{advice, shown},
    json::{self, Json, Members},
    response::Answer,
};

use super::{
    HttpConnectionContext,
    fields::{Field, FieldLocation},
    status,
};

/// The parsed request body.
#[derive(Debug)]
pub(crate) struct CheckRequest<'j> {
    pub(crate) entries: Vec<(&'j str, &'j str)>,
    pub(crate) cost: Cost,
    pub(crate) spelling: Spelling,
}

pub(super) async fn check(
    context: &HttpConnectionContext,
    body: &[u8],
    effect: Effect,
) -> Result<Answer, Problem> {
    let members = json::object(body)?;
    let wait = Cell::new(Span::ZERO);
    let check = match effect {
        Effect::Charge => {
            let known = &["entries", "cost", "raw", "wait_ms"];
            read_with(&members, known, |field, problems| {
                wait.set(longest_wait(field, problems).unwrap_or(Span::ZERO));
            })?
        }
        _ => read(&members)?,
    };
    with_request(context, check, async |rules, request, scratch| {
        let limiter = &context.limiter;
        if wait.get() > Span::ZERO {
            let finish = |rules: &Arc<RuleSet>, verdict: &Verdict<'_>| {
                let now = limiter.now();
                context.observe(rules, request, verdict, now);
                context.verdict(status(verdict), verdict, now)
            };
            let decision = limiter.check_within(rules, scratch, request, wait.get(), finish);
            // A request rarely waits, and the future is large, so it is boxed.
            return Ok(Box::pin(context.wait_for(decision, || false)).await??);
        }
        let now = limiter.now();
        let decision = limiter.check(rules, scratch, request, effect);
        // An `.await` of a ready verdict would move it several times.
        let verdict = match decision.boxed() {
            MaybeReady::Ready(verdict) => verdict?,
            MaybeReady::Pending(verdict) => verdict.await?,
        };
        if effect == Effect::Charge {
            context.observe(rules, request, &verdict, now);
        }
        Ok(context.verdict(status(&verdict), &verdict, now))
    })
    .await
}

/// Normalises the request entries in `check`, and calls `decide` with the resulting request.
pub(super) async fn with_request<T>(
    context: &HttpConnectionContext,
    check: CheckRequest<'_>,
    decide: impl AsyncFnOnce(&Arc<RuleSet>, &Request<'_>, &mut Scratch) -> Result<T, Problem>,
) -> Result<T, Problem> {
    let CheckRequest {
        entries,
        cost,
        spelling,
    } = check;
    let original = Request::new(&entries, cost)?;
    let rules = context.limiter.rules();
    let replaced = normalize(context.limiter.trust(), &rules, spelling, &entries)?;
    let normalized;
    let request = if replaced.is_empty() {
        original
    } else {
        normalized = rewritten(&entries, &replaced);
        Request::new(&normalized, cost)?
    };
    with_scratch(async |scratch| decide(&rules, &request, scratch).await).await
}

/// Parses a body, or reports all errors in it.
pub(crate) fn read<'j>(members: &'j Members<'_>) -> Result<CheckRequest<'j>, Problem> {
    read_with(members, &["entries", "cost", "raw"], |_, _| {})
}

/// Parses a body that may contain the `known` fields, or reports all errors in it. `read_field`
/// reads the fields that a check does not have.
pub(super) fn read_with<'j>(
    members: &'j Members<'_>,
    known: &[&str],
    mut read_field: impl FnMut(Field<'j, '_>, &mut Vec<Problem>),
) -> Result<CheckRequest<'j>, Problem> {
    let mut problems = Vec::new();
    let (mut entries, mut cost, mut spelling) = (None, Cost::ONE, Spelling::default());
    for (name, value) in members {
        let field = Field {
            location: FieldLocation::Body,
            name,
            value,
        };
        match &**name {
            "entries" => entries = read_entries(field, &mut problems),
            "cost" => cost = field.cost(&mut problems).unwrap_or(cost),
            "raw" => {
                if field.truth(&mut problems) == Some(true) {
                    spelling = Spelling::Raw;
                }
            }
            name if known.contains(&name) => read_field(field, &mut problems),
            _ => {
                let problem = format!("unknown field; {}", advice(name, known));
                problems.push(Problem::bad(shown(name), problem));
            }
        }
    }
    if !members.iter().any(|(name, _)| name == "entries") {
        problems.push(Problem::bad(
            "entries",
            "is missing; it describes the request, such as {\"ip\": \"203.0.113.9\"}",
        ));
    }
    match (entries, problems.is_empty()) {
        (Some(entries), true) => Ok(CheckRequest {
            entries,
            cost,
            spelling,
        }),
        _ => Err(Problem::several(problems)),
    }
}

/// Reads `wait_ms`, the longest time that the request may wait for a concurrency slot.
pub(super) fn longest_wait(field: Field<'_, '_>, problems: &mut Vec<Problem>) -> Option<Span> {
    let millis = field.number(problems)?;
    let max = MAX_SLOT_WAIT.as_millis_ceil();
    if millis > max {
        return field.wrong(format!("{millis} exceeds the maximum of {max}"), problems);
    }
    Some(Span::from_millis(millis))
}

/// Reads the entries. A body with too many entries is rejected before its entries are validated.
fn read_entries<'j>(
    field: Field<'j, '_>,
    problems: &mut Vec<Problem>,
) -> Option<Vec<(&'j str, &'j str)>> {
    let Json::Object(members) = field.value else {
        return field.expected("an object of names and strings", problems);
    };
    if members.len() > MAX_ENTRIES {
        let problem = format!(
            "{} entries exceed the maximum of {MAX_ENTRIES}",
            members.len()
        );
        return field.wrong(problem, problems);
    }
    let mut entries = Vec::with_capacity(members.len());
    for (name, value) in members {
        match value {
            Json::Text(text) => entries.push((&**name, &**text)),
            other => {
                let problem = format!("expected a string, got {other}");
                problems.push(Problem::bad(format!("entries.{}", shown(name)), problem));
            }
        }
    }
    Some(entries)
}
