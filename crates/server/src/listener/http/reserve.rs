//! `POST /v1/reserve`, `/v1/settle` and `/v1/renew`: charges that are settled later.

use std::{cell::Cell, ops::RangeInclusive, sync::Arc};

use hyper::{HeaderMap, StatusCode, header::HeaderName};
use tidegate::rate_limiter::{CancelSignal, SlotTurn};
use tidegate_core::{Effect, RuleSet, Span, Verdict, bounds::MAX_COUNT, notation};
use tidegate_limiter::reservations::{
    DEFAULT_TTL, Reservation, ReservationError, ReserveError, SettledReservation,
};
use tidegate_net::{
    Problem,
    input::{advice, shown},
    json::{self, Members},
    response::{self, Answer},
};
use tidegate_tower::RuleNames;

use super::{
    HttpConnectionContext,
    check::{longest_wait, read_with, with_request},
    fields::{Field, FieldLocation, integer},
    status, verdict,
};

/// The header with the reservation token, in `/v1/authorize` responses and `/v1/settle` requests.
pub(super) const RESERVATION: HeaderName = HeaderName::from_static("tidegate-reservation");

/// The header with the final cost, in `/v1/settle` requests.
const COST: HeaderName = HeaderName::from_static("tidegate-cost");

/// The final costs of a reservation.
const FINAL_COSTS: RangeInclusive<u64> = 0..=MAX_COUNT;

/// The maximum length of a reservation's JSON fields without its token, in bytes: the names, and a
/// number of up to 20 digits.
const RESERVATION_JSON_BYTES: usize = 34 + 20;

pub(super) async fn reserve(
    context: &HttpConnectionContext,
    body: &[u8],
) -> Result<Answer, Problem> {
    let members = json::object(body)?;
    let (ttl, wait) = (Cell::new(DEFAULT_TTL), Cell::new(Span::ZERO));
    let known = &["entries", "cost", "raw", "ttl", "wait_ms"];
    let read_own = |field: Field<'_, '_>, problems: &mut Vec<Problem>| match field.name {
        "ttl" => ttl.set(time_to_live(field, problems).unwrap_or(DEFAULT_TTL)),
        _ => wait.set(longest_wait(field, problems).unwrap_or(Span::ZERO)),
    };
    let check = read_with(&members, known, read_own)?;
    with_request(context, check, async |rules, request, scratch| {
        let limiter = &context.limiter;
        let signal = CancelSignal::default();
        let turn = SlotTurn::new(Effect::Charge, wait.get()).with_signal(Some(&signal));
        let finish = |rules: &Arc<RuleSet>, verdict: &Verdict<'_>, reservation| {
            let now = limiter.now();
            context.observe(rules, request, verdict, now);
            let body = match reservation {
                Some(reservation) => body_with(verdict, &reservation),
                None => verdict::body(verdict, RuleNames::Shown),
            };
            context.verdict_with(body, status(verdict), verdict, now)
        };
        // The future is boxed because it is large, and because this block contains it twice: alone
        // and in `wait_for`.
        let reserving = Box::pin(limiter.reserve(rules, scratch, request, ttl.get(), turn, finish));
        let answer = if wait.get() > Span::ZERO {
            context.wait_for(reserving, || signal.cancel()).await?
        } else {
            reserving.await
        };
        answer.map_err(refusal)
    })
    .await
}

/// Returns the JSON document of a verdict and its reservation.
fn body_with(verdict: &Verdict<'_>, reservation: &Reservation) -> Vec<u8> {
    let extra = reservation.token.len() + RESERVATION_JSON_BYTES;
    let mut body = verdict::body_with_capacity(verdict, RuleNames::Shown, extra);
    body.pop();
    body.push(b',');
    push_reservation(&mut body, reservation);
    body
}

/// Appends a reservation's JSON fields, followed by the closing brace of the object.
fn push_reservation(body: &mut Vec<u8>, reservation: &Reservation) {
    let Reservation { token, expires_in } = reservation;
    // A token contains no characters that need escaping.
    let number = &mut itoa::Buffer::new();
    let parts = [
        "\"reservation\":\"",
        token,
        "\",\"expires_in_ms\":",
        number.format(expires_in.as_millis_ceil()),
        "}",
    ];
    body.reserve(parts.iter().map(|part| part.len()).sum());
    parts
        .iter()
        .for_each(|part| body.extend_from_slice(part.as_bytes()));
}

