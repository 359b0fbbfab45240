//! Converts envoyproxy/ratelimit files to resources, without using the parser under test. The
//! control plane in Python has its own conversion to protobuf.

use prost_types::{ListValue, Struct, Value, value::Kind};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value as Json, json};

use crate::{
    format::ConfigFile,
    proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace, RateLimitUnit,
    },
};

/// A resource with the fields of a file. Its JSON is what the control plane in Python reads.
#[derive(Clone, Serialize)]
pub(super) struct Resource {
    name: String,
    #[serde(flatten)]
    file: File,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    domain: String,
    #[serde(default)]
    descriptors: Vec<Descriptor>,
}

#[derive(Clone, Serialize, Deserialize)]
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

#[derive(Clone, Serialize, Deserialize)]
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

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Replaces {
    #[serde(default, deserialize_with = "text_or_null")]
    name: String,
}

/// Reads a string. `name:` without a value is null, which protobuf expresses as an empty string.
fn text_or_null<'d, D: Deserializer<'d>>(deserializer: D) -> Result<String, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.unwrap_or_default())
}

impl Resource {
    /// Returns the resource with the content of `file`. Returns `None` if the resource type cannot
    /// express the content.
    pub(super) fn of(file: &ConfigFile) -> Option<Self> {
        let resource = Self {
            name: file.name.clone(),
            file: serde_saphyr::from_str(&file.yaml).ok()?,
        };
        resource.clone().message().map(|_| resource)
    }

    /// Returns a resource with a limit for the key `user`. The unit is a name, or a number of the
    /// protobuf enum.
    pub(super) fn limiting(domain: &str, requests_per_unit: u32, unit: &str) -> Self {
        let limit = json!({"unit": unit, "requests_per_unit": requests_per_unit});
        let descriptors = json!([{"key": "user", "rate_limit": limit}]);
        let file = json!({"domain": domain, "descriptors": descriptors});
        Self {
            name: domain.to_owned(),
            file: serde_json::from_value(file).unwrap(),
        }
    }

    /// Returns the protobuf message; `None` if it cannot express the resource.
    pub(super) fn message(self) -> Option<RateLimitConfig> {
        let descriptors = self.file.descriptors.into_iter().map(descriptor);
        Some(RateLimitConfig {
            name: self.name,
            domain: self.file.domain,
            descriptors: descriptors.collect::<Option<_>>()?,
        })
    }
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
    let unit = match limit.unit.as_deref().map(str::parse) {
        None => RateLimitUnit::Unknown.into(),
        Some(Ok(number)) => number,
        Some(Err(_)) => RateLimitUnit::from_str_name(&limit.unit?.to_uppercase())?.into(),
    };
    let replaces = limit.replaces.into_iter();
    let replaces = replaces.map(|one| RateLimitReplace { name: one.name });
    Some(RateLimitPolicy {
        unit,
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
