//! Parses a request from protobuf JSON.

use tidegate_net::{
    Problem,
    input::shown,
    json::{Json, Members},
};

use super::wrong;
use crate::{
    Descriptor, LimitOverride, MAX_DESCRIPTOR_ENTRIES, MAX_DESCRIPTORS, RateLimitRequest, Unit,
};

/// Parses a request. Stops at the first error.
pub(super) fn read(members: &Members<'_>) -> Result<RateLimitRequest, Problem> {
    let mut request = RateLimitRequest::default();
    for (name, value) in set(members) {
        match name {
            "domain" => request.domain = text(name, value)?.to_owned(),
            "descriptors" => request.descriptors = list(name, value, MAX_DESCRIPTORS, descriptor)?,
            "hits_addend" | "hitsAddend" => request.hits_addend = number(name, value)?,
            _ => return Err(unknown(name)),
        }
    }
    Ok(request)
}

fn descriptor(path: &str, value: &Json<'_>) -> Result<Descriptor, Problem> {
    let mut descriptor = Descriptor::default();
    for (name, value) in set(object(path, value)?) {
        let field = format!("{path}.{name}");
        match name {
            "entries" => descriptor.entries = list(&field, value, MAX_DESCRIPTOR_ENTRIES, entry)?,
            "limit" => descriptor.limit = Some(limit(&field, value)?),
            "hits_addend" | "hitsAddend" => descriptor.hits_addend = Some(number(&field, value)?),
            "is_negative_hits" | "isNegativeHits" => {
                descriptor.is_negative_hits = truth(&field, value)?
            }
            _ => return Err(unknown(&field)),
        }
    }
    Ok(descriptor)
}

fn entry(path: &str, value: &Json<'_>) -> Result<(String, String), Problem> {
    let mut entry = (String::new(), String::new());
    for (name, value) in set(object(path, value)?) {
        let field = format!("{path}.{name}");
        match name {
            "key" => entry.0 = text(&field, value)?.to_owned(),
            "value" => entry.1 = text(&field, value)?.to_owned(),
            _ => return Err(unknown(&field)),
        }
    }
    Ok(entry)
}

fn limit(path: &str, value: &Json<'_>) -> Result<LimitOverride, Problem> {
    let mut limit = LimitOverride {
        requests_per_unit: 0,
        unit: Unit::Unknown,
    };
    for (name, value) in set(object(path, value)?) {
        let field = format!("{path}.{name}");
        match name {
            "requests_per_unit" | "requestsPerUnit" => {
                limit.requests_per_unit = number(&field, value)?
            }
            "unit" => limit.unit = unit(&field, value)?,
            _ => return Err(unknown(&field)),
        }
    }
    Ok(limit)
}

/// The units in the order of `envoy.type.v3.RateLimitUnit`, followed by the week.
const UNITS: [Unit; 8] = [
    Unit::Unknown,
    Unit::Second,
    Unit::Minute,
    Unit::Hour,
    Unit::Day,
    Unit::Month,
    Unit::Year,
    Unit::Week,
];

fn unit(field: &str, value: &Json<'_>) -> Result<Unit, Problem> {
    let unit = match value {
        Json::Text(name) => Unit::ALL
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, unit)| *unit),
        Json::Whole(number) => usize::try_from(*number)
            .ok()
            .and_then(|number| UNITS.get(number))
            .copied(),
        _ => None,
    };
    unit.ok_or_else(|| {
        wrong(
            field,
            &format!("expected a unit such as MINUTE, got {value}"),
        )
    })
}

/// Returns the fields whose value is not null. Null has the same meaning as an absent field.
fn set<'m, 'b>(members: &'m Members<'b>) -> impl Iterator<Item = (&'m str, &'m Json<'b>)> {
    let set = members
        .iter()
        .filter(|(_, value)| !matches!(value, Json::Null));
    set.map(|(name, value)| (&**name, value))
}

fn object<'m, 'b>(path: &str, value: &'m Json<'b>) -> Result<&'m Members<'b>, Problem> {
    match value {
        Json::Object(members) => Ok(members),
        other => Err(wrong(path, &format!("expected an object, got {other}"))),
    }
}

fn list<T>(
    field: &str,
    value: &Json<'_>,
    most: usize,
    item: impl Fn(&str, &Json<'_>) -> Result<T, Problem>,
) -> Result<Vec<T>, Problem> {
    let Json::List(items) = value else {
        return Err(wrong(field, &format!("expected a list, got {value}")));
    };
    if items.len() > most {
        return Err(wrong(
            field,
            &format!("{} items exceed the maximum of {most}", items.len()),
        ));
    }
    items
        .iter()
        .enumerate()
        .map(|(at, value)| item(&format!("{field}[{at}]"), value))
        .collect()
}

fn text<'j>(field: &str, value: &'j Json<'_>) -> Result<&'j str, Problem> {
    match value {
        Json::Text(text) => Ok(text),
        other => Err(wrong(field, &format!("expected a string, got {other}"))),
    }
}

fn truth(field: &str, value: &Json<'_>) -> Result<bool, Problem> {
    match value {
        Json::Truth(truth) => Ok(*truth),
        other => Err(wrong(
            field,
            &format!("expected true or false, got {other}"),
        )),
    }
}

/// Parses an integer, or a string that contains an integer. Protobuf JSON writes 64-bit integers as
/// strings.
fn number<T: TryFrom<u64>>(field: &str, value: &Json<'_>) -> Result<T, Problem> {
    let number = match value {
        Json::Whole(number) => Some(*number),
        Json::Text(digits) => digits.parse().ok(),
        _ => None,
    };
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| {
        wrong(
            field,
            &format!(
                "expected a non-negative integer that fits the type of the field, got {value}"
            ),
        )
    })
}

fn unknown(field: &str) -> Problem {
    wrong(&shown(field), "unknown field")
}
