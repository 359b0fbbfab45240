//! The notation of rates, such as `20/min` or `5/10s`, and the suggestions in errors about a
//! malformed rate.

use super::{
    bounds,
    rate::{Rate, in_whole_units},
    rate_guess::probably_meant,
};
use crate::{
    shown::shown,
    time::{
        Span,
        notation::{NotationError, leading_digits, span, unit_micros},
    },
};

/// Parses a rate in the notation `count/period`. The period is a unit, such as `min`, or a
/// duration, such as `10s`.
///
/// # Errors
///
/// Rejects any other notation, a count over [`bounds::MAX_COUNT`], a period of zero, and a period
/// over [`bounds::MAX_PERIOD`].
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
    let Some((count, period)) = text.trim().split_once('/') else {
        return Err(without_slash(text));
    };
    let (count, period) = (count.trim(), period.trim());
    if let Some(whole) = in_whole_units(count, period) {
        return Err(NotationError(format!(
            "the number of requests must be an integer, got \"{}\"; write {whole}",
            shown(text)
        )));
    }
    if count.is_empty() {
        return Err(malformed(text, "the number of requests is missing", None));
    }
    if leading_digits(count).len() != count.len() {
        let why = "the number of requests must contain only digits";
        return Err(malformed(text, why, None));
    }
    let number = count
        .parse::<u64>()
        .ok()
        .filter(|n| *n <= bounds::MAX_COUNT)
        .ok_or_else(|| {
            NotationError(format!(
                "\"{}\": the number of requests exceeds the maximum of {}",
                shown(text),
                bounds::MAX_COUNT
            ))
        })?;
    let period = period_of(text, count, period)?;
    Ok(Rate {
        count: number,
        period,
    })
}

/// Parses the period of a rate, which is a unit or a duration. `count` and the whole rate, `text`,
/// are used in error messages.
fn period_of(text: &str, count: &str, period: &str) -> Result<Span, NotationError> {
    let digits = leading_digits(period);
    let unit = period[digits.len()..].trim();
    if let Some(micros) = unit_micros(unit) {
        if digits.is_empty() {
            return Ok(Span::from_micros(micros));
        }
        return span(period).map_err(|_| {
            if digits.bytes().all(|digit| digit == b'0') {
                let advice = format!("write {count}/{unit}");
                return malformed(text, "the period must be longer than zero", Some(advice));
            }
            let why = "the period exceeds the maximum of 10 years";
            malformed(text, why, None)
        });
    }
    if let Some((first, more)) = unit.split_once(char::is_whitespace)
        && unit_micros(first).is_some()
    {
        let why = format!("\"{}\" is not part of a rate", shown(more.trim()));
        let advice = format!("write {count}/{digits}{first}");
        return Err(malformed(text, &why, Some(advice)));
    }
    if unit.contains('/') {
        let first = unit.split('/').find(|part| !part.is_empty());
        let known = first.filter(|first| unit_micros(first.trim()).is_some());
        let advice = known.map(|first| format!("write {count}/{digits}{}", first.trim()));
        return Err(malformed(text, "a rate has only one slash", advice));
    }
    let why = match (digits, unit) {
        ("", "") => {
            let advice = units_advice(count, "");
            return Err(malformed(text, "the period is missing", Some(advice)));
        }
        (_, "") => {
            let advice = units_advice(count, digits);
            return Err(malformed(text, "the period has no unit", Some(advice)));
        }
        (_, unit) if unit.starts_with('.') => "the period must be an integer".to_owned(),
        (_, unit) if unit.starts_with("month") => {
            let advice = format!(
                "write {count}/30d, or set `limit` to {count} and `anchor` to {{calendar: month}}"
            );
            return Err(malformed(text, "a month has no fixed length", Some(advice)));
        }
        (_, unit) => format!("unknown unit \"{}\"", shown(unit)),
    };
    let units = "use us, ms, s, min, h, d or w".to_owned();
    Err(malformed(text, &why, Some(units)))
}

