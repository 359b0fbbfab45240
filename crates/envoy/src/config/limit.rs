//! Reads the `rate_limit` field of envoyproxy/ratelimit, with Tidegate's extensions.
//!
//! ```yaml
//! rate_limit: {unit: minute, requests_per_unit: 20}                   # envoyproxy/ratelimit
//! rate_limit: {window: 30s, requests_per_unit: 20}                    # a different window length
//! rate_limit: {anchor: {calendar: month}, requests_per_unit: 1000}    # a calendar window
//! rate_limit: {unit: minute, requests_per_unit: 20, algorithm: gcra}  # a different algorithm
//! rate_limit: {algorithm: token_bucket, capacity: 10, refill: 1/s}    # any limit of a rules file
//! rate_limits: [5/s, {unit: day, requests_per_unit: 250}]             # several, in one decision
//! ```

use std::sync::{Arc, OnceLock};

use tidegate_config::{
    limits::{self, DefaultAlgorithm, Fallback},
    report::Report,
    value::Value,
    yaml::YamlContent,
};
use tidegate_core::{
    Algorithm, AlgorithmName, Anchor, Limit, LimitSpec, Limits, Rate, Span, Window,
};
use tidegate_net::input::shown;

use super::{
    fields::{field, flag, text, unreadable, wrong},
    scalar::{self, TypedScalar},
};
use crate::{
    Unit,
    rules::DeniedHits,
    rules::{Allowance, RuleLimits},
};

/// The content of `rate_limit` or `rate_limits`.
#[derive(Debug)]
pub(super) struct ParsedLimit {
    pub(super) allowance: Allowance,
    pub(super) name: Option<Arc<str>>,
    pub(super) replaces: Box<[Box<str>]>,
}

impl ParsedLimit {
    /// Applies a mode to the limits. In shadow mode, the limits never deny. In quota mode, the
    /// limits deny only if all of the request's quotas are over their limits.
    pub(super) fn denying(mut self, shadow: bool, quota: bool) -> Self {
        if let Allowance::Limited(limits) = &mut self.allowance {
            if shadow {
                let in_shadow = Limits::clone(&limits.limits).in_shadow(true);
                limits.limits = Arc::new(in_shadow);
            } else if quota {
                limits.add_shadow_limits();
            }
        }
        self
    }
}

/// Reads the limits of a descriptor. Returns `None` if the descriptor has no limits, or if its
/// limits are invalid.
pub(super) fn read(
    descriptor: &Value<'_>,
    denied: DeniedHits,
    report: &mut Report,
) -> Option<ParsedLimit> {
    match (
        field(descriptor, "rate_limit"),
        field(descriptor, "rate_limits"),
    ) {
        (Some(_), Some(several)) => {
            several.wrong(
                report,
                "conflicts with `rate_limit`; move that limit into the list",
            );
            None
        }
        (Some(one), None) => match one.content() {
            YamlContent::Empty => None,
            YamlContent::Map(_) => single(&one, denied, report),
            _ => {
                unreadable(&one, "a map with a unit and requests_per_unit", report);
                None
            }
        },
        (None, Some(several)) => list(&several, report),
        (None, None) => None,
    }
}

fn single(value: &Value<'_>, denied: DeniedHits, report: &mut Report) -> Option<ParsedLimit> {
    let name = text(value, "name", report).filter(|name| !name.is_empty());
    let replaces = replaces(value, name, report);
    let allowance = if flag(value, "unlimited", report) {
        check_unlimited(value, report);
        Allowance::Unlimited
    } else {
        Allowance::Limited(compile(vec![limit(value, denied, report)?], value, report)?)
    };
    Some(ParsedLimit {
        allowance,
        name: name.map(Arc::from),
        replaces,
    })
}

