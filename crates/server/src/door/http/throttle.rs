//! `POST /v1/throttle`: the limit comes with the request.

use std::{borrow::Cow, cell::RefCell};

use serde_json::{Map, Value};
use tidegate_core::{
    AlgorithmName, Anchor, Calendar, CalendarUnit, Charge, Cost, Effect, Limit, LimitError,
    LimitSpec, RefillMode, Verdict, notation,
};

use super::{Asked, Problem, limits_cache::LimitsCache, status, wire::Answer};
use crate::{config::report::advice, limiter::Limiter, metrics::Door};

/// The fields of a request beside those of its limit.
const OWN_FIELDS: [&str; 4] = ["key", "cost", "peek", "limits"];

const LIMIT_FIELDS: [&str; 15] = [
    "algorithm",
    "rate",
    "burst",
    "capacity",
    "refill",
    "refill_mode",
    "leak",
    "queue",
    "limit",
    "window",
    "anchor",
    "buckets",
    "strict",
    "soft",
    "count_denied",
];

thread_local! {
    /// The limits that were built last on this worker.
    static CACHE: RefCell<LimitsCache> = const { RefCell::new(LimitsCache::new()) };
}

pub(super) fn throttle(asked: &Asked, body: &[u8]) -> Result<Answer, Problem> {
    let body: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| Problem::json(&error))?;
    let mut problems = unknown_fields(&body);
    let specs = specs(&body, &mut problems);
    let (key, cost) = (key(&body, &mut problems), cost(&body, &mut problems));
    let effect = peek(&body, &mut problems);
    let (Some(key), Some(cost), Some(effect), true) = (key, cost, effect, problems.is_empty())
    else {
        return Err(Problem::several(problems));
    };
    let limits = CACHE
        .with_borrow_mut(|cache| cache.limits(specs))
        .map_err(|errors| {
            Problem::several(
                errors
                    .into_iter()
                    .map(|error| Problem::bad(error.field, error.problem))
                    .collect(),
            )
        })?;
    let mut buffer = Vec::new();
    let charges = [Charge::new(
        Limiter::throttle_key(key.as_bytes(), &mut buffer)?,
        &limits,
        cost,
    )?];
    let mut outcomes = Vec::new();
    let decision = asked.limiter.throttle(charges[0], effect, &mut outcomes);
    if effect == Effect::Charge {
        asked.limiter.observe_throttle(Door::Http, &decision);
    }
    let verdict = Verdict::of(&decision, &charges, &outcomes);
    Ok(asked.verdict(status(verdict.allowed), &verdict))
}

fn unknown_fields(body: &Map<String, Value>) -> Vec<Problem> {
    let known: Vec<&str> = OWN_FIELDS.iter().chain(&LIMIT_FIELDS).copied().collect();
    let unknown = body.keys().filter(|field| !known.contains(&field.as_str()));
    unknown
        .map(|field| {
            Problem::bad(
                field.clone(),
                format!("unknown field; {}", advice(field, &known)),
            )
        })
        .collect()
}

fn key<'b>(body: &'b Map<String, Value>, problems: &mut Vec<Problem>) -> Option<&'b str> {
    let key = body.get("key").and_then(Value::as_str);
    if key.is_none() {
        problems.push(Problem::bad(
            "key",
            "must be a text that says whose count it is",
        ));
    }
    key
}

fn cost(body: &Map<String, Value>, problems: &mut Vec<Problem>) -> Option<Cost> {
    let units = body.get("cost").map_or(Some(1), Value::as_u64);
    match units.map(Cost::new) {
        Some(Ok(cost)) => return Some(cost),
        Some(Err(error)) => problems.push(error.into()),
        None => problems.push(Problem::bad("cost", "must be a whole number from 1")),
    }
    None
}

fn peek(body: &Map<String, Value>, problems: &mut Vec<Problem>) -> Option<Effect> {
    match body.get("peek").map_or(Some(false), Value::as_bool) {
        Some(true) => Some(Effect::Peek),
        Some(false) => Some(Effect::Charge),
        None => {
            problems.push(Problem::bad("peek", "must be true or false"));
            None
        }
    }
}

