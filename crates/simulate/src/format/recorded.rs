//! Requests recorded by a server (`record` in its rules file), with one JSON object per line.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Number, Value};

use super::LineError;
use crate::{field::Field, record::LogRecord, timestamp::TimeForm};

/// The name of the format.
pub(super) const NAME: &str = "record";

/// A line. Other JSON fields, such as the server's decision, are ignored.
#[derive(Debug, Deserialize)]
struct RecordedLine {
    time: Number,
    cost: u64,
    entries: Map<String, Value>,
}

/// Parses a line. The recorded entries take precedence over all other data about the request, so
/// that the simulation uses the same values as the server did.
pub(super) fn parse(line: &str) -> Result<LogRecord<'static>, LineError> {
    let parsed: RecordedLine = serde_json::from_str(line).map_err(|error| {
        // The parser's message about an invalid value contains the value, which must not appear in
        // a report with hashed keys.
        let text = error.to_string();
        let problem = if error.is_data() && !text.starts_with("missing field") {
            "`time`, `cost` or `entries` has the wrong type".to_owned()
        } else {
            let problem = text.split(" at line ").next();
            problem.unwrap_or_default().to_owned()
        };
        LineError {
            column: error.column().max(1),
            problem: format!("not a recorded request: {problem}"),
        }
    })?;
    let mut record = LogRecord::default();
    let time = match parsed.time.as_f64() {
        // A float is formatted without an exponent.
        Some(seconds) if parsed.time.is_f64() => seconds.to_string(),
        _ => parsed.time.to_string(),
    };
    if !record.set(&Field::Arrival(TimeForm::Any), Cow::Owned(time)) {
        return Err(LineError::at(line, 0, "`time` is not a time".to_owned()));
    }
    if !record.set_cost(parsed.cost) {
        return Err(LineError::at(line, 0, "`cost` is out of range".to_owned()));
    }
    for (name, value) in parsed.entries {
        let Value::String(value) = value else {
            let problem = format!("the entry `{name}` is not a string");
            return Err(LineError::at(line, 0, problem));
        };
        if matches!(&*name, "ip" | "ip.exact") {
            record.set(&Field::Peer, Cow::Owned(value.clone()));
        }
        record.set(&Field::Entry(name.into()), Cow::Owned(value));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use tidegate_identity::Entries;

    use super::*;

    #[test]
    fn the_recorded_entries_are_used_unchanged() {
        let line = r#"{"time":1700000000.000123,"cost":3,"allowed":false,"entries":{"ip":"203.0.113.9","path":"/a","customer":""}}"#;
        let record = parse(line).unwrap();
        assert_eq!(record.arrival().unwrap().as_micros(), 1_700_000_000_000_123);
        assert_eq!(record.cost().units(), 3);
        let parts = record.into_parts().unwrap();
        let entries = parts.extensions.get::<Entries>().unwrap();
        let values = ["ip", "path", "method"].map(|name| entries.get(name));
        assert_eq!(values, [Some("203.0.113.9"), Some("/a"), Some("")]);
    }

    #[test]
    fn a_damaged_line_is_an_error() {
        for (line, problem) in [
            (
                "{\"time\":1,\"cost\":1",
                "not a recorded request: EOF while parsing an object",
            ),
            (
                r#"{"time":1,"cost":0,"entries":{}}"#,
                "`cost` is out of range",
            ),
            (
                r#"{"time":-5,"cost":1,"entries":{}}"#,
                "`time` is not a time",
            ),
            (
                r#"{"time":1700000000,"cost":1,"entries":{"a":1}}"#,
                "the entry `a` is not a string",
            ),
            (
                r#"{"time":1700000000,"entries":{}}"#,
                "not a recorded request: missing field `cost`",
            ),
        ] {
            assert_eq!(parse(line).unwrap_err().problem, problem, "{line}");
        }
    }
}
