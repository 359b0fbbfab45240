//! Explanations: why a rule does not apply to a request.

use std::fmt;

use super::{
    ActiveHours, Pattern, Request, Rule, RuleSet, When,
    pattern::PatternKind,
    text::{Exact, Word},
};
use crate::time::Timestamp;

/// The maximum number of alternatives that an explanation lists.
const MAX_NAMED: usize = 10;

/// The maximum length of a value or a pattern in an explanation, in characters.
const MAX_SHOWN: usize = 120;

/// The first of a rule's conditions that a request does not meet.
///
/// Its [`Display`](fmt::Display) form is a sentence such as `path is /login, but the rule requires
/// /api/**`.
#[derive(Clone, Copy, Debug)]
pub enum FailedCondition<'a> {
    /// An entry of the request does not match the rule's pattern.
    Entry {
        /// The name of the entry.
        entry: &'a str,
        /// The value in the request; `None` if the request lacks the entry.
        value: Option<&'a str>,
        /// The rule's pattern. If several patterns must match, this is the first pattern that does
        /// not match.
        pattern: &'a Pattern,
    },
    /// The rule does not apply at the time of the request.
    ActiveHours {
        /// The times at which the rule applies.
        schedule: &'a ActiveHours,
        /// The time of the request.
        now: Timestamp,
    },
    /// The request lacks an entry of the rule's key.
    Key {
        /// The name of the entry.
        entry: &'a str,
    },
    /// The request is on the rule's own allow list.
    Allowed {
        /// The matching item of the allow list.
        by: &'a When,
    },
}

impl Rule {
    /// Returns the first condition that fails for `request` at `now`, or `None` if the rule
    /// applies.
    ///
    /// Checks the rule's conditions first, followed by its active hours, its key and its allow
    /// list. The allow list of the whole [`RuleSet`] is not checked; see
    /// [`RuleSet::allow_listed_by`].
    #[must_use]
    pub fn failed_condition<'a>(
        &'a self,
        request: &Request<'a>,
        now: Timestamp,
    ) -> Option<FailedCondition<'a>> {
        let failed = self.conditions().find_map(|condition| {
            let (entry, value) = (condition.entry(), request.entry(condition.entry()));
            let pattern = failed_part(condition.pattern(), value)?;
            Some(FailedCondition::Entry {
                entry,
                value,
                pattern,
            })
        });
        let schedule = self.applies_when().schedule();
        let is_over = |schedule: &&ActiveHours| !schedule.holds(now);
        failed
            .or_else(|| {
                let schedule = schedule.filter(is_over)?;
                Some(FailedCondition::ActiveHours { schedule, now })
            })
            .or_else(|| {
                let entry = self.key().find(|entry| request.entry(entry).is_none())?;
                Some(FailedCondition::Key { entry })
            })
            .or_else(|| {
                let by = self.allow_list().find(request, now)?;
                Some(FailedCondition::Allowed { by })
            })
    }
}

impl RuleSet {
    /// Returns the first item of the allow list that `request` matches at `now`. No rule charges a
    /// request that matches an item.
    ///
    /// The number of pattern evaluations is not limited. Call [`Self::charges`] first, which
    /// rejects a request that would need too many evaluations.
    #[must_use]
    pub fn allow_listed_by(&self, request: &Request<'_>, now: Timestamp) -> Option<&When> {
        self.allow_list().find(request, now)
    }
}

/// Returns the first part of `pattern` that does not match `value`, or `None` if the pattern
/// matches.
fn failed_part<'p>(pattern: &'p Pattern, value: Option<&str>) -> Option<&'p Pattern> {
    match pattern.kind() {
        PatternKind::All(parts) => parts.iter().find_map(|part| failed_part(part, value)),
        _ => (!pattern.matches(value)).then_some(pattern),
    }
}

