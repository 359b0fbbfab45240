//! The notation of durations (`10s`, `1d`, `500ms`) and of instants (`2030-01-31T09:00:00Z`).

use std::fmt;

use jiff::{civil, tz::TimeZone};

use super::{MAX_PERIOD, Span, Timestamp};
use crate::shown::shown;

/// The units of time, longest first. Each entry contains the unit's length in microseconds and its
/// names. The first name is the canonical name.
const UNITS: [(u64, &[&str]); 7] = [
    (604_800_000_000, &["w", "week", "weeks"]),
    (86_400_000_000, &["d", "day", "days"]),
    (3_600_000_000, &["h", "hour", "hours"]),
    (60_000_000, &["min", "m", "minute", "minutes"]),
    (1_000_000, &["s", "sec", "second", "seconds"]),
    (1_000, &["ms", "millisecond", "milliseconds"]),
    (1, &["us", "µs", "microsecond", "microseconds"]),
];

/// An error about invalid notation. The message describes the expected notation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotationError(pub(crate) String);

impl fmt::Display for NotationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotationError {}

/// Formats the span in the notation of the rules file, in the largest exact unit: `1d`, `90s`,
/// `1500ms`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = largest_unit(self.as_micros());
        write!(f, "{}{name}", self.as_micros() / unit)
    }
}

/// Parses a duration, which is a number with a unit.
///
/// # Errors
///
/// Rejects a string without a number or a unit, an unknown unit, a duration of zero, and a duration
/// over [`MAX_PERIOD`].
///
/// # Examples
///
/// ```
/// use tidegate_core::{notation, Span};
/// assert_eq!(notation::span("500ms"), Ok(Span::from_millis(500)));
/// assert_eq!(notation::span("1min").unwrap().to_string(), "1min");
/// assert!(notation::span("10").is_err(), "a duration carries its unit");
/// ```
pub fn span(text: &str) -> Result<Span, NotationError> {
    let text = text.trim();
    let digits = leading_digits(text);
    if digits.is_empty() {
        return Err(expected_span(text));
    }
    let unit = unit_micros(text[digits.len()..].trim()).ok_or_else(|| expected_span(text))?;
    let micros = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    in_range(micros, text)
}

/// Parses an instant: a date and time with a time zone (RFC 3339), or a date, which means the start
/// of that day in UTC.
///
/// # Errors
///
/// Rejects any other notation, a date and time without a time zone, and an instant before 1970.
///
/// # Examples
///
/// ```
/// use tidegate_core::notation;
///
/// let midnight = notation::instant("2030-01-31T00:00:00Z").unwrap();
/// assert_eq!(notation::instant("2030-01-31"), Ok(midnight));
/// assert_eq!(notation::instant("2030-01-31T01:00:00+01:00"), Ok(midnight));
/// let refused = notation::instant("2030-01-31T00:00:00").unwrap_err();
/// assert!(refused.to_string().ends_with("; for UTC, write 2030-01-31T00:00:00Z"));
/// ```
pub fn instant(text: &str) -> Result<Timestamp, NotationError> {
    let text = text.trim();
    let instant = match start_of_day(text) {
        Some(start) => start,
        None => text.parse().map_err(|_| expected_instant(text))?,
    };
    let micros = u64::try_from(instant.as_microsecond());
    let micros = micros.map_err(|_| {
        let text = shown(text);
        NotationError(format!("expected 1970-01-01 or later, got \"{text}\""))
    })?;
    Ok(Timestamp::from_micros(micros))
}

