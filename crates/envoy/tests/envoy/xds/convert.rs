//! Converts envoyproxy/ratelimit files to resources, without using the parser under test.

use prost_types::{ListValue, Struct, Value, value::Kind};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::{
    format::ConfigFile,
    proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace, RateLimitUnit,
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    domain: String,
    #[serde(default)]
    descriptors: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Descriptor {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
    rate_limit: Option<Limit>,
    #[serde(default)]
    descriptors: Vec<Self>,
    #[serde(default)]
    shadow_mode: bool,
    #[serde(default)]
    detailed_metric: bool,
    #[serde(default)]
    quota_mode: bool,
    metadata: Option<Json>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Limit {
    unit: Option<String>,
    #[serde(default)]
    requests_per_unit: u32,
    #[serde(default)]
    unlimited: bool,
    #[serde(default)]
    name: String,
    #[serde(default)]
    replaces: Vec<Replaces>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Replaces {
    #[serde(default)]
    name: String,
}

/// Returns the resource with the content of `file`. Returns `None` if the resource type cannot
/// express the content.
pub(super) fn resource(file: &ConfigFile) -> Option<RateLimitConfig> {
    let File {
        domain,
        descriptors,
    } = serde_saphyr::from_str(&file.yaml).ok()?;
    Some(RateLimitConfig {
        name: file.name.clone(),
        domain,
        descriptors: descriptors
            .into_iter()
            .map(descriptor)
            .collect::<Option<_>>()?,
    })
}

fn descriptor(fields: Descriptor) -> Option<RateLimitDescriptor> {
    let rate_limit = match fields.rate_limit {
        Some(limit) => Some(policy(limit)?),
        None => None,
    };
    let metadata = match fields.metadata {
        Some(Json::Object(members)) => Some(structure(members)),
        Some(_) => return None,
        None => None,
    };
    let inside = fields.descriptors.into_iter().map(descriptor);
    Some(RateLimitDescriptor {
        key: fields.key,
        value: fields.value,
        rate_limit,
        descriptors: inside.collect::<Option<_>>()?,
        shadow_mode: fields.shadow_mode,
        detailed_metric: fields.detailed_metric,
        quota_mode: fields.quota_mode,
        metadata,
    })
}

fn policy(limit: Limit) -> Option<RateLimitPolicy> {
    let unit = match limit.unit {
        None => RateLimitUnit::Unknown,
        Some(name) => RateLimitUnit::from_str_name(&name.to_uppercase())?,
    };
    let replaces = limit.replaces.into_iter();
    let replaces = replaces.map(|one| RateLimitReplace { name: one.name });
    Some(RateLimitPolicy {
        unit: unit.into(),
        requests_per_unit: limit.requests_per_unit,
        unlimited: limit.unlimited,
        name: limit.name,
        replaces: replaces.collect(),
    })
}

fn structure(members: serde_json::Map<String, Json>) -> Struct {
    let members = members.into_iter();
    Struct {
        fields: members.map(|(name, json)| (name, value(json))).collect(),
    }
}

fn value(json: Json) -> Value {
    let kind = match json {
        Json::Null => Kind::NullValue(0),
        Json::Bool(truth) => Kind::BoolValue(truth),
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
        Json::String(text) => Kind::StringValue(text),
        Json::Array(items) => Kind::ListValue(ListValue {
            values: items.into_iter().map(value).collect(),
        }),
        Json::Object(members) => Kind::StructValue(structure(members)),
    };
    Value { kind: Some(kind) }
}
