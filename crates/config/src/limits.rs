//! Reads limits in the short form, such as `20/min` or `100/s burst 20`, and in the full form with
//! named fields.

use tidegate_core::{
    AlgorithmName, Anchor, Calendar, CalendarUnit, Limit, LimitError, LimitSpec, RefillMode,
    notation,
};

use super::{
    report::Report,
    source_span::SourceSpan,
    value::{Fields, Shape, Value},
};

/// The settings that a limit inherits from its rule or from the file.
#[derive(Clone, Copy, Debug)]
pub struct Fallback {
    /// `algorithm`: the algorithm of limits without their own `algorithm`.
    pub algorithm: DefaultAlgorithm,
    /// `soft`: the percentage by which a limit may be exceeded.
    pub soft: Option<u32>,
    /// `count_denied`: whether denied requests count against the limit.
    pub count_denied: Option<bool>,
}

/// The algorithm of limits without their own `algorithm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultAlgorithm {
    /// No default algorithm is set, so the limit uses a sliding window. The size of the limit
    /// determines the implementation: sliding window log or sliding window counter.
    BySize,
    /// The algorithm with this name.
    Named(AlgorithmName),
    /// The named algorithm does not exist. The error about the name has already been reported.
    /// Limits that inherit the algorithm cannot be checked.
    Unreadable,
}

impl DefaultAlgorithm {
    /// Reads the field `algorithm` in `fields`. If the field is missing, returns `outer`, the
    /// default of the enclosing level.
    pub(crate) fn read(fields: &Fields<'_>, outer: Self, report: &mut Report) -> Self {
        match fields.get("algorithm") {
            Some(value) => algorithm(value, report).map_or(Self::Unreadable, Self::Named),
            None if fields.tries("algorithm") => Self::Unreadable,
            None => outer,
        }
    }

    fn name(self) -> Option<AlgorithmName> {
        match self {
            Self::Named(name) => Some(name),
            Self::BySize | Self::Unreadable => None,
        }
    }
}

/// A limit, as written in the rules file.
#[derive(Debug)]
pub(crate) struct RawLimit {
    pub(crate) span: SourceSpan,
    /// The fields of the full form, excluding inherited fields; `None` if the limit is in the short
    /// form.
    pub(crate) full_form: Option<Box<LimitSpec>>,
}

/// Reads a limit, or a list of limits. Returns all limits as written, and the valid limits among
/// them.
pub(crate) fn limits(
    value: &Value<'_>,
    fallback: Fallback,
    report: &mut Report,
) -> (Vec<RawLimit>, Vec<Limit>) {
    let items = value.one_or_more(report);
    if items.is_empty() {
        value.wrong(report, "must name at least one limit, such as 20/min");
    }
    let (mut raw, mut limits) = (Vec::new(), Vec::new());
    for item in &items {
        let (written, limit) = raw_limit(item, fallback, report);
        raw.push(written);
        limits.extend(limit);
    }
    (raw, limits)
}

/// Reads the name of an algorithm.
pub(crate) fn algorithm(value: &Value<'_>, report: &mut Report) -> Option<AlgorithmName> {
    value.choice(report, &AlgorithmName::ALL)
}

/// Reads a percentage such as `10%`.
pub(crate) fn percent(value: &Value<'_>, report: &mut Report) -> Option<u32> {
    let what = "a percentage such as 10%";
    let text = value.text(report, what)?;
    let digits = text.strip_suffix('%').map(str::trim_end);
    let digits = digits.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let percent = digits.and_then(|digits| digits.parse().ok());
    if percent.is_none() {
        value.expected(report, what);
    }
    percent
}

/// Reads a limit.
pub fn limit(value: &Value<'_>, fallback: Fallback, report: &mut Report) -> Option<Limit> {
    let (_, limit) = raw_limit(value, fallback, report);
    limit
}

