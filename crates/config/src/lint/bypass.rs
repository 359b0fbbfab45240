//! A lint that warns about rules that a client can bypass by omitting a header, a query parameter
//! or a cookie.

use tidegate_core::RuleSet;
use tidegate_identity::DerivedEntry;

use crate::{report::Report, rules::RawRule};

/// The code of the warning, by which users can search for it.
const CODE: &str = "empty-key";

/// The prefixes of entries that a client chooses freely and can omit.
const CLIENT_PREFIXES: [&str; 3] = ["header.", "query.", "cookie."];

/// The maximum number of rules that get their own warning. If more rules are affected, one
/// additional warning says that later rules may be affected too.
const MAX_NAMED: usize = 20;

/// Warns about each rule in `set` that a client can bypass by omitting one of the rule's key
/// entries. Does not warn if another rule applies to every request that lacks the omitted entry.
/// `rules` contains the rules as written, in the same order as in the file.
pub(crate) fn warn(
    set: &RuleSet,
    rules: &[RawRule<'_>],
    parts: &[(Box<str>, DerivedEntry)],
    report: &mut Report,
) {
    let is_optional = |name: &str| {
        let part = parts.iter().find(|(known, _)| **known == *name);
        is_client_entry(part.map_or(name, |(_, part)| part.source()))
    };
    let bypasses = set.bypasses(is_optional);
    for (count, bypass) in bypasses.take(MAX_NAMED + 1).enumerate() {
        let Some(rule) = rules.get(bypass.rule) else {
            continue;
        };
        let entry = bypass.entry;
        let message = if count < MAX_NAMED {
            format!(
                "{CODE}: a client can bypass this rule by omitting {entry}, and no other rule is certain to \
                 apply; add a rule with the condition {{{entry}: {{present: false}}}} and the key [ip]"
            )
        } else {
            format!(
                "{CODE}: a client can also bypass this rule by omitting {entry}; later rules with the same problem \
                 are not listed"
            )
        };
        let span = rule.key.as_ref().map_or(&rule.span, |(span, _)| span);
        span.warn(report, message);
    }
}

/// Returns whether a client chooses the value of the entry with this name.
pub(super) fn is_client_entry(name: &str) -> bool {
    CLIENT_PREFIXES
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn warnings(rules: &str) -> Vec<String> {
        let entries =
            "entries: {key_id: {of: header.x-api-key, split: '.'}, shop: {of: host, split: '.'}}";
        let config = Config::parse(&format!("{entries}\nrules:\n{rules}")).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn header_names_are_compared_without_regard_to_case() {
        let rules = "
- {name: api, key: [header.X-Api-Key], limits: [1000/min]}
- {name: rest, when: {header.x-api-key: {present: false}}, key: [ip], limits: [10/min]}
";
        assert_eq!(warnings(rules), [""; 0]);
        let config = Config::parse(&format!("rules:{rules}")).unwrap();
        let rule = config.rules.rule("api").unwrap();
        assert!(rule.key().eq(["header.x-api-key"]));
    }

    #[test]
    fn a_key_entry_that_clients_can_omit_needs_another_rule() {
        let keys = "  - {name: a, when: {path: /api/**}, key: [key_id, ip], limits: [1/s]}\n";
        let advice = "rules[0].key (line 3): empty-key: a client can bypass this rule by omitting key_id, and \
            no other rule is certain to apply; add a rule with the condition {key_id: {present: false}} and the \
            key [ip]";
        assert_eq!(warnings(keys), [advice]);
        for behind in [
            "key: [ip]",
            "when: {key_id: {present: false}}",
            "when: {path: /api/**}, key: [customer]",
        ] {
            let both = format!("{keys}  - {{name: b, limits: [9/s], {behind}}}\n");
            assert!(warnings(&both).is_empty(), "{behind}");
        }
        for behind in ["key: [cookie.s]", "when: {path: /login}", "mode: shadow"] {
            let both = format!("{keys}  - {{name: b, limits: [9/s], {behind}}}\n");
            assert!(!warnings(&both).is_empty(), "{behind}");
        }
        for key in ["header.x-tenant", "query.token", "cookie.session"] {
            let rule = format!("  - {{name: a, key: {key}, limits: [1/s]}}\n");
            assert_eq!(warnings(&rule).len(), 1, "{key}");
        }
        for key in ["ip", "customer", "shop", "country"] {
            let rule = format!("  - {{name: a, key: {key}, limits: [1/s]}}\n");
            assert!(warnings(&rule).is_empty(), "{key}");
        }
    }

    #[test]
    fn at_most_twenty_rules_are_named() {
        let rule = |at: usize| {
            format!(
                "  - {{name: r{at}, when: {{path: {{route: /{at}}}}}, key: key_id, limits: [1/s]}}\n"
            )
        };
        let messages = warnings(&(0..50).map(rule).collect::<String>());
        assert_eq!(messages.len(), 21);
        let last = "rules[20].key (line 23): empty-key: a client can also bypass this rule by omitting key_id; \
            later rules with the same problem are not listed";
        assert_eq!(messages[20], last);
    }
}