impl fmt::Display for FailedCondition<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Entry {
                entry,
                value,
                pattern,
            } => {
                let entry = TruncatedText(Word(entry));
                match value {
                    Some(value) => write!(f, "{entry} is {}", TruncatedText(Word(value)))?,
                    None => write!(f, "the request has no {entry}")?,
                }
                match pattern.kind() {
                    PatternKind::Not(inner) if matches!(inner.kind(), PatternKind::Present) => {
                        write!(f, ", but the rule matches only requests without {entry}")
                    }
                    _ => write!(f, ", but the rule requires {}", PatternDescription(pattern)),
                }
            }
            Self::ActiveHours { schedule, now } => {
                let (day, hour, minute) = schedule.local_time(now);
                let zone = schedule.zone_name();
                write!(
                    f,
                    "it is {day} {hour:02}:{minute:02} in {zone}, but the rule is active only at {{{schedule}}}"
                )
            }
            Self::Key { entry } => {
                let entry = TruncatedText(Word(entry));
                write!(
                    f,
                    "the request has no {entry}, which is part of the rule's key"
                )
            }
            Self::Allowed { by } => {
                write!(
                    f,
                    "the request matches the rule's allow list: {}",
                    TruncatedText(by)
                )
            }
        }
    }
}

/// A pattern whose `Display` form describes the values that it matches.
struct PatternDescription<'p>(&'p Pattern);

impl fmt::Display for PatternDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.kind() {
            PatternKind::Exact(_) | PatternKind::Glob(_) => TruncatedText(self.0).fmt(f),
            PatternKind::Regex(regex) => {
                write!(
                    f,
                    "a match of the regular expression {}",
                    TruncatedText(regex.as_str())
                )
            }
            PatternKind::Route(route) => write!(f, "the route {}", TruncatedText(route.as_str())),
            PatternKind::Present => f.write_str("any value"),
            PatternKind::Cidr(nets) => {
                f.write_str("an address in ")?;
                named(f, nets.iter())
            }
            PatternKind::Any(any) => {
                let mut exact: Vec<Exact<'_>> = any.exact().map(|text| Exact(text)).collect();
                exact.sort_unstable();
                let exact = exact.iter().map(|text| TruncatedText(text).to_string());
                let others = any
                    .others()
                    .iter()
                    .map(|other| PatternDescription(other).to_string());
                named(f, exact.chain(others))
            }
            PatternKind::Not(inner) => write!(f, "anything but {}", Self(inner)),
            PatternKind::All(_) => TruncatedText(self.0).fmt(f),
        }
    }
}

/// Writes at most [`MAX_NAMED`] items, in the form `a, b or c`.
fn named<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    items: impl Iterator<Item = T>,
) -> fmt::Result {
    let mut items = items.peekable();
    let mut at = 0;
    while let Some(item) = items.next() {
        if at == MAX_NAMED {
            return write!(f, " or one of {} more", items.count() + 1);
        }
        match (at, items.peek()) {
            (0, _) => {}
            (_, Some(_)) => f.write_str(", ")?,
            (_, None) => f.write_str(" or ")?,
        }
        item.fmt(f)?;
        at += 1;
    }
    Ok(())
}

/// A value formatted with at most [`MAX_SHOWN`] characters.
struct TruncatedText<T>(T);

