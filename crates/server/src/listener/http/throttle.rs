//! Serves `POST /v1/throttle`, whose requests contain the limit.

use std::{cell::RefCell, sync::Arc};

use tidegate::rate_limiter::SlotTurn;
use tidegate_core::{
    AlgorithmName, Charge, Cost, Effect, LimitSpec, Limits, Outcome,
    bounds::{MAX_LIMITS_PER_RULE, MAX_SLOT_WAIT},
};
use tidegate_limiter::{BuildCache, DecisionRequest, ThrottledRequest, metrics::ListenerKind};
use tidegate_net::{
    Problem,
    json::{self, Json, Members},
    response::Answer,
};

use super::{
    HttpConnectionContext,
    build_limits::build_limits,
    fields::{Field, FieldLocation},
    limit_fields::{is_field, listed, set, unknown},
    status,
    template_cache::{TemplateCache, ThrottleParameters},
};

/// The request fields that are not fields of a limit.
const OWN_NAMES: [&str; 4] = ["key", "cost", "peek", "limits"];

/// The maximum number of parsed limits that each worker caches. Callers rarely use more than a few
/// limits.
const CACHED_LIMITS: usize = 64;

thread_local! {
    /// Buffers and caches that this worker's requests share.
    static BUFFERS: RefCell<ThrottleBuffers> = RefCell::default();
    static TEMPLATES: RefCell<TemplateCache> = RefCell::default();
    static LIMITS: RefCell<BuildCache<Vec<LimitSpec>, Arc<Limits>>> =
        RefCell::new(BuildCache::new(CACHED_LIMITS));
}

#[derive(Debug, Default)]
struct ThrottleBuffers {
    key: Vec<u8>,
    outcomes: Vec<Outcome>,
}

/// The parsed request body.
#[derive(Debug)]
struct ThrottleRequest<'j> {
    key: &'j str,
    cost: Cost,
    effect: Effect,
    specs: Vec<LimitSpec>,
    /// Maps an index in `specs` to its location in the request.
    location: fn(usize) -> FieldLocation,
}

pub(super) async fn throttle(
    context: &HttpConnectionContext,
    body: &[u8],
) -> Result<Answer, Problem> {
    let mut members = Members::new();
    let (key, parameters) = match cached(body) {
        Some(cached) => cached,
        None => parse_and_cache(body, &mut members)?,
    };
    // If a suspended decision is using the buffers, fresh buffers are allocated.
    let mut buffers = BUFFERS.take();
    let answered = answer(context, key, &parameters, &mut buffers).await;
    BUFFERS.set(buffers);
    answered
}

/// Returns the key and the parsed request for `body`, if `body` matches an entry of the template
/// cache.
fn cached(body: &[u8]) -> Option<(&str, ThrottleParameters)> {
    TEMPLATES.with_borrow(|cache| {
        let (key, parameters) = cache.find(body)?;
        Some((key, parameters.clone()))
    })
}

/// Parses `body` into `members`, from which the returned key may borrow, and caches the result.
fn parse_and_cache<'b>(
    body: &'b [u8],
    members: &'b mut Members<'b>,
) -> Result<(&'b str, ThrottleParameters), Problem> {
    *members = json::object(body)?;
    let ThrottleRequest {
        key,
        cost,
        effect,
        specs,
        location,
    } = read(members)?;
    let limits = LIMITS.with_borrow_mut(|cache| {
        let limits = cache.get_or_build(specs, |specs| build_limits(specs, location).map(Arc::new));
        limits.cloned()
    })?;
    let parameters = ThrottleParameters {
        cost,
        effect,
        limits,
    };
    TEMPLATES.with_borrow_mut(|cache| cache.insert(body, key, &parameters));
    Ok((key, parameters))
}

