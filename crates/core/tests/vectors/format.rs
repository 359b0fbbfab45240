//! The format of a test vector file. A file contains cases. A case has one or more limits on one
//! key, and operations.
//!
//! `vectors/seeds.yaml` describes the format. Unknown fields are rejected, so that no expectation
//! is silently ignored.

use serde::Deserialize;
use tidegate_core::{
    AlgorithmName, Anchor, Calendar, CalendarUnit, LimitSpec, Rate, RefillMode, Span, Timestamp,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) id: String,
    #[serde(default, rename = "about")]
    _about: String,
    #[serde(default)]
    pub(crate) limits: Vec<LimitFields>,
    pub(crate) start: Option<String>,
    #[serde(default)]
    pub(crate) ops: Vec<Op>,
    pub(crate) generate: Option<Generate>,
    pub(crate) totals: Option<Totals>,
    #[serde(default)]
    pub(crate) invalid: Vec<LimitFields>,
    #[serde(default)]
    pub(crate) invalid_requests: Vec<RequestFields>,
}

/// A limit as written in the file. Periods are in milliseconds, and a rate is a count and a period.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitFields {
    pub(crate) algorithm: String,
    pub(crate) limit: Option<Number>,
    pub(crate) window_ms: Option<Number>,
    pub(crate) lease_ms: Option<Number>,
    pub(crate) capacity: Option<Number>,
    pub(crate) refill_tokens: Option<Number>,
    pub(crate) refill_interval_ms: Option<Number>,
    pub(crate) refill_mode: Option<String>,
    pub(crate) leak: Option<Number>,
    pub(crate) leak_interval_ms: Option<Number>,
    pub(crate) queue: Option<bool>,
    pub(crate) rate: Option<Number>,
    pub(crate) period_ms: Option<Number>,
    pub(crate) burst: Option<Number>,
    pub(crate) buckets: Option<Number>,
    pub(crate) strict: Option<bool>,
    pub(crate) anchor: Option<AnchorFields>,
    pub(crate) soft_percent: Option<Number>,
    pub(crate) count_denied: Option<bool>,
}

/// A number as written in the file. Negative and fractional numbers occur only in cases with an
/// invalid limit or request.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Number {
    Natural(u64),
    Other(f64),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum AnchorFields {
    Name(String),
    Calendar(CalendarFields),
}

/// A calendar, such as `{calendar: month, zone: Europe/Berlin, day: 31}`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CalendarFields {
    pub(crate) calendar: String,
    pub(crate) zone: Option<String>,
    pub(crate) day: Option<i8>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequestFields {
    pub(crate) key: String,
    pub(crate) cost: Option<Number>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Op {
    pub(crate) at: Option<u64>,
    pub(crate) at_us: Option<u64>,
    pub(crate) repeat: Option<u64>,
    pub(crate) cost: Option<u64>,
    #[serde(default)]
    pub(crate) peek: bool,
    pub(crate) block_ms: Option<u64>,
    #[serde(default)]
    pub(crate) unblock: bool,
    #[serde(default)]
    pub(crate) reset: bool,
    pub(crate) allowed: Option<bool>,
    pub(crate) reason: Option<String>,
    pub(crate) over_limit: Option<bool>,
    pub(crate) remaining: Option<u64>,
    pub(crate) retry_ms: Option<Wait>,
    pub(crate) retry_us: Option<Wait>,
    pub(crate) reset_ms: Option<u64>,
    pub(crate) reset_us: Option<u64>,
    pub(crate) delay_ms: Option<u64>,
    pub(crate) delay_us: Option<u64>,
}

/// A wait time in the unit that its field uses, or the word `never`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Wait {
    Units(u64),
    Word(String),
}

/// A sequence of operations at regular intervals: either `count` operations, or all operations
/// until `for_ms` has elapsed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Generate {
    #[serde(default)]
    pub(crate) from_ms: u64,
    pub(crate) every_ms: u64,
    pub(crate) for_ms: Option<u64>,
    pub(crate) count: Option<u64>,
    pub(crate) cost: Option<u64>,
}

/// The expected totals over all operations of a case. Seconds are counted from the start of the
/// case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Totals {
    pub(crate) allowed: Option<u64>,
    pub(crate) denied: Option<u64>,
    pub(crate) first_second: Option<u64>,
    pub(crate) first_minute: Option<u64>,
    pub(crate) first_hour: Option<u64>,
}

/// Parses the cases of a file.
pub(crate) fn parse(text: &str) -> Result<Vec<Case>, String> {
    serde_saphyr::from_str(text).map_err(|error| error.to_string())
}

impl Case {
    /// Returns the start time of the case.
    pub(crate) fn start(&self) -> Result<Timestamp, String> {
        let text = self.start.as_deref().ok_or("start is missing")?;
        let instant: jiff::Timestamp = text
            .parse()
            .map_err(|error| format!("start {text}: {error}"))?;
        let micros = u64::try_from(instant.as_microsecond())
            .map_err(|_| format!("start {text} is before 1970"))?;
        Ok(Timestamp::from_micros(micros))
    }
}

