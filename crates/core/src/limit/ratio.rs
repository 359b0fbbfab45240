//! Ratios for scaling a limit: a server's share of a limit, or an override's factor.

use std::{fmt, str::FromStr};

use super::{Algorithm, Limit, Rate, RefillMode, bounds};
use crate::{error::LimitError, shown::shown, time::Span};

/// A reduced fraction above 0, used to scale a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ratio {
    numerator: u32,
    denominator: u32,
}

impl Ratio {
    /// Creates the fraction `numerator / denominator`; both must be above 0.
    pub(crate) const fn new(numerator: u32, denominator: u32) -> Self {
        let (mut divisor, mut rest) = (numerator, denominator);
        while rest != 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        Self {
            numerator: numerator / divisor,
            denominator: denominator / divisor,
        }
    }

    /// Returns `limit` scaled by this fraction. Rates are scaled exactly, if possible, and counts
    /// are rounded down. A count above 0 is never rounded down to 0.
    ///
    /// # Errors
    ///
    /// Returns an error if the scaled limit would exceed a maximum.
    pub(crate) fn of(self, limit: &Limit) -> Result<Limit, LimitError> {
        let scaled = match limit.algorithm().clone() {
            Algorithm::Gcra { rate, burst } => Algorithm::Gcra {
                rate: self.of_rate(rate),
                burst: self.of_count(burst.saturating_add(1)) - 1,
            },
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode,
            } => Algorithm::TokenBucket {
                capacity: self.of_count(capacity),
                refill: match mode {
                    RefillMode::Interval if self.floor(refill.count) > 0 => Rate {
                        count: self.floor(refill.count),
                        ..refill
                    },
                    RefillMode::Interval | RefillMode::Continuous => self.of_rate(refill),
                },
                mode,
            },
            Algorithm::LeakyBucket {
                capacity,
                leak,
                queue,
            } => Algorithm::LeakyBucket {
                // The quota of a queue is its capacity plus one: the capacity counts only waiting
                // requests and not the request that is being served.
                capacity: self.of_count(capacity.saturating_add(u64::from(queue)))
                    - u64::from(queue),
                leak: self.of_rate(leak),
                queue,
            },
            Algorithm::FixedWindow { limit, window } => Algorithm::FixedWindow {
                limit: self.of_count(limit),
                window,
            },
            Algorithm::SlidingWindowLog { limit, window } => Algorithm::SlidingWindowLog {
                limit: self.of_count(limit),
                window,
            },
            Algorithm::Concurrency { limit, lease } => Algorithm::Concurrency {
                limit: self.of_count(limit),
                lease,
            },
            Algorithm::SlidingWindowCounter {
                limit,
                window,
                counting,
            } => Algorithm::SlidingWindowCounter {
                limit: self.of_count(limit),
                window,
                counting,
            },
        };
        let scaled =
            Limit::new(scaled).and_then(|scaled| scaled.with_soft_percent(limit.soft_percent()));
        let scaled = scaled?.counting_denied(limit.count_denied());
        if limit.counts_in_full() {
            return scaled.counting_in_full();
        }
        match limit.slot_wait() {
            Some(slot_wait) => scaled.with_slot_wait(slot_wait),
            None => Ok(scaled),
        }
    }

    fn floor(self, count: u64) -> u64 {
        let share = u128::from(count) * u128::from(self.numerator) / u128::from(self.denominator);
        // A result that does not fit in a `u64` exceeds every maximum, and is rejected later.
        u64::try_from(share).unwrap_or(u64::MAX)
    }

    /// Scales a count. A count of 0 stays 0, and the result for any other count is at least 1.
    fn of_count(self, count: u64) -> u64 {
        self.floor(count).max(count.min(1))
    }

    /// Scales a rate exactly, with a longer period if necessary: a third of 10/s is 10/3s. If the
    /// exact count or period exceeds its maximum, only the count is scaled.
    fn of_rate(self, rate: Rate) -> Rate {
        let (times, over) = (u64::from(self.numerator), u64::from(self.denominator));
        let common = gcd(rate.count.max(1), over);
        let exact = rate
            .count
            .checked_div(common)
            .and_then(|count| count.checked_mul(times))
            .zip(rate.period.as_micros().checked_mul(over / common))
            .filter(|(count, period)| {
                *count <= bounds::MAX_COUNT && *period <= bounds::MAX_PERIOD.as_micros()
            });
        match exact {
            Some((count, period)) => Rate {
                count,
                period: Span::from_micros(period),
            },
            None => Rate {
                count: self.of_count(rate.count),
                ..rate
            },
        }
    }
}