async fn answer(
    context: &HttpConnectionContext,
    key: &str,
    parameters: &ThrottleParameters,
    buffers: &mut ThrottleBuffers,
) -> Result<Answer, Problem> {
    let key = tidegate_limiter::throttle_key(key.as_bytes(), &mut buffers.key)?;
    let charge = Charge::new(key, &parameters.limits, parameters.cost)?;
    let now = context.limiter.now();
    let request = DecisionRequest {
        charges: &[charge],
        now,
        effect: parameters.effect,
        within: None,
    };
    let mut now = now;
    let decided = if parameters.effect == Effect::Charge && parameters.limits.has_slot_wait() {
        let (limiter, mut charges) = (&*context.limiter, vec![charge]);
        let turn = SlotTurn::new(Effect::Charge, MAX_SLOT_WAIT);
        let outcomes = &mut buffers.outcomes;
        let decision = turn.decide(limiter, &mut charges, outcomes);
        let turn = Box::pin(context.wait_for(decision, || false)).await?;
        now = limiter.now();
        turn.decision
    } else {
        let decision = context.limiter.decide(request, &mut buffers.outcomes);
        decision.boxed().await
    };
    if parameters.effect == Effect::Charge {
        let throttled = ThrottledRequest {
            charge: &charge,
            outcomes: &buffers.outcomes,
            now,
        };
        context
            .limiter
            .observe_throttle(ListenerKind::Http, throttled, &decided);
    }
    let verdict = decided.verdict(&[charge], &buffers.outcomes);
    Ok(context.verdict(status(&verdict), &verdict, now))
}

/// Parses a body, or reports all errors in it.
fn read<'j>(members: &'j Members<'_>) -> Result<ThrottleRequest<'j>, Problem> {
    let mut problems = Vec::new();
    let (mut key, mut cost, mut effect) = (None, Some(Cost::ONE), Some(Effect::Charge));
    let (mut list, mut beside) = (None, Vec::new());
    let mut spec = LimitSpec::default();
    for (name, value) in members {
        let field = Field {
            location: FieldLocation::Body,
            name,
            value,
        };
        match (&**name, value) {
            ("key", _) => key = field.text("a string, the key to count by", &mut problems),
            (_, Json::Null) => {}
            ("cost", _) => cost = field.cost(&mut problems),
            ("peek", _) => effect = read_peek(field, &mut problems),
            ("limits", _) => list = Some(field),
            ("algorithm", _) => drop(set(&mut spec, field, &mut problems)),
            _ if set(&mut spec, field, &mut problems) => beside.push(field),
            _ => unknown(field, &OWN_NAMES, &mut problems),
        }
    }
    if !members.iter().any(|(name, _)| name == "key") {
        problems.push(Problem::bad("key", "is missing; give the key to count by"));
    }
    let has_limit_fields = members.iter().any(|(name, _)| is_field(name));
    let location: fn(usize) -> FieldLocation = if list.is_some() {
        FieldLocation::Limit
    } else {
        |_| FieldLocation::Body
    };
    let specs = match list {
        Some(list) => specs_of(list, &beside, &spec, &mut problems),
        None if has_limit_fields => vec![spec],
        None => {
            let problem =
                "is missing; give limits such as [\"20/min\"], or an algorithm with its parameters";
            problems.push(Problem::bad("limits", problem));
            Vec::new()
        }
    };
    match (key, cost, effect, problems.is_empty()) {
        (Some(key), Some(cost), Some(effect), true) => Ok(ThrottleRequest {
            key,
            cost,
            effect,
            specs,
            location,
        }),
        _ => Err(Problem::several(problems)),
    }
}

fn read_peek(field: Field<'_, '_>, problems: &mut Vec<Problem>) -> Option<Effect> {
    let peek = field.truth(problems)?;
    Some(if peek { Effect::Peek } else { Effect::Charge })
}

/// Parses the limits in `list`. `beside` contains the limit fields that the body has next to
/// `limits`. The field `algorithm` sets the default algorithm of the limits in `list`. Every other
/// field in `beside` is reported as an error.
fn specs_of(
    list: Field<'_, '_>,
    beside: &[Field<'_, '_>],
    spec: &LimitSpec,
    problems: &mut Vec<Problem>,
) -> Vec<LimitSpec> {
    for field in beside {
        let problem = "is outside `limits`; move this field into one of the limits";
        field.wrong::<()>(problem, problems);
    }
    read_list(list, spec.algorithm, problems)
}

fn read_list(
    list: Field<'_, '_>,
    algorithm: Option<AlgorithmName>,
    problems: &mut Vec<Problem>,
) -> Vec<LimitSpec> {
    let Json::List(limits) = list.value else {
        let _: Option<()> =
            list.expected("a list of limits such as [\"1/s\", \"20/min\"]", problems);
        return Vec::new();
    };
    if limits.len() > MAX_LIMITS_PER_RULE {
        let problem = format!(
            "{} limits exceed the maximum of {MAX_LIMITS_PER_RULE}",
            limits.len()
        );
        problems.push(Problem::bad("limits", problem));
        return Vec::new();
    }
    let limits = limits.iter().enumerate();
    limits
        .filter_map(|(index, limit)| listed(index, limit, algorithm, problems))
        .collect()
}
