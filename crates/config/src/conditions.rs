//! Conditions of `when` and `allow`.

use std::borrow::Cow;

use tidegate_core::{ActiveHours, Condition, Days, Hours, Pattern, RuleError, When};

use super::{
    report::Report,
    value::{Shape, Value},
};

const OPERATORS: &[&str] = &["is", "not", "route", "cidr", "regex", "present"];

/// The keys of a schedule. With a map of operators as their value they are ordinary entries
/// instead.
const SCHEDULE: [&str; 3] = ["time", "days", "zone"];

/// Reads a map of conditions on entries, all of which must hold, and an optional schedule.
pub(super) fn when(value: &Value<'_>, report: &mut Report) -> Option<When> {
    let what = "a map of conditions such as {path: /api/**}";
    let (mut conditions, before) = (Vec::new(), report.count());
    let (mut scheduled, pairs) = (Vec::new(), value.pairs(report, what)?);
    for (entry, value) in pairs {
        if is_misplaced(entry, &value) {
            let message = "is not part of a schedule, which has only `time`, `days` and `zone`; to match an \
                entry of this name, write {is: …}";
            value.wrong_key(report, message);
        } else if is_schedule(entry, &value) {
            scheduled.push((entry, value));
        } else if let Some(pattern) = pattern(&value, report) {
            let condition = Condition::new(&entry_name(entry), pattern);
            conditions.extend(accept(condition, &value, report));
        }
    }
    let schedule = schedule(&scheduled, report);
    if report.count() > before {
        return None;
    }
    let when = When::all(conditions);
    Some(match schedule {
        Some(schedule) => when.during(schedule),
        None => when,
    })
}

/// Returns the name under which rules know `entry`. Header names are case-insensitive, so those in
/// `header.NAME` are converted to lower case.
#[must_use]
pub fn entry_name(entry: &str) -> Cow<'_, str> {
    let is_header = entry.starts_with("header.");
    if is_header && entry.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Owned(entry.to_ascii_lowercase());
    }
    Cow::Borrowed(entry)
}

/// Keys that look like part of a schedule but are not supported.
const NOT_IN_SCHEDULE: [&str; 11] = [
    "until", "since", "before", "after", "hours", "times", "day", "weekday", "weekdays",
    "timezone", "tz",
];

/// Returns whether the key `entry` was probably meant as part of a schedule. If it were treated as
/// an entry, no request would have it, so the rule would silently be disabled.
fn is_misplaced(entry: &str, value: &Value<'_>) -> bool {
    NOT_IN_SCHEDULE.contains(&entry) && !matches!(value.shape(), Shape::Map)
}

/// Returns whether the key `entry` is part of a schedule and not an entry of a request.
pub(super) fn is_schedule(entry: &str, value: &Value<'_>) -> bool {
    SCHEDULE.contains(&entry) && !matches!(value.shape(), Shape::Map)
}

/// Builds the schedule of `time`, `days` and `zone`. Returns `None` without `time` and `days`.
fn schedule(fields: &[(&str, Value<'_>)], report: &mut Report) -> Option<ActiveHours> {
    let field = |name| fields.iter().find(|(known, _)| *known == name);
    let [time, days, zone] = SCHEDULE.map(|name| field(name).map(|(_, value)| value));
    let hours = time.map(|value| listed(value, report, "22:00-06:00", Hours::parse));
    let of_week = days.map(|value| listed(value, report, "mon", Days::parse));
    let name = zone.map_or(Some("UTC"), |zone| {
        zone.text(report, "a time zone such as Europe/Berlin")
    });
    if time.is_none() && days.is_none() {
        zone?.wrong(
            report,
            "requires `time` or `days`; to match an entry of this name, write {is: …}",
        );
        return None;
    }
    let of_week = of_week.and_then(|days| days.into_iter().reduce(Days::and));
    let built = ActiveHours::new(
        hours.unwrap_or_default(),
        of_week.unwrap_or(Days::ALL),
        name?,
    );
    let at = |error: &RuleError| if error.field == "zone" { zone } else { time };
    built
        .map_err(|error| at(&error).map(|value| value.wrong(report, error.problem)))
        .ok()
}

/// Reads one value or a list of values with `read`. `example` is shown in messages.
fn listed<T>(
    value: &Value<'_>,
    report: &mut Report,
    example: &str,
    read: impl Fn(&str) -> Result<T, RuleError>,
) -> Vec<T> {
    let items = value.one_or_more(report);
    if items.is_empty() {
        let problem = format!("is empty; write a value such as {example}, or remove it");
        value.wrong(report, problem);
    }
    let what = format!("a text such as {example}");
    let items = items.iter();
    items
        .filter_map(|item| item.parsed(report, &what, &read))
        .collect()
}

/// Reads the allow list, whose requests are admitted without a charge: a map of conditions, or a
/// list of maps of which one must match.
pub(super) fn allow(value: &Value<'_>, report: &mut Report) -> Vec<When> {
    let mut items = Vec::new();
    for item in value.one_or_more(report) {
        let is_empty = item
            .pairs(&mut Report::default(), "")
            .is_some_and(|pairs| pairs.is_empty());
        if is_empty {
            item.wrong(
                report,
                "has no condition, so every request would pass; name at least one",
            );
            continue;
        }
        items.extend(when(&item, report));
    }
    items
}

/// Reads the pattern that one entry must match.
pub(super) fn pattern(value: &Value<'_>, report: &mut Report) -> Option<Pattern> {
    match value.shape() {
        Shape::Scalar => {
            let what = "a value, a list of values, or a map such as {not: …}";
            let text = value.text(report, what)?;
            accept(Pattern::text(text), value, report)
        }
        Shape::List => {
            let items = value.items(report, "a list")?;
            let before = report.count();
            let patterns = items
                .iter()
                .filter_map(|item| pattern(item, report))
                .collect();
            let whole = report.count() == before;
            whole
                .then(|| accept(Pattern::any_of(patterns), value, report))
                .flatten()
        }
        Shape::Map => operators(value, report),
    }
}

/// How a text in a pattern is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// Without an operator: literally, or as a glob if it has a `*`.
    Plain,
    /// `is`: literally.
    Is,
    /// `route`: as many web frameworks compare paths.
    Route,
    /// `regex`: as a regular expression.
    Regex,
}

/// A text in a pattern.
#[derive(Clone, Debug)]
pub(super) struct PatternText<'v> {
    pub(super) value: Value<'v>,
    pub(super) comparison: Comparison,
    /// Whether it is under a `not`.
    pub(super) is_negated: bool,
}

