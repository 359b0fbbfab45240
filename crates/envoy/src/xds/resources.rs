//! Reads the resources from a control plane.
//!
//! A resource and a configuration file with equal rules are converted to equal documents. The
//! documents are then read like files, so that rules from files and from a control plane have the
//! same checks, messages and meaning.

use std::borrow::Cow;

use prost::{DecodeError, Message as _};
use prost_types::{Any, Struct, Value, value::Kind};
use tidegate_config::{
    Mistake,
    envoy::DomainFiles,
    yaml::{YamlContent, YamlDocument, YamlNode},
};
use tidegate_net::input::shown;

use super::wire::count_elements;
use crate::{
    FileMistake, LoadedConfig,
    config::{FileMistakes, interpret, of_file},
    proto::ratelimit::config::ratelimit::v3::{
        RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
    },
};

/// The type of the resources that the client subscribes to.
pub const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// The maximum number of resources in one response.
pub const MAX_RESOURCES: usize = 10_000;

/// The maximum number of descriptors in all resources of a response, at all depths. Replaced limits
/// and metadata values are counted as descriptors. The maximum is necessary because an empty
/// descriptor takes two bytes on the wire, but a hundred times as much memory.
pub const MAX_RESOURCE_DESCRIPTORS: usize = 500_000;

/// Reads all `resources` of a response as one configuration.
///
/// # Errors
///
/// Returns the errors in all resources, of which at most 1,000 are listed. The list of errors is
/// never empty.
pub(super) fn read(
    resources: &[Any],
    merging: DomainFiles,
) -> Result<LoadedConfig, Vec<FileMistake>> {
    if resources.len() > MAX_RESOURCES {
        let message = format!("the number of resources exceeds the maximum of {MAX_RESOURCES}");
        return Err(vec![mistake("response", message)]);
    }
    let mut configs = Vec::with_capacity(resources.len());
    let mut mistakes = FileMistakes::default();
    let mut elements = 0_usize;
    for (at, resource) in resources.iter().enumerate() {
        let place = format!("resources[{at}]");
        let decoded = match count(resource) {
            Ok(count) => {
                elements = elements.saturating_add(count);
                if elements > MAX_RESOURCE_DESCRIPTORS {
                    let message = format!(
                        "the number of descriptors, replaced limits and metadata values in the resources exceeds the maximum of {MAX_RESOURCE_DESCRIPTORS}"
                    );
                    return Err(vec![mistake("response", message)]);
                }
                RateLimitConfig::decode(&*resource.value).map_err(|error| undecodable(&error))
            }
            Err(message) => Err(message),
        };
        match decoded {
            Ok(config) => {
                let name = Some(&config.name).filter(|name| !name.is_empty());
                configs.push((name.map_or(place, |name| shown(name)), config));
            }
            Err(message) => mistakes.push(mistake(&place, message)),
        }
    }
    configs.sort_by(|(a, _), (b, _)| a.cmp(b));
    let documents = configs.iter();
    let documents: Vec<(&str, YamlDocument<'_>)> = documents
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

/// Returns the number of elements in a resource that is not decoded yet.
fn count(resource: &Any) -> Result<usize, String> {
    if resource.type_url != TYPE_URL {
        let found = shown(&resource.type_url);
        return Err(format!("has the type \"{found}\", expected {TYPE_URL}"));
    }
    count_elements(&resource.value).map_err(|error| undecodable(&error))
}

fn undecodable(error: &DecodeError) -> String {
    format!("cannot be decoded: {error}")
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
fn document(config: &RateLimitConfig) -> YamlDocument<'_> {
    let root = map([
        ("domain", text(&config.domain)),
        ("descriptors", list(&config.descriptors, descriptor)),
    ]);
    YamlDocument {
        root,
        warnings: Vec::new(),
    }
}

fn descriptor(fields: &RateLimitDescriptor) -> YamlNode<'_> {
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

fn policy(policy: &RateLimitPolicy) -> YamlNode<'_> {
    let unit = match RateLimitUnit::try_from(policy.unit) {
        Ok(RateLimitUnit::Unknown) if policy.unlimited => None,
        Ok(unit) => Some(Cow::Borrowed(unit.as_str_name())),
        Err(_) => Some(Cow::Owned(policy.unit.to_string())),
    };
    let requests = || {
        node(YamlContent::Plain(
            policy.requests_per_unit.to_string().into(),
        ))
    };
    map([
        ("unit", unit.map(|unit| node(YamlContent::Quoted(unit)))),
        ("requests_per_unit", (!policy.unlimited).then(requests)),
        ("unlimited", flag(policy.unlimited)),
        ("name", text(&policy.name)),
        (
            "replaces",
            list(&policy.replaces, |one| map([("name", text(&one.name))])),
        ),
    ])
}

fn structure(fields: &Struct) -> YamlNode<'_> {
    let members = fields.fields.iter();
    let members = members.map(|(name, field)| (key(name), value(field)));
    node(YamlContent::Map(members.collect()))
}

fn value(field: &Value) -> YamlNode<'_> {
    let content = match &field.kind {
        None | Some(Kind::NullValue(_)) => YamlContent::Empty,
        Some(Kind::NumberValue(number)) => YamlContent::Plain(number.to_string().into()),
        Some(Kind::BoolValue(truth)) => YamlContent::Plain(truth.to_string().into()),
        Some(Kind::StringValue(text)) => YamlContent::Quoted(text.into()),
        Some(Kind::StructValue(inside)) => return structure(inside),
        Some(Kind::ListValue(list)) => YamlContent::List(list.values.iter().map(value).collect()),
    };
    node(content)
}