/// An override's multiplier for the limits of a rule, such as `2x` or `0.5x`: from 0.001 to 1000,
/// with at most three decimal places.
///
/// # Examples
///
/// ```
/// use tidegate_core::{Factor, Limit};
///
/// let factor: Factor = "1.5x".parse()?;
/// let limit = factor.of(&"20/min".parse::<Limit>()?)?;
/// assert_eq!(&**limit.policy(), "30/min");
/// # Ok::<(), tidegate_core::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    thousandths: u32,
}

impl Factor {
    const MAX_THOUSANDTHS: u32 = 1_000_000;

    /// Returns whether `text` is probably meant as a factor and not as a limit, even if it is
    /// malformed: `2x`, `x2` or `200%`.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        let text = text.trim();
        let is_marked = text.ends_with(['x', 'X', '\u{d7}', '%'])
            || text.starts_with(['x', 'X', '\u{d7}', '*']);
        is_marked && !text.contains('/')
    }

    /// Returns the factor that the malformed `text` probably means: `2x` for `x2`, `2X` or `200%`,
    /// and `1.5x` for `+50%`.
    fn probably_meant(text: &str) -> Option<Self> {
        const MAX_BYTES: usize = 32;
        const SIGNS: [char; 4] = ['x', 'X', '\u{d7}', '*'];
        if text.len() > MAX_BYTES {
            return None;
        }
        let text: String = text.split_whitespace().collect();
        let text = text.replace(',', ".");
        let thousandths = match text.strip_suffix('%') {
            None => thousandths(text.trim_matches(SIGNS))?,
            Some(percent) => {
                let number = percent.trim_start_matches(['+', '-']);
                // The number of percent in thousandths is 100 times the factor in thousandths.
                let exact = thousandths(number).filter(|number| number.is_multiple_of(100))?;
                match percent.chars().next()? {
                    '+' => (exact / 100).checked_add(1_000)?,
                    '-' => 1_000_u32.checked_sub(exact / 100)?,
                    _ => exact / 100,
                }
            }
        };
        let is_valid = (1..=Self::MAX_THOUSANDTHS).contains(&thousandths);
        is_valid.then_some(Self { thousandths })
    }

    /// Returns `limit` multiplied by this factor. Rates are scaled exactly, if possible, and counts
    /// are rounded down. A count above 0 is never rounded down to 0.
    ///
    /// # Errors
    ///
    /// Returns an error if the multiplied limit would exceed a maximum.
    pub fn of(self, limit: &Limit) -> Result<Limit, LimitError> {
        Ratio::new(self.thousandths, 1_000).of(limit)
    }
}

impl FromStr for Factor {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let wrong = || {
            let meant = Self::probably_meant(text).map(|meant| format!("; write {meant}"));
            let problem = format!(
                "expected a factor from 0.001x to 1000x with at most three decimal places, such as 2x or \
                 0.5x, got \"{}\"{}",
                shown(text),
                meant.unwrap_or_default()
            );
            LimitError::new("factor", problem)
        };
        let number = text.strip_suffix('x').ok_or_else(wrong)?;
        let has_digits = |digits: &str| !digits.is_empty();
        if !number.split('.').all(has_digits) {
            return Err(wrong());
        }
        match thousandths(number) {
            Some(thousandths @ 1..=Self::MAX_THOUSANDTHS) => Ok(Self { thousandths }),
            _ => Err(wrong()),
        }
    }
}