/// Returns the error for a rate without a slash.
fn without_slash(text: &str) -> NotationError {
    let count = text.trim();
    if !count.is_empty() && leading_digits(count).len() == count.len() {
        let advice = units_advice(count, "");
        return malformed(text, "the period is missing", Some(advice));
    }
    let why = "a slash separates the number of requests and the period";
    malformed(text, why, None)
}

fn units_advice(count: &str, number: &str) -> String {
    let (count, number) = (shown(count), shown(number));
    format!("write {count}/{number}s, {count}/{number}min or {count}/{number}h")
}

/// Returns the error for the malformed rate `text`. The error suggests the rate that was probably
/// meant, or contains `advice` if no rate can be guessed.
fn malformed(text: &str, why: &str, advice: Option<String>) -> NotationError {
    let meant = probably_meant(text).map(|rate| format!("write {rate}"));
    let advice = meant.or(advice);
    let advice = advice.map(|advice| format!(": {advice}"));
    NotationError(format!(
        "expected a rate such as 20/min or 5/10s, got \"{}\"; {why}{}",
        shown(text),
        advice.unwrap_or_default()
    ))
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
            let expected =
                format!("the number of requests must be an integer, got \"{text}\"; write {whole}");
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
    fn an_error_says_what_is_wrong_and_names_the_nearest_rate() {
        for (text, problem) in [
            ("5", "the period is missing: write 5/s, 5/min or 5/h"),
            ("5/", "the period is missing: write 5/s, 5/min or 5/h"),
            (
                "5/10",
                "the period has no unit: write 5/10s, 5/10min or 5/10h",
            ),
            ("5/0s", "the period must be longer than zero: write 5/s"),
            (
                "5/0.0s",
                "the period must be an integer: use us, ms, s, min, h, d or w",
            ),
            ("5/9999w", "the period exceeds the maximum of 10 years"),
            ("5/1.5s", "the period must be an integer: write 5/1500ms"),
            (
                "5/fortnight",
                "unknown unit \"fortnight\": use us, ms, s, min, h, d or w",
            ),
            ("5/10 mins", "unknown unit \"mins\": write 5/10min"),
            ("5/Hour", "unknown unit \"Hour\": write 5/h"),
            ("5/year", "unknown unit \"year\": write 5/365d"),
            (
                "5/month",
                "a month has no fixed length: write 5/30d, or set `limit` to 5 and `anchor` to {calendar: month}",
            ),
            ("1/s/s", "a rate has only one slash: write 1/s"),
            ("5//10s", "a rate has only one slash"),
            (
                "1,000/s",
                "the number of requests must contain only digits: write 1000/s",
            ),
            ("1,5/s", "the number of requests must contain only digits"),
            (
                "5/min burst 3",
                "\"burst 3\" is not part of a rate: write 5/min",
            ),
            ("/s", "the number of requests is missing: write 1/s"),
            ("-1/s", "the number of requests must contain only digits"),
            (
                "5r/s",
                "the number of requests must contain only digits: write 5/s",
            ),
            (
                "1k/s",
                "the number of requests must contain only digits: write 1000/s",
            ),
            (
                "1_000/s",
                "the number of requests must contain only digits: write 1000/s",
            ),
            (
                "1e3/s",
                "the number of requests must contain only digits: write 1000/s",
            ),
            (
                "min/5",
                "the number of requests must contain only digits: write 5/min",
            ),
            (
                "5 per minute",
                "a slash separates the number of requests and the period: write 5/min",
            ),
            (
                "5 requests per 10 seconds",
                "a slash separates the number of requests and the period: write 5/10s",
            ),
            (
                "1.5 per second",
                "a slash separates the number of requests and the period: write 3/2s",
            ),
            (
                "5rps",
                "a slash separates the number of requests and the period: write 5/s",
            ),
            (
                "often",
                "a slash separates the number of requests and the period",
            ),
        ] {
            let expected =
                format!("expected a rate such as 20/min or 5/10s, got \"{text}\"; {problem}");
            assert_eq!(rate(text).unwrap_err().to_string(), expected);
        }
        for text in ["5 / min", " 5/ 10 s ", "100/second", "100/1 minute"] {
            assert!(rate(text).is_ok(), "{text}");
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
