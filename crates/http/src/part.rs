//! The part of an entry that may be shown: whose an API key is, without its secret.
//!
//! Keys stand in metrics' neighbourhood: in snapshots, on the admin door, in logs of whoever asks it. So what
//! is secret in them must be cut off before they are counted by.

use std::fmt;

use regex::{Regex, RegexBuilder};
use tidegate_core::bounds::{MAX_PATTERN_BYTES, MAX_REGEX_BYTES};

/// The most parts among which one is chosen.
const MAX_PART: usize = 16;

/// An entry that is part of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    source: Box<str>,
    cut: Cut,
}

#[derive(Clone, Debug)]
enum Cut {
    /// What stands at `index`, from 0, between `separator`s.
    Split { separator: Box<str>, index: usize },
    /// The one group of an expression that matches the whole value.
    Group(Regex),
}

/// Expressions are alike if they are written alike.
impl PartialEq for Cut {
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

impl Eq for Cut {}

/// Why there can be no such part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartError {
    /// What is wrong: `of`, `split`, `part` or `regex`.
    pub field: &'static str,
    /// Why.
    pub problem: String,
}

impl fmt::Display for PartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for PartError {}

impl Part {
    /// Part number `part`, from 1, of the entry `source`, split at each `separator`.
    ///
    /// A value without the separator has no parts: it may be nothing but a secret.
    ///
    /// # Errors
    ///
    /// Refuses an empty separator, and a number that is not from 1 to 16.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_http::Part;
    ///
    /// let id = Part::split("header.x-api-key", ".", 1).unwrap();
    /// assert_eq!(id.of("acme.s3cret"), Some("acme"));
    /// assert_eq!(id.of("s3cret"), None);
    /// ```
    pub fn split(source: &str, separator: &str, part: usize) -> Result<Self, PartError> {
        if separator.is_empty() {
            return Err(error("split", "must not be empty"));
        }
        let index = part.checked_sub(1).filter(|index| *index < MAX_PART);
        let index = index
            .ok_or_else(|| error("part", format!("must be from 1 to {MAX_PART}, got {part}")))?;
        let separator = separator.into();
        Self::new(source, Cut::Split { separator, index })
    }

    /// What the one group of `pattern` captures in the entry `source`, all of which it must match.
    ///
    /// # Errors
    ///
    /// Refuses what is no regular expression, one that is too long or too large, and one without exactly one group.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_http::Part;
    ///
    /// let tenant = Part::regex("header.authorization", "(?i:bearer) +([a-z0-9]+)_.*").unwrap();
    /// assert_eq!(tenant.of("Bearer acme_s3cret"), Some("acme"));
    /// assert_eq!(tenant.of("bearer  acme_s3cret"), Some("acme"));
    /// assert_eq!(tenant.of("Basic YTpi"), None);
    /// ```
    pub fn regex(source: &str, pattern: &str) -> Result<Self, PartError> {
        if pattern.len() > MAX_PATTERN_BYTES {
            let problem = format!(
                "{} bytes are over the maximum of {MAX_PATTERN_BYTES}",
                pattern.len()
            );
            return Err(error("regex", problem));
        }
        let regex = RegexBuilder::new(&format!("^(?:{pattern})$"))
            .size_limit(MAX_REGEX_BYTES)
            .dfa_size_limit(MAX_REGEX_BYTES)
            .build()
            .map_err(|problem| {
                // The parser's message is a drawing of several lines, of which the last says what is wrong.
                let text = problem.to_string();
                let last = text.lines().last().unwrap_or_default();
                error(
                    "regex",
                    format!(
                        "is no regular expression: {}",
                        last.trim_start_matches("error: ")
                    ),
                )
            })?;
        match regex.captures_len() {
            2 => Self::new(source, Cut::Group(regex)),
            groups => {
                let problem = format!(
                    "must have one group in parentheses around what is to be kept, has {}; others are written (?:…)",
                    groups - 1
                );
                Err(error("regex", problem))
            }
        }
    }

    fn new(source: &str, cut: Cut) -> Result<Self, PartError> {
        if source.is_empty() {
            return Err(error("of", "must name an entry such as header.x-api-key"));
        }
        let source = source.into();
        Ok(Self { source, cut })
    }

    /// The entry of which it is a part.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The part of `value`; `None` if it has no such part, or an empty one.
    #[must_use]
    pub fn of<'v>(&self, value: &'v str) -> Option<&'v str> {
        let part = match &self.cut {
            Cut::Split { separator, index } => {
                value.find(&**separator)?;
                value.split(&**separator).nth(*index)
            }
            Cut::Group(regex) => regex.captures(value)?.get(1).map(|group| group.as_str()),
        };
        part.filter(|part| !part.is_empty())
    }
}

fn error(field: &'static str, problem: impl Into<String>) -> PartError {
    PartError {
        field,
        problem: problem.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_never_comes_out() {
        let first = Part::split("k", "::", 1).unwrap();
        let third = Part::split("k", "::", 3).unwrap();
        for (value, one, three) in [
            ("a::b::c::d", Some("a"), Some("c")),
            ("a::b", Some("a"), None),
            ("secret", None, None),
            ("::secret", None, None),
            ("", None, None),
            ("é::x", Some("é"), None),
        ] {
            assert_eq!((first.of(value), third.of(value)), (one, three), "{value}");
        }
        let group = Part::regex("k", "(?:live|test)_([a-z]+)_.{3,}").unwrap();
        assert_eq!(group.of("live_acme_xyz"), Some("acme"));
        for value in [
            "live_acme_xy",
            "xlive_acme_xyz",
            "live__xyz",
            "live_acme_xyz\n",
        ] {
            assert_eq!(group.of(value), None, "{value:?}");
        }
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        let refused = |part: Result<Part, PartError>| part.unwrap_err().to_string();
        assert_eq!(refused(Part::split("k", "", 1)), "split: must not be empty");
        assert_eq!(
            refused(Part::split("k", ".", 0)),
            "part: must be from 1 to 16, got 0"
        );
        assert_eq!(
            refused(Part::split("k", ".", 17)),
            "part: must be from 1 to 16, got 17"
        );
        assert!(refused(Part::split("", ".", 1)).starts_with("of: "));
        assert_eq!(
            refused(Part::regex("k", "(")),
            "regex: is no regular expression: unclosed group"
        );
        for pattern in ["a", "(a)(b)"] {
            assert!(refused(Part::regex("k", pattern)).starts_with("regex: must have one group"));
        }
        assert!(refused(Part::regex("k", &"a".repeat(2_000))).contains("over the maximum"));
        assert!(refused(Part::regex("k", "(\\pL{999})")).starts_with("regex: "));
    }
}
