//! `POST /v1/throttle`: the limit is sent with the request.

use std::cell::RefCell;

use tidegate_core::{
    AlgorithmName, Charge, Cost, Effect, LimitSpec, Outcome, bounds::MAX_LIMITS_PER_RULE,
};

use super::{
    Asked, Problem,
    fields::{Field, Place},
    forms::{Asks, Forms},
    json::{self, Json, Members},
    limit_fields::{is_field, listed, set, unknown},
    limits_cache::LimitsCache,
    status,
    wire::Answer,
};
use crate::{limiter::Limiter, metrics::ListenerKind};

/// The fields of a request other than those of its limit.
const OWN_NAMES: [&str; 4] = ["key", "cost", "peek", "limits"];

thread_local! {
    /// Buffers and caches that the requests of this worker share.
    static DESK: RefCell<Desk> = RefCell::default();
    static FORMS: RefCell<Forms> = RefCell::default();
    static CACHE: RefCell<LimitsCache> = RefCell::default();
}

#[derive(Debug, Default)]
struct Desk {
    key: Vec<u8>,
    outcomes: Vec<Outcome>,
}

/// The parsed request body.
#[derive(Debug)]
struct Throttle<'j> {
    key: &'j str,
    cost: Cost,
    effect: Effect,
    specs: Vec<LimitSpec>,
    /// Maps an index in `specs` to its location in the request.
    place: fn(usize) -> Place,
}

pub(super) async fn throttle(asked: &Asked, body: &[u8]) -> Result<Answer, Problem> {
    let mut members = Members::new();
    let (key, asks) = match known(body) {
        Some(known) => known,
        None => read_and_remember(body, &mut members)?,
    };
    // If the buffers are in use by a suspended decision, fresh ones are allocated.
    let mut desk = DESK.take();
    let answered = answer(asked, key, &asks, &mut desk).await;
    DESK.set(desk);
    answered
}

/// Returns the key and the parsed request for `body`, if a body of the same form is cached.
fn known(body: &[u8]) -> Option<(&str, Asks)> {
    FORMS.with_borrow(|forms| {
        let (key, asks) = forms.find(body)?;
        Some((key, asks.clone()))
    })
}

/// Parses `body` into `members`, which the returned key may borrow from, and caches the result.
fn read_and_remember<'b>(
    body: &'b [u8],
    members: &'b mut Members<'b>,
) -> Result<(&'b str, Asks), Problem> {
    *members = json::object(body)?;
    let Throttle {
        key,
        cost,
        effect,
        specs,
        place,
    } = read(members)?;
    let limits = CACHE.with_borrow_mut(|cache| cache.limits(specs, place))?;
    let asks = Asks {
        cost,
        effect,
        limits,
    };
    FORMS.with_borrow_mut(|forms| forms.remember(body, key, &asks));
    Ok((key, asks))
}

async fn answer(asked: &Asked, key: &str, asks: &Asks, desk: &mut Desk) -> Result<Answer, Problem> {
    let key = Limiter::throttle_key(key.as_bytes(), &mut desk.key)?;
    let charge = Charge::new(key, &asks.limits, asks.cost)?;
    let now = asked.limiter.now();
    let decided = asked
        .limiter
        .throttle(charge, now, asks.effect, &mut desk.outcomes)
        .await;
    if asks.effect == Effect::Charge {
        asked.limiter.observe_throttle(ListenerKind::Http, &decided);
    }
    let verdict = decided.verdict(&[charge], &desk.outcomes);
    Ok(asked.verdict(status(&verdict), &verdict, now))
}

/// Parses a body, or reports all mistakes in it.
fn read<'j>(members: &'j Members<'_>) -> Result<Throttle<'j>, Problem> {
    let mut problems = Vec::new();
    let (mut key, mut cost, mut effect) = (None, Some(Cost::ONE), Some(Effect::Charge));
    let (mut list, mut beside) = (None, Vec::new());
    let mut spec = LimitSpec::default();
    for (name, value) in members {
        let field = Field {
            place: Place::Body,
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
        problems.push(Problem::bad("key", "is missing; it is the key to count by"));
    }
    let given = members.iter().any(|(name, _)| is_field(name));
    let place: fn(usize) -> Place = if list.is_some() {
        Place::Limit
    } else {
        |_| Place::Body
    };
    let specs = match list {
        Some(list) => specs_of(list, &beside, &spec, &mut problems),
        None if given => vec![spec],
        None => {
            let problem =
                "is missing; give limits such as [\"20/min\"], or an algorithm with its numbers";
            problems.push(Problem::bad("limits", problem));
            Vec::new()
        }
    };
    match (key, cost, effect, problems.is_empty()) {
        (Some(key), Some(cost), Some(effect), true) => Ok(Throttle {
            key,
            cost,
            effect,
            specs,
            place,
        }),
        _ => Err(Problem::several(problems)),
    }
}

fn read_peek(field: Field<'_, '_>, problems: &mut Vec<Problem>) -> Option<Effect> {
    let peek = field.truth(problems)?;
    Some(if peek { Effect::Peek } else { Effect::Charge })
}

/// Parses the limits in `list`. Of the fields next to `limits` only `algorithm` is allowed; it is
/// the algorithm of shorthands. The fields in `beside` are mistakes.
fn specs_of(
    list: Field<'_, '_>,
    beside: &[Field<'_, '_>],
    spec: &LimitSpec,
    problems: &mut Vec<Problem>,
) -> Vec<LimitSpec> {
    for field in beside {
        let problem = "is outside `limits`; move it into one of them";
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
            "{} limits are over the maximum of {MAX_LIMITS_PER_RULE}",
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