impl Op {
    /// Returns the time from the start of the case to the operation.
    pub(crate) fn offset(&self) -> Result<Span, String> {
        match (self.at, self.at_us) {
            (Some(millis), None) => Ok(Span::from_millis(millis)),
            (None, Some(micros)) => Ok(Span::from_micros(micros)),
            _ => Err("needs one of at and at_us".to_owned()),
        }
    }
}

impl Generate {
    /// Returns the time of each operation, as an offset from the start of the case.
    pub(crate) fn offsets(&self) -> Result<impl Iterator<Item = Span> + use<>, String> {
        let count = match (self.for_ms, self.count) {
            (Some(for_ms), None) if self.every_ms > 0 => for_ms.div_ceil(self.every_ms),
            (None, Some(count)) => count,
            _ => return Err("generate needs one of for_ms and count, and every_ms above 0".into()),
        };
        let (from, every) = (self.from_ms, self.every_ms);
        Ok((0..count).map(move |n| Span::from_millis(from + n * every)))
    }
}

impl LimitFields {
    /// Converts the fields to a [`LimitSpec`]. Errors name the invalid field as in a rules file.
    pub(crate) fn spec(&self) -> Result<LimitSpec, String> {
        let algorithm = AlgorithmName::parse(&self.algorithm)
            .ok_or_else(|| format!("algorithm: unknown name {}", self.algorithm))?;
        Ok(LimitSpec {
            algorithm: Some(algorithm),
            rate: rate("rate", self.rate, self.period_ms)?,
            burst: natural("burst", self.burst)?,
            capacity: natural("capacity", self.capacity)?,
            refill: rate("refill", self.refill_tokens, self.refill_interval_ms)?,
            refill_mode: self.refill_mode()?,
            leak: rate("leak", self.leak, self.leak_interval_ms)?,
            queue: self.queue,
            limit: natural("limit", self.limit)?,
            window: natural("window", self.window_ms)?.map(Span::from_millis),
            lease: natural("lease", self.lease_ms)?.map(Span::from_millis),
            wait: None,
            slot_queue: None,
            anchor: self.anchor.as_ref().map(AnchorFields::anchor).transpose()?,
            buckets: small("buckets", self.buckets)?,
            strict: self.strict,
            soft: small("soft", self.soft_percent)?,
            count_denied: self.count_denied,
        })
    }

    fn refill_mode(&self) -> Result<Option<RefillMode>, String> {
        match self.refill_mode.as_deref() {
            None => Ok(None),
            Some("continuous") => Ok(Some(RefillMode::Continuous)),
            Some("interval") => Ok(Some(RefillMode::Interval)),
            Some(other) => Err(format!("refill_mode: unknown mode {other}")),
        }
    }
}

impl AnchorFields {
    fn anchor(&self) -> Result<Anchor, String> {
        match self {
            Self::Name(name) => match name.as_str() {
                "epoch" => Ok(Anchor::Epoch),
                "first_request" => Ok(Anchor::FirstRequest),
                "day" | "week" | "month" => calendar(name, "UTC", None),
                other => Err(format!("anchor: unknown anchor {other}")),
            },
            Self::Calendar(fields) => {
                let zone = fields.zone.as_deref().unwrap_or("UTC");
                calendar(&fields.calendar, zone, fields.day)
            }
        }
    }
}

fn calendar(unit: &str, zone: &str, day: Option<i8>) -> Result<Anchor, String> {
    let unit = match unit {
        "day" => CalendarUnit::Day,
        "week" => CalendarUnit::Week,
        "month" => CalendarUnit::Month,
        other => return Err(format!("anchor: unknown calendar {other}")),
    };
    let calendar =
        Calendar::new(unit, zone, day).map_err(|problem| format!("anchor: {problem}"))?;
    Ok(Anchor::Calendar(calendar))
}

pub(crate) fn natural(field: &str, number: Option<Number>) -> Result<Option<u64>, String> {
    match number {
        None => Ok(None),
        Some(Number::Natural(natural)) => Ok(Some(natural)),
        Some(Number::Other(other)) => Err(format!("{field}: {other} is not a natural number")),
    }
}

fn small(field: &str, number: Option<Number>) -> Result<Option<u32>, String> {
    let Some(natural) = natural(field, number)? else {
        return Ok(None);
    };
    u32::try_from(natural)
        .map(Some)
        .map_err(|_| format!("{field}: {natural} is too large"))
}

fn rate(
    field: &str,
    count: Option<Number>,
    period_ms: Option<Number>,
) -> Result<Option<Rate>, String> {
    match (natural(field, count)?, natural(field, period_ms)?) {
        (None, None) => Ok(None),
        (Some(count), Some(millis)) => Ok(Some(Rate {
            count,
            period: Span::from_millis(millis),
        })),
        _ => Err(format!("{field}: needs both a count and a period")),
    }
}
