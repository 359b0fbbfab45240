//! Logs with one JSON object per line, such as the logs of Tidegate, Caddy, Traefik, and nginx with
//! a JSON format.

use std::{borrow::Cow, collections::BTreeSet};

use http::HeaderName;
use serde_json::{Map, Value};

use super::{LineError, names::fields_of};
use crate::{
    field::{EntryMapping, Field},
    record::LogRecord,
};

/// The maximum number of distinct field names in a log.
const MAX_NAMES: usize = 1_000;

/// The fields of a JSON log.
#[derive(Clone, Debug)]
pub(crate) struct JsonLogFields {
    /// The name of the program that writes such logs.
    pub(crate) name: &'static str,
    /// The path and the meaning of each used value. In a path, the keys of nested objects are
    /// separated by dots.
    fields: Vec<(Box<str>, Field)>,
}

impl JsonLogFields {
    /// Determines which fields to use from the field names in `sample`.
    ///
    /// # Errors
    ///
    /// Returns an error for the first line if no line is an object, or if no line contains a time.
    pub(crate) fn detect(sample: &[String], mappings: &[EntryMapping]) -> Result<Self, LineError> {
        let first = sample.first().map_or("", String::as_str);
        let mut names = BTreeSet::new();
        for line in sample {
            if let Ok(Value::Object(object)) = serde_json::from_str(line) {
                collect_names(&object, "", &mut names);
            }
        }
        if names.is_empty() {
            let problem = "expected a JSON object".to_owned();
            return Err(parse(first)
                .err()
                .unwrap_or_else(|| LineError::at(first, 0, problem)));
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let has = |name: &str| names.contains(&name);
        let name = if has("duration_us") && has("complete") {
            "tidegate"
        } else if has("request.uri") {
            "caddy"
        } else if has("StartUTC") || has("DownstreamStatus") {
            "traefik-json"
        } else {
            "json"
        };
        let fields = fields_of(&names).into_iter();
        let mut fields: Vec<(Box<str>, Field)> = fields
            .map(|(at, field)| (names[at].into(), field))
            .collect();
        let mapped = mappings.iter();
        fields.extend(mapped.map(|mapping| (mapping.field.clone(), mapping.meaning.clone())));
        if !fields.iter().any(|(_, field)| field.is_time()) {
            let shown = names.join(", ");
            let problem = format!(
                "no field is recognised as the time; name it with --entry time=FIELD; the fields are {shown}"
            );
            return Err(LineError::at(first, 0, problem));
        }
        Ok(Self { name, fields })
    }

    pub(crate) fn parse(&self, line: &str) -> Result<LogRecord<'static>, LineError> {
        let object = parse(line)?;
        let mut record = LogRecord::default();
        for (path, field) in &self.fields {
            let Some(value) = find(&object, path) else {
                continue;
            };
            if *field == Field::Headers {
                add_headers(&mut record, value);
                continue;
            }
            let Some(text) = text_of(value).filter(|text| !text.is_empty() && text != "-") else {
                continue;
            };
            if !record.set(field, Cow::Owned(text)) {
                let expected = field.expected();
                return Err(LineError::at(
                    line,
                    0,
                    format!("`{path}`: expected {expected}"),
                ));
            }
        }
        Ok(record)
    }
}

fn parse(line: &str) -> Result<Map<String, Value>, LineError> {
    serde_json::from_str(line).map_err(|error| {
        let problem = error.to_string();
        let problem = problem.split(" at line ").next().unwrap_or_default();
        let problem = if error.is_data() {
            // The line is another kind of JSON value. The parser's own message would contain the
            // value.
            "not a JSON object".to_owned()
        } else {
            format!("not a JSON object: {problem}")
        };
        LineError {
            column: error.column().max(1),
            problem,
        }
    })
}

/// Collects the paths of all fields.
fn collect_names(object: &Map<String, Value>, prefix: &str, names: &mut BTreeSet<String>) {
    for (key, value) in object {
        let path = format!("{prefix}{key}");
        // Do not collect header names, because they differ between lines.
        if let Value::Object(inner) = value
            && !key.eq_ignore_ascii_case("headers")
        {
            collect_names(inner, &format!("{path}."), names);
        } else if names.len() < MAX_NAMES {
            names.insert(path);
        }
    }
}

/// Returns the value at `path`. A key may contain dots.
fn find<'v>(object: &'v Map<String, Value>, path: &str) -> Option<&'v Value> {
    if let Some(value) = object.get(path) {
        return Some(value);
    }
    path.match_indices('.')
        .find_map(|(at, _)| match object.get(&path[..at])? {
            Value::Object(inner) => find(inner, &path[at + 1..]),
            _ => None,
        })
}

/// Converts a value to a string. For a list, returns its first value; for an object, returns
/// `None`.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        // A float is formatted without an exponent. serde_json would format 0.00009 as 9e-5.
        Value::Number(number) if number.is_f64() => number.as_f64().map(|float| float.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        Value::Array(values) => text_of(values.first()?),
        Value::Null | Value::Object(_) => None,
    }
}

/// Adds the headers in an object, where each name has a value or a list of values.
fn add_headers(record: &mut LogRecord<'_>, headers: &Value) {
    let Value::Object(headers) = headers else {
        return;
    };
    for (name, value) in headers {
        let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else {
            continue;
        };
        match value {
            Value::Array(lines) => {
                for line in lines {
                    record.add_header(&name, &text_of(line).unwrap_or_default());
                }
            }
            line => record.add_header(&name, &text_of(line).unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_and_dotted_names_are_found() {
        let object = serde_json::from_str(r#"{"a": {"b.c": 1, "d": {"e": 2}}, "f.g": 3}"#).unwrap();
        for (path, expected) in [
            ("a.b.c", Some(1)),
            ("a.d.e", Some(2)),
            ("f.g", Some(3)),
            ("a.x", None),
            ("f.g.h", None),
        ] {
            assert_eq!(
                find(&object, path).and_then(Value::as_i64),
                expected,
                "{path}"
            );
        }
    }

    #[test]
    fn small_numbers_have_no_exponent() {
        let value = serde_json::from_str("[0.00009, 1795325114.2501, 7]").unwrap();
        let Value::Array(values) = value else {
            panic!("{value}")
        };
        let texts: Vec<String> = values.iter().filter_map(text_of).collect();
        assert_eq!(texts, ["0.00009", "1795325114.2501", "7"]);
    }

    #[test]
    fn a_log_without_a_time_lists_its_fields() {
        let sample = [r#"{"who": "a", "what": {"x": 1}}"#.to_owned()];
        let error = JsonLogFields::detect(&sample, &[]).unwrap_err();
        assert!(
            error.problem.ends_with("the fields are what.x, who"),
            "{error:?}"
        );
        let mapping = EntryMapping::parse("time=what.x").unwrap();
        assert!(JsonLogFields::detect(&sample, &[mapping]).is_ok());
        let error = JsonLogFields::detect(&["{\"a\": tru}".to_owned()], &[]).unwrap_err();
        assert_eq!(
            (error.column, &*error.problem),
            (10, "not a JSON object: expected ident")
        );
    }
}