/// Reads a limit. Returns the limit as written and, if it is valid, the parsed limit.
fn raw_limit(
    value: &Value<'_>,
    fallback: Fallback,
    report: &mut Report,
) -> (RawLimit, Option<Limit>) {
    let before = report.count();
    let what = "a rate such as 20/min, or a map with the fields of a limit";
    let mut raw = RawLimit {
        span: value.span().clone(),
        full_form: None,
    };
    let read = match value.shape() {
        Shape::Scalar => {
            let name = fallback.algorithm.name();
            let read = |text: &str| LimitSpec::parse_shorthand(text, name);
            let spec = value.parsed(report, what, |text| read(text).map_err(|e| problem(&e)));
            spec.map(|spec| (spec, fallback.algorithm, None))
        }
        Shape::List | Shape::Map => value
            .fields(report, what, &LimitSpec::FIELDS)
            .map(|fields| {
                let (spec, algorithm) = full_form(&fields, fallback.algorithm, report);
                let has_algorithm = fields.get("algorithm").is_some();
                let written = LimitSpec {
                    algorithm: spec.algorithm.filter(|_| has_algorithm),
                    ..spec.clone()
                };
                raw.full_form = Some(Box::new(written));
                (spec, algorithm, Some(fields))
            }),
    };
    let Some((spec, algorithm, fields)) = read else {
        return (raw, None);
    };
    if algorithm == DefaultAlgorithm::Unreadable {
        return (raw, None);
    }
    let spec = LimitSpec {
        soft: spec.soft.or(fallback.soft),
        count_denied: spec.count_denied.or(fallback.count_denied),
        ..spec
    };
    let unread = report.count() > before;
    let limit = build(&spec, value, fields.as_ref(), unread, report);
    (raw, limit)
}

/// Creates the limit from `spec`, which was read from `value`. For a limit in the full form,
/// `fields` are the fields of `value`. If `unread` is true, some fields could not be read. Errors
/// in unread fields have already been reported, so do not report these fields as missing too.
pub fn build(
    spec: &LimitSpec,
    value: &Value<'_>,
    fields: Option<&Fields<'_>>,
    unread: bool,
    report: &mut Report,
) -> Option<Limit> {
    let errors = match spec.build() {
        Ok(limit) => return (!unread).then_some(limit),
        Err(errors) => errors,
    };
    for error in errors {
        match fields {
            Some(fields) if unread && error.is_missing() && tried(fields, error.field) => {}
            Some(fields)
                if ["algorithm", "window"].contains(&error.field)
                    && has_unread_field(spec, fields) => {}
            Some(fields) => fields.wrong(report, error.field, problem(&error)),
            None => value.wrong(report, format!("{}: {}", error.field, problem(&error))),
        }
    }
    None
}

/// Describes an error about a limit, with the limit that was probably meant.
fn problem(error: &LimitError) -> String {
    match error.meant() {
        Some(meant) => format!("{}: {meant}", error.problem),
        None => error.problem.clone(),
    }
}

/// Returns whether a field is missing only because of an error that has already been reported. The
/// file then contains the field, but the field could not be read. The file may contain `anchor` in
/// place of `window`.
fn tried(fields: &Fields<'_>, field: &str) -> bool {
    fields.tries(field) || (field == "window" && fields.tries("anchor"))
}

/// Returns whether the file contains a field that could determine the algorithm but could not be
/// read.
fn has_unread_field(spec: &LimitSpec, fields: &Fields<'_>) -> bool {
    let of_every_algorithm = ["algorithm", "soft", "count_denied"];
    let written = spec.fields_written();
    let is_unread = |name: &&str| !written.contains(name) && fields.tries(name);
    let mut names = LimitSpec::FIELDS
        .into_iter()
        .filter(|name| !of_every_algorithm.contains(name));
    spec.algorithm.is_none() && names.any(|name| is_unread(&name))
}