/// Returns the first instant of a date such as `2030-01-31` in UTC.
fn start_of_day(text: &str) -> Option<jiff::Timestamp> {
    // The parser of dates also accepts a date and time, and ignores the time.
    if text.len() != "2030-01-31".len() {
        return None;
    }
    let date: civil::Date = text.parse().ok()?;
    Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

fn expected_instant(text: &str) -> NotationError {
    let in_utc = format!("{text}Z");
    let advice = match in_utc.parse::<jiff::Timestamp>() {
        Ok(_) => format!("; for UTC, write {}", shown(&in_utc)),
        Err(_) => String::new(),
    };
    let text = shown(text);
    NotationError(format!(
        "expected a date such as 2030-01-31 (00:00 UTC), or a date and time with a time zone such as \
         2030-01-31T09:00:00Z, got \"{text}\"{advice}"
    ))
}

/// Returns the longest unit that divides `micros` without a remainder, and its name. Weeks are not
/// used.
fn largest_unit(micros: u64) -> (u64, &'static str) {
    let whole =
        |unit: u64| unit != 604_800_000_000 && micros >= unit && micros.is_multiple_of(unit);
    UNITS
        .iter()
        .find(|(unit, _)| whole(*unit))
        .map_or((1, "us"), |(unit, names)| (*unit, names[0]))
}

pub(crate) fn unit_micros(name: &str) -> Option<u64> {
    UNITS
        .iter()
        .find(|(_, names)| names.contains(&name))
        .map(|(unit, _)| *unit)
}

pub(crate) fn leading_digits(text: &str) -> &str {
    let end = text
        .bytes()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    &text[..end]
}

fn expected_span(text: &str) -> NotationError {
    let advice = years_advice(text).unwrap_or_default();
    let text = shown(text);
    NotationError(format!(
        "expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"{text}\"{advice}"
    ))
}

/// Returns a suggestion for a number of years, which is not a unit because years differ in length.
fn years_advice(text: &str) -> Option<String> {
    let digits = leading_digits(text);
    let unit = text[digits.len()..].trim();
    if !["y", "yr", "yrs", "year", "years"].contains(&unit) {
        return None;
    }
    let years: u64 = digits.parse().ok()?;
    Some(match years {
        0 => return None,
        1..=10 => format!("; write {}d", years * 365),
        _ => format!("; a year is not a unit, and the maximum is {MAX_PERIOD} (10 years)"),
    })
}

fn in_range(micros: Option<u64>, text: &str) -> Result<Span, NotationError> {
    let max = MAX_PERIOD;
    match micros {
        Some(0) => Err(NotationError(format!(
            "a duration must be longer than zero, got \"{}\"",
            shown(text)
        ))),
        Some(micros) if micros <= max.as_micros() => Ok(Span::from_micros(micros)),
        _ => Err(NotationError(format!(
            "\"{}\" exceeds the maximum of {max} (10 years)",
            shown(text)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_is_a_date_or_a_date_and_time_with_a_zone() {
        let new_year = Timestamp::from_micros(1_798_761_600_000_000);
        for text in [
            "2027-01-01",
            " 2027-01-01 ",
            "2027-01-01T00:00:00Z",
            "2027-01-01T01:00:00+01:00",
            "2026-12-31 19:00:00-05:00",
        ] {
            assert_eq!(instant(text), Ok(new_year), "{text}");
        }
        let expected = "expected a date such as 2030-01-31 (00:00 UTC), or a date and time with a time zone such \
            as 2030-01-31T09:00:00Z, got";
        for (text, advice) in [
            ("", ""),
            ("tomorrow", ""),
            ("2030-02-30", ""),
            ("2030-1-1", ""),
            ("31.01.2030", ""),
            ("1735689600", ""),
            (
                "2030-01-31T09:00:00",
                "; for UTC, write 2030-01-31T09:00:00Z",
            ),
            ("2030-01-31 09:00", "; for UTC, write 2030-01-31 09:00Z"),
        ] {
            let message = instant(text).unwrap_err().to_string();
            assert_eq!(message, format!("{expected} \"{text}\"{advice}"));
        }
        assert_eq!(instant("1970-01-01"), Ok(Timestamp::from_micros(0)));
        let hostile = instant("a\nERROR \u{1b}[31m").unwrap_err().to_string();
        assert!(
            hostile.ends_with("got \"a\\nERROR \\u{1b}[31m\""),
            "{hostile}"
        );
        let long = instant(&"9".repeat(60_000)).unwrap_err().to_string();
        assert!(long.len() < 300, "{long}");
        for text in ["1960-01-01", "1969-12-31T23:59:59Z"] {
            let message = instant(text).unwrap_err().to_string();
            assert_eq!(
                message,
                format!("expected 1970-01-01 or later, got \"{text}\"")
            );
        }
    }

    #[test]
    fn a_number_of_years_is_refused_with_days_or_the_maximum() {
        for (text, advice) in [
            ("1y", "; write 365d"),
            ("10 years", "; write 3650d"),
            (
                "11y",
                "; a year is not a unit, and the maximum is 87660h (10 years)",
            ),
            ("0y", ""),
            ("y", ""),
            ("1 fortnight", ""),
        ] {
            let message = span(text).unwrap_err().to_string();
            assert!(
                message.ends_with(&format!("got \"{text}\"{advice}")),
                "{message}"
            );
        }
        assert_eq!(MAX_PERIOD.to_string(), "87660h");
    }

    #[test]
    fn a_malformed_duration_is_refused() {
        for text in [
            "",
            "s",
            "0s",
            "5",
            "1e3s",
            "11y",
            "9999999d",
            "18446744073709551615d",
        ] {
            assert!(span(text).is_err(), "{text}");
        }
    }
}