/// Settles the reservation in the body, or in the headers if the body is empty. Proxies send
/// headers, because most proxies cannot write a request body.
pub(super) async fn settle(
    context: &HttpConnectionContext,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Answer, Problem> {
    let members;
    let is_in_headers = headers.contains_key(RESERVATION) || headers.contains_key(COST);
    let (token, cost) = if body.is_empty() {
        if !is_in_headers {
            let problem = "is empty; expected an object with `reservation` and `cost`, or no body \
                and the headers Tidegate-Reservation and Tidegate-Cost";
            return Err(Problem::bad("body", problem));
        }
        settlement_in_headers(headers)?
    } else {
        members = json::object(body)?;
        settlement_in_body(&members)?
    };
    let settled = context
        .limiter
        .settle_reservation(token, cost)
        .await
        .map_err(problem)?;
    let SettledReservation {
        settled,
        released,
        over,
    } = settled;
    let mut body = String::with_capacity(64);
    let mut number = itoa::Buffer::new();
    for (name, units) in [
        ("{\"settled\":", settled),
        (",\"released\":", released),
        (",\"over\":", over),
    ] {
        body.push_str(name);
        body.push_str(number.format(units));
    }
    body.push('}');
    Ok(response::json_document(StatusCode::OK, body))
}

fn settlement_in_headers(headers: &HeaderMap) -> Result<(&str, u64), Problem> {
    let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let token = text(&RESERVATION).ok_or_else(|| {
        Problem::bad(
            "Tidegate-Reservation",
            "is missing; set it to the value of this header in the response of /v1/authorize",
        )
    })?;
    if token.is_empty() {
        return Err(Problem::bad(
            "Tidegate-Reservation",
            "is empty; a request without a reservation must not be settled",
        ));
    }
    let cost = text(&COST).ok_or_else(|| {
        Problem::bad(
            "Tidegate-Cost",
            "is missing; set it to the final cost of the request, or to 0 to cancel the reservation",
        )
    })?;
    let wrong = || {
        let problem = format!("{}, got \"{}\"", integer(FINAL_COSTS), shown(cost));
        Problem::bad("Tidegate-Cost", problem)
    };
    let units = cost.parse().ok().filter(|cost| FINAL_COSTS.contains(cost));
    Ok((token, units.ok_or_else(wrong)?))
}

fn settlement_in_body<'j>(members: &'j Members<'_>) -> Result<(&'j str, u64), Problem> {
    let mut problems = Vec::new();
    let (mut token, mut cost) = (None, None);
    read_fields(
        members,
        &["reservation", "cost"],
        &mut problems,
        |field, problems| match field.name {
            "reservation" => token = field.text(A_TOKEN, problems),
            _ => cost = field.number_in(FINAL_COSTS, problems),
        },
    );
    let is_given = |name: &str| members.iter().any(|(given, _)| given == name);
    if !is_given("cost") {
        let missing = "is missing; set it to the final cost of the request, or to 0 to cancel the reservation";
        problems.push(Problem::bad("cost", missing));
    }
    match (token, cost, problems.is_empty()) {
        (Some(token), Some(cost), true) => Ok((token, cost)),
        _ => Err(Problem::several(problems)),
    }
}

pub(super) async fn renew(context: &HttpConnectionContext, body: &[u8]) -> Result<Answer, Problem> {
    let members = json::object(body)?;
    let mut problems = Vec::new();
    let (mut token, mut ttl) = (None, DEFAULT_TTL);
    read_fields(
        &members,
        &["reservation", "ttl"],
        &mut problems,
        |field, problems| match field.name {
            "reservation" => token = field.text(A_TOKEN, problems),
            _ => ttl = time_to_live(field, problems).unwrap_or(DEFAULT_TTL),
        },
    );
    let Some(token) = token.filter(|_| problems.is_empty()) else {
        return Err(Problem::several(problems));
    };
    let renewed = context.limiter.renew_reservation(token, ttl).await;
    let renewed = renewed.map_err(problem)?;
    let mut body = vec![b'{'];
    push_reservation(&mut body, &renewed);
    Ok(response::json_document(StatusCode::OK, body))
}

const A_TOKEN: &str = "the string that /v1/reserve returned";

/// Reads the fields of a body. Only the `known` fields are allowed, and the first of these fields
/// is required.
fn read_fields<'j>(
    members: &'j Members<'_>,
    known: &[&str],
    problems: &mut Vec<Problem>,
    mut read: impl FnMut(Field<'j, '_>, &mut Vec<Problem>),
) {
    for (name, value) in members {
        if known.contains(&&**name) {
            let location = FieldLocation::Body;
            let field = Field {
                location,
                name,
                value,
            };
            read(field, problems);
        } else {
            let problem = format!("unknown field; {}", advice(name, known));
            problems.push(Problem::bad(shown(name), problem));
        }
    }
    if let Some(required) = known.first()
        && !members.iter().any(|(name, _)| name == required)
    {
        let missing = "is missing; it is the string that /v1/reserve returned";
        problems.push(Problem::bad(*required, missing));
    }
}

fn time_to_live(field: Field<'_, '_>, problems: &mut Vec<Problem>) -> Option<Span> {
    let ttl = field.parsed("a duration such as \"30s\"", notation::span, problems)?;
    if ttl < Span::from_millis(1) {
        return field.wrong("must be at least 1ms", problems);
    }
    Some(ttl)
}

/// Returns the problem for a request that could not be reserved.
pub(super) fn refusal(error: ReserveError) -> Problem {
    let status = match error {
        ReserveError::Request(error) => return error.into(),
        ReserveError::TooMany(0) => StatusCode::NOT_FOUND,
        ReserveError::TooMany(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    Problem::new(status, error.to_string())
}

/// Returns the problem for a reservation that could not be settled or renewed.
#[expect(
    clippy::needless_pass_by_value,
    reason = "this is the argument of `map_err`"
)]
fn problem(error: ReservationError) -> Problem {
    let status = match &error {
        ReservationError::Off => return Problem::new(StatusCode::NOT_FOUND, error.reason()),
        ReservationError::Invalid => StatusCode::BAD_REQUEST,
        ReservationError::NotOutstanding(_) => StatusCode::NOT_FOUND,
        ReservationError::Moved => StatusCode::SERVICE_UNAVAILABLE,
        ReservationError::Unavailable(store_error) => {
            tracing::debug!("a reservation was not settled: {store_error}");
            return Problem::new(StatusCode::SERVICE_UNAVAILABLE, error.reason());
        }
    };
    Problem::bad("reservation", error.reason()).with_status(status)
}