/// The limits that came with the request: its own fields, or the list `limits`, each a shorthand or an object.
fn specs(body: &Map<String, Value>, problems: &mut Vec<Problem>) -> Vec<LimitSpec> {
    let default = match body.get("algorithm") {
        None => AlgorithmName::TokenBucket,
        Some(name) => match name.as_str().and_then(AlgorithmName::parse) {
            Some(algorithm) => algorithm,
            None => {
                let known = AlgorithmName::ALL.map(|(name, _)| name);
                let name = name.as_str().unwrap_or_default();
                problems.push(Problem::bad(
                    "algorithm",
                    format!("unknown algorithm; {}", advice(name, &known)),
                ));
                return Vec::new();
            }
        },
    };
    let Some(limits) = body.get("limits") else {
        return vec![spec("", body, default, problems)];
    };
    let Some(limits) = limits.as_array() else {
        problems.push(Problem::bad(
            "limits",
            "must be a list of limits such as [\"1/s\", \"20/min\"]",
        ));
        return Vec::new();
    };
    if limits.len() > tidegate_core::bounds::MAX_LIMITS_PER_RULE {
        let most = tidegate_core::bounds::MAX_LIMITS_PER_RULE;
        problems.push(Problem::bad(
            "limits",
            format!("{} limits are over the maximum of {most}", limits.len()),
        ));
        return Vec::new();
    }
    let mut read = |(index, limit): (usize, &Value)| {
        let path = format!("limits[{index}]");
        match limit {
            Value::Object(fields) => Some(spec(&format!("{path}."), fields, default, problems)),
            other => {
                let rate = Field { path, value: other }.parsed(
                    "a rate such as 20/min",
                    notation::rate,
                    problems,
                )?;
                Some(LimitSpec::shorthand(rate, default))
            }
        }
    };
    limits.iter().enumerate().filter_map(&mut read).collect()
}

fn spec(
    prefix: &str,
    fields: &Map<String, Value>,
    default: AlgorithmName,
    problems: &mut Vec<Problem>,
) -> LimitSpec {
    let field = |name: &str| {
        let value = fields.get(name).filter(|value| !value.is_null())?;
        Some(Field {
            path: format!("{prefix}{name}"),
            value,
        })
    };
    let algorithms = AlgorithmName::ALL;
    let modes = [
        ("continuous", RefillMode::Continuous),
        ("interval", RefillMode::Interval),
    ];
    let rate = "a rate such as 20/min";
    LimitSpec {
        algorithm: field("algorithm")
            .map_or(Some(default), |field| field.choice(&algorithms, problems)),
        rate: field("rate").and_then(|field| field.parsed(rate, notation::rate, problems)),
        burst: field("burst").and_then(|field| field.number(problems)),
        capacity: field("capacity").and_then(|field| field.number(problems)),
        refill: field("refill").and_then(|field| field.parsed(rate, notation::rate, problems)),
        refill_mode: field("refill_mode").and_then(|field| field.choice(&modes, problems)),
        leak: field("leak").and_then(|field| field.parsed(rate, notation::rate, problems)),
        queue: field("queue").and_then(|field| field.truth(problems)),
        limit: field("limit").and_then(|field| field.number(problems)),
        window: field("window")
            .and_then(|field| field.parsed("a duration such as 1min", notation::span, problems)),
        anchor: field("anchor").and_then(|field| field.anchor(problems)),
        buckets: field("buckets")
            .and_then(|field| field.number(problems))
            .map(|buckets| u32::try_from(buckets).unwrap_or(u32::MAX)),
        strict: field("strict").and_then(|field| field.truth(problems)),
        soft: field("soft").and_then(|field| field.percent(problems)),
        count_denied: field("count_denied").and_then(|field| field.truth(problems)),
    }
}

/// A field of a limit and where it stands.
struct Field<'b> {
    path: String,
    value: &'b Value,
}

