//! Routes: paths compared as in many web frameworks.
//!
//! Other patterns compare paths byte by byte, but many frameworks treat `/login/`, `/LOGIN`,
//! `/login;x=1` and `/login%20` like `/login`. The [`Route`] `/login` matches all four paths.

use std::borrow::Cow;

use super::{Pattern, PatternKind};
use crate::{rules::RuleError, shown::shown};

/// A path or glob that ignores letter case, trailing slashes, path parameters (`;name=value`) and
/// trailing encoded white space.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::rules) struct Route {
    written: Box<str>,
    /// The exact value or glob for the [normalised form](form) of a value.
    inner: Box<Pattern>,
}

impl Route {
    pub(in crate::rules) fn new(text: &str) -> Result<Self, RuleError> {
        if !text.starts_with('/') {
            let text = shown(text);
            let problem = format!("a route is a path and must begin with a slash, got \"{text}\"");
            return Err(RuleError::new("route", problem));
        }
        if text.contains([';', '?', '#']) {
            let problem = "a route is a path without parameters; remove everything from the `;`, `?` or `#` on";
            return Err(RuleError::new("route", problem));
        }
        let inner = Pattern::text(&form(text))?;
        Ok(Self {
            written: text.into(),
            inner: Box::new(inner),
        })
    }

    /// Returns the route as written in the rules file.
    pub(in crate::rules) fn as_str(&self) -> &str {
        &self.written
    }

    /// Returns the pattern for the [normalised form](form) of a value.
    pub(in crate::rules) fn inner(&self) -> &Pattern {
        &self.inner
    }

    pub(in crate::rules) fn matches(&self, value: &str) -> bool {
        match self.inner.kind() {
            PatternKind::Glob(glob) => glob.matches(&form(value)),
            PatternKind::Exact(text) => form(value) == **text,
            _ => false,
        }
    }
}

/// Returns the normalised form of a path for comparing routes: lower case, without path parameters,
/// trailing slashes and trailing encoded white space. The normalised form of the root path is `/`.
pub(in crate::rules) fn form(path: &str) -> Cow<'_, str> {
    if is_form(path) {
        return Cow::Borrowed(path);
    }
    let mut form = String::with_capacity(path.len());
    let mut is_parameter = false;
    for letter in path.chars() {
        match letter {
            '/' => is_parameter = false,
            ';' => is_parameter = true,
            _ => {}
        }
        // A segment consisting only of parameters must not leave a double slash.
        let is_double = letter == '/' && form.ends_with('/');
        if !is_parameter && !is_double {
            form.push(letter.to_ascii_lowercase());
        }
    }
    let end = trimmed(&form);
    form.truncate(end.max(1));
    Cow::Owned(form)
}

/// Returns true if `path` is already normalised, which is the common case.
fn is_form(path: &str) -> bool {
    let is_small = |byte: u8| !byte.is_ascii_uppercase() && byte != b';';
    trimmed(path) == path.len() && !path.contains("//") && path.bytes().all(is_small)
}

/// Returns the length of `path` without trailing slashes and white space.
fn trimmed(path: &str) -> usize {
    const WHITE_SPACE: [&str; 7] = ["%20", "%09", "%0a", "%0b", "%0c", "%0d", "%00"];
    let mut rest = path;
    loop {
        let shorter =
            rest.trim_end_matches(|letter: char| letter == '/' || letter.is_ascii_whitespace());
        let last = shorter
            .len()
            .checked_sub(3)
            .and_then(|at| shorter.get(at..));
        let is_white = |last: &str| {
            WHITE_SPACE
                .iter()
                .any(|white| white.eq_ignore_ascii_case(last))
        };
        let shorter = match last {
            Some(last) if is_white(last) => &shorter[..shorter.len() - last.len()],
            _ => shorter,
        };
        if shorter.len() == rest.len() {
            return rest.len();
        }
        rest = shorter;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_route_matches_the_spellings_that_frameworks_treat_as_equal() {
        let login = Pattern::route("/login").unwrap();
        for same in [
            "/login",
            "/login/",
            "/LOGIN",
            "/Login//",
            "/login;x=1",
            "/login;jsessionid=A/",
            "/login%20",
            "/login%09%0A/",
            "/login/;x",
            "/login;a/;b",
            "/login%20/%20",
            "/login%00",
        ] {
            assert!(login.matches(Some(same)), "{same}");
        }
        for other in [
            "/logi",
            "/login2",
            "/a/login",
            "/login/x",
            "/login.json",
            "/",
            "",
            "/%20login",
        ] {
            assert!(!login.matches(Some(other)), "{other}");
        }
        assert!(!login.matches(None));
    }

    #[test]
    fn a_route_may_have_wildcards_and_be_the_root() {
        let api = Pattern::route("/API/**").unwrap();
        for below in ["/api", "/api/", "/Api/v1", "/api;v=1/users", "/api%20"] {
            assert!(api.matches(Some(below)), "{below}");
        }
        assert!(!api.matches(Some("/apis")));
        let users = Pattern::route("/users/*/posts/").unwrap();
        assert!(users.matches(Some("/Users/7;a=b/posts")));
        assert!(!users.matches(Some("/users/7/8/posts")));
        let root = Pattern::route("/").unwrap();
        assert!(root.matches(Some("/")) && root.matches(Some("/;x")) && !root.matches(Some("/a")));
    }

    #[test]
    fn an_invalid_path_is_refused() {
        for text in ["login", "", "*", "/login;x", "/login?next=/"] {
            assert!(Pattern::route(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn normalizing_twice_changes_nothing(path in "/[a-bA-B/;%20]{0,12}") {
            let once = form(&path).into_owned();
            prop_assert!(is_form(&once) || once == "/", "{}", once);
            prop_assert_eq!(form(&once), once.as_str());
        }
    }
}