/// Reads the full form of a limit. Also returns the limit's algorithm, which the limit itself sets
/// or inherits.
#[must_use]
pub fn full_form(
    fields: &Fields<'_>,
    fallback: DefaultAlgorithm,
    report: &mut Report,
) -> (LimitSpec, DefaultAlgorithm) {
    let mut number = |name| fields.get(name).and_then(|value| value.number(report));
    let (burst, capacity, limit) = (number("burst"), number("capacity"), number("limit"));
    let mut rate = |name| {
        let what = "a rate such as 20/min or 5/10s";
        fields
            .get(name)
            .and_then(|value| value.parsed(report, what, notation::rate))
    };
    let (rate, refill, leak) = (rate("rate"), rate("refill"), rate("leak"));
    let mut span = |name| {
        let what = "a duration with its unit, such as 20s or 1d";
        fields
            .get(name)
            .and_then(|value| value.parsed(report, what, notation::span))
    };
    let (window, lease, wait) = (span("window"), span("lease"), span("wait"));
    let mut flag = |name| fields.get(name).and_then(|value| value.flag(report));
    let (strict, count_denied) = (flag("strict"), flag("count_denied"));
    let (queue, slot_queue) = queue(fields, report);
    let algorithm = DefaultAlgorithm::read(fields, fallback, report);
    let spec = LimitSpec {
        algorithm: algorithm.name(),
        rate,
        burst,
        capacity,
        refill,
        refill_mode: fields
            .get("refill_mode")
            .and_then(|value| value.choice(report, &RefillMode::ALL)),
        leak,
        queue,
        slot_queue,
        limit,
        window,
        anchor: fields.get("anchor").and_then(|value| anchor(value, report)),
        buckets: fields
            .get("buckets")
            .and_then(|value| value.small_number(report)),
        strict,
        lease,
        wait,
        soft: fields.get("soft").and_then(|value| percent(value, report)),
        count_denied,
    };
    (spec, algorithm)
}

/// Reads `queue`. For a leaky bucket, it is a boolean. For a concurrency limit, it is a number of
/// requests.
fn queue(fields: &Fields<'_>, report: &mut Report) -> (Option<bool>, Option<u64>) {
    let Some(value) = fields.get("queue") else {
        return (None, None);
    };
    let is_number = |text: &str| text.starts_with(|first: char| first.is_ascii_digit());
    if value.scalar().is_some_and(is_number) {
        (None, value.number(report))
    } else {
        (value.flag(report), None)
    }
}

fn anchor(value: &Value<'_>, report: &mut Report) -> Option<Anchor> {
    if value.shape() == Shape::Map {
        return calendar(value, report).map(Anchor::Calendar);
    }
    match value.scalar() {
        Some("epoch") => return Some(Anchor::Epoch),
        Some("first_request") => return Some(Anchor::FirstRequest),
        _ => {}
    }
    let unit = CalendarUnit::ALL
        .into_iter()
        .find(|(name, _)| Some(*name) == value.scalar());
    let (unit, _) = unit.unwrap_or(("month", CalendarUnit::Month));
    let what = format!("epoch, first_request, or a calendar such as {{calendar: {unit}}}");
    value.expected(report, &what);
    None
}

fn calendar(value: &Value<'_>, report: &mut Report) -> Option<Calendar> {
    let before = report.count();
    let fields = value.fields(report, "a calendar", &["calendar", "zone", "day"])?;
    let unit = match fields.get("calendar") {
        Some(unit) => unit.choice(report, &CalendarUnit::ALL),
        None => {
            fields.wrong(report, "calendar", "is missing; write day, week or month");
            None
        }
    };
    let zone = fields.get("zone").map_or(Some("UTC"), |zone| {
        zone.text(report, "a time zone such as Europe/Berlin")
    });
    let day = fields
        .get("day")
        .and_then(|day| day.small_number::<i8>(report));
    // If the calendar unit is missing or invalid, assume the longest unit. With the longest unit,
    // values that are invalid for every unit are also reported.
    let assumed = unit.unwrap_or(CalendarUnit::Month);
    for error in Calendar::errors(assumed, zone.unwrap_or("UTC"), day) {
        fields.wrong(report, error.field, error.problem);
    }
    if report.count() > before {
        return None;
    }
    Calendar::new(unit?, zone?, day).ok()
}
