//! Globs: patterns for a whole value, with `*` as a wildcard.

use std::fmt;

use super::work::Effort;
use crate::{limit::bounds, rules::RuleError};

/// A pattern with at least one `*`, matched against the whole value.
///
/// - In a pattern that begins with `/` (a path), `*` matches any characters except `/`, so it stays
///   within one path segment. In any other pattern, `*` matches any characters, so that `*bot*`
///   also finds `bot` in a user agent with slashes.
/// - `**` matches any characters, including `/`.
/// - A pattern that ends in `/**` also matches the path before this slash: `/api/**` matches
///   `/api`, `/api/` and all paths below `/api/`.
///
/// A wildcard also matches the empty string. Stars cannot be escaped: to match a value that
/// contains a `*`, use [`Pattern::exact`](super::Pattern::exact).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::rules) struct Glob {
    /// The literal text before the first wildcard.
    head: Box<str>,
    /// Each wildcard, with the literal text that follows it.
    runs: Box<[(Run, Box<str>)]>,
    /// Whether a value equal to `head` matches: the glob `/api/**`, whose head is `/api`, also
    /// matches `/api`.
    or_head: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// A wildcard for any characters except `/`.
    Segment,
    /// A wildcard for any characters.
    Any,
}

impl Glob {
    pub(in crate::rules) fn new(text: &str) -> Result<Self, RuleError> {
        if text.len() > bounds::MAX_PATTERN_BYTES {
            let most = bounds::MAX_PATTERN_BYTES;
            let problem = format!(
                "the glob has {} bytes, which exceeds the maximum of {most}",
                text.len()
            );
            return Err(RuleError::new("", problem));
        }
        let (head, mut rest) = text.split_at(text.find('*').unwrap_or(text.len()));
        let single = if text.starts_with('/') {
            Run::Segment
        } else {
            Run::Any
        };
        let mut runs = Vec::new();
        while !rest.is_empty() {
            let after = rest.trim_start_matches('*');
            let run = if rest.len() - after.len() == 1 {
                single
            } else {
                Run::Any
            };
            let (literal, next) = after.split_at(after.find('*').unwrap_or(after.len()));
            runs.push((run, literal.into()));
            rest = next;
        }
        if runs.len() > bounds::MAX_WILDCARDS {
            let most = bounds::MAX_WILDCARDS;
            let problem = format!("{} wildcards exceed the maximum of {most}", runs.len());
            return Err(RuleError::new("", problem));
        }
        let is_directory = text.ends_with("/**") && runs.len() == 1;
        Ok(Self::with_head(head, runs, is_directory))
    }

    /// Creates a glob. For a glob such as `/api/**`, which also matches `/api`, the head does not
    /// include the slash before the wildcard.
    fn with_head(head: &str, runs: Vec<(Run, Box<str>)>, is_directory: bool) -> Self {
        let directory = head
            .strip_suffix('/')
            .filter(|directory| !directory.is_empty());
        let directory = directory.filter(|_| is_directory);
        Self {
            head: directory.unwrap_or(head).into(),
            runs: runs.into(),
            or_head: directory.is_some(),
        }
    }

    /// Returns the prefix of every matching value.
    pub(in crate::rules) fn head(&self) -> &str {
        &self.head
    }

    /// Returns the suffix of every matching value.
    pub(in crate::rules) fn tail(&self) -> &str {
        let last = self.runs.last().filter(|_| !self.or_head);
        last.map_or("", |(_, literal)| literal)
    }

    /// Returns the literals between the wildcards. Every matching value contains each literal.
    pub(in crate::rules) fn parts(&self) -> impl Iterator<Item = &str> {
        let between = self.runs.len().saturating_sub(1);
        self.runs[..between].iter().map(|(_, literal)| &**literal)
    }

    /// Returns the [effort](Effort) of matching one value.
    pub(in crate::rules) fn effort(&self) -> Effort {
        if self.runs.len() > 1 {
            Effort::Linear
        } else {
            Effort::Constant
        }
    }

    pub(in crate::rules) fn matches(&self, value: &str) -> bool {
        let Some(rest) = value.strip_prefix(&*self.head) else {
            return false;
        };
        if self.or_head {
            return rest.is_empty() || rest.starts_with('/');
        }
        match &*self.runs {
            [] => rest.is_empty(),
            [(run, tail)] => rest
                .strip_suffix(&**tail)
                .is_some_and(|skipped| run.takes(skipped.as_bytes())),
            runs if runs.iter().all(|(run, _)| *run == Run::Any) => matches_any_runs(runs, rest),
            runs => matches_runs(runs, rest.as_bytes()),
        }
    }
}

/// Formats the glob as in the rules file, but with three or more adjacent stars reduced to two.
impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.head)?;
        if self.or_head {
            f.write_str("/")?;
        }
        for (run, literal) in &self.runs {
            let has_segments = self.head.starts_with('/');
            let stars = if *run == Run::Any && has_segments {
                "**"
            } else {
                "*"
            };
            write!(f, "{stars}{literal}")?;
        }
        Ok(())
    }
}

impl Run {
    fn takes(self, bytes: &[u8]) -> bool {
        self == Self::Any || !bytes.contains(&b'/')
    }
}

