//! Reads the resources from a control plane.
//!
//! A resource and a configuration file with equal rules are converted to equal documents. The
//! documents are then read like files, so that rules from files and from a control plane have the
//! same checks, messages and meaning.

use std::borrow::Cow;

use prost::Message as _;
use prost_types::{Any, Struct, Value, value::Kind};
use tidegate_config::{
    Mistake,
    envoy::DomainFiles,
    yaml::{Content, Document, Node},
};
use tidegate_net::input::shown;

use crate::{
    FileMistake, LoadedConfig,
    config::{interpret, of_file},
    proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
    },
};

/// The type of the resources that the client subscribes to.
pub const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// The maximum number of resources in one response.
pub const MAX_RESOURCES: usize = 10_000;

/// The maximum number of descriptors in all resources of a response, at all depths. The maximum is
/// necessary because an empty descriptor takes two bytes on the wire, but a hundred times as much
/// memory.
pub const MAX_RESOURCE_DESCRIPTORS: usize = 500_000;

/// Reads all `resources` of a response as one configuration.
///
/// # Errors
///
/// Returns all errors in all resources. The list of errors is never empty.
pub(super) fn read(
    resources: &[Any],
    merging: DomainFiles,
) -> Result<LoadedConfig, Vec<FileMistake>> {
    if resources.len() > MAX_RESOURCES {
        let found = resources.len();
        let message = format!("{found} resources exceed the maximum of {MAX_RESOURCES}");
        return Err(vec![mistake("response", message)]);
    }
    let (mut configs, mut mistakes) = (Vec::with_capacity(resources.len()), Vec::new());
    let mut descriptors = 0_usize;
    for (at, resource) in resources.iter().enumerate() {
        let place = format!("resources[{at}]");
        match decode(resource) {
            Ok(config) => {
                descriptors = descriptors.saturating_add(count(&config.descriptors));
                let name = Some(&config.name).filter(|name| !name.is_empty());
                configs.push((name.map_or(place, |name| shown(name)), config));
            }
            Err(message) => mistakes.push(mistake(&place, message)),
        }
        if descriptors > MAX_RESOURCE_DESCRIPTORS {
            let message = format!(
                "the number of descriptors in the resources exceeds the maximum of {MAX_RESOURCE_DESCRIPTORS}"
            );
            return Err(vec![mistake("response", message)]);
        }
    }
    configs.sort_by(|(a, _), (b, _)| a.cmp(b));
    let documents = configs.iter();
    let documents: Vec<(&str, Document<'_>)> = documents
        .map(|(name, config)| (name.as_str(), document(config)))
        .collect();
    let mut read = interpret(&documents, merging, mistakes);
    let reported = match &mut read {
        Ok(loaded) => &mut loaded.warnings,
        Err(mistakes) => mistakes,
    };
    for reported in reported {
        // A resource does not have line numbers.
        reported.mistake.line = None;
    }
    read
}

fn decode(resource: &Any) -> Result<RateLimitConfig, String> {
    if resource.type_url != TYPE_URL {
        let found = shown(&resource.type_url);
        return Err(format!("has the type \"{found}\", expected {TYPE_URL}"));
    }
    RateLimitConfig::decode(&*resource.value).map_err(|error| format!("cannot be decoded: {error}"))
}

/// Returns the number of descriptors at all depths. The recursion is bounded, because the decoder
/// limits the depth.
fn count(descriptors: &[RateLimitDescriptor]) -> usize {
    let inside = descriptors.iter().map(|one| count(&one.descriptors));
    inside.fold(descriptors.len(), usize::saturating_add)
}

/// Creates an error about the resource `name` as a whole.
fn mistake(name: &str, message: String) -> FileMistake {
    let mistake = Mistake {
        path: String::new(),
        line: None,
        message,
    };
    of_file(name, mistake)
}

/// Converts a resource to the document of a configuration file with the same content. Fields with
/// the default value are omitted, because protobuf does not distinguish them from missing fields.
fn document(config: &RateLimitConfig) -> Document<'_> {
    let root = map([
        ("domain", text(&config.domain)),
        ("descriptors", list(&config.descriptors, descriptor)),
    ]);
    Document {
        root,
        warnings: Vec::new(),
    }
}

fn descriptor(fields: &RateLimitDescriptor) -> Node<'_> {
    map([
        ("key", text(&fields.key)),
        ("value", text(&fields.value)),
        ("rate_limit", fields.rate_limit.as_ref().map(policy)),
        ("descriptors", list(&fields.descriptors, descriptor)),
        ("shadow_mode", flag(fields.shadow_mode)),
        ("detailed_metric", flag(fields.detailed_metric)),
        ("quota_mode", flag(fields.quota_mode)),
        ("metadata", fields.metadata.as_ref().map(structure)),
    ])
}

fn policy(policy: &RateLimitPolicy) -> Node<'_> {
    let unit = match RateLimitUnit::try_from(policy.unit) {
        Ok(RateLimitUnit::Unknown) if policy.unlimited => None,
        Ok(unit) => Some(Cow::Borrowed(unit.as_str_name())),
        Err(_) => Some(Cow::Owned(policy.unit.to_string())),
    };
    let requests = || node(Content::Plain(policy.requests_per_unit.to_string().into()));
    map([
        ("unit", unit.map(|unit| node(Content::Quoted(unit)))),
        ("requests_per_unit", (!policy.unlimited).then(requests)),
        ("unlimited", flag(policy.unlimited)),
        ("name", text(&policy.name)),
        (
            "replaces",
            list(&policy.replaces, |one| map([("name", text(&one.name))])),
        ),
    ])
}

