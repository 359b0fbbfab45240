//! `--sweep RULE.limit=LIMIT,LIMIT`: the denials with several alternative limits for one rule.

use std::str::FromStr;

use serde::Serialize;
use tidegate_core::{Algorithm, Limit, Mode, Rate, Rule, RuleSet, Span, notation};

use crate::{
    replay::{RuleCounts, RuleSetReplay, RulesUnderTest},
    what_if,
};

/// The maximum number of limits in a sweep. A separate state of all rules is kept in memory for
/// each limit.
pub const MAX_SWEEP_VALUES: usize = 32;

/// A rule, and the limits to try for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    rule: Box<str>,
    limits: Vec<Box<str>>,
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "expected RULE.limit=LIMITS, such as api.limit=50/min,100/min or \"api.limit=50..200/min step 50\", got \"{text}\""
            )
        };
        let (rule, values) = text
            .rsplit_once('=')
            .and_then(|(rule, values)| Some((rule.trim().strip_suffix(".limit")?, values)))
            .filter(|(rule, values)| !rule.is_empty() && !values.trim().is_empty())
            .ok_or_else(expected)?;
        let mut limits = Vec::new();
        for value in values.split(',').map(str::trim) {
            match value.split_once("..") {
                None if value.is_empty() => return Err(expected()),
                Some((from, rest)) => expand(value, from, rest, &mut limits)?,
                None => limits.push(value.into()),
            }
            if limits.len() > MAX_SWEEP_VALUES {
                return Err(too_many());
            }
        }
        Ok(Self {
            rule: rule.into(),
            limits,
        })
    }
}

fn too_many() -> String {
    format!("has more than the maximum of {MAX_SWEEP_VALUES} limits")
}

/// Appends the limits in the range `from..rest`, such as `50..200/min step 50`.
fn expand(range: &str, from: &str, rest: &str, limits: &mut Vec<Box<str>>) -> Result<(), String> {
    let expected = || format!("expected a range such as \"50..200/min step 50\", got \"{range}\"");
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| expected());
    let (last, step) = rest.rsplit_once("step").ok_or_else(expected)?;
    let (from, step) = (number(from)?, number(step)?);
    // A burst or a capacity that follows the rate applies to every limit in the range.
    let (last, size) = match last.trim().split_once(char::is_whitespace) {
        Some((last, size)) => (last, format!(" {}", size.trim())),
        None => (last, String::new()),
    };
    let last = notation::rate(last).map_err(|error| format!("{}: {error}", expected()))?;
    if step == 0 {
        return Err(format!("{}; the step must be at least 1", expected()));
    }
    if from > last.count {
        return Err(format!(
            "{}; {from} is greater than {}",
            expected(),
            last.count
        ));
    }
    if (last.count - from) / step >= MAX_SWEEP_VALUES as u64 {
        return Err(too_many());
    }
    let mut count = from;
    while count <= last.count {
        let rate = Rate { count, ..last };
        limits.push(format!("{rate}{size}").into());
        count = count.saturating_add(step);
    }
    Ok(())
}

/// Copies of a file's rules, one copy for each limit in a sweep.
#[derive(Debug)]
pub struct Candidates {
    rule: Box<str>,
    /// The position of the rule in its file.
    at: usize,
    candidates: Vec<SweepCandidate>,
}

#[derive(Debug)]
struct SweepCandidate {
    limit: Limit,
    rules: RuleSet,
}

impl RulesUnderTest {
    /// Returns a copy of these rules for each limit of `sweep`.
    ///
    /// # Errors
    ///
    /// Returns a description of the problem if the rule does not exist, or if a limit is invalid or
    /// is given twice.
    pub fn candidates(&self, sweep: &Sweep) -> Result<Candidates, String> {
        let Sweep { rule: name, limits } = sweep;
        let rule = self
            .rule(name)
            .map_err(|problem| format!("--sweep: {problem}"))?;
        let like = rule.limits().iter().next();
        let mut candidates: Vec<SweepCandidate> = Vec::with_capacity(limits.len());
        for text in limits {
            let refused = |problem: String| format!("--sweep {name}.limit={text}: {problem}");
            let limit = what_if::parse(text, like).map_err(refused)?;
            if candidates.iter().any(|other| other.limit == limit) {
                return Err(refused("is given twice".to_owned()));
            }
            let rules = self.rules().clone().with_limits(name, vec![limit.clone()]);
            let rules = rules.map_err(|error| refused(error.to_string()))?;
            candidates.push(SweepCandidate { limit, rules });
        }
        let at = self.rules().iter().position(|rule| rule.name() == &**name);
        Ok(Candidates {
            rule: name.clone(),
            at: at.unwrap_or_default(),
            candidates,
        })
    }
}

