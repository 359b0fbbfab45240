//! A lint that warns about rules that a client can bypass with a different spelling of the path.
//!
//! A plain path under `when` is compared byte by byte, but many web frameworks treat `/login/`,
//! `/LOGIN`, `/login;x` and `/login%20` like `/login`. If the author means the exact path, writing
//! `{is: /login}` disables the warning. Rules in shadow mode never deny a request, so they are not
//! checked.

use tidegate_core::Mode;
use tidegate_net::input::shown;

use super::{dead_conditions, misread};
use crate::{
    conditions::{PatternText, TextComparison},
    report::Report,
    rules::RawRule,
    source_span::SourceSpan,
};

/// The code of the warning, by which users can search for it.
const CODE: &str = "exact-path";

/// The maximum number of rules that get their own warning.
const MAX_NAMED: usize = 20;

/// Warns about each rule that has a condition on an exact path.
pub(crate) fn warn(rules: &[RawRule<'_>], report: &mut Report) {
    let mut bypassed = rules.iter().filter_map(BypassedRule::find);
    for rule in bypassed.by_ref().take(MAX_NAMED) {
        rule.span.warn(report, rule.message());
    }
    if let Some(rule) = bypassed.next() {
        let message = match bypassed.count() {
            0 => format!(
                "{CODE}: a client can also bypass this rule with other spellings of its path"
            ),
            later => format!(
                "{CODE}: a client can also bypass this rule and {later} later rules with other spellings of their paths"
            ),
        };
        rule.span.warn(report, message);
    }
}

/// A rule that a client can bypass with a different spelling of the path.
struct BypassedRule<'r> {
    name: &'r str,
    /// The first exact path in the rule's condition on `path`.
    path: &'r str,
    span: &'r SourceSpan,
    /// The number of further exact paths in the condition.
    others: usize,
}

impl<'r> BypassedRule<'r> {
    fn find(rule: &'r RawRule<'_>) -> Option<Self> {
        if rule.mode == Mode::Shadow {
            return None;
        }
        let mut conditions = rule.when.conditions.iter();
        let path = conditions.find(|condition| condition.entry == "path")?;
        let texts = path.pattern.texts();
        let mut exact = texts.into_iter().filter_map(exact_path);
        let (span, path) = exact.next()?;
        Some(Self {
            name: rule.name.as_ref()?.text,
            path,
            span,
            others: exact.count(),
        })
    }

    fn message(&self) -> String {
        let (name, path) = (shown(self.name), shown(self.path));
        let bare = path.trim_end_matches('/');
        let mut spellings = vec![if bare == path {
            format!("{path}/")
        } else {
            bare.to_owned()
        }];
        let other_case = [path.to_ascii_uppercase(), path.to_ascii_lowercase()];
        spellings.extend(other_case.into_iter().find(|other| *other != path));
        spellings.push(format!("{bare};x"));
        let spellings = spellings.join(", ");
        let others = match self.others {
            0 => String::new(),
            1 => " (1 more path of the rule has the same problem)".to_owned(),
            others => format!(" ({others} more paths of the rule have the same problem)"),
        };
        format!(
            "{CODE}: {spellings} and {bare}%20 bypass the rule `{name}`, and many services treat them like \
             {path}{others}; write {{route: {bare}}}, or {{is: {path}}} if the service distinguishes them"
        )
    }
}

