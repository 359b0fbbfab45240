//! Warns about rules that a client bypasses by spelling the path differently.
//!
//! A plain path under `when` is compared byte by byte, but many web frameworks treat `/login/`,
//! `/LOGIN`, `/login;x` and `/login%20` like `/login`. Only rules keyed by client address are
//! checked: they protect a path against abuse, so a bypass is useful to an abuser. One warning
//! covers all of these rules. `{is: /login}` declares that the exact path is meant and silences it.

use tidegate_net::input::shown;

use super::misread;
use crate::{
    conditions::{self, Comparison, PatternText},
    report::Report,
    value::{Fields, Value},
};

/// The code of the warning, for log searches.
const CODE: &str = "exact-path";

/// Warns about the first rule in `file` that protects an exact path, and counts the others.
pub(crate) fn warn(file: &Fields<'_>, report: &mut Report) {
    let rules = file.get("rules");
    let rules = rules.and_then(|rules| rules.items(&mut Report::default(), ""));
    let rules = rules.unwrap_or_default();
    let mut guarded = rules.iter().filter_map(guarded_path);
    let Some((value, path)) = guarded.next() else {
        return;
    };
    let others = match guarded.count() {
        0 => String::new(),
        1 => " (1 more rule has the same problem)".to_owned(),
        others => format!(" ({others} more rules have the same problem)"),
    };
    let path = shown(path);
    let message = format!(
        "{CODE}: {path}/, {}, {path};x and {path}%20 bypass this rule, and many services treat them like \
         {path}{others}; write {{route: {path}}}, or {{is: {path}}} if the service distinguishes them",
        path.to_ascii_uppercase(),
    );
    value.warn(report, message);
}

/// Returns the exact path that `rule` protects, if the rule enforces a limit by client address.
fn guarded_path<'v>(rule: &Value<'v>) -> Option<(Value<'v>, &'v str)> {
    let quiet = &mut Report::default();
    let fields = rule.fields_among(&["when", "key", "mode"])?;
    let keys = fields.get("key")?.one_or_more(quiet);
    let by_address = |key: &Value<'_>| matches!(key.scalar(), Some("ip" | "ip.exact"));
    let is_shadow = fields.get("mode").and_then(Value::scalar) == Some("shadow");
    if is_shadow || !keys.iter().any(by_address) {
        return None;
    }
    let conditions = fields.get("when")?.pairs(quiet, "")?;
    let path = conditions.into_iter().find(|(entry, _)| *entry == "path");
    let (_, path) = path?;
    conditions::texts(&path).into_iter().find_map(|text| {
        let PatternText {
            value,
            comparison,
            is_negated,
        } = text;
        let text = value.scalar()?;
        let exact = match comparison {
            Comparison::Plain => (text.starts_with('/') && !text.contains('*')).then_some(text)?,
            Comparison::Regex => misread::exact_expression(text)?,
            Comparison::Is | Comparison::Route => return None,
        };
        // A text with another warning gets no second one.
        let has_warning = || misread::message("path", comparison, text).is_some();
        let is_bypassed = !is_negated && exact.len() > 1 && !has_warning();
        is_bypassed.then_some((value, exact))
    })
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn warnings(rules: &str) -> Vec<String> {
        let config = Config::parse(&format!("rules:\n{rules}")).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_exact_path_with_a_limit_by_address_is_a_warning() {
        let rule = |when: &str, rest: &str| {
            format!(
                "  - {{name: '{when}{rest}', when: {{path: {when}}}, limits: [5/min], {rest}}}\n"
            )
        };
        let login = rule("/login", "key: [ip]");
        let expected = "rules[0].when.path (line 2): exact-path: /login/, /LOGIN, /login;x and /login%20 bypass \
            this rule, and many services treat them like /login; write {route: /login}, or {is: /login} if the \
            service distinguishes them";
        assert_eq!(warnings(&login), [expected]);
        // An expression without operators is an exact path, too.
        let regex = warnings(&rule("{regex: ^/login$}", "key: [ip]"));
        let expected = expected.replace(".path (", ".path.regex (");
        assert_eq!(regex, [expected]);
        // A condition with another warning gets no second one.
        for once in ["\"/login?x=1\"", "\"/users/:id\"", "{regex: ^/login}"] {
            let said = warnings(&rule(once, "key: [ip]"));
            assert_eq!(said.len(), 1, "{said:?}");
            assert!(!said[0].contains("exact-path"), "{said:?}");
        }
        for silent in [
            rule("{not: /login}", "key: [ip]"),
            rule("{route: /login}", "key: [ip]"),
            rule("{is: /login}", "key: [ip]"),
            rule("/login/**", "key: [ip]"),
            rule("/", "key: [ip]"),
            rule("/login", "key: [customer]"),
            rule("/login", "mode: enforce"),
            rule("/login", "key: [ip], mode: shadow"),
        ] {
            assert!(warnings(&silent).is_empty(), "{silent}");
        }
        let three = [
            login,
            rule("[/a/**, /b]", "key: ip"),
            rule("/c", "key: ip.exact"),
        ]
        .concat();
        let said = warnings(&three);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].contains("(2 more rules have the same problem); write"),
            "{said:?}"
        );
    }
}
