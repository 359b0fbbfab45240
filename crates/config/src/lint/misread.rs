//! A lint that warns about patterns that are easily misunderstood. Examples are regular expressions
//! that match only a part of a value, globs that end within a path segment, and path parameters as
//! in web frameworks.

use tidegate_identity::normalize_path;
use tidegate_net::input::shown;

use crate::conditions::TextComparison;

/// The code of the warning about an expression that must match the whole value. Users can search
/// for the code.
const WHOLE_VALUE: &str = "whole-value";
/// The code of the warning about a path pattern such as `/login*`, which matches `/loginadmin` but
/// not `/login/reset`.
const OPEN_END: &str = "open-end";
/// The lint for conditions that no request can meet also has this code.
pub(super) const NO_MATCH: &str = "no-match";

/// Returns a warning about `text`, a string in a pattern for `entry`, if it probably does not mean
/// what its author intended.
pub(super) fn message(entry: &str, comparison: TextComparison, text: &str) -> Option<String> {
    let not_a_path = || {
        location(text)
            .or_else(|| url(comparison, text))
            .or_else(|| fragment(comparison, text))
            .or_else(|| query(text))
    };
    let of_path = || match comparison {
        TextComparison::Is => not_a_path(),
        TextComparison::Plain | TextComparison::Route => not_a_path()
            .or_else(|| parameter(comparison, text))
            .or_else(|| open_glob(text)),
        TextComparison::Regex => location(text)
            .or_else(|| query_expression(text))
            .or_else(|| parameter(comparison, text))
            .or_else(|| path_expression(text)),
    };
    let is_path = entry == "path";
    let of_path = if is_path { of_path() } else { None };
    of_path.or_else(|| part_expression(comparison, text))
}

/// Returns a warning for a string in nginx `location` notation, such as `~ ^/login`. No path begins
/// with a modifier such as `~`, so the string never matches.
fn location(text: &str) -> Option<String> {
    let (modifier, rest) = ["~*", "^~", "~", "="].iter().find_map(|modifier| {
        let rest = text.strip_prefix(modifier)?.trim_start();
        (!rest.is_empty()).then_some((*modifier, rest))
    })?;
    let advice = match modifier {
        "=" if is_path(rest) => format!("{{is: {}}}", shown(rest)),
        "^~" if is_path(rest) => format!("{{route: {}/**}}", shown(rest.trim_end_matches('/'))),
        "~" | "~*" => location_expression(modifier, rest),
        _ => return None,
    };
    Some(format!(
        "{NO_MATCH}: `{modifier}` is a modifier of nginx's `location`, and no path begins with it; write {advice}"
    ))
}

/// Returns the condition that is equivalent to an nginx `location` with the regular expression
/// `text`. In nginx, a `location` also applies if the expression matches only a part of the path.
fn location_expression(modifier: &str, text: &str) -> String {
    if let Some(path) = exact_expression(text).filter(|_| text.starts_with('^')) {
        let path = shown(path);
        return match text.ends_with('$') {
            true => format!("{{route: {path}}}"),
            false => format!(
                "{{route: {path}}} for this path, or {{route: {path}/**}} for this path and everything \
                 below"
            ),
        };
    }
    let begin = if text.starts_with('^') { "" } else { ".*" };
    let end = if text.ends_with('$') { "" } else { ".*" };
    let expression = format!("{begin}{}{end}", shown(without_anchors(text)));
    match modifier {
        "~*" => format!("{{regex: \"(?i:{expression})\"}}"),
        _ => format!("{{regex: \"{expression}\"}}"),
    }
}

/// Splits a URL with a scheme into its authority and the rest. For example,
/// `https://example.com/login` is split into `example.com` and `/login`.
pub(super) fn split_url(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    is_scheme.then(|| rest.split_at(end))
}

