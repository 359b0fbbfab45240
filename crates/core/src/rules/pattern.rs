//! Patterns: what the value of an entry must be.

use foldhash::HashSet;
use regex::{Regex, RegexBuilder};

use super::{RuleError, glob::Glob, nets::Nets};
use crate::bounds;

/// What the value of an entry must be, or whether there must be one.
///
/// Every pattern is held against the whole value, upper and lower case apart. An entry that is absent
/// matches nothing but [`Pattern::absent`] and the negation of what it does not match.
///
/// # Examples
///
/// ```
/// use tidegate_core::Pattern;
///
/// assert!(Pattern::text("/api/**").unwrap().matches(Some("/api/v1/users")));
/// assert!(Pattern::networks(&["10.0.0.0/8"]).unwrap().matches(Some("10.1.2.3")));
/// assert!(Pattern::exact("POST").unwrap().negated().matches(None));
/// assert_eq!(Pattern::regex("v[12]").unwrap(), Pattern::regex("v[12]").unwrap()); // written alike
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Pattern(Kind);

/// The patterns as they are matched and indexed.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    Exact(Box<str>),
    Glob(Glob),
    Regex(Expression),
    Nets(Nets),
    Present,
    /// Exact values apart, so that a long list of them is one look-up.
    Any(HashSet<Box<str>>, Vec<Pattern>),
    All(Vec<Pattern>),
    Not(Box<Pattern>),
}

/// An expression, the equal of one that is written alike.
#[derive(Clone, Debug)]
pub(super) struct Expression(Regex);

