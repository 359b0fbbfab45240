//! `limits`: from what was written to limits that are built.

use tidegate_core::{AlgorithmName, Anchor, Calendar, CalendarUnit, Limit, LimitSpec, RefillMode};

use super::{
    node::Value,
    read::{Mistakes, Place},
};

const FIELDS: [&str; 15] = [
    "algorithm",
    "rate",
    "burst",
    "capacity",
    "refill",
    "refill_mode",
    "leak",
    "queue",
    "limit",
    "window",
    "anchor",
    "buckets",
    "strict",
    "soft",
    "count_denied",
];

/// The limits of a rule; what has no algorithm of its own has `algorithm`.
pub(super) fn limits(
    place: &Place<'_>,
    algorithm: AlgorithmName,
    mistakes: &mut Mistakes,
) -> Vec<Limit> {
    let items = place.one_or_more(mistakes);
    items
        .iter()
        .filter_map(|item| limit(item, algorithm, mistakes))
        .collect()
}

pub(super) fn algorithm(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<AlgorithmName> {
    place.choice(&AlgorithmName::ALL, mistakes)
}

fn limit(place: &Place<'_>, algorithm: AlgorithmName, mistakes: &mut Mistakes) -> Option<Limit> {
    let before = mistakes.0.len();
    let spec = match &place.node.value {
        Value::Map(_) => written_out(place, algorithm, mistakes),
        _ => LimitSpec::shorthand(place.rate(mistakes)?, algorithm),
    };
    if mistakes.0.len() > before {
        return None;
    }
    match spec.build() {
        Ok(limit) => Some(limit),
        Err(problems) => {
            for problem in problems {
                mistakes.in_field(place, problem.field, problem.problem);
            }
            None
        }
    }
}

fn written_out(place: &Place<'_>, default: AlgorithmName, mistakes: &mut Mistakes) -> LimitSpec {
    place.expect_keys(&FIELDS, mistakes);
    let field = |name| place.written(name);
    LimitSpec {
        algorithm: field("algorithm").map_or(Some(default), |field| algorithm(&field, mistakes)),
        rate: field("rate").and_then(|field| field.rate(mistakes)),
        burst: field("burst").and_then(|field| field.number(mistakes)),
        capacity: field("capacity").and_then(|field| field.number(mistakes)),
        refill: field("refill").and_then(|field| field.rate(mistakes)),
        refill_mode: field("refill_mode").and_then(|field| refill_mode(&field, mistakes)),
        leak: field("leak").and_then(|field| field.rate(mistakes)),
        queue: field("queue").and_then(|field| field.truth(mistakes)),
        limit: field("limit").and_then(|field| field.number(mistakes)),
        window: field("window").and_then(|field| field.span(mistakes)),
        anchor: field("anchor").and_then(|field| anchor(&field, mistakes)),
        buckets: field("buckets")
            .and_then(|field| field.number(mistakes))
            .map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        strict: field("strict").and_then(|field| field.truth(mistakes)),
        soft: field("soft").and_then(|field| field.percent(mistakes)),
        count_denied: field("count_denied").and_then(|field| field.truth(mistakes)),
    }
}

fn refill_mode(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<RefillMode> {
    place.choice(
        &[
            ("continuous", RefillMode::Continuous),
            ("interval", RefillMode::Interval),
        ],
        mistakes,
    )
}

fn anchor(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<Anchor> {
    match place.node.value {
        Value::Map(_) => calendar(place, mistakes).map(Anchor::Calendar),
        _ => place.choice(
            &[
                ("epoch", Anchor::Epoch),
                ("first_request", Anchor::FirstRequest),
            ],
            mistakes,
        ),
    }
}

/// `{calendar: month, zone: Europe/Berlin, day: 15}`.
fn calendar(place: &Place<'_>, mistakes: &mut Mistakes) -> Option<Calendar> {
    place.expect_keys(&["calendar", "zone", "day"], mistakes);
    let units = [
        ("day", CalendarUnit::Day),
        ("week", CalendarUnit::Week),
        ("month", CalendarUnit::Month),
    ];
    let Some(unit) = place.written("calendar") else {
        mistakes.in_field(place, "calendar", "is missing; one of day, week, month");
        return None;
    };
    let unit = unit.choice(&units, mistakes)?;
    let zone = match place.written("zone") {
        Some(zone) => zone.text(mistakes, "an IANA time zone such as Europe/Berlin")?,
        None => "UTC",
    };
    let day = match place.written("day") {
        Some(day) => Some(i8::try_from(day.number(mistakes)?).unwrap_or(i8::MAX)),
        None => None,
    };
    let built = Calendar::new(unit, zone, day);
    built
        .map_err(|error| mistakes.in_field(place, error.field, error.problem))
        .ok()
}
