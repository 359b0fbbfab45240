//! Limits: shorthands such as `20/min`, and the full form with every field by name.

use tidegate_core::{
    AlgorithmName, Anchor, Calendar, CalendarUnit, Limit, LimitSpec, RefillMode, notation,
};

use super::{
    report::Report,
    value::{Fields, Shape, Value},
};

/// What a limit is where it does not say so itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fallback {
    pub(crate) algorithm: DefaultAlgorithm,
    pub(crate) soft: Option<u32>,
    pub(crate) count_denied: Option<bool>,
}

/// The algorithm of a limit that names none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultAlgorithm {
    /// None was named: a sliding window, in the form that suits its size.
    BySize,
    Named(AlgorithmName),
    /// One was named that does not exist. That is reported already, and nothing can be said of the
    /// limits that depend on it.
    Unreadable,
}

impl DefaultAlgorithm {
    /// What the field `algorithm` of `fields` says; `outer` where it was not written.
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

/// A limit, or a list of limits.
pub(crate) fn limits(value: &Value<'_>, fallback: Fallback, report: &mut Report) -> Vec<Limit> {
    let items = value.one_or_more(report);
    if items.is_empty() {
        value.wrong(report, "must name at least one limit, such as 20/min");
    }
    items
        .iter()
        .filter_map(|item| limit(item, fallback, report))
        .collect()
}

/// The name of an algorithm.
pub(crate) fn algorithm(value: &Value<'_>, report: &mut Report) -> Option<AlgorithmName> {
    value.choice(report, &AlgorithmName::ALL)
}

/// A share such as `10%`.
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

pub(crate) fn limit(value: &Value<'_>, fallback: Fallback, report: &mut Report) -> Option<Limit> {
    let before = report.count();
    let what = "a rate such as 20/min, or a map with the fields of a limit";
    let (spec, fields) = match value.shape() {
        Shape::Scalar => {
            let name = fallback.algorithm.name();
            let read = |text: &str| LimitSpec::parse_shorthand(text, name);
            let spec = value.parsed(report, what, |text| read(text).map_err(|e| e.problem))?;
            if fallback.algorithm == DefaultAlgorithm::Unreadable {
                return None;
            }
            (spec, None)
        }
        Shape::List | Shape::Map => {
            let fields = value.fields(report, what, &LimitSpec::FIELDS)?;
            let (spec, algorithm) = full_form(&fields, fallback.algorithm, report);
            if algorithm == DefaultAlgorithm::Unreadable {
                return None;
            }
            (spec, Some(fields))
        }
    };
    let spec = LimitSpec {
        soft: spec.soft.or(fallback.soft),
        count_denied: spec.count_denied.or(fallback.count_denied),
        ..spec
    };
    build(
        &spec,
        (value, fields.as_ref()),
        report.count() > before,
        report,
    )
}

/// Builds the limit of `spec`, which was read from `value` and, in its full form, from its `fields`. Where some of those
/// were `unread`, what is missing because of that is not reported again.
pub(crate) fn build(
    spec: &LimitSpec,
    (value, fields): (&Value<'_>, Option<&Fields<'_>>),
    unread: bool,
    report: &mut Report,
) -> Option<Limit> {
    let errors = match spec.build() {
        Ok(limit) => return (!unread).then_some(limit),
        Err(errors) => errors,
    };
    for error in errors {
        match fields {
            Some(fields)
                if unread && error.problem == "is missing" && tried(fields, error.field) => {}
            Some(fields) => fields.wrong(report, error.field, error.problem),
            None => value.wrong(report, error.to_string()),
        }
    }
    None
}

/// Whether a field is only missing because of what is reported already: it could not be read, or an
/// anchor that would have taken its place could not.
fn tried(fields: &Fields<'_>, field: &str) -> bool {
    fields.tries(field) || (field == "window" && fields.tries("anchor"))
}

/// The fields that were written, and where the algorithm among them comes from.
pub(crate) fn full_form(
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
    let (window, lease) = (span("window"), span("lease"));
    let mut flag = |name| fields.get(name).and_then(|value| value.flag(report));
    let (queue, strict, count_denied) = (flag("queue"), flag("strict"), flag("count_denied"));
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
        limit,
        window,
        anchor: fields.get("anchor").and_then(|value| anchor(value, report)),
        buckets: fields
            .get("buckets")
            .and_then(|value| value.small_number(report)),
        strict,
        lease,
        soft: fields.get("soft").and_then(|value| percent(value, report)),
        count_denied,
    };
    (spec, algorithm)
}

fn anchor(value: &Value<'_>, report: &mut Report) -> Option<Anchor> {
    let names = [
        ("epoch", AnchorName::Epoch),
        ("first_request", AnchorName::FirstRequest),
    ];
    match value.shape() {
        Shape::Scalar | Shape::List => value.choice(report, &names).map(|name| match name {
            AnchorName::Epoch => Anchor::Epoch,
            AnchorName::FirstRequest => Anchor::FirstRequest,
        }),
        Shape::Map => calendar(value, report).map(Anchor::Calendar),
    }
}

#[derive(Clone, Copy)]
enum AnchorName {
    Epoch,
    FirstRequest,
}

fn calendar(value: &Value<'_>, report: &mut Report) -> Option<Calendar> {
    let before = report.count();
    let fields = value.fields(report, "a calendar", &["calendar", "zone", "day"])?;
    let unit = match fields.get("calendar") {
        Some(unit) => unit.choice(report, &CalendarUnit::ALL),
        None => {
            fields.wrong(report, "calendar", "is missing; one of day, week, month");
            None
        }
    };
    let zone = fields.get("zone").map_or(Some("UTC"), |zone| {
        zone.text(report, "a time zone such as Europe/Berlin")
    });
    let day = fields
        .get("day")
        .and_then(|day| day.small_number::<i8>(report));
    // Of a calendar that is none the longest is assumed, so that what no calendar can have is told too.
    let assumed = unit.unwrap_or(CalendarUnit::Month);
    for error in Calendar::mistakes(assumed, zone.unwrap_or("UTC"), day) {
        fields.wrong(report, error.field, error.problem);
    }
    if report.count() > before {
        return None;
    }
    Calendar::new(unit?, zone?, day).ok()
}