/// Reads a list of limits. A request is admitted only if it is within every limit. Denied hits are
/// not counted.
fn list(value: &Value<'_>, report: &mut Report) -> Option<ParsedLimit> {
    let items = value.one_or_more(report);
    if items.is_empty() {
        value.wrong(report, "must name at least one limit, such as 20/min");
        return None;
    }
    let (mut limits, mut name, mut replaced) = (Vec::new(), None, Vec::new());
    for item in &items {
        if let YamlContent::Map(_) = item.content() {
            let own = text(item, "name", report).filter(|name| !name.is_empty());
            replaced.extend(replaces(item, own, report));
            name = name.or(own);
            if flag(item, "unlimited", report) {
                wrong(
                    item,
                    "unlimited",
                    report,
                    "is not allowed in a list of limits; remove it",
                );
                continue;
            }
        }
        limits.extend(limit(item, DeniedHits::NotCounted, report));
    }
    (limits.len() == items.len()).then_some(())?;
    let limits = compile(limits, value, report)?;
    Some(ParsedLimit {
        allowance: Allowance::Limited(limits),
        name: name.map(Arc::from),
        replaces: replaced.into(),
    })
}

fn compile(limits: Vec<Limit>, value: &Value<'_>, report: &mut Report) -> Option<RuleLimits> {
    let units = limits.iter().map(Unit::of_limit).collect();
    let window_seconds = match limits.as_slice() {
        [limit] => epoch_window(limit).map_or(0, Span::as_secs_ceil),
        _ => 0,
    };
    match Limits::new(limits) {
        Ok(limits) => Some(RuleLimits {
            limits: Arc::new(limits),
            shadow_limits: None,
            units,
            window_seconds,
            variants: OnceLock::new(),
        }),
        Err(error) => {
            value.wrong(report, error.to_string());
            None
        }
    }
}

fn epoch_window(limit: &Limit) -> Option<Span> {
    match limit.algorithm() {
        Algorithm::FixedWindow {
            window: Window::Epoch(span),
            ..
        } => Some(*span),
        _ => None,
    }
}

/// Reads one limit, which may have envoyproxy/ratelimit's fields, Tidegate's fields, or both.
fn limit(value: &Value<'_>, denied: DeniedHits, report: &mut Report) -> Option<Limit> {
    let fallback = Fallback {
        algorithm: DefaultAlgorithm::Named(AlgorithmName::FixedWindow),
        soft: None,
        count_denied: None,
    };
    let YamlContent::Map(_) = value.content() else {
        return limits::limit(value, fallback, report);
    };
    let before = report.count();
    // `keys::check` reports unknown keys.
    let fields = value.fields_among(&LimitSpec::FIELDS)?;
    let (spec, algorithm) = limits::full_form(&fields, fallback.algorithm, report);
    let spec = with_unit(value, spec, report)?;
    if algorithm == DefaultAlgorithm::Unreadable {
        return None;
    }
    let limit = limits::build(&spec, value, Some(&fields), report.count() > before, report)?;
    if denied == DeniedHits::NotCounted || spec.count_denied == Some(false) {
        return Some(limit);
    }
    // Only fixed windows count denied hits in full by default. The other algorithms count denied
    // hits only if `count_denied` is set.
    Some(limit.clone().counting_in_full().unwrap_or(limit))
}

/// Adds `unit` and `requests_per_unit` to the limit's other fields. Returns `None` if the unit is
/// missing or invalid.
fn with_unit(value: &Value<'_>, spec: LimitSpec, report: &mut Report) -> Option<LimitSpec> {
    let is_original = spec
        == LimitSpec {
            algorithm: Some(AlgorithmName::FixedWindow),
            ..LimitSpec::default()
        };
    let requests = requests_per_unit(value, report);
    let has_unit = field(value, "unit").is_some() || is_original;
    if is_original && requests.is_none() && field(value, "requests_per_unit").is_none() {
        value.warn(
            report,
            "requests_per_unit is missing and defaults to 0: every request is over the limit; set it",
        );
    }
    let unit = if has_unit {
        Some(unit(value, report)?)
    } else {
        None
    };
    let requests = requests.or_else(|| is_original.then_some(0));
    let original = match (requests, unit, spec.algorithm) {
        (Some(count), Some(period), Some(algorithm)) => {
            LimitSpec::shorthand(Rate { count, period }, algorithm)
        }
        (limit, window, _) => LimitSpec {
            limit,
            window,
            ..LimitSpec::default()
        },
    };
    check_set_once(value, &original, &spec, report);
    Some(LimitSpec {
        rate: spec.rate.or(original.rate),
        capacity: spec.capacity.or(original.capacity),
        refill: spec.refill.or(original.refill),
        leak: spec.leak.or(original.leak),
        limit: spec.limit.or(original.limit),
        window: spec.window.or(original.window),
        ..spec
    })
}

