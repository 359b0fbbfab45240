//! Reads free-form metadata from YAML.

use std::sync::Arc;

use tidegate_config::{report::Report, value::Value, yaml::YamlContent};

use super::scalar::{self, TypedScalar};

use crate::Metadata;

/// Reads the metadata of a rule, which is a map with string keys.
pub(super) fn read(value: &Value<'_>, report: &mut Report) -> Option<Metadata> {
    match value.content() {
        YamlContent::Empty => None,
        YamlContent::Map(_) => convert(value, report),
        YamlContent::Plain(_) | YamlContent::Quoted(_) | YamlContent::List(_) => {
            let found = value.describe();
            value.wrong(
                report,
                format!("metadata cannot be converted: expected a map, got {found}"),
            );
            None
        }
    }
}

fn convert(value: &Value<'_>, report: &mut Report) -> Option<Metadata> {
    match value.content() {
        YamlContent::Map(_) => {
            let mut members: Vec<(Arc<str>, Metadata)> = Vec::new();
            for (key, value) in value.members() {
                match key {
                    Some(YamlContent::Plain(name) | YamlContent::Quoted(name)) => {
                        members.extend(
                            convert(&value, report).map(|value| (Arc::from(&**name), value)),
                        );
                    }
                    _ => value.wrong(
                        report,
                        "metadata cannot be converted: a key is not a string",
                    ),
                }
            }
            Some(Metadata::map(members))
        }
        YamlContent::List(_) => {
            let items = value.items(report, "a list").unwrap_or_default();
            Some(Metadata::List(
                items
                    .iter()
                    .filter_map(|item| convert(item, report))
                    .collect(),
            ))
        }
        content => Some(plain(content)),
    }
}

fn plain(content: &YamlContent<'_>) -> Metadata {
    let text = match content {
        YamlContent::Plain(text) | YamlContent::Quoted(text) => text,
        YamlContent::Empty | YamlContent::List(_) | YamlContent::Map(_) => return Metadata::Null,
    };
    match scalar::of(content) {
        Some(TypedScalar::Truth(truth)) => Metadata::Truth(truth),
        Some(TypedScalar::Whole(number)) => Metadata::Number(approximate(number)),
        Some(TypedScalar::Fraction(number)) if number.is_finite() => Metadata::Number(number),
        _ => Metadata::text(text),
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a protobuf Struct has only f64 numbers, and no decision depends on them"
)]
fn approximate(number: i128) -> f64 {
    number as f64
}
