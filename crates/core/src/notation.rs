//! The notation of rates and durations: `20/min`, `5/10s`, `1d`, `500ms`.

use crate::{bounds, limit::Rate, time::Span};

/// Units in microseconds with their names, the canonical name first. The longest unit comes first.
const UNITS: [(u64, &[&str]); 7] = [
    (604_800_000_000, &["w", "week", "weeks"]),
    (86_400_000_000, &["d", "day", "days"]),
    (3_600_000_000, &["h", "hour", "hours"]),
    (60_000_000, &["min", "m", "minute", "minutes"]),
    (1_000_000, &["s", "sec", "second", "seconds"]),
    (1_000, &["ms", "millisecond", "milliseconds"]),
    (1, &["us", "µs", "microsecond", "microseconds"]),
];

/// An error about invalid notation. The text says what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotationError(String);

impl std::fmt::Display for NotationError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotationError {}

/// Parses a duration with a unit.
///
/// # Errors
///
/// Rejects a missing number or unit, an unknown unit, zero, and a duration over
/// [`bounds::MAX_PERIOD`].
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

/// Parses a rate, `count/period`. The period is a unit (`min`) or a duration (`10s`).
///
/// # Errors
///
/// Rejects any other text, a count over [`bounds::MAX_COUNT`], and a period over
/// [`bounds::MAX_PERIOD`].
///
/// # Examples
///
/// ```
/// use tidegate_core::{notation, Span};
/// let rate = notation::rate("5/10s").unwrap();
/// assert_eq!((rate.count, rate.period), (5, Span::from_secs(10)));
/// assert_eq!(rate.to_string(), "5/10s");
/// ```
pub fn rate(text: &str) -> Result<Rate, NotationError> {
    let expected = || {
        NotationError(format!(
            "expected a rate such as 20/min or 5/10s, got \"{text}\""
        ))
    };
    let (count, period) = text.trim().split_once('/').ok_or_else(expected)?;
    let count = count.trim();
    if let Some(whole) = in_whole_units(count, period) {
        return Err(NotationError(format!(
            "the count of a rate must be a whole number, got \"{text}\"; write {whole}"
        )));
    }
    if count.is_empty() || leading_digits(count).len() != count.len() {
        return Err(expected());
    }
    let count = count
        .parse::<u64>()
        .ok()
        .filter(|n| *n <= bounds::MAX_COUNT)
        .ok_or_else(|| {
            NotationError(format!(
                "the count of \"{text}\" is over the maximum of {}",
                bounds::MAX_COUNT
            ))
        })?;
    let period = period.trim();
    let period = if leading_digits(period).is_empty() {
        Span::from_micros(unit_micros(period).ok_or_else(expected)?)
    } else {
        span(period).map_err(|_| expected())?
    };
    Ok(Rate { count, period })
}

/// Converts a rate with a fractional count to whole units: `1.5/s` becomes `3/2s`.
fn in_whole_units(count: &str, period: &str) -> Option<Rate> {
    let (whole, fraction) = count.split_once('.')?;
    let digits = format!("{whole}{fraction}");
    let places = u32::try_from(fraction.len())
        .ok()
        .filter(|places| (1..=6).contains(places))?;
    if leading_digits(&digits).len() != digits.len() {
        return None;
    }
    let (count, parts) = (digits.parse::<u64>().ok()?, 10_u64.pow(places));
    let common = common_divisor(count, parts);
    let one = rate(&format!("1/{}", period.trim())).ok()?.period;
    let period = one.as_micros().checked_mul(parts / common)?;
    let rate = Rate {
        count: count / common,
        period: Span::from_micros(period),
    };
    (rate.count > 0 && rate.period <= bounds::MAX_PERIOD).then_some(rate)
}

/// Returns the greatest common divisor; `b` is not zero.
fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while a > 0 {
        (a, b) = (b % a, a);
    }
    b
}

/// Returns the largest unit that divides `micros`, and its name. Weeks are not used.
pub(crate) fn largest_unit(micros: u64) -> (u64, &'static str) {
    let whole =
        |unit: u64| unit != 604_800_000_000 && micros >= unit && micros.is_multiple_of(unit);
    UNITS
        .iter()
        .find(|(unit, _)| whole(*unit))
        .map_or((1, "us"), |(unit, names)| (*unit, names[0]))
}

fn unit_micros(name: &str) -> Option<u64> {
    UNITS
        .iter()
        .find(|(_, names)| names.contains(&name))
        .map(|(unit, _)| *unit)
}

fn leading_digits(text: &str) -> &str {
    let end = text
        .bytes()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    &text[..end]
}

fn expected_span(text: &str) -> NotationError {
    NotationError(format!(
        "expected a duration with its unit, such as 500ms, 20s, 1min, 1h or 1d, got \"{text}\""
    ))
}

fn in_range(micros: Option<u64>, text: &str) -> Result<Span, NotationError> {
    let max = bounds::MAX_PERIOD;
    match micros {
        Some(0) => Err(NotationError(format!(
            "a duration must be longer than zero, got \"{text}\""
        ))),
        Some(micros) if micros <= max.as_micros() => Ok(Span::from_micros(micros)),
        _ => Err(NotationError(format!(
            "\"{text}\" is over the maximum of {max} (10 years)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_survive_a_round_trip() {
        for text in [
            "1/s", "20/min", "200/h", "800/d", "5/10s", "7/1500ms", "3/7us", "2/7d",
        ] {
            assert_eq!(rate(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_fractional_count_is_refused_with_a_whole_number_rate() {
        for (text, whole) in [
            ("1.5/s", "3/2s"),
            ("0.5/s", "1/2s"),
            ("2.0/min", "2/min"),
            ("0.1/10s", "1/100s"),
            ("1.25/h", "5/4h"),
        ] {
            let message = rate(text).unwrap_err().to_string();
            let expected = format!(
                "the count of a rate must be a whole number, got \"{text}\"; write {whole}"
            );
            assert_eq!(message, expected);
        }
        for text in [
            "1.5/0s",
            "./s",
            "1./s",
            "0.0/s",
            "1.5.1/s",
            "-1.5/s",
            "9.999999/10y",
        ] {
            assert!(
                !rate(text).unwrap_err().to_string().contains("write"),
                "{text}"
            );
        }
    }

    #[test]
    fn an_invalid_rate_is_refused_and_quoted() {
        for text in [
            "",
            "/",
            "5",
            "5/",
            "/s",
            "-1/s",
            "1.5/s",
            "5/0s",
            "5/fortnight",
            "99999999999999999999/s",
            "1/s/s",
        ] {
            let message = rate(text).unwrap_err().to_string();
            assert!(message.contains(text), "{message}");
        }
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