/// The denials with several alternative limits for one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SweepReport {
    /// The rule.
    pub rule: String,
    /// `enforce` or `shadow`.
    pub mode: &'static str,
    /// The number of requests to which the rule applies.
    pub requests: u64,
    /// The number of the rule's keys.
    pub keys: u64,
    /// The number of decided requests.
    pub decided: u64,
    /// The number of keys of all enforced rules.
    pub all_keys: u64,
    /// The horizontal axis of the chart. The axis depends on which numbers of the limits differ.
    #[serde(skip)]
    pub(crate) axis: Axis,
    /// The limits, in the order given in the option.
    pub values: Vec<SweepValue>,
}

/// The denials with one limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SweepValue {
    /// The limit in short notation.
    pub limit: String,
    /// The number of requests that the rule denies (in shadow mode, would deny).
    pub denied: u64,
    /// The number of the rule's keys with at least one denied request.
    pub keys_denied: u64,
    /// The number of requests that an enforced rule denies.
    pub all_denied: u64,
    /// The number of keys of all enforced rules with at least one denied request.
    pub all_keys_denied: u64,
    /// The position on the axis of the curve.
    #[serde(skip)]
    pub(crate) position: u64,
}

/// The horizontal axis of the curve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// The limits differ only in their count. The string is the label of the axis, such as `units
    /// per minute`.
    Count(String),
    /// The limits differ in more than one number, so they are placed at equal distances.
    Order,
}

impl Candidates {
    pub(crate) fn replays<'r>(&'r self, plan: &'r RulesUnderTest) -> Vec<RuleSetReplay<'r>> {
        let candidates = self.candidates.iter();
        candidates
            .map(|candidate| RuleSetReplay::with_rules(plan, &candidate.rules))
            .collect()
    }

    pub(crate) fn report(&self, replays: &[RuleSetReplay<'_>]) -> SweepReport {
        let numbers: Vec<LimitNumbers> = self
            .candidates
            .iter()
            .map(|candidate| LimitNumbers::of(&candidate.limit))
            .collect();
        let (axis, positions) = axis(&numbers);
        let values = self.candidates.iter().zip(replays).zip(positions);
        let values = values.map(|((candidate, replay), position)| {
            let counts = &replay.rules[self.at];
            SweepValue {
                limit: candidate.limit.policy().to_string(),
                denied: counts.denied,
                keys_denied: keys_denied(counts),
                all_denied: replay.denied,
                all_keys_denied: enforced(replay).map(keys_denied).sum(),
                position,
            }
        });
        // The number of requests and the number of keys do not depend on the limit.
        let first = replays.first();
        let of_rule = first.map(|replay| &replay.rules[self.at]);
        let mode = first.and_then(|replay| replay.rule_set.rule(&self.rule));
        SweepReport {
            rule: self.rule.to_string(),
            mode: mode_name(mode),
            requests: of_rule.map_or(0, |counts| counts.requests),
            keys: of_rule.map_or(0, |counts| counts.keys.len() as u64),
            decided: first.map_or(0, |replay| replay.decided),
            all_keys: first.map_or(0, |replay| {
                enforced(replay)
                    .map(|counts| counts.keys.len() as u64)
                    .sum()
            }),
            axis,
            values: values.collect(),
        }
    }
}

fn mode_name(rule: Option<&Rule>) -> &'static str {
    match rule.map(Rule::mode) {
        Some(Mode::Shadow) => "shadow",
        Some(Mode::Enforce) | None => "enforce",
    }
}

fn enforced<'c>(replay: &'c RuleSetReplay<'_>) -> impl Iterator<Item = &'c RuleCounts> {
    let rules = replay.rule_set.iter().zip(&replay.rules);
    rules
        .filter(|(rule, _)| rule.mode() == Mode::Enforce)
        .map(|(_, counts)| counts)
}

fn keys_denied(counts: &RuleCounts) -> u64 {
    counts.keys.values().filter(|key| key.denied > 0).count() as u64
}

/// The numbers that can differ between limits with the same algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LimitNumbers {
    count: u64,
    period: Span,
    /// The burst or the capacity. The size is `None` if the limit has neither, or if the burst or
    /// the capacity equals the count.
    size: Option<u64>,
}

impl LimitNumbers {
    fn of(limit: &Limit) -> Self {
        let rated = |rate: &Rate, size: u64| Self {
            count: rate.count,
            period: rate.period,
            size: Some(size),
        };
        match limit.algorithm() {
            Algorithm::Gcra { rate, burst } => rated(rate, *burst),
            Algorithm::TokenBucket {
                capacity,
                refill: rate,
                ..
            }
            | Algorithm::LeakyBucket {
                capacity,
                leak: rate,
                ..
            } => Self {
                size: Some(*capacity).filter(|capacity| *capacity != rate.count),
                ..rated(rate, *capacity)
            },
            Algorithm::FixedWindow { .. }
            | Algorithm::SlidingWindowLog { .. }
            | Algorithm::SlidingWindowCounter { .. }
            | Algorithm::Concurrency { .. } => Self {
                count: limit.quota(),
                period: limit.window(),
                size: None,
            },
        }
    }
}

