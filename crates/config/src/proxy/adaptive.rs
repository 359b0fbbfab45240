//! `proxy.upstreams[].adaptive`: the adaptive concurrency limit of an upstream, and its priority
//! classes.

use tidegate_core::{
    Span, When,
    concurrency::{AdaptiveSettings, Aimd, Gradient, Method},
    notation,
};
use tidegate_tower::{ConcurrencyLimitLayer, HeadroomCondition, SlotShare};

use super::name;
use crate::{
    conditions::{self, RawWhen},
    limits::percent,
    report::Report,
    value::{Fields, Value},
};

/// The maximum number of priority classes in addition to the default class. The maximum also bounds
/// the number of label values in metrics.
const MAX_CLASSES: usize = ConcurrencyLimitLayer::MAX_CLASSES - 1;

/// The name of the default class, which contains the requests that match no other class.
const NO_CLASS: &str = "default";

const FIELDS: &[&str] = &[
    "algorithm",
    "min",
    "initial",
    "max",
    "window",
    "samples",
    "tolerance",
    "queue",
    "smoothing",
    "backoff",
    "too_slow",
    "classes",
    "headroom",
];

/// The fields of the gradient algorithm only.
const GRADIENT: &[&str] = &["tolerance", "queue", "smoothing"];
/// The fields of the AIMD algorithm only.
const AIMD: &[&str] = &["backoff", "too_slow"];

/// The adaptive concurrency limit of an upstream, and the priority classes that share the limit.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Adaptive {
    /// `algorithm` and its parameters. The parameters determine how the limit follows the measured
    /// latencies.
    pub settings: AdaptiveSettings,
    /// `classes`: a request belongs to the first class whose conditions match. The last class is
    /// the default class, which matches every request and may use the whole limit.
    pub classes: Vec<Class>,
    /// `headroom`: the conditions under which the `headroom.*` entry tells rules that the upstream
    /// has spare capacity. All of these conditions must hold. By default, the only condition is
    /// that the number of requests in flight is less than 60 % of the limit.
    pub headroom: Vec<HeadroomCondition>,
}

/// A priority class.
#[derive(Clone, Debug)]
pub struct Class {
    /// `name`: the name of the class in metrics.
    pub name: Box<str>,
    /// `share`: the share of the concurrency limit that the class may use; by default the whole
    /// limit.
    pub share: SlotShare,
    /// `when`: the conditions that a request must meet to be in this class.
    pub when: When,
}

/// Reads the adaptive concurrency limit. Returns the conditions of its classes as written, and the
/// parsed limit, which is `None` if the value is invalid.
pub(super) fn adaptive<'n>(
    value: &Value<'n>,
    report: &mut Report,
) -> (Vec<RawWhen<'n>>, Option<Adaptive>) {
    let what = "a map such as {algorithm: gradient, max: 200}";
    let Some(fields) = value.fields(report, what, FIELDS) else {
        return (Vec::new(), None);
    };
    let before = report.count();
    let method = method(&fields, report);
    // If the algorithm name is invalid, check the other fields as if they were for the default
    // algorithm.
    let settings = settings(method.unwrap_or_default(), &fields, report);
    let classes = fields.get("classes");
    let (conditions, classes) =
        classes.map_or_else(Default::default, |value| classes_of(value, report));
    let headroom = fields
        .get("headroom")
        .map(|value| headroom(value, method, report));
    let everybody = Class {
        name: NO_CLASS.into(),
        share: SlotShare::ALL,
        when: When::default(),
    };
    let settings = settings.filter(|_| report.count() == before);
    let adaptive = settings.map(|settings| Adaptive {
        settings,
        classes: classes.into_iter().chain([everybody]).collect(),
        headroom: headroom.unwrap_or_else(|| vec![HeadroomCondition::InFlight(60)]),
    });
    (conditions, adaptive)
}

fn method(fields: &Fields<'_>, report: &mut Report) -> Option<Method> {
    let choices = [
        ("gradient", Method::Gradient(Gradient::default())),
        ("aimd", Method::Aimd(Aimd::default())),
    ];
    let mut method = match fields.get("algorithm") {
        Some(value) => value.choice(report, &choices)?,
        None => Method::default(),
    };
    let (others, belongs) = match &method {
        Method::Gradient(_) => (AIMD, "requires `algorithm: aimd`"),
        Method::Aimd(_) => (GRADIENT, "requires `algorithm: gradient`"),
    };
    for field in others {
        if fields.get(field).is_some() {
            fields.wrong(report, field, belongs);
        }
    }
    let read = |field: &str, report: &mut Report| percent(fields.get(field)?, report);
    match &mut method {
        Method::Gradient(gradient) => {
            let tolerance = read("tolerance", report);
            gradient.tolerance = tolerance.unwrap_or(gradient.tolerance);
            let smoothing = read("smoothing", report);
            gradient.smoothing = smoothing.unwrap_or(gradient.smoothing);
            gradient.queue = count(fields, "queue", gradient.queue, report);
        }
        Method::Aimd(aimd) => {
            aimd.backoff = read("backoff", report).unwrap_or(aimd.backoff);
            aimd.too_slow = span(fields, "too_slow", aimd.too_slow, report);
        }
    }
    Some(method)
}

