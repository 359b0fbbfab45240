//! Patterns: conditions on the value of an entry.

mod alternatives;
mod cidr;
mod glob;
pub(super) mod index;
mod literals;
mod route;
mod work;

pub use self::cidr::canonical_net;
pub(super) use self::work::Work;

use std::sync::Arc;

use foldhash::HashSet;
use regex_automata::{meta::Regex, util::syntax};
use regex_syntax::hir::{Hir, Look};

use self::{
    alternatives::Alternatives, cidr::CidrSet, glob::Glob, literals::Literals, route::Route,
    work::Effort,
};
use crate::{limit::bounds, rules::RuleError};

/// A condition on the value of an entry, or on whether the entry is present.
///
/// Every pattern is matched against the whole value and is case-sensitive. Only [`Pattern::route`]
/// ignores case. An absent entry matches only [`Pattern::absent`] and the negations of patterns
/// that require a value.
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
pub struct Pattern(PatternKind);

/// The kind of a pattern, which determines how it is matched and indexed.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::rules) enum PatternKind {
    Exact(Box<str>),
    Glob(Glob),
    Regex(RegexPattern),
    Cidr(CidrSet),
    Route(Route),
    Present,
    Any(Alternatives),
    All(Vec<Pattern>),
    Not(Box<Pattern>),
}

/// A regular expression for a whole value. Two expressions are equal if their sources are equal.
#[derive(Clone, Debug)]
pub(in crate::rules) struct RegexPattern {
    source: Box<str>,
    regex: Regex,
    literals: Arc<[Literals]>,
}

impl RegexPattern {
    /// Returns the expression as written in the rules file.
    pub(in crate::rules) fn as_str(&self) -> &str {
        &self.source
    }

    /// Returns the required literals of matching values.
    pub(in crate::rules) fn literals(&self) -> &[Literals] {
        &self.literals
    }
}

impl PartialEq for RegexPattern {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl Pattern {
    /// Creates a pattern that matches the value `text` or, if `text` contains a `*`, the glob
    /// `text`.
    ///
    /// In a pattern that begins with `/`, `*` matches any characters except `/`. In any other
    /// pattern, `*` matches any characters. In every pattern, `**` matches any characters. The
    /// pattern `/api/**` also matches `/api`.
    ///
    /// # Errors
    ///
    /// Rejects a glob longer than [`bounds::MAX_PATTERN_BYTES`] or with more than
    /// [`bounds::MAX_WILDCARDS`] wildcards. Rejects a string without wildcards that is longer than
    /// any value can be.
    pub fn text(text: &str) -> Result<Self, RuleError> {
        if text.contains('*') {
            return Glob::new(text).map(|glob| Self(PatternKind::Glob(glob)));
        }
        Self::exact(text)
    }

    /// Creates a pattern that matches exactly the value `text`. Stars have no special meaning.
    ///
    /// # Errors
    ///
    /// Rejects a string longer than [`bounds::MAX_ENTRY_VALUE_BYTES`], because values cannot be
    /// that long.
    pub fn exact(text: &str) -> Result<Self, RuleError> {
        let most = bounds::MAX_ENTRY_VALUE_BYTES;
        if text.len() > most {
            let problem = format!(
                "the string has {} bytes, which exceeds the maximum of {most} for a value",
                text.len()
            );
            return Err(RuleError::new("", problem));
        }
        Ok(Self(PatternKind::Exact(text.into())))
    }

    /// Creates a pattern that matches the regular expression `source` against the whole value. To
    /// search inside the value, put `.*` before and after the expression. Matching takes linear
    /// time for any expression and value.
    ///
    /// # Errors
    ///
    /// Rejects a regular expression that is invalid, is longer than [`bounds::MAX_PATTERN_BYTES`],
    /// or compiles to more than [`bounds::MAX_REGEX_BYTES`].
    pub fn regex(source: &str) -> Result<Self, RuleError> {
        let most = bounds::MAX_PATTERN_BYTES;
        if source.len() > most {
            let problem = format!(
                "the regular expression has {} bytes, which exceeds the maximum of {most}",
                source.len()
            );
            return Err(RuleError::new("regex", problem));
        }
        let hir = syntax::parse(source).map_err(|error| not_a_regex(&error.to_string()))?;
        let literals = literals::of(&hir).into();
        let regex = compile(hir)?;
        Ok(Self(PatternKind::Regex(RegexPattern {
            source: source.into(),
            regex,
            literals,
        })))
    }