/// Returns the axis for these limits, and the position of each limit on the axis.
fn axis(limits: &[LimitNumbers]) -> (Axis, Vec<u64>) {
    let is_same = |part: fn(&LimitNumbers) -> (Option<u64>, u64)| {
        limits
            .windows(2)
            .all(|pair| part(&pair[0]) == part(&pair[1]))
    };
    let period = limits.first().map_or(Span::ZERO, |limit| limit.period);
    if is_same(|limit| (limit.size, limit.period.as_micros())) {
        let positions = limits.iter().map(|limit| limit.count).collect();
        // Format the period as in a rate: `min`, `10s`.
        let rate = Rate { count: 1, period }.to_string();
        let unit = rate.split_once('/').map_or("", |(_, unit)| unit);
        return (Axis::Count(format!("units per {unit}")), positions);
    }
    if is_same(|limit| (Some(limit.count), limit.period.as_micros()))
        && limits.iter().all(|limit| limit.size.is_some())
    {
        let positions = limits.iter().filter_map(|limit| limit.size).collect();
        return (Axis::Count("units at once".to_owned()), positions);
    }
    (Axis::Order, (0..limits.len() as u64).collect())
}

#[cfg(test)]
mod tests {
    use tidegate_config::Config;

    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        let sweep: Sweep = text.parse().unwrap();
        assert_eq!(&*sweep.rule, "a.b");
        sweep.limits.iter().map(|limit| limit.to_string()).collect()
    }

    #[test]
    fn limits_are_listed_or_a_range() {
        assert_eq!(
            parsed("a.b.limit=5/s, 10/s burst 2"),
            ["5/s", "10/s burst 2"]
        );
        assert_eq!(
            parsed("a.b.limit=50..200/min step 50"),
            ["50/min", "100/min", "150/min", "200/min"]
        );
        assert_eq!(
            parsed("a.b.limit=1..6/10s step 4,9/10s"),
            ["1/10s", "5/10s", "9/10s"]
        );
        assert_eq!(
            parsed("a.b.limit=1..2/s burst 5 step 1"),
            ["1/s burst 5", "2/s burst 5"]
        );
        assert_eq!(parsed("a.b.limit=1..32/s step 1").len(), MAX_SWEEP_VALUES);
    }

    #[test]
    fn an_error_says_what_was_expected() {
        for (text, expected) in [
            ("", "expected RULE.limit=LIMITS"),
            ("a=1/s", "expected RULE.limit=LIMITS"),
            (".limit=1/s", "expected RULE.limit=LIMITS"),
            ("a.limit= ", "expected RULE.limit=LIMITS"),
            ("a.limit=1/s,,2/s", "expected RULE.limit=LIMITS"),
            ("a.limit=1..9/s", "expected a range"),
            ("a.limit=1..9 step 2", "expected a range"),
            ("a.limit=x..9/s step 2", "expected a range"),
            ("a.limit=1..9/s step 0", "the step must be at least 1"),
            ("a.limit=9..1/s step 1", "9 is greater than 1"),
            (
                "a.limit=1..33/s step 1",
                "more than the maximum of 32 limits",
            ),
            (
                "a.limit=0..999999999999999/s step 1",
                "more than the maximum of 32 limits",
            ),
            (
                "a.limit=1..20/s step 1,1..20/min step 1",
                "more than the maximum of 32 limits",
            ),
        ] {
            let refused = text.parse::<Sweep>().unwrap_err();
            assert!(refused.contains(expected), "{text}: {refused}");
        }
    }

    #[test]
    fn the_axis_shows_the_number_that_differs() {
        let rules = "rules: [{name: a, algorithm: token_bucket, limits: [5/min]}]";
        let rules = RulesUnderTest::new("rules.yaml", Config::parse(rules).unwrap());
        let axis_of = |text: &str| {
            let candidates = rules.candidates(&text.parse().unwrap()).unwrap();
            let limits = candidates.candidates.iter();
            let limits: Vec<_> = limits.map(|value| LimitNumbers::of(&value.limit)).collect();
            axis(&limits)
        };
        let unit = |unit: &str| Axis::Count(unit.to_owned());
        assert_eq!(
            axis_of("a.limit=9/min,3/min"),
            (unit("units per min"), vec![9, 3])
        );
        assert_eq!(
            axis_of("a.limit=5/s capacity 9,5/s capacity 20"),
            (unit("units at once"), vec![9, 20])
        );
        assert_eq!(axis_of("a.limit=9/min,3/s"), (Axis::Order, vec![0, 1]));
        let refused = |text: &str| rules.candidates(&text.parse().unwrap()).unwrap_err();
        assert_eq!(
            refused("a.limit=9/min,9/min"),
            "--sweep a.limit=9/min: is given twice"
        );
        assert!(refused("a.limit=x").starts_with("--sweep a.limit=x: expected a rate"));
        assert!(refused("b.limit=1/s").starts_with("--sweep: rules.yaml has no rule `b`"));
    }
}