/// Returns a warning for a URL in place of a path, such as `https://example.com/login`.
fn url(comparison: TextComparison, text: &str) -> Option<String> {
    let (_, rest) = split_url(text)?;
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    let advice = path_advice(comparison, &rest[..end]);
    Some(format!(
        "{NO_MATCH}: a path never contains a scheme and a host; write {advice}, and match the host with the \
         entry `host`"
    ))
}

/// Returns a warning for a path with a fragment, such as `/login#top`.
fn fragment(comparison: TextComparison, text: &str) -> Option<String> {
    let (path, _) = text.split_once('#')?;
    let why = "a path never contains a fragment (`#` and what follows), because clients do not send it to a server";
    let path = path.split('?').next().unwrap_or_default();
    if path.is_empty() {
        return Some(format!("{NO_MATCH}: {why}; write the path of the page"));
    }
    let advice = path_advice(comparison, path);
    Some(format!("{NO_MATCH}: {why}; write {advice}"))
}

/// Returns the suggested condition for `path`: a route, which is safer than an exact path.
fn path_advice(comparison: TextComparison, path: &str) -> String {
    let normal = normalize_path(path);
    let path = shown(normal.as_deref().unwrap_or(path));
    match comparison {
        TextComparison::Is => format!("{{is: {path}}}"),
        _ if path == "/" => path,
        _ => format!("{{route: {path}}}"),
    }
}

/// Returns a warning for a path with a query, such as `/login?x=1`.
fn query(text: &str) -> Option<String> {
    let (path, _) = text.split_once('?').filter(|(path, _)| is_path(path))?;
    // Skip strings that are probably regular expressions, because another warning covers them.
    if path.contains(['(', '[', '\\']) {
        return None;
    }
    Some(no_query(path))
}

/// Returns a warning for a regular expression that requires a query, such as `/login\?.*`.
fn query_expression(text: &str) -> Option<String> {
    let (path, _) = without_anchors(text).split_once("\\?")?;
    (is_path(path) && is_literal(path)).then(|| no_query(path))
}

fn no_query(path: &str) -> String {
    let path = shown(path);
    format!(
        "{NO_MATCH}: a path never contains the query; to match the path alone, write {{route: {path}}}; \
         to match a parameter of the query, use the entry `query.NAME`"
    )
}

/// Returns a warning for a path segment such as `:id`, `{id}` or `<id>`. In other software, a
/// segment of this form is a placeholder for any value.
fn parameter(comparison: TextComparison, text: &str) -> Option<String> {
    let bare = match comparison {
        TextComparison::Regex => without_anchors(text),
        _ => text,
    };
    let mut segments = bare.split('/');
    let found = shown(segments.clone().find(|segment| is_parameter(segment))?);
    let is_glob = comparison != TextComparison::Regex
        || segments.all(|segment| is_parameter(segment) || is_literal(segment));
    let (advice, meaning) = if is_glob {
        let advice = glob_advice(comparison, bare);
        let meaning = match advice.contains("**") {
            true => "`*` matches one segment and `**` any number of segments",
            false => "`*` matches one segment",
        };
        (advice, meaning)
    } else {
        // Do not suggest a glob, because a glob would compare all other segments literally.
        (expression_advice(text), "`[^/]+` matches one segment")
    };
    Some(format!(
        "{NO_MATCH}: `{found}` is compared literally, because conditions have no named parameters; write {advice}, \
         in which {meaning}"
    ))
}

/// Returns the suggested condition for `path`, with its parameters replaced by wildcards.
fn glob_advice(comparison: TextComparison, path: &str) -> String {
    let segments = path.split('/');
    let globs = segments.map(
        |segment| match (is_parameter(segment), segment.contains('*')) {
            // A parameter such as `{*rest}` stands for any number of segments.
            (true, true) => "**",
            (true, false) => "*",
            (false, _) => segment,
        },
    );
    let glob = shown(&globs.collect::<Vec<_>>().join("/"));
    match comparison {
        TextComparison::Route => format!("{{route: {glob}}}"),
        _ => glob,
    }
}

