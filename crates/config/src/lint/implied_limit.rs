//! A lint that warns about limits that have no effect, because another limit of the same rule is
//! stricter: in `[10/min, 20/min]`, a client always reaches 10/min first.
//!
//! Rules whose limits change while they run are not checked: rules with plans, elastic rules, and
//! the rules on whose limits elastic rules depend.

use tidegate_core::{Limit, RuleSet};

use crate::{report::Report, rules::RawRule};

/// The code of the warning, by which users can search for it.
const CODE: &str = "implied-limit";

/// The maximum number of warnings from this lint.
const MAX_WARNINGS: usize = 20;

/// Warns about each limit that never decides. `rules` contains the rules of `set` as written, in
/// the same order.
pub(crate) fn warn(set: &RuleSet, rules: &[RawRule<'_>], report: &mut Report) {
    let is_parent = |name: &str| {
        let mut parents = rules.iter().filter_map(|rule| rule.elastic.parent.as_ref());
        parents.any(|parent| parent.text == name)
    };
    let checked = set.iter().zip(rules).filter(|(rule, raw)| {
        let limits = rule.limits();
        limits.len() > 1
            && limits.len() == raw.limits.len()
            && limits.stretch() == 0
            && !raw.has_plans
            && !is_parent(rule.name())
    });
    let implied = checked.flat_map(|(rule, raw)| {
        let limits: Vec<&Limit> = rule.limits().iter().collect();
        let found: Vec<_> = (0..limits.len())
            .filter_map(|at| Some((at, implying(&limits, at)?)))
            .map(|(at, by)| (&raw.limits[at].span, message(limits[at], limits[by], by)))
            .collect();
        found
    });
    for (span, message) in implied.take(MAX_WARNINGS) {
        span.warn(report, message);
    }
}

/// Returns the index of a limit that implies the limit at `at`. If two limits imply each other,
/// only the later one counts as implied.
fn implying(limits: &[&Limit], at: usize) -> Option<usize> {
    let implies = |by: usize, at: usize| limits[by].implies(limits[at]);
    (0..limits.len()).find(|by| *by != at && implies(*by, at) && (*by < at || !implies(at, *by)))
}

fn message(implied: &Limit, by: &Limit, index: usize) -> String {
    let (implied, by) = (implied.policy(), by.policy());
    format!(
        "{CODE}: {implied} never denies a request that limits[{index}] ({by}) admits, so it has no effect; remove it, \
         or correct one of the two limits"
    )
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn warnings(file: &str) -> Vec<String> {
        let config = Config::parse(file).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    fn of_rule(fields: &str) -> Vec<String> {
        warnings(&format!("rules:\n  - {{name: a, {fields}}}\n"))
    }

    #[test]
    fn a_limit_that_never_decides_is_a_warning() {
        let expected = |at: usize, implied: &str, index: usize, by: &str| {
            format!(
                "rules[0].limits[{at}] (line 2): implied-limit: {implied} never denies a request that limits[{index}] \
                 ({by}) admits, so it has no effect; remove it, or correct one of the two limits"
            )
        };
        for (limits, expected) in [
            ("[10/min, 20/min]", expected(1, "20/min", 0, "10/min")),
            ("[20/min, 10/min]", expected(0, "20/min", 1, "10/min")),
            ("[10/min, 10/min]", expected(1, "10/min", 0, "10/min")),
            ("[10/s, 1000/min]", expected(1, "1000/min", 0, "10/s")),
            (
                "[9/s, 100/s burst 5, 100/s burst 20]",
                expected(2, "100/s burst 20", 1, "100/s burst 5"),
            ),
            (
                "[{algorithm: concurrency, limit: 9}, 9/s, {algorithm: concurrency, limit: 4}]",
                expected(0, "9 at once", 2, "4 at once"),
            ),
        ] {
            assert_eq!(
                of_rule(&format!("limits: {limits}")),
                [expected],
                "{limits}"
            );
        }
    }

    #[test]
    fn a_limit_that_can_decide_is_no_warning() {
        for fields in [
            "limits: [10/s, 200/min]",
            "limits: [10/s, 100/s burst 20]",
            "limits: [100/s burst 5, 200/s burst 20]",
            "limits: [10/min, 20/min], count_denied: true",
            "limits: [10/min, 14/min], soft: 50%",
            "limits: [{limit: 10, window: 1min, anchor: first_request}, {limit: 20, window: 1min}], algorithm: fixed_window",
            "limits: [10/min, 20/min], elastic: {extra: 50%, when: {headroom.app: 'yes'}}",
        ] {
            assert_eq!(of_rule(fields), [""; 0], "{fields}");
        }
        let parent = "rules:\n  - {name: all, limits: [10/s, 1000/min]}\n  - {name: each, key: user, limits: 1/s, \
                      elastic: {extra: 50%, unused: {rule: all, share: 30%}}}\n";
        assert_eq!(warnings(parent), [""; 0]);
        let plans = "plans: {pro: {a: [99/s, 1000/min]}}\nrules: [{name: a, key: user, limits: [10/s, 1000/min], plan: tier}]\n";
        assert_eq!(warnings(plans), [""; 0]);
    }

    #[test]
    fn the_number_of_warnings_is_bounded() {
        let rule = |at: usize| format!("  - {{name: r{at}, limits: [1/s, 2/s]}}\n");
        let rules: String = (0..50).map(rule).collect();
        assert_eq!(warnings(&format!("rules:\n{rules}")).len(), 20);
    }
}