/// Returns the texts in a pattern.
pub(super) fn texts<'v>(pattern: &Value<'v>) -> Vec<PatternText<'v>> {
    let quiet = &mut Report::default();
    let compared = |value: &Value<'v>, comparison| PatternText {
        value: value.clone(),
        comparison,
        is_negated: false,
    };
    match pattern.shape() {
        Shape::Scalar => vec![compared(pattern, Comparison::Plain)],
        Shape::List => {
            let items = pattern.items(quiet, "").unwrap_or_default();
            items.iter().flat_map(texts).collect()
        }
        Shape::Map => {
            let operators = pattern.pairs(quiet, "").unwrap_or_default();
            let texts_of = |(operator, value): &(&str, Value<'v>)| {
                let comparison = match *operator {
                    "is" => Comparison::Is,
                    "route" => Comparison::Route,
                    "regex" => Comparison::Regex,
                    "not" => {
                        let negated = |text: PatternText<'v>| PatternText {
                            is_negated: !text.is_negated,
                            ..text
                        };
                        return texts(value).into_iter().map(negated).collect();
                    }
                    _ => return Vec::new(),
                };
                let items = value.one_or_more(&mut Report::default());
                items
                    .iter()
                    .map(|item| compared(item, comparison))
                    .collect()
            };
            operators.iter().flat_map(texts_of).collect()
        }
    }
}

/// Reads a map of operators, all of which must hold.
fn operators(value: &Value<'_>, report: &mut Report) -> Option<Pattern> {
    let before = report.count();
    let fields = value.fields(report, "a map", OPERATORS)?;
    let mut patterns = Vec::new();
    if let Some(is) = fields.get("is") {
        patterns.extend(one_of(is, report, "a value", Pattern::exact));
    }
    if let Some(not) = fields.get("not") {
        patterns.extend(pattern(not, report).map(Pattern::negated));
    }
    if let Some(route) = fields.get("route") {
        patterns.extend(one_of(route, report, "a path", Pattern::route));
    }
    if let Some(cidr) = fields.get("cidr") {
        patterns.extend(networks(cidr, report));
    }
    if let Some(regex) = fields.get("regex") {
        patterns.extend(one_of(
            regex,
            report,
            "a regular expression",
            Pattern::regex,
        ));
    }
    if let Some(present) = fields.get("present") {
        let pattern = |present| {
            if present {
                Pattern::present()
            } else {
                Pattern::absent()
            }
        };
        patterns.extend(present.flag(report).map(pattern));
    }
    let whole = report.count() == before;
    whole
        .then(|| accept(Pattern::all_of(patterns), value, report))
        .flatten()
}

/// Reads one text or a list of texts, any of which may match.
fn one_of(
    value: &Value<'_>,
    report: &mut Report,
    what: &str,
    build: impl Fn(&str) -> Result<Pattern, RuleError>,
) -> Option<Pattern> {
    let before = report.count();
    let mut patterns = Vec::new();
    for item in value.one_or_more(report) {
        let built = item.text(report, what).map(&build);
        patterns.extend(built.and_then(|built| accept(built, &item, report)));
    }
    let whole = report.count() == before;
    whole
        .then(|| accept(Pattern::any_of(patterns), value, report))
        .flatten()
}

/// Reads one network or a list of networks.
fn networks(value: &Value<'_>, report: &mut Report) -> Option<Pattern> {
    let before = report.count();
    let mut texts = Vec::new();
    for item in value.one_or_more(report) {
        let text = item.text(report, "a network such as 10.0.0.0/8");
        // Check each network on its own first, so that a mistake is reported at its line.
        let sound =
            text.filter(|text| accept(Pattern::networks(&[*text]), &item, report).is_some());
        texts.extend(sound);
    }
    let whole = report.count() == before;
    whole
        .then(|| accept(Pattern::networks(&texts), value, report))
        .flatten()
}

/// Returns the built value, or reports the error at `value`.
fn accept<T>(built: Result<T, RuleError>, value: &Value<'_>, report: &mut Report) -> Option<T> {
    built
        .map_err(|error| value.wrong(report, error.problem))
        .ok()
}