/// Parses a decimal number with at most three decimal places, in thousandths. The number may begin
/// or end with the point.
fn thousandths(number: &str) -> Option<u32> {
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
    let has_digits = !whole.is_empty() || !decimals.is_empty();
    if !has_digits || !is_number(whole) || !is_number(decimals) || decimals.len() > 3 {
        return None;
    }
    format!("{whole}{decimals:0<3}").parse().ok()
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.thousandths / 1_000, self.thousandths % 1_000);
        if rest == 0 {
            return write!(f, "{whole}x");
        }
        let decimals = format!("{rest:03}");
        write!(f, "{whole}.{}x", decimals.trim_end_matches('0'))
    }
}

/// Returns the greatest common divisor.
pub(crate) const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_parsed_exactly() {
        for (text, shown) in [
            ("2x", "2x"),
            ("0.5x", "0.5x"),
            ("1.250x", "1.25x"),
            ("1000x", "1000x"),
            ("0.001x", "0.001x"),
            ("02.0x", "2x"),
        ] {
            let factor: Factor = text.parse().unwrap();
            assert_eq!(factor.to_string(), shown, "{text}");
            assert_eq!(factor.to_string().parse(), Ok(factor), "{text}");
        }
        for text in [
            "",
            "x",
            "2",
            "0x",
            "0.000x",
            "1000.001x",
            "-1x",
            "+2x",
            "1.x",
            ".5x",
            "1.2345x",
            "2 x",
            "2X",
            "99999999999x",
        ] {
            let error = text.parse::<Factor>().unwrap_err();
            assert_eq!(error.field, "factor", "{text}: {error}");
        }
    }

    #[test]
    fn a_malformed_factor_is_corrected() {
        for (text, meant) in [
            ("x2", "2x"),
            ("X2", "2x"),
            ("*2", "2x"),
            ("2X", "2x"),
            ("2 x", "2x"),
            ("2\u{d7}", "2x"),
            (".5x", "0.5x"),
            ("1.x", "1x"),
            ("0,5x", "0.5x"),
            ("200%", "2x"),
            ("0.1%", "0.001x"),
            ("+50%", "1.5x"),
            ("-20 %", "0.8x"),
        ] {
            assert!(Factor::is_meant(text), "{text}");
            let problem = text.parse::<Factor>().unwrap_err().problem;
            let advice = format!("got \"{text}\"; write {meant}");
            assert!(problem.ends_with(&advice), "{problem}");
            assert!(meant.parse::<Factor>().is_ok(), "{meant}");
        }
        for text in [
            "x",
            "1001x",
            "0%",
            "0.01%",
            "-100%",
            "-200%",
            "999999999999%",
            "x2x3",
        ] {
            assert!(Factor::is_meant(text), "{text}");
            let problem = text.parse::<Factor>().unwrap_err().problem;
            assert!(problem.ends_with(&format!("got \"{text}\"")), "{problem}");
        }
        for text in ["20/min", "10/max", "2", "5 at once", "5x/min", "double"] {
            assert!(!Factor::is_meant(text), "{text}");
        }
    }

    #[test]
    fn a_factor_scales_every_algorithm() {
        for (limit, factor, scaled) in [
            ("20/min", "2x", "40/min"),
            ("20/min", "0.01x", "1/min"),
            ("100/s burst 19", "2x", "200/s burst 39"),
            ("100/s capacity 20", "0.5x", "50/s capacity 10"),
        ] {
            let limit: Limit = limit.parse().unwrap();
            let factor: Factor = factor.parse().unwrap();
            assert_eq!(&**factor.of(&limit).unwrap().policy(), scaled);
        }
        let most: Limit = "999999999999999/h".parse().unwrap();
        let twice: Factor = "2x".parse().unwrap();
        assert!(twice.of(&most).is_err());
    }
}
