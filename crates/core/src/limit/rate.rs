//! A rate, such as `20/min` or `5/10s`.

use std::fmt;

use super::bounds::{self, check_count, check_period};
use crate::{
    error::LimitError,
    time::{
        Span,
        notation::{leading_digits, span, unit_micros},
    },
};

/// A rate: a number of units per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// The number of units.
    pub count: u64,
    /// The length of the period.
    pub period: Span,
}

/// Formats the rate as `20/min` if the period is exactly one unit of time, and otherwise as
/// `5/10s`.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let period = self.period.to_string();
        write!(f, "{}/{}", self.count, bare_unit(&period))
    }
}

/// Removes the number 1 from a period such as `1min`, but leaves a period such as `11min`
/// unchanged.
fn bare_unit(period: &str) -> &str {
    match period.strip_prefix('1') {
        Some(unit) if !unit.starts_with(|c: char| c.is_ascii_digit()) => unit,
        _ => period,
    }
}

/// Parses the count and the period of a rate. Returns `None` if either of them is invalid.
pub(super) fn strict(count: &str, period: &str) -> Option<Rate> {
    let is_number = !count.is_empty() && leading_digits(count).len() == count.len();
    let count = count.parse::<u64>().ok().filter(|_| is_number)?;
    let period = match unit_micros(period) {
        Some(micros) => Span::from_micros(micros),
        None => span(period).ok()?,
    };
    (count <= bounds::MAX_COUNT).then_some(Rate { count, period })
}

/// Converts a rate with a fractional count to a rate with an integer count: `1.5/s` becomes `3/2s`.
/// Returns `None` if the count has no fraction or the rate is invalid.
pub(super) fn in_whole_units(count: &str, period: &str) -> Option<Rate> {
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
    let one = strict("1", period.trim())?.period;
    let period = one.as_micros().checked_mul(parts / common)?;
    let rate = Rate {
        count: count / common,
        period: Span::from_micros(period),
    };
    (rate.count > 0 && rate.period <= bounds::MAX_PERIOD).then_some(rate)
}

/// Returns the greatest common divisor of `a` and `b`, where `b` is not zero.
fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while a > 0 {
        (a, b) = (b % a, a);
    }
    b
}

/// Returns an error if the count or the period of `rate` is invalid.
pub(crate) fn check_rate(field: &'static str, rate: Rate) -> Result<(), LimitError> {
    if rate.count == 0 {
        let problem = "a rate must be at least 1, got 0; to deny everything, set `algorithm` to fixed_window, \
            `limit` to 0 and `window` to 1min";
        let meant = "{algorithm: fixed_window, limit: 0, window: 1min}".to_owned();
        return Err(LimitError::new(field, problem).meaning(meant));
    }
    check_count(field, rate.count, 1)?;
    check_period(field, rate.period)
}