impl Field<'_> {
    fn expected<T>(self, what: &str, problems: &mut Vec<Problem>) -> Option<T> {
        let got: Cow<'_, str> = match self.value {
            Value::Array(_) => "a list".into(),
            Value::Object(_) => "an object".into(),
            scalar => scalar
                .to_string()
                .chars()
                .take(60)
                .collect::<String>()
                .into(),
        };
        problems.push(Problem::bad(
            self.path,
            format!("expected {what}, got {got}"),
        ));
        None
    }

    fn number(self, problems: &mut Vec<Problem>) -> Option<u64> {
        self.value
            .as_u64()
            .or_else(|| self.expected("a whole number from 0", problems))
    }

    fn truth(self, problems: &mut Vec<Problem>) -> Option<bool> {
        self.value
            .as_bool()
            .or_else(|| self.expected("true or false", problems))
    }

    fn parsed<T>(
        self,
        what: &str,
        parse: impl Fn(&str) -> Result<T, notation::NotationError>,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        match self.value.as_str().map(parse) {
            Some(Ok(parsed)) => Some(parsed),
            Some(Err(error)) => {
                problems.push(Problem::bad(self.path, error.to_string()));
                None
            }
            None => self.expected(what, problems),
        }
    }

    fn choice<T: Copy>(self, choices: &[(&str, T)], problems: &mut Vec<Problem>) -> Option<T> {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let found = self
            .value
            .as_str()
            .and_then(|text| choices.iter().find(|(word, _)| *word == text));
        found
            .map(|(_, choice)| *choice)
            .or_else(|| self.expected(&format!("one of {}", words.join(", ")), problems))
    }

    /// `"10%"`, or the number alone.
    fn percent(self, problems: &mut Vec<Problem>) -> Option<u32> {
        let number = match self.value {
            Value::String(text) => text.strip_suffix('%').unwrap_or(text).parse().ok(),
            other => other.as_u64(),
        };
        let percent = number.and_then(|number| u32::try_from(number).ok());
        percent.or_else(|| self.expected("a percentage such as \"10%\"", problems))
    }

    fn anchor(self, problems: &mut Vec<Problem>) -> Option<Anchor> {
        match self.value {
            Value::String(text) if text == "epoch" => Some(Anchor::Epoch),
            Value::String(text) if text == "first_request" => Some(Anchor::FirstRequest),
            Value::Object(fields) => match calendar(fields) {
                Ok(calendar) => Some(Anchor::Calendar(calendar)),
                Err(error) => {
                    problems.push(Problem::bad(
                        format!("{}.{}", self.path, error.field),
                        error.problem,
                    ));
                    None
                }
            },
            _ => self.expected("epoch, first_request, or {\"calendar\": …}", problems),
        }
    }
}

fn calendar(fields: &Map<String, Value>) -> Result<Calendar, LimitError> {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let complain = |field: &'static str, problem: &str| LimitError {
        field,
        problem: problem.to_owned(),
    };
    if let Some(unknown) = fields
        .keys()
        .find(|field| !["calendar", "zone", "day"].contains(&field.as_str()))
    {
        return Err(complain(
            "calendar",
            &format!("takes zone and day beside it, not {unknown}"),
        ));
    }
    let unit = match text("calendar") {
        Some("day") => CalendarUnit::Day,
        Some("week") => CalendarUnit::Week,
        Some("month") => CalendarUnit::Month,
        _ => return Err(complain("calendar", "must be day, week or month")),
    };
    let day = match fields.get("day") {
        None => None,
        Some(day) => Some(
            day.as_i64()
                .map_or(i8::MAX, |day| i8::try_from(day).unwrap_or(i8::MAX)),
        ),
    };
    Calendar::new(unit, text("zone").unwrap_or("UTC"), day)
}

/// The limits of a spec list, if all can be built.
pub(super) fn build(specs: &[LimitSpec]) -> Result<Vec<Limit>, Vec<LimitError>> {
    let (mut limits, mut errors) = (Vec::new(), Vec::new());
    for spec in specs {
        match spec.build() {
            Ok(limit) => limits.push(limit),
            Err(problems) => errors.extend(problems),
        }
    }
    if errors.is_empty() {
        Ok(limits)
    } else {
        Err(errors)
    }
}