/// Reports the fields of `spec` that set the same property as `unit` or `requests_per_unit`.
fn check_set_once(value: &Value<'_>, original: &LimitSpec, spec: &LimitSpec, report: &mut Report) {
    let has_window = spec.window.is_some() || is_calendar(spec);
    let twice = [
        ("rate", original.rate.is_some() && spec.rate.is_some()),
        (
            "capacity",
            original.capacity.is_some() && spec.capacity.is_some(),
        ),
        ("refill", original.refill.is_some() && spec.refill.is_some()),
        ("leak", original.leak.is_some() && spec.leak.is_some()),
        ("limit", original.limit.is_some() && spec.limit.is_some()),
        ("window", original.window.is_some() && has_window),
    ];
    for (name, _) in twice.into_iter().filter(|(_, twice)| *twice) {
        let message = "has the same meaning as unit or requests_per_unit; remove one of the two";
        wrong(value, name, report, message);
    }
}

fn is_calendar(spec: &LimitSpec) -> bool {
    matches!(spec.anchor, Some(Anchor::Calendar(_)))
}

fn requests_per_unit(value: &Value<'_>, report: &mut Report) -> Option<u64> {
    let value = field(value, "requests_per_unit")?;
    let number = match scalar::of(value.content()) {
        Some(TypedScalar::Whole(number)) => u32::try_from(number).ok(),
        // envoyproxy/ratelimit treats null like a missing value, which is 0.
        Some(TypedScalar::Null) => Some(0),
        _ => None,
    };
    if number.is_none() {
        unreadable(
            &value,
            &format!("an integer from 0 to {}", u32::MAX),
            report,
        );
    }
    number.map(u64::from)
}

fn unit(value: &Value<'_>, report: &mut Report) -> Option<Span> {
    let text = text(value, "unit", report).unwrap_or_default();
    let span = Unit::parse(text).and_then(Unit::span);
    if span.is_none() {
        let message = format!(
            "invalid rate limit unit '{}'; use one of second, minute, hour, day, week, month, year",
            shown(text)
        );
        wrong(value, "unit", report, message);
    }
    span
}

/// Checks that an unlimited rule has neither a unit nor other limit fields.
fn check_unlimited(value: &Value<'_>, report: &mut Report) {
    let text = text(value, "unit", report).unwrap_or_default();
    if Unit::parse(text).and_then(Unit::span).is_some() {
        wrong(
            value,
            "unit",
            report,
            "should not specify rate limit unit when unlimited",
        );
    }
    for name in LimitSpec::FIELDS
        .iter()
        .filter(|name| field(value, name).is_some())
    {
        wrong(
            value,
            name,
            report,
            "conflicts with `unlimited`; remove one of the two",
        );
    }
}

fn replaces(value: &Value<'_>, own: Option<&str>, report: &mut Report) -> Box<[Box<str>]> {
    let Some(list) = field(value, "replaces") else {
        return Box::default();
    };
    let items = list.items(report, "a list of names").unwrap_or_default();
    let named = items
        .iter()
        .filter(|item| matches!(item.content(), YamlContent::Map(_)));
    let names = named.filter_map(|item| {
        let name = text(item, "name", report).unwrap_or_default();
        if name.is_empty() {
            item.wrong(report, "should not have an empty replaces entry");
        } else if Some(name) == own {
            item.wrong(
                report,
                "replaces should not contain name of same descriptor",
            );
        }
        (!name.is_empty()).then(|| name.into())
    });
    names.collect()
}
