//! Derived entries. A derived entry is the part of another entry that is safe to show, such as the
//! owner's name in an API key, without the secret.
//!
//! Keys are visible in snapshots, on the admin listener, and in the logs of tools that query the
//! admin listener. Secrets must therefore be removed from an entry before rules use it in a key.

use std::fmt;

use regex::{Regex, RegexBuilder};
use tidegate_core::bounds::{MAX_PATTERN_BYTES, MAX_REGEX_BYTES};

/// The highest part number that can be selected.
const MAX_PART: usize = 16;

/// An entry whose value is a part of another entry's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DerivedEntry {
    source: Box<str>,
    cut: Selector,
}

#[derive(Clone, Debug)]
enum Selector {
    /// The part at `index`, counted from 0, of the value split at each `separator`.
    Split { separator: Box<str>, index: usize },
    /// The only capture group of a regular expression. The expression must match the whole value.
    Group(Regex),
}

/// Two regular expressions are equal if their sources are equal.
impl PartialEq for Selector {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Split { separator, index },
                Self::Split {
                    separator: of,
                    index: at,
                },
            ) => (separator, index) == (of, at),
            (Self::Group(regex), Self::Group(other)) => regex.as_str() == other.as_str(),
            _ => false,
        }
    }
}

impl Eq for Selector {}

/// The error for an invalid derived entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DerivedEntryError {
    /// The invalid field: `of`, `split`, `part` or `regex`.
    pub field: &'static str,
    /// A description of the problem.
    pub problem: String,
}

impl fmt::Display for DerivedEntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for DerivedEntryError {}

impl DerivedEntry {
    /// Splits the value of the entry `source` at each `separator`, and selects part number `part`,
    /// counted from 1.
    ///
    /// A value without the separator does not have any parts, because the whole value may be
    /// secret.
    ///
    /// # Errors
    ///
    /// Returns an error if the separator is empty, or if the part number is not between 1 and 16.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_identity::DerivedEntry;
    ///
    /// let id = DerivedEntry::split("header.x-api-key", ".", 1).unwrap();
    /// assert_eq!(id.extract("acme.s3cret"), Some("acme"));
    /// assert_eq!(id.extract("s3cret"), None);
    /// ```
    pub fn split(source: &str, separator: &str, part: usize) -> Result<Self, DerivedEntryError> {
        if separator.is_empty() {
            return Err(error("split", "must not be empty"));
        }
        let index = part.checked_sub(1).filter(|index| *index < MAX_PART);
        let index = index
            .ok_or_else(|| error("part", format!("must be from 1 to {MAX_PART}, got {part}")))?;
        let separator = separator.into();
        Self::new(source, Selector::Split { separator, index })
    }

    /// Selects the part of the entry `source` that the only capture group of `pattern` matches. The
    /// pattern must match the whole value.
    ///
    /// # Errors
    ///
    /// Returns an error if the regular expression is invalid, too long or too large, or if it does
    /// not have exactly one capture group.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_identity::DerivedEntry;
    ///
    /// let pattern = "(?i:bearer) +([a-z0-9]+)_.*";
    /// let tenant = DerivedEntry::regex("header.authorization", pattern).unwrap();
    /// assert_eq!(tenant.extract("Bearer acme_s3cret"), Some("acme"));
    /// assert_eq!(tenant.extract("bearer  acme_s3cret"), Some("acme"));
    /// assert_eq!(tenant.extract("Basic YTpi"), None);
    /// ```
    pub fn regex(source: &str, pattern: &str) -> Result<Self, DerivedEntryError> {
        if pattern.len() > MAX_PATTERN_BYTES {
            let problem = format!(
                "{} bytes exceed the maximum of {MAX_PATTERN_BYTES}",
                pattern.len()
            );
            return Err(error("regex", problem));
        }
        let regex = RegexBuilder::new(&format!("^(?:{pattern})$"))
            .size_limit(MAX_REGEX_BYTES)
            .dfa_size_limit(MAX_REGEX_BYTES)
            .build()
            .map_err(|problem| {
                // The regex parser's error message has several lines, most of which show the
                // position. Only the last line names the problem.
                let text = problem.to_string();
                let last = text.lines().last().unwrap_or_default();
                error(
                    "regex",
                    format!(
                        "is not a valid regular expression: {}",
                        last.trim_start_matches("error: ")
                    ),
                )
            })?;
        match regex.captures_len() {
            2 => Self::new(source, Selector::Group(regex)),
            groups => {
                let problem = format!(
                    "must have one capture group around the part to keep, has {}; write other groups as (?:…)",
                    groups - 1
                );
                Err(error("regex", problem))
            }
        }
    }