/// Matches wildcards that can all skip any characters. For wildcards that can skip any characters,
/// it is enough to try the first occurrence of each literal. The value must end with the last
/// literal.
fn matches_any_runs(runs: &[(Run, Box<str>)], mut rest: &str) -> bool {
    let Some(((_, last), literals)) = runs.split_last() else {
        return rest.is_empty();
    };
    for (_, literal) in literals {
        let Some((_, after)) = rest.split_once(&**literal) else {
            return false;
        };
        rest = after;
    }
    rest.ends_with(&**last)
}

/// Matches several wildcards without backtracking, by tracking all possible end positions of a
/// wildcard at once. The time is at most proportional to the number of wildcards times the length
/// of `value`, for any input.
fn matches_runs(runs: &[(Run, Box<str>)], value: &[u8]) -> bool {
    // `ends[i]` is true if the part of the pattern processed so far can match exactly `value[..i]`.
    let mut ends = vec![false; value.len() + 1];
    ends[0] = true;
    for (run, literal) in runs {
        ends = step(*run, literal.as_bytes(), value, &ends);
    }
    ends.last().copied().unwrap_or(false)
}

fn step(run: Run, literal: &[u8], value: &[u8], before: &[bool]) -> Vec<bool> {
    let mut after = vec![false; before.len()];
    let mut open = false;
    for (at, begins) in before.iter().enumerate() {
        // A wildcard that has begun can end at this position if its literal follows.
        open |= begins;
        if open && value[at..].starts_with(literal) {
            after[at + literal.len()] = true;
        }
        if run == Run::Segment && value.get(at) == Some(&b'/') {
            open = false;
        }
    }
    after
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn glob(text: &str) -> Glob {
        Glob::new(text).unwrap()
    }

    #[test]
    fn a_star_in_a_path_stays_in_its_segment() {
        let users = glob("/users/*/posts");
        assert!(users.matches("/users/7/posts"));
        assert!(users.matches("/users//posts"));
        assert!(!users.matches("/users/7/8/posts"));
        assert!(!users.matches("/users/7/posts/"));
        assert!(glob("/static/*.js").matches("/static/a.js"));
        assert!(!glob("/static/*.js").matches("/static/a/b.js"));
    }

    #[test]
    fn a_star_elsewhere_matches_any_run() {
        assert!(glob("*bot*").matches("Mozilla/5.0 (compatible; Googlebot/2.1)"));
        assert!(glob("curl*").matches("curl/8.0"));
        assert!(!glob("curl*").matches("a curl"));
        assert!(glob("*").matches(""));
    }

    #[test]
    fn two_stars_cross_segments_and_match_the_directory_itself() {
        let api = glob("/api/**");
        for value in ["/api", "/api/", "/api/v1", "/api/v1/x"] {
            assert!(api.matches(value), "{value}");
        }
        assert!(!api.matches("/apix"));
        assert!(!api.matches("/ap"));
        assert!(glob("/**").matches("/"));
        assert!(!glob("/**").matches(""));
        assert!(glob("/a/**/z").matches("/a/b/c/z"));
        assert!(!glob("/a/**/z").matches("/a/z"));
    }

    #[test]
    fn one_star_does_not_match_the_directory_itself() {
        // In a pattern that is not a path, a single star also matches any characters, but only a
        // pattern that ends in `/**` also matches the text before the slash.
        assert!(!glob("a/*").matches("a"));
        assert!(!glob("/a/*").matches("/a"));
        assert!(glob("a/**").matches("a"));
    }

    #[test]
    fn a_pattern_that_is_too_long_or_has_too_many_wildcards_is_refused() {
        assert!(Glob::new(&"*a".repeat(16)).is_ok());
        let problem = Glob::new(&"*a".repeat(17)).unwrap_err().problem;
        assert_eq!(problem, "17 wildcards exceed the maximum of 16");
        assert!(Glob::new(&"a".repeat(1_025)).is_err());
    }

    /// A simple reference implementation, which tries every possible match of every wildcard.
    fn naive(pattern: &[u8], value: &[u8], path: bool) -> bool {
        match pattern {
            [] => value.is_empty(),
            [b'*', b'*', rest @ ..] if rest.first() != Some(&b'*') => {
                (0..=value.len()).any(|skip| naive(rest, &value[skip..], path))
            }
            [b'*', rest @ ..] if rest.first() == Some(&b'*') => naive(rest, value, path),
            [b'*', rest @ ..] => (0..=value.len())
                .filter(|skip| !path || !value[..*skip].contains(&b'/'))
                .any(|skip| naive(rest, &value[skip..], path)),
            [literal, rest @ ..] => {
                value.first() == Some(literal) && naive(rest, &value[1..], path)
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]
        #[test]
        fn a_glob_matches_the_same_values_as_its_model(pattern in "[/ab*]{1,8}", value in "[/ab]{0,10}") {
            let path = pattern.starts_with('/');
            let twin = naive(pattern.as_bytes(), value.as_bytes(), path);
            let directory = pattern.strip_suffix("/**").is_some_and(|head| {
                !head.is_empty() && !head.contains('*') && head == value
            });
            prop_assert_eq!(glob(&pattern).matches(&value), twin || directory);
        }
    }
}
