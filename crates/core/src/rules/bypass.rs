//! Bypass detection: finds rules that a client can bypass by leaving out an entry.
//!
//! A rule applies only to requests that have every entry of its key. If a trusted component sets
//! the entries, clients cannot bypass the rule. A client that sets an entry itself can bypass the
//! rule. For example, a rule with the API key as its key does not limit clients that leave out
//! their API key. To prevent a bypass, add a catch-all rule. The catch-all rule must apply to all
//! requests to which the first rule applies, and clients must not be able to leave out the entries
//! of its key.

use super::{Pattern, Rule, pattern::PatternKind};

/// The maximum number of catch-all candidates. If there are more candidates, only those with the
/// fewest conditions are examined.
const MAX_CATCH_ALL: usize = 1_000;

/// A rule that is bypassed by requests without a certain key entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bypass<'r> {
    /// The index of the rule, from 0.
    pub rule: usize,
    /// The key entry missing from the request.
    pub entry: &'r str,
}

/// Finds the rules that a request bypasses if it lacks an entry for which `is_optional` returns
/// true. Each rule is returned at most once. The iterator is lazy.
pub(super) fn bypasses<'r>(
    rules: &'r [Rule],
    is_optional: impl Fn(&str) -> bool,
) -> impl Iterator<Item = Bypass<'r>> {
    let counts_all =
        |rule: &&Rule| rule.mode() == super::Mode::Enforce && !rule.key().any(&is_optional);
    let mut catch_all: Vec<&Rule> = rules.iter().filter(counts_all).collect();
    catch_all.sort_by_key(|rule| rule.conditions().len());
    catch_all.truncate(MAX_CATCH_ALL);
    let bypass = move |(at, rule): (usize, &'r Rule)| {
        let mut optional = rule.key().filter(|entry| is_optional(entry));
        let is_closed = |entry| catch_all.iter().any(|other| subsumes(other, rule, entry));
        let entry = optional.find(|entry| !is_closed(entry));
        entry.map(|entry| Bypass { rule: at, entry })
    };
    rules.iter().enumerate().filter_map(bypass)
}

/// Returns true if `other` is known to apply to every request that bypasses `rule` by leaving out
/// `entry`.
fn subsumes(other: &Rule, rule: &Rule, entry: &str) -> bool {
    let is_implied = |condition: &super::Condition| {
        let lacks = condition.entry() == entry && condition.pattern().matches(None);
        let mut same = rule
            .conditions()
            .filter(|known| known.entry() == condition.entry());
        lacks || same.any(|known| known.pattern().implies(condition.pattern()))
    };
    let times = other.applies_when().schedule().is_none_or(|schedule| {
        let same = rule.applies_when().schedule();
        same.is_some_and(|same| same.to_string() == schedule.to_string())
    });
    times && other.conditions().all(is_implied)
}

impl Pattern {
    /// Returns true if every value that matches this pattern is known to match `other`. Returns
    /// false if some value does not match `other`, or if the answer is unknown.
    fn implies(&self, other: &Self) -> bool {
        match (self.kind(), other.kind()) {
            (_, PatternKind::Present) => !self.matches(None),
            (PatternKind::Exact(text), _) => other.matches(Some(text)),
            (_, PatternKind::Exact(_)) => false,
            (PatternKind::Any(any), _) => {
                any.exact().all(|text| other.matches(Some(text)))
                    && any.others().iter().all(|pattern| pattern.implies(other))
            }
            (PatternKind::All(patterns), _) => {
                patterns.iter().any(|pattern| pattern.implies(other))
            }
            (PatternKind::Glob(glob), PatternKind::Glob(wide)) => {
                glob == wide || begins_with(&glob.to_string(), &wide.to_string())
            }
            (PatternKind::Route(route), PatternKind::Route(wide)) => {
                route.inner().implies(wide.inner())
            }
            // A route only matches paths, and the glob `/**` matches every path.
            (PatternKind::Route(_), PatternKind::Glob(wide)) => wide.to_string() == "/**",
            _ => self == other,
        }
    }
}

/// Returns true if `other` is a fixed prefix followed by `**`, and every value matched by the glob
/// `text` begins with that prefix.
fn begins_with(text: &str, other: &str) -> bool {
    let fixed = text.split('*').next().unwrap_or_default();
    let Some(head) = other.strip_suffix("**") else {
        return false;
    };
    !head.contains('*') && fixed.starts_with(head)
}

#[cfg(test)]
mod tests {
    use super::{super::*, *};
    use crate::{AlgorithmName, LimitSpec, notation};