impl Expression {
    pub(super) fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Pattern {
    /// The value is `text`, or matches it as a glob if it has a `*`.
    ///
    /// In a pattern that begins with `/`, `*` matches any run of characters without `/`; in any other
    /// pattern, and as `**` in both, any run at all. `/api/**` matches `/api` too.
    ///
    /// # Errors
    ///
    /// Refuses a glob over [`bounds::MAX_PATTERN_BYTES`] or with more than [`bounds::MAX_WILDCARDS`]
    /// runs, and a text that is longer than any value.
    pub fn text(text: &str) -> Result<Self, RuleError> {
        if text.contains('*') {
            return Glob::new(text).map(|glob| Self(Kind::Glob(glob)));
        }
        Self::exact(text)
    }

    /// The value is `text`, stars and all.
    ///
    /// # Errors
    ///
    /// Refuses a text over [`bounds::MAX_ENTRY_VALUE_BYTES`], which no value could be.
    pub fn exact(text: &str) -> Result<Self, RuleError> {
        let most = bounds::MAX_ENTRY_VALUE_BYTES;
        if text.len() > most {
            let problem = format!(
                "{} bytes are over the maximum of {most} of any value",
                text.len()
            );
            return Err(RuleError::new("", problem));
        }
        Ok(Self(Kind::Exact(text.into())))
    }

    /// The whole value matches the regular expression `source`; write `.*` around it to find it
    /// anywhere in the value. Matching takes linear time, whatever the expression and the value.
    ///
    /// # Errors
    ///
    /// Refuses what is no regular expression, one over [`bounds::MAX_PATTERN_BYTES`], and one that
    /// compiles to more than [`bounds::MAX_REGEX_BYTES`].
    pub fn regex(source: &str) -> Result<Self, RuleError> {
        let most = bounds::MAX_PATTERN_BYTES;
        if source.len() > most {
            let problem = format!(
                "{} bytes of expression are over the maximum of {most}",
                source.len()
            );
            return Err(RuleError::new("regex", problem));
        }
        // First as it was written, so that an error shows what was written.
        compile(source)?;
        compile(&format!(r"\A(?:{source})\z")).map(|regex| Self(Kind::Regex(Expression(regex))))
    }

    /// The value is an address in one of `networks`, IPv4 or IPv6: `10.0.0.0/8`, `2001:db8::/32`,
    /// `192.0.2.7`. An IPv4-mapped IPv6 address is the IPv4 address that it carries.
    ///
    /// # Errors
    ///
    /// Refuses an empty list, what is no network, and an address with bits beyond its prefix.
    pub fn networks(networks: &[&str]) -> Result<Self, RuleError> {
        Nets::new(networks).map(|nets| Self(Kind::Nets(nets)))
    }

    /// There is a value, be it empty.
    #[must_use]
    pub fn present() -> Self {
        Self(Kind::Present)
    }

    /// There is no such entry.
    #[must_use]
    pub fn absent() -> Self {
        Self::present().negated()
    }

    /// One of `patterns` matches.
    ///
    /// # Errors
    ///
    /// Refuses an empty list, and nesting deeper than [`bounds::MAX_PATTERN_DEPTH`].
    pub fn any_of(patterns: Vec<Self>) -> Result<Self, RuleError> {
        let (mut exact, mut others) = (HashSet::default(), Vec::new());
        match <[Self; 1]>::try_from(patterns) {
            Ok([only]) => return Ok(only),
            Err(patterns) => {
                for pattern in patterns {
                    match pattern.0 {
                        Kind::Exact(text) => drop(exact.insert(text)),
                        _ => others.push(pattern),
                    }
                }
            }
        }
        if exact.is_empty() && others.is_empty() {
            return Err(RuleError::new(
                "",
                "an empty list matches nothing; name at least one value",
            ));
        }
        Self(Kind::Any(exact, others)).not_too_deep()
    }

    /// Every one of `patterns` matches.
    ///
    /// # Errors
    ///
    /// Refuses an empty list, and nesting deeper than [`bounds::MAX_PATTERN_DEPTH`].
    pub fn all_of(patterns: Vec<Self>) -> Result<Self, RuleError> {
        match <[Self; 1]>::try_from(patterns) {
            Ok([only]) => Ok(only),
            Err(patterns) if patterns.is_empty() => {
                Err(RuleError::new("", "is empty; name at least one condition"))
            }
            Err(patterns) => Self(Kind::All(patterns)).not_too_deep(),
        }
    }

    /// The pattern does not match. What needs a value to match, negated matches an absent entry.
    #[must_use]
    pub fn negated(self) -> Self {
        match self.0 {
            Kind::Not(inner) => *inner,
            kind => Self(Kind::Not(Box::new(Self(kind)))),
        }
    }

    /// Whether the pattern matches `value`, `None` being an entry that is absent.
    #[must_use]
    pub fn matches(&self, value: Option<&str>) -> bool {
        match &self.0 {
            Kind::Exact(text) => value == Some(text),
            Kind::Glob(glob) => value.is_some_and(|value| glob.matches(value)),
            Kind::Regex(regex) => value.is_some_and(|value| regex.0.is_match(value)),
            Kind::Nets(nets) => value.is_some_and(|value| nets.contains(value)),
            Kind::Present => value.is_some(),
            Kind::Any(exact, others) => {
                value.is_some_and(|value| exact.contains(value))
                    || others.iter().any(|pattern| pattern.matches(value))
            }
            Kind::All(patterns) => patterns.iter().all(|pattern| pattern.matches(value)),
            Kind::Not(pattern) => !pattern.matches(value),
        }
    }

    pub(super) fn kind(&self) -> &Kind {
        &self.0
    }

    fn depth(&self) -> usize {
        let deepest = |patterns: &[Self]| patterns.iter().map(Self::depth).max().unwrap_or(0);
        match &self.0 {
            Kind::Any(_, others) => 1 + deepest(others),
            Kind::All(patterns) => 1 + deepest(patterns),
            Kind::Not(pattern) => 1 + pattern.depth(),
            Kind::Exact(_) | Kind::Glob(_) | Kind::Regex(_) | Kind::Nets(_) | Kind::Present => 1,
        }
    }

    fn not_too_deep(self) -> Result<Self, RuleError> {
        let most = bounds::MAX_PATTERN_DEPTH;
        if self.depth() > most {
            let problem = format!("conditions are nested deeper than the maximum of {most}");
            return Err(RuleError::new("", problem));
        }
        Ok(self)
    }
}

fn compile(source: &str) -> Result<Regex, RuleError> {
    let built = RegexBuilder::new(source)
        .size_limit(bounds::MAX_REGEX_BYTES)
        .dfa_size_limit(bounds::MAX_REGEX_BYTES)
        .build();
    built.map_err(|error| {
        let problem = match error {
            regex::Error::CompiledTooBig(most) => {
                format!("compiles to more than {most} bytes; make it simpler")
            }
            // The parser's message is a drawing of several lines, of which the last says what is wrong.
            error => {
                let text = error.to_string();
                let last = text.lines().last().unwrap_or_default();
                format!(
                    "is no regular expression: {}",
                    last.trim_start_matches("error: ")
                )
            }
        };
        RuleError::new("regex", problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Pattern {
        Pattern::text(text).unwrap()
    }

    #[test]
    fn an_absent_entry_matches_only_absence_and_negations() {
        let patterns = [
            text("a"),
            text("*"),
            Pattern::regex(".*").unwrap(),
            Pattern::networks(&["0.0.0.0/0"]).unwrap(),
            Pattern::present(),
            Pattern::any_of(vec![text("a"), text("b")]).unwrap(),
        ];
        for pattern in patterns {
            assert!(!pattern.matches(None), "{pattern:?}");
            assert!(pattern.clone().negated().matches(None), "{pattern:?}");
        }
        assert!(Pattern::absent().matches(None));
        assert!(!Pattern::absent().matches(Some("")));
        assert!(Pattern::present().matches(Some("")));
    }

    #[test]
    fn a_regular_expression_covers_the_whole_value() {
        let digits = Pattern::regex("[0-9]+|x").unwrap();
        assert!(digits.matches(Some("42")));
        assert!(digits.matches(Some("x")));
        assert!(!digits.matches(Some("42a")));
        assert!(!digits.matches(Some("ax")));
    }

    #[test]
    fn a_bad_expression_is_refused_in_one_line() {
        let refused = |source: &str| Pattern::regex(source).unwrap_err().to_string();
        assert_eq!(
            refused("(a"),
            "regex: is no regular expression: unclosed group"
        );
        assert!(refused(&"a".repeat(1_025)).contains("maximum of 1024"));
        assert!(refused(r"((\w{100}){100}){100}").contains("make it simpler"));
    }

    #[test]
    fn lists_may_mix_kinds_and_combine() {
        let mixed = Pattern::any_of(vec![text("GET"), text("P*"), text("HEAD")]).unwrap();
        for method in ["GET", "HEAD", "POST", "PUT"] {
            assert!(mixed.matches(Some(method)), "{method}");
        }
        assert!(!mixed.matches(Some("DELETE")));
        let not_put = Pattern::all_of(vec![mixed, text("PUT").negated()]).unwrap();
        assert!(not_put.matches(Some("POST")));
        assert!(!not_put.matches(Some("PUT")));
    }

    #[test]
    fn nothing_and_nesting_without_end_are_refused() {
        assert!(Pattern::any_of(Vec::new()).is_err());
        assert!(Pattern::all_of(Vec::new()).is_err());
        let mut nested = Ok(text("a"));
        for _ in 0..bounds::MAX_PATTERN_DEPTH {
            nested = nested.and_then(|inner| Pattern::any_of(vec![inner.negated(), text("b")]));
        }
        assert!(nested.unwrap_err().problem.contains("nested deeper"));
    }
}