fn settings(method: Method, fields: &Fields<'_>, report: &mut Report) -> Option<AdaptiveSettings> {
    let before = report.count();
    let default = AdaptiveSettings::default();
    let min = count(fields, "min", default.min, report);
    let max = count(fields, "max", default.max, report);
    let settings = AdaptiveSettings {
        method,
        min,
        // If `initial` is missing, use its default, clamped to the configured minimum and maximum.
        initial: count(fields, "initial", default.initial.min(max).max(min), report),
        max,
        window: span(fields, "window", default.window, report),
        samples: count(fields, "samples", default.samples, report),
    };
    if report.count() > before {
        return None;
    }
    for error in settings.errors() {
        fields.wrong(report, error.field, error.problem);
    }
    (report.count() == before).then_some(settings)
}

fn count(fields: &Fields<'_>, name: &str, default: u32, report: &mut Report) -> u32 {
    let value = fields.get(name);
    let count = value.and_then(|value| value.small_number(report));
    count.unwrap_or(default)
}

fn span(fields: &Fields<'_>, name: &str, default: Span, report: &mut Report) -> Span {
    let value = fields.get(name);
    let span =
        value.and_then(|value| value.parsed(report, "a duration such as 100ms", notation::span));
    span.unwrap_or(default)
}

/// Reads the priority classes. Returns the conditions of each class as written, and the parsed
/// classes.
fn classes_of<'n>(value: &Value<'n>, report: &mut Report) -> (Vec<RawWhen<'n>>, Vec<Class>) {
    let what = "a list of classes such as [{name: batch, when: {path: /batch/**}, share: 50%}]";
    let Some(items) = value.items(report, what) else {
        return (Vec::new(), Vec::new());
    };
    if items.len() > MAX_CLASSES {
        let problem = format!(
            "{} classes exceed the maximum of {MAX_CLASSES}",
            items.len()
        );
        value.wrong(report, problem);
        return (Vec::new(), Vec::new());
    }
    let (mut conditions, mut classes) = (Vec::new(), Vec::<Class>::new());
    for item in &items {
        let (raw, class) = class(item, report);
        conditions.push(raw);
        let Some(class) = class else {
            continue;
        };
        let is_known = classes.iter().any(|known| known.name == class.name);
        if is_known || *class.name == *NO_CLASS {
            item.wrong(
                report,
                format!(
                    "another class has the name `{}`; give each class its own name",
                    class.name
                ),
            );
        }
        classes.push(class);
    }
    (conditions, classes)
}

/// Reads a priority class. Returns the conditions as written, and the class if it is valid.
fn class<'n>(value: &Value<'n>, report: &mut Report) -> (RawWhen<'n>, Option<Class>) {
    let what = "a map such as {name: batch, when: {path: /batch/**}, share: 50%}";
    let Some(fields) = value.fields(report, what, &["name", "when", "share"]) else {
        return (RawWhen::default(), None);
    };
    for name in ["name", "when"] {
        if !fields.tries(name) {
            let message = "is missing; every class has a name and conditions (`when`)";
            fields.wrong(report, name, message);
        }
    }
    let name = fields.get("name");
    let name = name.and_then(|value| name::name(value, report));
    let when = fields.get("when");
    let (raw, when) = when.map_or_else(Default::default, |value| conditions::when(value, report));
    let share = match fields.get("share") {
        None => Some(SlotShare::ALL),
        Some(value) => {
            let share = percent(value, report).map(SlotShare::new);
            share.and_then(|share| {
                let refused = |_| value.wrong(report, "must be 1% to 100%");
                share.map_err(refused).ok()
            })
        }
    };
    let required = || Some((name?, share?, when?));
    let class = required().map(|(name, share, when)| Class { name, share, when });
    (raw, class)
}

fn headroom(
    value: &Value<'_>,
    method: Option<Method>,
    report: &mut Report,
) -> Vec<HeadroomCondition> {
    let what = "a map such as {in_flight: 60%} or {latency: 120%}";
    let Some(fields) = value.fields(report, what, &["in_flight", "latency"]) else {
        return Vec::new();
    };
    let is_aimd = matches!(method, Some(Method::Aimd(_)));
    if is_aimd && fields.get("latency").is_some() {
        let problem =
            "requires `algorithm: gradient`, because `aimd` does not measure the usual latency";
        fields.wrong(report, "latency", problem);
    }
    let mut bound = |name: &str, least: u32, most: u32| {
        let value = fields.get(name)?;
        let bound = percent(value, report)?;
        if !(least..=most).contains(&bound) {
            value.wrong(report, format!("must be {least}% to {most}%, not {bound}%"));
        }
        Some(bound)
    };
    let in_flight = bound("in_flight", 1, 100).map(HeadroomCondition::InFlight);
    let latency = bound("latency", 101, 1_000).map(HeadroomCondition::Latency);
    if !(fields.tries("in_flight") || fields.tries("latency")) {
        value.wrong(report, "is empty; set `in_flight`, `latency` or both");
    }
    in_flight.into_iter().chain(latency).collect()
}