    fn new(source: &str, cut: Selector) -> Result<Self, DerivedEntryError> {
        if source.is_empty() {
            return Err(error("of", "must name an entry such as header.x-api-key"));
        }
        let source = source.into();
        Ok(Self { source, cut })
    }

    /// Returns the name of the entry from which this entry is derived.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the selected part of `value`. Returns `None` if `value` lacks the selected part, or
    /// if the part is empty.
    #[must_use]
    pub fn extract<'v>(&self, value: &'v str) -> Option<&'v str> {
        let part = match &self.cut {
            Selector::Split { separator, index } => {
                value.find(&**separator)?;
                value.split(&**separator).nth(*index)
            }
            Selector::Group(regex) => regex.captures(value)?.get(1).map(|group| group.as_str()),
        };
        part.filter(|part| !part.is_empty())
    }
}

fn error(field: &'static str, problem: impl Into<String>) -> DerivedEntryError {
    DerivedEntryError {
        field,
        problem: problem.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_part_is_never_included() {
        let first = DerivedEntry::split("k", "::", 1).unwrap();
        let third = DerivedEntry::split("k", "::", 3).unwrap();
        for (value, one, three) in [
            ("a::b::c::d", Some("a"), Some("c")),
            ("a::b", Some("a"), None),
            ("secret", None, None),
            ("::secret", None, None),
            ("", None, None),
            ("é::x", Some("é"), None),
        ] {
            assert_eq!(
                (first.extract(value), third.extract(value)),
                (one, three),
                "{value}"
            );
        }
        let group = DerivedEntry::regex("k", "(?:live|test)_([a-z]+)_.{3,}").unwrap();
        assert_eq!(group.extract("live_acme_xyz"), Some("acme"));
        for value in [
            "live_acme_xy",
            "xlive_acme_xyz",
            "live__xyz",
            "live_acme_xyz\n",
        ] {
            assert_eq!(group.extract(value), None, "{value:?}");
        }
    }

    #[test]
    fn invalid_parts_are_refused() {
        let refused = |part: Result<DerivedEntry, DerivedEntryError>| part.unwrap_err().to_string();
        assert_eq!(
            refused(DerivedEntry::split("k", "", 1)),
            "split: must not be empty"
        );
        assert_eq!(
            refused(DerivedEntry::split("k", ".", 0)),
            "part: must be from 1 to 16, got 0"
        );
        assert_eq!(
            refused(DerivedEntry::split("k", ".", 17)),
            "part: must be from 1 to 16, got 17"
        );
        assert!(refused(DerivedEntry::split("", ".", 1)).starts_with("of: "));
        assert_eq!(
            refused(DerivedEntry::regex("k", "(")),
            "regex: is not a valid regular expression: unclosed group"
        );
        for pattern in ["a", "(a)(b)"] {
            assert!(
                refused(DerivedEntry::regex("k", pattern))
                    .starts_with("regex: must have one capture group")
            );
        }
        assert!(
            refused(DerivedEntry::regex("k", &"a".repeat(2_000))).contains("exceed the maximum")
        );
        assert!(refused(DerivedEntry::regex("k", "(\\pL{999})")).starts_with("regex: "));
    }
}
