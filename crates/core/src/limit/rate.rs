//! A rate, and its notation: `20/min`, `5/10s`.

use std::fmt;

use super::bounds;
use crate::time::{
    Span,
    notation::{NotationError, leading_digits, span, unit_micros},
};

/// A number of units per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// The number of units.
    pub count: u64,
    /// The length of the period.
    pub period: Span,
}

/// Formats the rate as `20/min` if the period is exactly one unit, else as `5/10s`.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let period = self.period.to_string();
        write!(f, "{}/{}", self.count, bare_unit(&period))
    }
}

/// Removes the leading 1 from a period such as `1min`, but not from `11min`.
fn bare_unit(period: &str) -> &str {
    match period.strip_prefix('1') {
        Some(unit) if !unit.starts_with(|c: char| c.is_ascii_digit()) => unit,
        _ => period,
    }
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
    }
}
