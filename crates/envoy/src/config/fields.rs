//! The fields of the maps in a configuration file, and their scalar values.

use tidegate_config::{report::Report, value::Value, yaml::YamlContent};

use super::scalar::{self, TypedScalar};

/// Returns the string value of a field, if the value is a scalar.
pub(super) fn text_of<'n>(value: &Value<'n>, name: &str) -> Option<&'n str> {
    field(value, name)?.scalar()
}

/// Returns the value of a field, if it exists. If a key occurs more than once, the last value wins.
pub(super) fn field<'n>(value: &Value<'n>, name: &str) -> Option<Value<'n>> {
    let has_name = |key: &YamlContent<'_>| matches!(key, YamlContent::Plain(text) | YamlContent::Quoted(text) if text == name);
    let fields = value.members().into_iter();
    fields
        .filter(|(key, _)| key.is_some_and(has_name))
        .map(|(_, value)| value)
        .next_back()
}

/// Returns the string value of a scalar field, quoted or not; `None` if it is empty.
pub(super) fn text<'n>(value: &Value<'n>, name: &str, report: &mut Report) -> Option<&'n str> {
    let value = field(value, name)?;
    match value.content() {
        YamlContent::Plain(text) | YamlContent::Quoted(text) => Some(text),
        YamlContent::Empty => None,
        YamlContent::List(_) | YamlContent::Map(_) => {
            unreadable(&value, "a string", report);
            None
        }
    }
}

/// Reads a boolean in any YAML 1.1 notation. A missing value counts as false.
pub(super) fn flag(value: &Value<'_>, name: &str, report: &mut Report) -> bool {
    let Some(value) = field(value, name) else {
        return false;
    };
    match scalar::of(value.content()) {
        Some(TypedScalar::Truth(truth)) => truth,
        Some(TypedScalar::Null) => false,
        // A fraction is not reported at this point, because the key check reports it as an error.
        Some(TypedScalar::Fraction(_)) => false,
        Some(TypedScalar::Whole(_) | TypedScalar::Text) | None => {
            unreadable(&value, "true or false", report);
            false
        }
    }
}

/// Reports that a value has the wrong type.
pub(super) fn unreadable(value: &Value<'_>, what: &str, report: &mut Report) {
    let found = value.describe();
    value.wrong(
        report,
        format!("error loading config file: expected {what}, got {found}"),
    );
}

/// Reports an error in the field `name`, or in `value` if the field does not exist.
pub(super) fn wrong(
    value: &Value<'_>,
    name: &str,
    report: &mut Report,
    message: impl Into<String>,
) {
    field(value, name)
        .as_ref()
        .unwrap_or(value)
        .wrong(report, message);
}