    fn rule(name: &str, when: &[(&str, &str)], key: &[&str]) -> Rule {
        let rate = notation::rate("10/s").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::TokenBucket).build();
        let condition = |(entry, pattern): &(&str, &str)| {
            let pattern = match *pattern {
                "absent" => Pattern::absent(),
                "writes" => {
                    let writes = ["PUT", "POST"].map(|text| Pattern::exact(text).unwrap());
                    Pattern::any_of(writes.to_vec()).unwrap()
                }
                text => Pattern::text(text).unwrap(),
            };
            Condition::new(entry, pattern).unwrap()
        };
        let when = When::all(when.iter().map(condition).collect());
        let rule = Rule::new(name, vec![limit.unwrap()]).unwrap();
        rule.when(when).keyed_by(key).unwrap()
    }

    /// Returns true if a request without the entry `h.key` bypasses a rule with the conditions
    /// `when` despite a second rule, `catch_all`.
    fn can_bypass(when: &[(&str, &str)], catch_all: Rule) -> bool {
        let rules = [rule("front", when, &["h.key", "path"]), catch_all];
        let found: Vec<Bypass<'_>> = bypasses(&rules, |entry| entry.starts_with("h.")).collect();
        let bypass = Bypass {
            rule: 0,
            entry: "h.key",
        };
        found.contains(&bypass)
    }

    #[test]
    fn a_second_rule_covers_requests_that_bypass_the_first() {
        let api = [("path", "/api/v1/**"), ("method", "writes")];
        for (closes, when, key) in [
            (true, [].as_slice(), ["ip"].as_slice()),
            (true, &[], &[]),
            (true, &[("path", "/api/v1/**")], &["ip"]),
            (true, &[("path", "/api/**")], &["ip"]),
            (true, &[("method", "P*")], &["ip"]),
            (true, &[("h.key", "absent"), ("path", "/**")], &["ip"]),
            (false, &[("path", "/api/v2/**")], &["ip"]),
            (false, &[("path", "/api/v1/*")], &["ip"]),
            (false, &[("path", "/api/v1/x/**")], &["ip"]),
            (false, &[("path", "/login")], &["ip"]),
            (false, &[("method", "POST")], &["ip"]),
            (false, &[("h.other", "absent")], &["ip"]),
            (false, &[("host", "a")], &["ip"]),
            (false, &[], &["h.other"]),
        ] {
            let escaped = can_bypass(&api, rule("behind", when, key));
            assert_eq!(escaped, !closes, "{when:?} {key:?}");
        }
    }

    /// Regression test: an exact value that contains a star was considered equal to the glob with
    /// the same text, so the lint missed a bypass.
    #[test]
    fn an_exact_value_with_a_star_does_not_imply_the_glob() {
        let (exact, glob) = (
            || Pattern::exact("a*").unwrap(),
            Pattern::text("a*").unwrap(),
        );
        let (not_exact, not_glob) = (exact().negated(), glob.clone().negated());
        assert!(exact().implies(&glob) && !glob.implies(&exact()));
        assert!(!not_exact.implies(&not_glob));
        assert!(not_exact.implies(&exact().negated()) && not_glob.implies(&not_glob));
        let when = |pattern| When::all(vec![Condition::new("agent", pattern).unwrap()]);
        let escapes_behind = |catch_all: Pattern| {
            let front = rule("front", &[], &["h.key"]).when(when(not_exact.clone()));
            let rules = [front, rule("behind", &[], &["ip"]).when(when(catch_all))];
            let is_optional = |entry: &str| entry.starts_with("h.");
            bypasses(&rules, is_optional).next().is_some()
        };
        assert!(escapes_behind(not_glob));
        assert!(!escapes_behind(exact().negated()));
    }

    #[test]
    fn only_a_rule_that_denies_at_the_same_times_covers_a_bypass() {
        let shadow = rule("behind", &[], &["ip"]).in_mode(Mode::Shadow);
        assert!(can_bypass(&[], shadow));
        let nights = || {
            let hours = vec![Hours::parse("22:00-06:00").unwrap()];
            When::default().during(ActiveHours::new(hours, Days::ALL, "UTC").unwrap())
        };
        assert!(can_bypass(&[], rule("behind", &[], &["ip"]).when(nights())));
        let rules = [
            rule("front", &[], &["h.key"]).when(nights()),
            rule("behind", &[], &["ip"]).when(nights()),
        ];
        assert!(
            bypasses(&rules, |entry| entry.starts_with("h."))
                .next()
                .is_none()
        );
    }
}