impl<T: fmt::Display> fmt::Display for TruncatedText<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        match text.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => write!(f, "{}…", &text[..end]),
            None => f.write_str(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlgorithmName, Condition, Cost, Days, Hours, LimitSpec, limit::bounds, notation};

    fn rule(when: When, key: &[&str]) -> Rule {
        let rate = notation::rate("1/min").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::Gcra).build();
        let rule = Rule::new("r", vec![limit.unwrap()]).unwrap();
        rule.when(when).keyed_by(key).unwrap()
    }

    fn on(entry: &str, pattern: Pattern) -> When {
        When::all(vec![Condition::new(entry, pattern).unwrap()])
    }

    fn because(rule: &Rule, entries: &[(&str, &str)]) -> Option<String> {
        let request = Request::new(entries, Cost::ONE).unwrap();
        // The time is 2023-11-14 22:13:20 UTC, a Tuesday.
        let now = Timestamp::from_micros(1_700_000_000_000_000);
        let failed = rule.failed_condition(&request, now);
        failed.map(|failed| failed.to_string())
    }

    #[test]
    fn the_sentence_names_the_value_and_what_the_rule_wants() {
        let text = |text: &str| Pattern::text(text).unwrap();
        let any =
            |texts: &[&str]| Pattern::any_of(texts.iter().map(|one| text(one)).collect()).unwrap();
        let nets = Pattern::networks(&["192.0.2.0/24", "2001:db8::/32"]).unwrap();
        for (pattern, value, expected) in [
            (
                text("/api/**"),
                Some("/login"),
                "e is /login, but the rule requires /api/**",
            ),
            (
                text("/api/**"),
                None,
                "the request has no e, but the rule requires /api/**",
            ),
            (
                any(&["POST", "PUT", "P*"]),
                Some("GET"),
                "e is GET, but the rule requires POST, PUT or P*",
            ),
            (
                nets,
                Some("10.0.0.1"),
                "e is 10.0.0.1, but the rule requires an address in 192.0.2.0/24 or 2001:db8::/32",
            ),
            (
                Pattern::absent(),
                Some("7 8"),
                "e is \"7 8\", but the rule matches only requests without e",
            ),
            (
                Pattern::present(),
                None,
                "the request has no e, but the rule requires any value",
            ),
            (
                any(&["a", "b"]).negated(),
                Some("b"),
                "e is b, but the rule requires anything but a or b",
            ),
            (
                Pattern::all_of(vec![text("a*"), text("*z")]).unwrap(),
                Some("ab"),
                "e is ab, but the rule requires \"*z\"",
            ),
            (
                Pattern::regex("bot|spider").unwrap(),
                Some("curl"),
                "e is curl, but the rule requires a match of the regular expression bot|spider",
            ),
            (
                Pattern::route("/login").unwrap(),
                Some("/log"),
                "e is /log, but the rule requires the route /login",
            ),
        ] {
            let rule = rule(on("e", pattern), &[]);
            let entries: Vec<(&str, &str)> = value.map(|value| ("e", value)).into_iter().collect();
            assert_eq!(because(&rule, &entries).unwrap(), expected);
        }
    }

    #[test]
    fn the_sentence_names_a_missing_key_entry_the_time_and_the_allow_list() {
        let keyed = rule(on("path", Pattern::text("/**").unwrap()), &["user"]);
        assert_eq!(
            because(&keyed, &[("path", "/a")]).unwrap(),
            "the request has no user, which is part of the rule's key"
        );
        assert_eq!(because(&keyed, &[("path", "/a"), ("user", "7")]), None);

        let hours = vec![Hours::parse("01:00-06:00").unwrap()];
        let nights = ActiveHours::new(hours, Days::ALL, "Europe/Berlin").unwrap();
        assert_eq!(
            because(&rule(When::default().during(nights), &[]), &[]).unwrap(),
            "it is tue 23:13 in Europe/Berlin, but the rule is active only at \
             {time: [01:00-06:00], zone: Europe/Berlin}"
        );

        let office = on("ip", Pattern::networks(&["192.0.2.0/24"]).unwrap());
        let allowing = rule(When::default(), &[]).allowing(vec![office]);
        assert_eq!(
            because(&allowing, &[("ip", "192.0.2.7")]).unwrap(),
            "the request matches the rule's allow list: {ip: {cidr: [192.0.2.0/24]}}"
        );
        assert_eq!(because(&allowing, &[("ip", "192.0.3.7")]), None);
    }

    #[test]
    fn a_sentence_about_long_texts_and_lists_is_short() {
        let long = "x".repeat(bounds::MAX_ENTRY_VALUE_BYTES);
        let many = (0..1_000).map(|number| Pattern::exact(&format!("v{number}{long}")[..1_000]));
        let any = Pattern::any_of(many.map(Result::unwrap).collect()).unwrap();
        let sentence = because(&rule(on("e", any), &[]), &[("e", &long)]).unwrap();
        assert!(sentence.ends_with("… or one of 990 more"), "{sentence}");
        assert!(sentence.len() < 2_000, "{}", sentence.len());
    }
}
