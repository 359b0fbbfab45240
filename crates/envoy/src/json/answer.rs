//! Serialises a response as protobuf JSON.

use serde_json::{Map, Value, json};

use crate::{CurrentLimit, DescriptorStatus, Metadata, RateLimitAnswer, ResponseHeader, Unit};

pub(super) fn written(answer: &RateLimitAnswer) -> Value {
    let mut members = Map::new();
    members.insert("overallCode".into(), json!(answer.overall_code.as_str()));
    members.insert(
        "statuses".into(),
        answer.statuses.iter().map(status).collect(),
    );
    if !answer.response_headers.is_empty() {
        let headers = answer.response_headers.iter().map(header).collect();
        members.insert("responseHeadersToAdd".into(), headers);
    }
    if let Some(metadata) = &answer.dynamic_metadata {
        members.insert("dynamicMetadata".into(), value(metadata));
    }
    Value::Object(members)
}

/// Serialises the status of a descriptor. Omits fields that have their default value.
fn status(status: &DescriptorStatus) -> Value {
    let mut members = Map::new();
    members.insert("code".into(), json!(status.code.as_str()));
    if let Some(limit) = &status.current_limit {
        members.insert("currentLimit".into(), current_limit(limit));
    }
    if status.limit_remaining > 0 {
        members.insert("limitRemaining".into(), json!(status.limit_remaining));
    }
    if let Some(span) = status.duration_until_reset {
        members.insert(
            "durationUntilReset".into(),
            json!(format!("{}s", span.as_secs_ceil())),
        );
    }
    Value::Object(members)
}

fn current_limit(limit: &CurrentLimit) -> Value {
    let mut members = Map::new();
    if limit.requests_per_unit > 0 {
        members.insert("requestsPerUnit".into(), json!(limit.requests_per_unit));
    }
    if limit.unit != Unit::Unknown {
        members.insert("unit".into(), json!(limit.unit.as_str()));
    }
    if let Some(name) = &limit.name {
        members.insert("name".into(), json!(&**name));
    }
    Value::Object(members)
}

fn header(header: &ResponseHeader) -> Value {
    json!({"key": &*header.name, "value": header.value})
}

fn value(metadata: &Metadata) -> Value {
    match metadata {
        Metadata::Null => Value::Null,
        Metadata::Truth(truth) => json!(truth),
        // protobuf writes integral numbers without a fraction.
        #[expect(
            clippy::cast_possible_truncation,
            reason = "it is an integer, and small enough to be exact"
        )]
        Metadata::Number(number) if number.fract() == 0.0 && number.abs() < EXACT => {
            json!(*number as i64)
        }
        Metadata::Number(number) => json!(number),
        Metadata::Text(text) => json!(&**text),
        Metadata::List(items) => items.iter().map(value).collect(),
        Metadata::Map(members) => members
            .iter()
            .map(|(name, member)| (name.to_string(), value(member)))
            .collect(),
    }
}

/// The number 2^53, below which a double represents every integer exactly.
const EXACT: f64 = 9_007_199_254_740_992.0;
