//! Formats that consist of variables with literal strings between them, such as nginx's
//! `log_format` and Apache's `LogFormat`.

use std::borrow::Cow;

use super::LineError;
use crate::{
    field::{EntryMapping, Field},
    record::LogRecord,
};

/// A variable in a template.
#[derive(Clone, Debug)]
pub(crate) struct TemplateVariable {
    /// The name of the variable, without `$` or `%{}`.
    pub(crate) name: Box<str>,
    /// The part of the request that the variable contains, if the variable is used.
    pub(crate) field: Option<Field>,
    /// The literal string after the variable. The string can be empty only for the last variable.
    pub(crate) after: Box<str>,
}

/// How a server writes quotation marks, backslashes and control characters in a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Escapes {
    /// Escaped with a backslash, as in nginx and Apache.
    #[default]
    Backslash,
    /// Unchanged, as in Envoy.
    None,
}

/// A compiled template.
#[derive(Clone, Debug)]
pub(crate) struct LineTemplate {
    /// Two strings for detecting and skipping a prefix that precedes the actual line, such as a
    /// syslog header. If the first string occurs in a line, everything up to the second string is
    /// skipped.
    pub(crate) prefix: Option<(&'static str, &'static str)>,
    escapes: Escapes,
    /// The literal string before the first variable.
    pub(crate) head: Box<str>,
    pub(crate) variables: Vec<TemplateVariable>,
    /// The index and the meaning of each used variable, in the order in which the fields are set.
    fields: Vec<(usize, Field)>,
}

impl LineTemplate {
    /// Creates a template. Two adjacent variables without a literal string between them are an
    /// error, because the end of the first variable would be unknown.
    pub(crate) fn new(head: &str, variables: Vec<TemplateVariable>) -> Result<Self, String> {
        if variables.is_empty() {
            return Err("has no variables".to_owned());
        }
        for pair in variables.windows(2) {
            if pair[0].after.is_empty() {
                return Err(format!(
                    "`{}` and `{}` have no text between them, so the end of the first cannot be found",
                    pair[0].name, pair[1].name
                ));
            }
        }
        let fields = variables.iter().enumerate();
        let fields = fields.filter_map(|(at, variable)| Some((at, variable.field.clone()?)));
        Ok(Self {
            prefix: None,
            escapes: Escapes::default(),
            head: head.into(),
            fields: fields.collect(),
            variables,
        })
    }

    /// In lines that contain `mark`, skips everything up to `end`.
    pub(crate) fn after_prefix(self, mark: &'static str, end: &'static str) -> Self {
        Self {
            prefix: Some((mark, end)),
            ..self
        }
    }

    /// Treats backslashes in values as literal characters.
    pub(crate) fn without_escapes(self) -> Self {
        Self {
            escapes: Escapes::None,
            ..self
        }
    }

    /// Maps the variables named in `mappings` to entries.
    pub(crate) fn map(&mut self, mappings: &[EntryMapping]) -> Result<(), String> {
        for EntryMapping { field, meaning } in mappings {
            let at = self
                .variables
                .iter()
                .position(|variable| variable.name == *field);
            let at = at.ok_or_else(|| {
                let names: Vec<&str> = self.variables.iter().map(|known| &*known.name).collect();
                format!(
                    "`{field}` is not a field of the log format; its fields are {}",
                    names.join(", ")
                )
            })?;
            self.fields.push((at, meaning.clone()));
        }
        Ok(())
    }

    /// Returns true if lines in this format contain a time.
    pub(crate) fn has_time(&self) -> bool {
        self.fields.iter().any(|(_, field)| field.is_time())
    }