/// Returns the suggested regular expression, with the parameters replaced by `[^/]+`.
fn expression_advice(expression: &str) -> String {
    let bare = without_anchors(expression);
    let replace = |segment| {
        if is_parameter(segment) {
            "[^/]+"
        } else {
            segment
        }
    };
    let segments: Vec<&str> = bare.split('/').map(replace).collect();
    // Replace only the part between the anchors `^` and `$`, so that the anchors are kept.
    format!(
        "{{regex: '{}'}}",
        shown(&expression.replace(bare, &segments.join("/")))
    )
}

fn is_parameter(segment: &str) -> bool {
    let name = |open: &str, close: &str| {
        let name = segment.strip_prefix(open)?.strip_suffix(close)?;
        // Some frameworks allow a type (`<int:id>`) or a regular expression (`{id:[0-9]+}`) beside
        // the name.
        name.starts_with(|first: char| first.is_ascii_alphabetic() || matches!(first, '_' | '*'))
            .then_some(())
    };
    let found = name(":", "").or_else(|| name("{", "}"));
    found.or_else(|| name("<", ">")).is_some()
}

/// Returns a warning for a glob such as `/login*`, which matches `/loginadmin` but not
/// `/login/reset`.
fn open_glob(text: &str) -> Option<String> {
    let path = text.strip_suffix('*')?;
    let is_open = is_path(path) && !path.contains('*') && !path.ends_with('/');
    is_open.then(|| {
        let (glob, path) = (shown(text), shown(path));
        format!(
            "{OPEN_END}: {glob} also matches {path}x, and does not match {path}/x; write {{route: {path}}} for this \
             path, {{route: {path}/**}} for this path and everything below, or \
             {{regex: \"{path}[^/]*\"}} if this is intended"
        )
    })
}

/// Returns a warning for a regular expression that describes only the beginning or the end of a
/// path: `^/login`, `/login.*`.
fn path_expression(text: &str) -> Option<String> {
    let bare = without_anchors(text);
    if let Some(path) = bare.strip_suffix(".*").or_else(|| bare.strip_suffix(".+")) {
        let is_open = is_path(path) && is_literal(path) && !path.ends_with('/');
        return is_open.then(|| {
            let (text, path) = (shown(text), shown(path));
            format!(
                "{OPEN_END}: {text} also matches {path}x, and matches only this letter case; write \
                 {{route: {path}/**}} for this path and everything below, or the glob {path}** if this is intended"
            )
        });
    }
    let is_prefix = text.starts_with('^') && !text.ends_with('$');
    (is_prefix && is_path(bare) && is_literal(bare)).then(|| {
        let (text, path) = (shown(text), shown(bare));
        format!(
            "{WHOLE_VALUE}: a regular expression must match the whole path, so {text} matches only {path}, in this \
             letter case and without a trailing slash; write {{route: {path}}} for this path, or \
             {{route: {path}/**}} for this path and everything below"
        )
    })
}

/// Returns a warning for a regular expression with an anchor at only one end. In other software, an
/// expression with one anchor matches any value that starts with a match (`^`) or ends with a match
/// (`$`).
fn part_expression(comparison: TextComparison, text: &str) -> Option<String> {
    // In an expression such as `^a|b$`, each alternative has one anchor, so do not warn about it.
    if comparison != TextComparison::Regex || text.contains('|') {
        return None;
    }
    let begins = text.starts_with('^');
    let ends = text.ends_with('$') && !text.ends_with("\\$");
    let open_begin = [".*", ".+"].iter().any(|any| text.starts_with(any));
    let open_end = [".*", ".+", ".*?", ".+?"]
        .iter()
        .any(|any| text.ends_with(any));
    let advice = match (begins, ends) {
        (true, false) if !open_end => format!("{}.*", shown(text)),
        (false, true) if !open_begin => format!(".*{}", shown(text)),
        _ => return None,
    };
    let text = shown(text);
    Some(format!(
        "{WHOLE_VALUE}: a regular expression must match the whole value, so {text} does not match longer values; \
         write {{regex: \"{advice}\"}} to match longer values too, or remove the anchor, which has no effect"
    ))
}