/// Returns the string's position and its path, if the string matches only one spelling of a path.
/// Returns `None` if another lint already warns about the string.
fn exact_path<'r>(text: PatternText<'r, '_>) -> Option<(&'r SourceSpan, &'r str)> {
    let PatternText {
        scalar,
        comparison,
        is_negated,
    } = text;
    let text = scalar.text;
    let exact = match comparison {
        TextComparison::Plain => (text.starts_with('/') && !text.contains('*')).then_some(text)?,
        TextComparison::Regex => misread::exact_expression(text)?,
        TextComparison::Is | TextComparison::Route => return None,
    };
    let has_warning = || dead_conditions::text_message("path", comparison, text).is_some();
    let is_bypassed = !is_negated && exact.len() > 1 && !has_warning();
    is_bypassed.then_some((&scalar.span, exact))
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn warnings(rules: &str) -> Vec<String> {
        let config = Config::parse(&format!("rules:\n{rules}")).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    fn rule(path: &str, rest: &str) -> String {
        format!("  - {{name: '{path}{rest}', when: {{path: {path}}}, limits: [5/min], {rest}}}\n")
    }

    #[test]
    fn an_exact_path_is_a_warning_whatever_the_key_is() {
        for rest in ["key: [ip]", "key: [customer]", "mode: enforce"] {
            let expected = format!(
                "rules[0].when.path (line 2): exact-path: /login/, /LOGIN, /login;x and /login%20 bypass the rule \
                 `/login{rest}`, and many services treat them like /login; write {{route: /login}}, or {{is: /login}} \
                 if the service distinguishes them"
            );
            assert_eq!(warnings(&rule("/login", rest)), [expected]);
        }
        // A regular expression without operators also matches only an exact path.
        let messages = warnings(&rule("{regex: ^/login$}", "key: [ip]"));
        let begins = "rules[0].when.path.regex (line 2): exact-path: /login/, /LOGIN, ";
        assert!(
            messages.len() == 1 && messages[0].starts_with(begins),
            "{messages:?}"
        );
        assert!(
            messages[0].contains("write {route: /login}, "),
            "{messages:?}"
        );
    }

    #[test]
    fn the_advice_fits_the_path() {
        for (path, parts) in [
            (
                "/a/",
                [
                    ": /a, /A/, /a;x and /a%20 bypass",
                    "write {route: /a}, or {is: /a/}",
                ],
            ),
            (
                "/1",
                [
                    ": /1/, /1;x and /1%20 bypass",
                    "write {route: /1}, or {is: /1}",
                ],
            ),
            (
                "/LOGIN",
                [": /LOGIN/, /login, /LOGIN;x", "write {route: /LOGIN}, or"],
            ),
        ] {
            let messages = warnings(&rule(path, "key: [ip]"));
            assert_eq!(messages.len(), 1, "{messages:?}");
            for part in parts {
                assert!(messages[0].contains(part), "no {part:?} in {messages:?}");
            }
        }
    }

    #[test]
    fn a_condition_with_another_warning_gets_no_second_one() {
        for once in [
            "\"/login?x=1\"",
            "\"/users/:id\"",
            "{regex: ^/login}",
            "/%6Cogin",
            "//login",
            "\"/login#top\"",
        ] {
            let messages = warnings(&rule(once, "key: [ip]"));
            assert_eq!(messages.len(), 1, "{messages:?}");
            assert!(!messages[0].contains("exact-path"), "{messages:?}");
        }
    }

    #[test]
    fn a_path_that_is_not_exact_is_no_warning() {
        for silent in [
            rule("{not: /login}", "key: [ip]"),
            rule("{route: /login}", "key: [ip]"),
            rule("{is: /login}", "key: [ip]"),
            rule("/login/**", "key: [ip]"),
            rule("/", "key: [ip]"),
            rule("/login", "key: [ip], mode: shadow"),
            "  - {name: a, key: [ip], limits: [5/min], allow: {path: /health}}\n".to_owned(),
        ] {
            assert!(warnings(&silent).is_empty(), "{silent}");
        }
    }

    #[test]
    fn each_rule_has_one_warning() {
        let three = [
            rule("/login", "key: [ip]"),
            rule("[/a/**, /b, /c, /d]", "key: ip"),
            rule("/e", "key: customer"),
        ]
        .concat();
        let messages = warnings(&three);
        assert_eq!(messages.len(), 3, "{messages:?}");
        let of_list =
            "rules[1].when.path[1] (line 3): exact-path: /b/, /B, /b;x and /b%20 bypass the rule";
        assert!(messages[1].starts_with(of_list), "{messages:?}");
        let others =
            "like /b (2 more paths of the rule have the same problem); write {route: /b}, or";
        assert!(messages[1].contains(others), "{messages:?}");
        assert!(
            messages[2].starts_with("rules[2].when.path (line 4): "),
            "{messages:?}"
        );
    }

    #[test]
    fn at_most_twenty_rules_are_named() {
        let rules = |count: usize| {
            let rules = (0..count).map(|at| rule(&format!("/{at}"), "key: [ip]"));
            warnings(&rules.collect::<String>())
        };
        assert_eq!(rules(20).len(), 20);
        let last = |messages: Vec<String>| messages.last().cloned().unwrap();
        let expected = "rules[20].when.path (line 22): exact-path: a client can also bypass this rule with other \
            spellings of its path";
        assert_eq!(last(rules(21)), expected);
        let messages = rules(50);
        assert_eq!(messages.len(), 21);
        let expected = "exact-path: a client can also bypass this rule and 29 later rules with other spellings of \
            their paths";
        assert!(last(messages).ends_with(expected));
    }
}