    /// Creates a pattern that matches IPv4 and IPv6 addresses in one of `networks`, such as
    /// `10.0.0.0/8`, `2001:db8::/32` and `192.0.2.7`. An IPv4-mapped IPv6 address is treated as the
    /// IPv4 address.
    ///
    /// # Errors
    ///
    /// Rejects an empty list, an invalid network, and a network with host bits set.
    pub fn networks(networks: &[&str]) -> Result<Self, RuleError> {
        CidrSet::new(networks).map(|nets| Self(PatternKind::Cidr(nets)))
    }

    /// Creates a pattern that matches the path `text` or, if `text` contains a `*`, the glob
    /// `text`. As in many web frameworks, the comparison ignores letter case, trailing slashes,
    /// path parameters (`;name=value`) and trailing encoded white space.
    ///
    /// # Errors
    ///
    /// Rejects a string that contains `;`, `?` or `#`, or that does not begin with a slash. Also
    /// rejects everything that [`Self::text`] rejects.
    pub fn route(text: &str) -> Result<Self, RuleError> {
        Route::new(text).map(|route| Self(PatternKind::Route(route)))
    }

    /// Creates a pattern that matches if the entry is present, with any value, including an empty
    /// string.
    #[must_use]
    pub fn present() -> Self {
        Self(PatternKind::Present)
    }

    /// Creates a pattern that matches if the entry is absent.
    #[must_use]
    pub fn absent() -> Self {
        Self::present().negated()
    }