fn is_path(text: &str) -> bool {
    text.starts_with('/')
}

/// Returns whether `text` contains no regular expression operators except dots. In a path, most
/// authors mean a dot literally.
fn is_literal(text: &str) -> bool {
    !text.contains([
        '\\', '[', ']', '(', ')', '{', '}', '*', '+', '?', '|', '^', '$',
    ])
}

/// Returns a regular expression without its anchors, which have no effect.
pub(super) fn without_anchors(text: &str) -> &str {
    let text = text.strip_prefix('^').unwrap_or(text);
    text.strip_suffix('$').unwrap_or(text)
}

/// Returns the only path that a regular expression matches, if it has no operators.
pub(super) fn exact_expression(text: &str) -> Option<&str> {
    let path = without_anchors(text);
    (is_path(path) && is_literal(path)).then_some(path)
}

#[cfg(test)]
mod tests {
    use crate::Config;

    /// Returns the warnings about a rule whose condition on `entry` is `pattern`. The rule is in
    /// shadow mode, so that no `exact-path` warnings are added.
    fn warnings(entry: &str, pattern: &str) -> Vec<String> {
        let when = format!("{{{entry}: {pattern}}}");
        let rules = format!("rules: [{{name: a, when: {when}, limits: [9/s], mode: shadow}}]");
        let config = Config::parse(&rules).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    fn assert_warned(entry: &str, pattern: &str, parts: &[&str]) {
        let messages = warnings(entry, pattern);
        assert_eq!(messages.len(), 1, "{pattern}: {messages:?}");
        for part in parts {
            assert!(messages[0].contains(part), "no {part:?} in {messages:?}");
        }
    }

    #[test]
    fn a_regular_expression_must_match_the_whole_value() {
        let parts = [
            "whole-value: a regular expression must match the whole path, so ^/login matches only /login",
            "write {route: /login} for this path, or {route: /login/**} for this path and everything below",
        ];
        assert_warned("path", "{regex: ^/login}", &parts);
        let parts = [
            "whole-value: a regular expression must match the whole value, so ^curl does",
            "write {regex: \"^curl.*\"} to match longer values too",
        ];
        assert_warned("header.user-agent", "{regex: ^curl}", &parts);
        assert_warned(
            "path",
            "{not: {regex: ['\\.php$']}}",
            &[r#"write {regex: ".*\\.php$"} to"#],
        );
        assert_warned(
            "path",
            "{regex: '^/v[0-9]+/a'}",
            &[r#"write {regex: "^/v[0-9]+/a.*"} to"#],
        );
        for silent in [
            "'^/login$'",
            "'/login'",
            "'^/v[0-9]+/.*'",
            "'.*[.]php$'",
            "'^/a$|^/b$'",
            "'/a(/.*)?'",
            "'[a-z]+'",
        ] {
            assert_eq!(warnings("path", &format!("{{regex: {silent}}}")), [""; 0]);
        }
    }

    #[test]
    fn a_pattern_that_ends_within_a_segment_matches_more_than_its_path() {
        let parts = [
            "open-end: /login* also matches /loginx, and does not match /login/x",
            "{route: /login} for this path, {route: /login/**} for this path and everything below",
            "{regex: \"/login[^/]*\"} if this is intended",
        ];
        for pattern in ["/login*", "{not: [/login*]}", "{route: /login*}"] {
            assert_warned("path", pattern, &parts);
        }
        let parts = [
            "also matches /loginx, and matches only this letter case",
            "{route: /login/**}",
            "the glob /login** if this is intended",
        ];
        for regex in ["/login.*", "^/login.*", "^/login.*$", "^/login.+"] {
            assert_warned("path", &format!("{{regex: '{regex}'}}"), &parts);
        }
        for silent in [
            "/login/*",
            "/login/**",
            "/login**",
            "/*",
            "'*.php'",
            "/a*b",
            "/*/b*",
            "{is: /login*}",
            "{regex: '/login[^/]*'}",
            "{regex: '/login/.*'}",
        ] {
            assert_eq!(warnings("path", silent), [""; 0], "{silent}");
        }
        assert_eq!(warnings("agent", "/login*"), [""; 0]);
    }

    #[test]
    fn parameters_of_other_frameworks_are_literal() {
        for (pattern, parts) in [
            (
                "{route: '/users/:id'}",
                ["`:id` is compared", "write {route: /users/*}, in which"],
            ),
            (
                "'/users/:id/posts/:post'",
                ["`:id` is compared", "write /users/*/posts/*, in"],
            ),
            (
                "{route: '/users/{id}'}",
                ["`{id}` is compared", "write {route: /users/*}, in"],
            ),
            ("'/users/<int:id>'", ["`<int:id>` is", "write /users/*, in"]),
            ("'/files/{*rest}'", ["`{*rest}` is", "write /files/**, in"]),
            (
                "{regex: '^/users/:id$'}",
                ["`:id` is compared", "write /users/*, in which"],
            ),
        ] {
            assert_warned("path", pattern, &parts);
        }
        // In a glob, `v[0-9]+` would be compared literally.
        for (pattern, advice) in [
            ("^/v[0-9]+/users/:id$", "{regex: '^/v[0-9]+/users/[^/]+$'}"),
            ("/(a|b)/<int:id>/:x", "{regex: '/(a|b)/[^/]+/[^/]+'}"),
        ] {
            let parts = [&format!("write {advice}, in which `[^/]+`")[..]];
            assert_warned("path", &format!("{{regex: '{pattern}'}}"), &parts);
            assert_eq!(warnings("path", advice), [""; 0], "{advice}");
        }
        for silent in [
            "{is: '/users/:id'}",
            "'/v1/books/7:publish'",
            "'/a:b'",
            "{route: '/users/*'}",
        ] {
            assert_eq!(warnings("path", silent), [""; 0], "{silent}");
        }
    }

    #[test]
    fn the_notation_of_nginx_has_an_equal_condition() {
        for (pattern, modifier, advice) in [
            (
                "'~ ^/login'",
                "~",
                "{route: /login} for this path, or {route: /login/**} for this path and everything below",
            ),
            ("'~* ^/login$'", "~*", "{route: /login}"),
            ("'= /login'", "=", "{is: /login}"),
            ("'^~ /static/'", "^~", "{route: /static/**}"),
            ("'~ \\.php$'", "~", r#"{regex: ".*\\.php"}"#),
            ("'~* ^/v[0-9]+/a'", "~*", r#"{regex: "(?i:/v[0-9]+/a.*)"}"#),
            ("{regex: '~ ^/v[0-9]+$'}", "~", r#"{regex: "/v[0-9]+"}"#),
        ] {
            let expected = format!(
                "no-match: `{modifier}` is a modifier of nginx's `location`, and no path begins with it; write {advice}"
            );
            let messages = warnings("path", pattern);
            assert_eq!(messages.len(), 1, "{pattern}: {messages:?}");
            assert!(messages[0].ends_with(&expected), "{messages:?}");
            if !advice.contains(" or ") {
                assert_eq!(warnings("path", advice), [""; 0], "{advice}");
            }
        }
        assert_eq!(warnings("customer", "'~ ^/login'"), [""; 0]);
    }

    #[test]
    fn a_path_has_no_query() {
        for (pattern, path) in [
            ("'/login?x=1'", "/login"),
            ("{is: '/login?x=1'}", "/login"),
            ("'/search?q=*'", "/search"),
            ("{regex: '/login\\?x=.*'}", "/login"),
        ] {
            let advice = format!("to match the path alone, write {{route: {path}}}");
            let parts = ["no-match: a path never contains the query", &advice];
            assert_warned("path", pattern, &parts);
        }
    }
}