    pub(crate) fn parse<'l>(&self, line: &'l str) -> Result<LogRecord<'l>, LineError> {
        let values = self.split(line)?;
        let mut record = LogRecord::default();
        for (at, field) in &self.fields {
            let (start, value) = values[*at];
            // Servers write `-` for a missing value.
            if (value == "-" || value.is_empty()) && !field.is_time() {
                continue;
            }
            let value = match self.escapes {
                Escapes::Backslash => unescaped(value),
                Escapes::None => Cow::Borrowed(value),
            };
            if !record.set(field, value) {
                let expected = field.expected();
                return Err(LineError::at(line, start, format!("expected {expected}")));
            }
        }
        Ok(record)
    }

    /// Returns the values of all variables, with their positions in the line.
    fn split<'l>(&self, line: &'l str) -> Result<Vec<(usize, &'l str)>, LineError> {
        let mut at = match self.prefix {
            Some((mark, end)) if line.contains(mark) => {
                line.find(end).map_or(0, |found| found + end.len())
            }
            _ => 0,
        };
        if !line[at..].starts_with(&*self.head) {
            return Err(LineError::at(line, at, format!("expected `{}`", self.head)));
        }
        at += self.head.len();
        let mut values = Vec::with_capacity(self.variables.len());
        for TemplateVariable { name, after, .. } in &self.variables {
            let rest = &line[at..];
            let length = if after.is_empty() {
                rest.len()
            } else {
                end_of_value(rest, after, self.escapes).ok_or_else(|| {
                    LineError::at(line, at, format!("expected `{after}` after `{name}`"))
                })?
            };
            values.push((at, &rest[..length]));
            at += length + after.len();
        }
        if at < line.len() {
            return Err(LineError::at(
                line,
                at,
                "expected the end of the line".to_owned(),
            ));
        }
        Ok(values)
    }
}

/// Returns the length of a value that ends before `after`. If a quotation mark ends the value, the
/// value may contain escaped quotation marks.
fn end_of_value(rest: &str, after: &str, escapes: Escapes) -> Option<usize> {
    if !after.starts_with('"') || escapes == Escapes::None {
        return rest.find(after);
    }
    let mut from = 0;
    loop {
        let found = from + rest[from..].find(after)?;
        let before = rest[..found].bytes().rev();
        let backslashes = before.take_while(|byte| *byte == b'\\').count();
        if backslashes % 2 == 0 {
            return Some(found);
        }
        from = found + 1;
    }
}

/// Decodes the escapes of nginx and Apache: `\x22`, `\"`, `\\`, `\n`, `\u0022`.
fn unescaped(value: &str) -> Cow<'_, str> {
    if !value.contains('\\') {
        return Cow::Borrowed(value);
    }
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find('\\') {
        bytes.extend_from_slice(&rest.as_bytes()[..at]);
        let escape = &rest[at + 1..];
        let hex = |digits: std::ops::Range<usize>| {
            let digits = escape.get(digits)?;
            let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_hex.then(|| u32::from_str_radix(digits, 16).ok())?
        };
        let mut push = |letter: char, used: usize| {
            bytes.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
            used
        };
        let used = match escape.chars().next() {
            Some('x') => match hex(1..3).and_then(|byte| u8::try_from(byte).ok()) {
                Some(byte) => {
                    bytes.push(byte);
                    3
                }
                None => push('\\', 0),
            },
            Some('u') => match hex(1..5).and_then(char::from_u32) {
                Some(letter) => push(letter, 5),
                None => push('\\', 0),
            },
            Some(plain @ ('"' | '\\' | '/')) => push(plain, 1),
            Some('n') => push('\n', 1),
            Some('t') => push('\t', 1),
            Some('r') => push('\r', 1),
            _ => push('\\', 0),
        };
        rest = &escape[used..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded() {
        for (written, expected) in [
            ("plain", "plain"),
            (r"a\x22b\x5Cc", "a\"b\\c"),
            (r#"a\"b\\c\/"#, "a\"b\\c/"),
            (r"\u0022\u00e9", "\"\u{e9}"),
            (r"\xC3\xA9", "\u{e9}"),
            (r"\n\t\r", "\n\t\r"),
            (r"\x2", r"\x2"),
            (r"\xzz\u12", r"\xzz\u12"),
            (r"\ud800", r"\ud800"),
            ("\\\u{e9}", "\\\u{e9}"),
            ("end\\", "end\\"),
        ] {
            assert_eq!(unescaped(written), expected, "{written}");
        }
    }

    #[test]
    fn an_escaped_quotation_mark_does_not_end_a_value() {
        let escaped = |rest, after| end_of_value(rest, after, Escapes::Backslash);
        assert_eq!(escaped(r#"a\"b" c"#, "\" "), Some(4));
        assert_eq!(escaped(r#"a\\" c"#, "\" "), Some(3));
        assert_eq!(escaped(r#"a\""#, "\""), None);
        assert_eq!(escaped("a b", " "), Some(1));
        assert_eq!(end_of_value(r#"a\" c"#, "\" ", Escapes::None), Some(2));
    }
}