    /// Creates a pattern that matches if at least one of `patterns` matches.
    ///
    /// # Errors
    ///
    /// Rejects an empty list, and nesting deeper than [`bounds::MAX_PATTERN_DEPTH`].
    pub fn any_of(patterns: Vec<Self>) -> Result<Self, RuleError> {
        let (mut exact, mut others) = (HashSet::default(), Vec::new());
        match <[Self; 1]>::try_from(patterns) {
            Ok([only]) => return Ok(only),
            Err(patterns) => {
                for pattern in patterns {
                    match pattern.0 {
                        PatternKind::Exact(text) => drop(exact.insert(text)),
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
        Self(PatternKind::Any(Alternatives::new(exact, others))).not_too_deep()
    }

    /// Creates a pattern that matches if all of `patterns` match.
    ///
    /// # Errors
    ///
    /// Rejects an empty list, and nesting deeper than [`bounds::MAX_PATTERN_DEPTH`].
    pub fn all_of(patterns: Vec<Self>) -> Result<Self, RuleError> {
        match <[Self; 1]>::try_from(patterns) {
            Ok([only]) => Ok(only),
            Err(patterns) if patterns.is_empty() => {
                Err(RuleError::new("", "is empty; name at least one condition"))
            }
            Err(patterns) => Self(PatternKind::All(patterns)).not_too_deep(),
        }
    }

    /// Negates the pattern. The negation of a pattern that requires a value matches an absent
    /// entry.
    #[must_use]
    pub fn negated(self) -> Self {
        match self.0 {
            PatternKind::Not(inner) => *inner,
            kind => Self(PatternKind::Not(Box::new(Self(kind)))),
        }
    }

    /// Returns true if the pattern matches `value`, which is `None` for an absent entry.
    #[must_use]
    pub fn matches(&self, value: Option<&str>) -> bool {
        self.evaluate(value, &mut Work::unbounded())
    }

    /// Returns true if the pattern matches `value`, and counts the evaluations in `work`. The
    /// result is only valid if `work` is not exhausted.
    pub(in crate::rules) fn evaluate(&self, value: Option<&str>, work: &mut Work) -> bool {
        if let Some(effort) = self.effort()
            && !work.spend(effort, value)
        {
            return false;
        }
        match &self.0 {
            PatternKind::Exact(text) => value == Some(text),
            PatternKind::Glob(glob) => value.is_some_and(|value| glob.matches(value)),
            PatternKind::Regex(regex) => value.is_some_and(|value| regex.regex.is_match(value)),
            PatternKind::Cidr(nets) => value.is_some_and(|value| nets.contains(value)),
            PatternKind::Route(route) => value.is_some_and(|value| route.matches(value)),
            PatternKind::Present => value.is_some(),
            PatternKind::Any(any) => any.evaluate(value, work),
            PatternKind::All(patterns) => {
                patterns.iter().all(|pattern| pattern.evaluate(value, work))
            }
            PatternKind::Not(pattern) => !pattern.evaluate(value, work),
        }
    }

    /// Returns the maximum number of pattern evaluations for matching one value.
    pub(in crate::rules) fn weight(&self) -> usize {
        match (&self.0, self.effort()) {
            (PatternKind::Any(any), _) => any.weight(),
            (PatternKind::All(patterns), _) => patterns
                .iter()
                .map(Self::weight)
                .fold(0, usize::saturating_add),
            (PatternKind::Not(pattern), _) => pattern.weight(),
            (_, effort) => effort.map_or(0, Effort::most),
        }
    }

    /// Returns the effort of one evaluation, or `None` for a composite pattern, whose parts are
    /// counted separately.
    fn effort(&self) -> Option<Effort> {
        match &self.0 {
            PatternKind::Exact(_) | PatternKind::Cidr(_) | PatternKind::Present => {
                Some(Effort::Constant)
            }
            PatternKind::Glob(glob) => Some(glob.effort()),
            PatternKind::Regex(_) | PatternKind::Route(_) => Some(Effort::Linear),
            PatternKind::Any(_) | PatternKind::All(_) | PatternKind::Not(_) => None,
        }
    }

    pub(in crate::rules) fn kind(&self) -> &PatternKind {
        &self.0
    }

    fn depth(&self) -> usize {
        let deepest = |patterns: &[Self]| patterns.iter().map(Self::depth).max().unwrap_or(0);
        match &self.0 {
            PatternKind::Any(any) => 1 + deepest(any.others()),
            PatternKind::All(patterns) => 1 + deepest(patterns),
            PatternKind::Not(pattern) => 1 + pattern.depth(),
            PatternKind::Exact(_)
            | PatternKind::Glob(_)
            | PatternKind::Regex(_)
            | PatternKind::Cidr(_)
            | PatternKind::Route(_)
            | PatternKind::Present => 1,
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

/// Compiles a regular expression, and anchors it so that it must match the whole value.
fn compile(hir: Hir) -> Result<Regex, RuleError> {
    let whole = Hir::concat(vec![Hir::look(Look::Start), hir, Hir::look(Look::End)]);
    let config = Regex::config()
        .nfa_size_limit(Some(bounds::MAX_REGEX_BYTES))
        .hybrid_cache_capacity(bounds::MAX_REGEX_BYTES)
        // Building the two disabled engines would take half of the compile time. The two engines
        // would save little time at runtime, because only a few expressions are evaluated per
        // request.
        .dfa(false)
        .onepass(false);
    let built = Regex::builder().configure(config).build_from_hir(&whole);
    built.map_err(|error| match error.size_limit() {
        Some(most) => {
            let problem = format!("compiles to more than {most} bytes; simplify it");
            RuleError::new("regex", problem)
        }
        None => not_a_regex(&error.to_string()),
    })
}

/// Converts an error message from the regex parser. The message has several lines that show the
/// position of the error; the last line describes the problem.
fn not_a_regex(message: &str) -> RuleError {
    let last = message.lines().last().unwrap_or_default();
    let last = last.trim_start_matches("error: ");
    RuleError::new(
        "regex",
        format!("is not a valid regular expression: {last}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Pattern {
        Pattern::text(text).unwrap()
    }

    #[test]
    fn an_absent_entry_matches_only_absent_and_not_patterns() {
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
    fn an_invalid_regular_expression_is_refused_in_one_line() {
        let refused = |source: &str| Pattern::regex(source).unwrap_err().to_string();
        assert_eq!(
            refused("(a"),
            "regex: is not a valid regular expression: unclosed group"
        );
        assert!(refused(&"a".repeat(1_025)).contains("maximum of 1024"));
        assert!(refused(r"((\w{100}){100}){100}").contains("simplify it"));
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
    fn empty_and_deeply_nested_conditions_are_refused() {
        assert!(Pattern::any_of(Vec::new()).is_err());
        assert!(Pattern::all_of(Vec::new()).is_err());
        let mut nested = Ok(text("a"));
        for _ in 0..bounds::MAX_PATTERN_DEPTH {
            nested = nested.and_then(|inner| Pattern::any_of(vec![inner.negated(), text("b")]));
        }
        assert!(nested.unwrap_err().problem.contains("nested deeper"));
    }
}