fn map<'m, const N: usize>(members: [(&'static str, Option<YamlNode<'m>>); N]) -> YamlNode<'m> {
    let members = members.into_iter();
    let members = members.filter_map(|(name, value)| Some((key(name), value?)));
    node(YamlContent::Map(members.collect()))
}

fn list<'m, M>(items: &'m [M], item: impl Fn(&'m M) -> YamlNode<'m>) -> Option<YamlNode<'m>> {
    (!items.is_empty()).then(|| node(YamlContent::List(items.iter().map(item).collect())))
}

/// Returns a quoted string value, so that it is never read as a number or a boolean. Returns `None`
/// for an empty string.
fn text(text: &str) -> Option<YamlNode<'_>> {
    (!text.is_empty()).then(|| key(text))
}

fn flag(flag: bool) -> Option<YamlNode<'static>> {
    flag.then(|| node(YamlContent::Plain("true".into())))
}

fn key(name: &str) -> YamlNode<'_> {
    node(YamlContent::Quoted(name.into()))
}

const fn node(content: YamlContent<'_>) -> YamlNode<'_> {
    YamlNode { line: 0, content }
}

#[cfg(test)]
mod tests {
    use prost_types::ListValue;

    use super::*;
    use crate::proto::ratelimit::config::ratelimit::v3::RateLimitReplace;

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
        let expected = "response: the number of resources exceeds the maximum of 10000";
        assert_eq!(mistakes(&many), [expected]);
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

    /// Returns resources with `count` elements of each type, which take two to five bytes each.
    fn elements(count: usize) -> [Any; 4] {
        let of = |descriptor| any(&config("", "d", vec![descriptor]));
        let descriptors = vec![RateLimitDescriptor::default(); count];
        let mut replaces = limited("a", 2);
        let policy = replaces.rate_limit.as_mut().unwrap();
        policy.replaces = vec![RateLimitReplace::default(); count];
        let with_metadata = |fields| RateLimitDescriptor {
            metadata: Some(Struct { fields }),
            ..limited("a", 2)
        };
        let values = vec![Value::default(); count];
        let list = Value {
            kind: Some(Kind::ListValue(ListValue { values })),
        };
        let members = (0..count).map(|at| (at.to_string(), Value::default()));
        [
            any(&config("", "d", descriptors)),
            of(replaces),
            of(with_metadata([(String::new(), list)].into())),
            of(with_metadata(members.collect())),
        ]
    }

    #[test]
    fn the_elements_of_a_response_are_bounded() {
        let expected = "response: the number of descriptors, replaced limits and metadata values \
            in the resources exceeds the maximum of 500000";
        for resource in elements(MAX_RESOURCE_DESCRIPTORS + 1) {
            assert_eq!(mistakes(&[resource]), [expected]);
        }
        // The elements of all resources count.
        let half = elements(MAX_RESOURCE_DESCRIPTORS / 2);
        assert_eq!(mistakes(&half), [expected]);
    }

    /// A decoder would allocate the memory before it reports the error at the end of the resource.
    #[test]
    fn the_elements_are_counted_before_a_resource_is_decoded() {
        let [mut many, ..] = elements(MAX_RESOURCE_DESCRIPTORS + 1);
        // The domain is not UTF-8.
        many.value.extend(b"\x12\x01\xff");
        let found = mistakes(&[many]);
        assert!(
            found[0].contains("exceeds the maximum of 500000"),
            "{found:?}"
        );
    }

    /// The decoder reads all fields of a message, even those beyond its end.
    #[test]
    fn a_field_beyond_the_end_of_its_message_is_not_decoded() {
        let mut long = b"\x1a\x04\x22\xc0\x84\x3d".to_vec();
        long.extend(b"\x22\0".repeat(MAX_RESOURCE_DESCRIPTORS + 1));
        let resource = Any {
            type_url: TYPE_URL.to_owned(),
            value: long,
        };
        let expected =
            "resources[0]: cannot be decoded: failed to decode Protobuf message: buffer underflow";
        assert_eq!(mistakes(&[resource]), [expected]);
    }

    #[test]
    fn at_most_a_thousand_errors_are_listed() {
        let wrong = vec![RateLimitDescriptor::default(); 1_500];
        let undecodable = Any {
            type_url: TYPE_URL.to_owned(),
            value: b"\xff".to_vec(),
        };
        let mut resources: Vec<Any> = ["a", "b"]
            .map(|domain| any(&config(domain, domain, wrong.clone())))
            .into();
        resources.extend(vec![undecodable; 10]);
        let found = mistakes(&resources);
        assert!(found[0].starts_with("resources[2]: "), "{}", found[0]);
        assert!(
            found[999].starts_with("a: descriptors[989]"),
            "{}",
            found[999]
        );
        assert_eq!(found[1_000..], ["and 2010 more errors"]);
        // The errors that precede the list are enough to fill it.
        let found = mistakes(&vec![resources[11].clone(); 1_001]);
        assert_eq!(found[1_000..], ["and 1 more error"]);
    }

    #[test]
    fn no_resource_is_a_valid_configuration() {
        assert_eq!(read(&[], DomainFiles::One).unwrap().domains(), 0);
    }
}
