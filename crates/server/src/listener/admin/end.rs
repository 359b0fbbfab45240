//! The end of an override or of a block: parses the fields `for` and `until`, and serialises it.

use serde_json::{Value, json};
use tidegate_core::{Span, Timestamp, bounds::MAX_PERIOD, notation};
use tidegate_limiter::date;
use tidegate_net::Problem;

/// Serialises the end of an override or of a block. Without an end, all fields are null.
pub(super) fn end_document(until: Option<Timestamp>, now: Timestamp) -> Value {
    let left = until.map(|until| until.since(now));
    json!({
        "until": until.and_then(date::date),
        "until_ms": until.map(|until| until.as_micros() / 1_000),
        "left_ms": left.map(Span::as_millis_ceil),
    })
}

/// The end that a request contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RequestedEnd {
    /// The request contains neither `for` nor `until`.
    #[default]
    Missing,
    /// `"for": "forever"`.
    Never,
    /// The instant at which the override or the block ends.
    At(Timestamp),
}

impl RequestedEnd {
    /// Returns the end; `None` if there is no end, or if it is missing.
    pub(super) fn until(self) -> Option<Timestamp> {
        match self {
            Self::Missing | Self::Never => None,
            Self::At(until) => Some(until),
        }
    }

    /// Reads the value of the field `for`: a duration, or `forever`.
    pub(super) fn read_for(&mut self, text: &str, now: Timestamp) -> Result<(), Problem> {
        let end = match text {
            "forever" => Self::Never,
            text => {
                let span = notation::span(text);
                let span = span.map_err(|error| {
                    Problem::bad("for", format!("{error}; for no end, write forever"))
                })?;
                Self::At(now.after(span))
            }
        };
        self.set("for", end)
    }

    /// Reads the value of the field `until`: a date, or a date and time, in the future.
    pub(super) fn read_until(&mut self, text: &str, now: Timestamp) -> Result<(), Problem> {
        let at = notation::instant(text);
        let at = at.map_err(|error| Problem::bad("until", error.to_string()))?;
        let date = |instant| date::date(instant).unwrap_or_default();
        if at <= now {
            let problem = format!("is in the past; give a time after now, {}", date(now));
            return Err(Problem::bad("until", problem));
        }
        if at.since(now) > MAX_PERIOD {
            // `date` rounds up, but the whole second must be within the maximum.
            let last = now.after(MAX_PERIOD).as_micros() / 1_000_000 * 1_000_000;
            let problem = format!(
                "is more than ten years from now; give a date up to {}, or, for no end, use `for` with the value forever instead of `until`",
                date(Timestamp::from_micros(last))
            );
            return Err(Problem::bad("until", problem));
        }
        self.set("until", Self::At(at))
    }

    /// Sets the end. Fails if the end is already set, because a request must not contain both `for`
    /// and `until`.
    fn set(&mut self, field: &str, end: Self) -> Result<(), Problem> {
        match std::mem::replace(self, end) {
            Self::Missing => Ok(()),
            Self::Never | Self::At(_) => {
                let problem = "cannot be combined: give one of `for` and `until`";
                Err(Problem::bad(field, problem))
            }
        }
    }
}