fn structure(fields: &Struct) -> Node<'_> {
    let members = fields.fields.iter();
    let members = members.map(|(name, field)| (key(name), value(field)));
    node(Content::Map(members.collect()))
}

fn value(field: &Value) -> Node<'_> {
    let content = match &field.kind {
        None | Some(Kind::NullValue(_)) => Content::Empty,
        Some(Kind::NumberValue(number)) => Content::Plain(number.to_string().into()),
        Some(Kind::BoolValue(truth)) => Content::Plain(truth.to_string().into()),
        Some(Kind::StringValue(text)) => Content::Quoted(text.into()),
        Some(Kind::StructValue(inside)) => return structure(inside),
        Some(Kind::ListValue(list)) => Content::List(list.values.iter().map(value).collect()),
    };
    node(content)
}

fn map<'m, const N: usize>(members: [(&'static str, Option<Node<'m>>); N]) -> Node<'m> {
    let members = members.into_iter();
    let members = members.filter_map(|(name, value)| Some((key(name), value?)));
    node(Content::Map(members.collect()))
}

fn list<'m, M>(items: &'m [M], item: impl Fn(&'m M) -> Node<'m>) -> Option<Node<'m>> {
    (!items.is_empty()).then(|| node(Content::List(items.iter().map(item).collect())))
}

/// Returns a quoted string value, so that it is never read as a number or a boolean. Returns `None`
/// for an empty string.
fn text(text: &str) -> Option<Node<'_>> {
    (!text.is_empty()).then(|| key(text))
}

fn flag(flag: bool) -> Option<Node<'static>> {
    flag.then(|| node(Content::Plain("true".into())))
}

fn key(name: &str) -> Node<'_> {
    node(Content::Quoted(name.into()))
}

const fn node(content: Content<'_>) -> Node<'_> {
    Node { line: 0, content }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(config: &RateLimitConfig) -> Any {
        Any {
            type_url: TYPE_URL.to_owned(),
            value: config.encode_to_vec(),
        }
    }

    fn limited(key: &str, unit: i32) -> RateLimitDescriptor {
        RateLimitDescriptor {
            key: key.to_owned(),
            rate_limit: Some(RateLimitPolicy {
                unit,
                requests_per_unit: 3,
                ..RateLimitPolicy::default()
            }),
            ..RateLimitDescriptor::default()
        }
    }

    fn config(name: &str, domain: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
        RateLimitConfig {
            name: name.to_owned(),
            domain: domain.to_owned(),
            descriptors,
        }
    }

    fn mistakes(resources: &[Any]) -> Vec<String> {
        let mistakes = read(resources, DomainFiles::One).unwrap_err();
        mistakes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_mistake_names_its_resource_and_field() {
        let mut nested = limited("a", 2);
        nested.descriptors = vec![limited("", 1), limited("b", 99)];
        let wrong_type = Any {
            type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
            value: Vec::new(),
        };
        let mut half = any(&config("half", "h", vec![limited("a", 2)]));
        half.value.truncate(half.value.len() - 1);
        let found = mistakes(&[
            any(&config("one", "d", vec![nested])),
            any(&config("two", "d", vec![limited("z", 0)])),
            any(&config("", "", Vec::new())),
            wrong_type,
            half,
        ]);
        for expected in [
            "resources[3]: has the type \"type.googleapis.com/envoy.config.cluster.v3.Cluster\", expected type.",
            "resources[4]: cannot be decoded: ",
            "one: descriptors[0].descriptors[0]: descriptor has empty key",
            "one: descriptors[0].descriptors[1].rate_limit.unit: invalid rate limit unit '99'",
            "resources[2]: config file cannot have empty domain",
            "two: domain: duplicate domain 'd' in config file; one already defines it",
            "two: descriptors[0].rate_limit.unit: invalid rate limit unit 'UNKNOWN'",
        ] {
            let is_found = found.iter().any(|line| line.starts_with(expected));
            assert!(is_found, "{expected}: {found:#?}");
        }
        assert_eq!(found.len(), 7, "{found:#?}");
    }

    #[test]
    fn resources_are_bounded() {
        let many = vec![any(&config("", "d", Vec::new())); MAX_RESOURCES + 1];
        let expected = "response: 10001 resources exceed the maximum of 10000";
        assert_eq!(mistakes(&many), [expected]);
        let empty = vec![RateLimitDescriptor::default(); MAX_RESOURCE_DESCRIPTORS + 1];
        let expected =
            "response: the number of descriptors in the resources exceeds the maximum of 500000";
        assert_eq!(mistakes(&[any(&config("", "d", empty))]), [expected]);
        let mut deep = limited("a", 2);
        for _ in 0..200 {
            deep = RateLimitDescriptor {
                key: "a".to_owned(),
                descriptors: vec![deep],
                ..RateLimitDescriptor::default()
            };
        }
        let found = mistakes(&[any(&config("deep", "d", vec![deep]))]);
        let expected = "resources[0]: cannot be decoded: ";
        assert!(found[0].starts_with(expected), "{found:?}");
    }

    #[test]
    fn no_resource_is_a_valid_configuration() {
        assert_eq!(read(&[], DomainFiles::One).unwrap().domains(), 0);
    }
}
