//! CSV with a header: the first line contains the column names. The separator is a comma, a
//! semicolon or a tab.

use std::borrow::Cow;

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use super::{LineError, names::fields_of};
use crate::{
    field::{EntryMapping, Field},
    record::LogRecord,
};

/// The maximum number of columns.
const MAX_COLUMNS: usize = 1_000;

/// The columns of a CSV log.
#[derive(Clone, Debug)]
pub(crate) struct Csv {
    separator: u8,
    columns: Vec<String>,
    /// The index and the meaning of each used column.
    fields: Vec<(usize, Field)>,
}

impl Csv {
    /// Determines the separator and the columns from the header line.
    ///
    /// # Errors
    ///
    /// Returns an error if the line is not a header, or if no column contains the time.
    pub(crate) fn new(header: &str, mappings: &[EntryMapping]) -> Result<Self, LineError> {
        let occurrences =
            |separator: &&u8| header.bytes().filter(|byte| byte == *separator).count();
        let separator = *b",;\t".iter().max_by_key(occurrences).unwrap_or(&b',');
        let header = header.trim_start_matches('\u{feff}');
        let columns = split(separator, header)
            .filter(|columns| columns.len() > 1)
            .ok_or_else(|| LineError::at(header, 0, "expected a header with columns".to_owned()))?;
        let names: Vec<&str> = columns.iter().map(|name| name.trim()).collect();
        let mut fields = fields_of(&names);
        for EntryMapping { field, meaning } in mappings {
            let at = names
                .iter()
                .position(|name| *name == &**field)
                .ok_or_else(|| {
                    let problem = format!("`{field}` is not a column of the header");
                    LineError::at(header, 0, problem)
                })?;
            fields.push((at, meaning.clone()));
        }
        if !fields.iter().any(|(_, field)| field.is_time()) {
            let problem =
                "no header column is recognised as the time; name it with --entry time=COLUMN";
            return Err(LineError::at(header, 0, problem.to_owned()));
        }
        let columns = names.iter().map(|name| (*name).to_owned()).collect();
        Ok(Self {
            separator,
            columns,
            fields,
        })
    }

    pub(crate) fn parse(&self, line: &str) -> Result<LogRecord<'static>, LineError> {
        let values = split(self.separator, line)
            .ok_or_else(|| LineError::at(line, 0, "a quoted value is not closed".to_owned()))?;
        if values.len() != self.columns.len() {
            let problem = format!(
                "has {} values, but the header has {} columns",
                values.len(),
                self.columns.len()
            );
            return Err(LineError::at(line, 0, problem));
        }
        let mut record = LogRecord::default();
        for (at, field) in &self.fields {
            let value = values[*at].trim();
            if value.is_empty() || value == "-" {
                continue;
            }
            if !record.set(field, Cow::Owned(value.to_owned())) {
                let (column, expected) = (&self.columns[*at], field.expected());
                return Err(LineError::at(
                    line,
                    0,
                    format!("`{column}`: expected {expected}"),
                ));
            }
        }
        Ok(record)
    }
}

/// Splits a line into its values. Returns `None` if a quoted value is not closed on this line.
fn split(separator: u8, line: &str) -> Option<Vec<String>> {
    let mut reader: Reader = ReaderBuilder::new().delimiter(separator).build();
    let mut values = vec![0; line.len() + 1];
    let mut ends = vec![0; MAX_COLUMNS];
    let (mut read, mut written, mut count) = (0, 0, 0);
    loop {
        let input = &line.as_bytes()[read..];
        let (result, input_used, output_used, ends_used) =
            reader.read_record(input, &mut values[written..], &mut ends[count..]);
        read += input_used;
        written += output_used;
        count += ends_used;
        match result {
            // The whole line has been read. The empty input in the next call ends the record.
            ReadRecordResult::InputEmpty if read == line.len() && !input.is_empty() => {}
            ReadRecordResult::Record => break,
            ReadRecordResult::InputEmpty
            | ReadRecordResult::OutputFull
            | ReadRecordResult::OutputEndsFull
            | ReadRecordResult::End => return None,
        }
    }
    let mut start = 0;
    let values = ends[..count].iter().map(|end| {
        let value = String::from_utf8_lossy(&values[start..*end]).into_owned();
        start = *end;
        value
    });
    Some(values.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_at_separators_outside_quotes() {
        for (line, expected) in [
            ("a,b,c", &["a", "b", "c"][..]),
            ("a,,", &["a", "", ""]),
            (r#""a,b","c ""d""",e"#, &["a,b", "c \"d\"", "e"]),
        ] {
            assert_eq!(split(b',', line).unwrap(), expected, "{line}");
        }
        assert_eq!(split(b',', ""), None);
        assert_eq!(split(b',', &",".repeat(MAX_COLUMNS)), None);
    }

    #[test]
    fn a_header_needs_a_time() {
        let error = Csv::new("a,b", &[]).unwrap_err();
        assert!(error.problem.contains("--entry time=COLUMN"), "{error:?}");
        let csv = Csv::new("\u{feff}time;client_ip;path", &[]).unwrap();
        assert!(csv.parse("2026-01-01T00:00:00Z;192.0.2.1;/a").is_ok());
        let error = csv.parse("2026-01-01T00:00:00Z;192.0.2.1").unwrap_err();
        assert_eq!(error.problem, "has 2 values, but the header has 3 columns");
        let error = csv.parse("now;192.0.2.1;/").unwrap_err();
        assert!(
            error.problem.starts_with("`time`: expected a time"),
            "{error:?}"
        );
    }
}
