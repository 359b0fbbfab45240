//! Lints about `plan`, the entry that names the plan of a request: a client can choose the entry,
//! or the rule has no plans.

use tidegate_identity::{DerivedEntry, Trust};
use tidegate_net::input::shown;

use super::bypass::is_client_entry;
use crate::{report::Report, rules::RawRule};

/// The code of the warning about a plan that a client can choose. Users can search for the code.
const CLIENT_PLAN: &str = "client-plan";
/// The code of the warning about a rule with `plan`, but without plans.
const NO_PLANS: &str = "no-plans";

/// The maximum number of warnings from this lint.
const MAX_WARNINGS: usize = 20;

/// Warns about the field `plan` in `rules`. `parts` are the derived entries.
pub(crate) fn warn(
    rules: &[RawRule<'_>],
    parts: &[(Box<str>, DerivedEntry)],
    trust: &Trust,
    report: &mut Report,
) {
    let warnings = rules.iter().filter_map(|rule| {
        let plan = rule.plan.as_ref()?;
        let message = match rule.has_plans {
            true => client_plan(plan.text, parts, trust)?,
            false => no_plans(rule.name.as_ref()?.text),
        };
        Some((&plan.span, message))
    });
    for (span, message) in warnings.take(MAX_WARNINGS) {
        span.warn(report, message);
    }
}

/// Returns a warning if a client chooses the value of `entry`. A trusted proxy may overwrite a
/// header, but forwards cookies and query parameters.
fn client_plan(entry: &str, parts: &[(Box<str>, DerivedEntry)], trust: &Trust) -> Option<String> {
    let part = parts.iter().find(|(known, _)| **known == *entry);
    let source = part.map_or(entry, |(_, part)| part.source());
    let source = source.to_ascii_lowercase();
    if !is_client_entry(&source) || (source.starts_with("header.") && trust.has_proxies()) {
        return None;
    }
    let advice = match source.starts_with("header.") {
        true => {
            "name an entry that your application sends; if your gateway overwrites this header, list \
             the gateway in `clients.proxies`"
        }
        false => "name an entry that your application or your gateway sets",
    };
    Some(format!(
        "{CLIENT_PLAN}: a client can choose its plan, and so its limits, because it sends {} itself; {advice}",
        shown(entry)
    ))
}

fn no_plans(rule: &str) -> String {
    let rule = shown(rule);
    format!(
        "{NO_PLANS}: no plan has limits for this rule, so `plan` has no effect; add them, such as `plans: {{pro: \
         {{{rule}: 1000/min}}}}`, or remove `plan`"
    )
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn warnings(file: &str) -> Vec<String> {
        let config = Config::parse(file).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    fn of_plan(entry: &str, clients: &str) -> Vec<String> {
        warnings(&format!(
            "clients: {clients}\n\
             entries: {{part: {{of: header.x-key, split: '.'}}}}\n\
             plans: {{pro: {{api: 10/min}}}}\n\
             rules:\n  - {{name: api, key: ip, limits: 5/min, plan: {entry}}}\n"
        ))
    }

    #[test]
    fn a_plan_that_a_client_chooses_is_a_warning() {
        let expected = |entry: &str, advice: &str| {
            format!(
                "rules[0].plan (line 5): client-plan: a client can choose its plan, and so its limits, because it \
                 sends {entry} itself; {advice}"
            )
        };
        let header = "name an entry that your application sends; if your gateway overwrites this header, list the \
                      gateway in `clients.proxies`";
        let other = "name an entry that your application or your gateway sets";
        for (entry, advice) in [
            ("header.x-plan", header),
            ("header.X-Plan", header),
            ("part", header),
            ("query.plan", other),
            ("cookie.plan", other),
        ] {
            let expected = expected(entry, advice);
            assert_eq!(of_plan(entry, "{ipv6_prefix: 64}"), [expected], "{entry}");
        }
    }

    #[test]
    fn a_plan_from_the_application_or_a_trusted_proxy_is_no_warning() {
        assert_eq!(of_plan("tier", "{ipv6_prefix: 64}"), [""; 0]);
        for clients in ["{proxies: 1}", "{proxies: [10.0.0.0/8]}"] {
            assert_eq!(of_plan("header.x-plan", clients), [""; 0]);
            assert_eq!(
                of_plan("query.plan", clients).len(),
                1,
                "a proxy forwards it"
            );
        }
        for clients in ["{proxies: 0}", "{proxies: []}"] {
            assert_eq!(of_plan("header.x-plan", clients).len(), 1, "{clients}");
        }
    }

    #[test]
    fn a_plan_without_plans_is_a_warning() {
        let rule = "rules:\n  - {name: api, key: ip, limits: 5/min, plan: tier}\n";
        let expected = "rules[0].plan (line 2): no-plans: no plan has limits for this rule, so `plan` has no \
                        effect; add them, such as `plans: {pro: {api: 1000/min}}`, or remove `plan`";
        assert_eq!(warnings(rule), [expected]);
        let others = "  - {name: other, key: ip, limits: 5/min}\nplans: {pro: {other: 10/min}}\n";
        assert_eq!(warnings(&format!("{rule}{others}")), [expected]);
        let own = "plans: {pro: {api: 10/min}}\n";
        assert_eq!(warnings(&format!("{rule}{own}")), [""; 0]);
    }

    #[test]
    fn the_number_of_warnings_is_bounded() {
        let rule = |at: usize| format!("  - {{name: r{at}, key: ip, limits: 5/min, plan: tier}}\n");
        let rules: String = (0..50).map(rule).collect();
        assert_eq!(warnings(&format!("rules:\n{rules}")).len(), 20);
    }
}
