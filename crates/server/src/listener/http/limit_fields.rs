//! Reads the fields of a limit in a JSON body. The fields have the same names and notation as in
//! the rules file.

use tidegate_core::{
    AlgorithmName, Anchor, Calendar, CalendarUnit, LimitError, LimitSpec, RefillMode, notation,
};
use tidegate_net::{
    Problem,
    input::{advice, shown},
    json::{Json, check_members},
};

use super::fields::{Field, FieldLocation};

/// How error messages describe a rate.
const RATE: &str = "a rate such as \"20/min\"";

/// How error messages describe a duration.
const SPAN: &str = "a duration such as \"1min\"";

/// Sets the value of `field` in `spec`. Returns false if limits have no field of that name.
pub(super) fn set(spec: &mut LimitSpec, field: Field<'_, '_>, problems: &mut Vec<Problem>) -> bool {
    match field.name {
        "algorithm" => spec.algorithm = field.choice(&AlgorithmName::ALL, problems),
        "rate" => spec.rate = field.parsed(RATE, notation::rate, problems),
        "burst" => spec.burst = field.number(problems),
        "capacity" => spec.capacity = field.number(problems),
        "refill" => spec.refill = field.parsed(RATE, notation::rate, problems),
        "refill_mode" => spec.refill_mode = field.choice(&RefillMode::ALL, problems),
        "leak" => spec.leak = field.parsed(RATE, notation::rate, problems),
        "queue" if matches!(field.value, Json::Whole(_)) => {
            spec.slot_queue = field.number(problems);
        }
        "queue" => spec.queue = field.truth(problems),
        "limit" => spec.limit = field.number(problems),
        "window" => spec.window = field.parsed(SPAN, notation::span, problems),
        "lease" => spec.lease = field.parsed(SPAN, notation::span, problems),
        "wait" => spec.wait = field.parsed(SPAN, notation::span, problems),
        "anchor" => spec.anchor = anchor(field, problems),
        "buckets" => {
            spec.buckets = field
                .number(problems)
                .map(|count| u32::try_from(count).unwrap_or(u32::MAX))
        }
        "strict" => spec.strict = field.truth(problems),
        "soft" => spec.soft = field.percent(problems),
        "count_denied" => spec.count_denied = field.truth(problems),
        _ => return false,
    }
    true
}

/// Returns whether `name` is the name of a field of a limit.
pub(super) fn is_field(name: &str) -> bool {
    LimitSpec::FIELDS.contains(&name)
}

/// Reports an error if the field is neither a field of a limit nor one of `others`.
pub(super) fn unknown(field: Field<'_, '_>, others: &[&str], problems: &mut Vec<Problem>) {
    let known: Vec<&str> = others.iter().chain(&LimitSpec::FIELDS).copied().collect();
    let path = format!("{}{}", field.location, shown(field.name));
    problems.push(Problem::bad(
        path,
        format!("unknown field; {}", advice(field.name, &known)),
    ));
}

/// Parses one element of `limits`: an object, or a string in short form. `algorithm` is the default
/// algorithm.
pub(super) fn listed(
    index: usize,
    limit: &Json<'_>,
    algorithm: Option<AlgorithmName>,
    problems: &mut Vec<Problem>,
) -> Option<LimitSpec> {
    let location = FieldLocation::Limit(index);
    let path = || format!("limits[{index}]");
    match limit {
        Json::Text(text) => match LimitSpec::parse_shorthand(text, algorithm) {
            Ok(spec) => Some(spec),
            Err(error) => {
                problems.push(Problem::bad(path(), error.problem));
                None
            }
        },
        Json::Object(members) => {
            if let Err(problem) = check_members(&location.to_string(), members) {
                problems.push(problem);
                return None;
            }
            let mut spec = LimitSpec {
                algorithm,
                ..LimitSpec::default()
            };
            for (name, value) in members
                .iter()
                .filter(|(_, value)| !matches!(value, Json::Null))
            {
                let field = Field {
                    location,
                    name,
                    value,
                };
                if !set(&mut spec, field, problems) {
                    unknown(field, &[], problems);
                }
            }
            Some(spec)
        }
        other => {
            let problem = format!("expected {RATE} or the fields of a limit, got {other}");
            problems.push(Problem::bad(path(), problem));
            None
        }
    }
}

fn anchor(field: Field<'_, '_>, problems: &mut Vec<Problem>) -> Option<Anchor> {
    match field.value {
        Json::Text(text) if text == "epoch" => Some(Anchor::Epoch),
        Json::Text(text) if text == "first_request" => Some(Anchor::FirstRequest),
        Json::Object(_) => calendar(field, problems).map(Anchor::Calendar),
        _ => field.expected(
            "epoch, first_request, or {\"calendar\": \"month\", \"zone\": \"UTC\"}",
            problems,
        ),
    }
}

/// Parses `{"calendar": "month", "zone": "Europe/Berlin", "day": 15}`.
fn calendar(field: Field<'_, '_>, problems: &mut Vec<Problem>) -> Option<Calendar> {
    let Json::Object(members) = field.value else {
        return None;
    };
    let path = format!("{}{}.", field.location, field.name);
    if let Err(problem) = check_members(&path, members) {
        problems.push(problem);
        return None;
    }
    let (mut unit, mut zone, mut day) = (None, Some("UTC".to_owned()), None);
    let before = problems.len();
    for (name, value) in members {
        let path = format!("{}.{}", field.name, shown(name));
        let part = Field {
            location: field.location,
            name: &path,
            value,
        };
        match &**name {
            "calendar" => unit = part.choice(&CalendarUnit::ALL, problems),
            "zone" => {
                zone = part
                    .text("an IANA time zone such as Europe/Berlin", problems)
                    .map(str::to_owned)
            }
            // A day that is too large for the integer type becomes 127. No month has the day 127,
            // so the value is rejected with a message that states the valid range.
            "day" => {
                day = part
                    .number(problems)
                    .map(|day| i8::try_from(day).unwrap_or(i8::MAX))
            }
            _ => part.wrong(
                format!(
                    "unknown field; {}",
                    advice(name, &["calendar", "zone", "day"])
                ),
                problems,
            )?,
        }
    }
    if unit.is_none() && problems.len() == before {
        field.wrong::<()>("needs `calendar`: day, week or month", problems);
    }
    // If the unit is invalid, `month` is assumed, because it permits the widest ranges. With
    // `month`, a value is reported only if it is invalid for every unit.
    let assumed = unit.unwrap_or(CalendarUnit::Month);
    for LimitError {
        field: part,
        problem,
        ..
    } in Calendar::errors(assumed, zone.as_deref().unwrap_or("UTC"), day)
    {
        field.wrong::<()>(format!("{part}: {problem}"), problems);
    }
    if problems.len() > before {
        return None;
    }
    Calendar::new(unit?, &zone?, day).ok()
}
