//! The backlog of each key, for several token bucket rates.
//!
//! Assume a bucket that admits every request of a key. The key's backlog at a given time is the
//! number of tokens that are missing from the bucket. A real bucket denies none of the key's
//! requests if and only if its capacity is at least the largest backlog:
//!
//! ```text
//! backlog
//!    4 ┤      ┌╲                 capacity 4: no request is denied
//!    3 ┤   ┌──┘ ╲   ┌╲           capacity 3: a request is denied
//!    2 ┤ ┌─┘     ╲  │ ╲
//!    1 ┤┌┘        ╲ │  ╲
//!      └┴──────────╲┴───╲───▶ time
//! ```

use tidegate_core::{Algorithm, Limit, Limits, Rate, RefillMode, Span, bounds};

/// The rates to try, as multiples of the rate in the file. Each multiple consists of a numerator
/// and a denominator.
const MULTIPLES: [(u64, u64); 7] = [(1, 4), (1, 2), (3, 4), (1, 1), (3, 2), (2, 1), (4, 1)];

/// The common denominator of the multiples.
const DENOMINATOR: u64 = 4;

/// A rate to try for a limit.
#[derive(Clone, Debug)]
pub(crate) struct TriedRate {
    /// The position of the limit in its rule.
    pub(crate) limit: usize,
    pub(crate) rate: Rate,
    /// The rate as a multiple of the rate in the file, in units of 1 / [`DENOMINATOR`].
    pub(crate) multiple: u64,
    /// The numerator of the time that refills one token, which is the reduced fraction `p / l`, in
    /// microseconds.
    p: u64,
    l: u64,
}

/// The backlog of a key at one rate, in units of `1 / l` microseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Backlog {
    now: u128,
    peak: u128,
}

impl Backlog {
    /// Counts a request that arrives `elapsed` after the previous request. The request is assumed
    /// to be admitted.
    pub(crate) fn count(&mut self, rate: &TriedRate, elapsed: Span, units: u64) {
        let drained = u128::from(elapsed.as_micros()) * u128::from(rate.l);
        let charged = u128::from(units) * u128::from(rate.p);
        self.now = self.now.saturating_sub(drained).saturating_add(charged);
        self.peak = self.peak.max(self.now);
    }

    /// Returns the smallest capacity that denies none of the key's requests.
    pub(crate) fn smallest_capacity(&self, rate: &TriedRate) -> u128 {
        self.peak.div_ceil(u128::from(rate.p))
    }
}

/// Returns the rates to try for the buckets among `limits`.
pub(crate) fn tried_rates(limits: &Limits) -> Vec<TriedRate> {
    let mut tried = Vec::new();
    for (at, limit) in limits.iter().enumerate() {
        let Some(rate) = bucket_rate(limit) else {
            continue;
        };
        for (numerator, denominator) in MULTIPLES {
            let Some(rate) = scaled(rate, numerator, denominator) else {
                continue;
            };
            let divisor = gcd(rate.count, rate.period.as_micros());
            tried.push(TriedRate {
                limit: at,
                rate,
                multiple: numerator * (DENOMINATOR / denominator),
                p: rate.period.as_micros() / divisor,
                l: rate.count / divisor,
            });
        }
    }
    tried
}

/// Returns the rate of `limit`, if it is a bucket that refills continuously and does not queue
/// requests.
fn bucket_rate(limit: &Limit) -> Option<Rate> {
    match limit.algorithm() {
        Algorithm::Gcra { rate, .. }
        | Algorithm::TokenBucket {
            refill: rate,
            mode: RefillMode::Continuous,
            ..
        }
        | Algorithm::LeakyBucket {
            leak: rate,
            queue: false,
            ..
        } => Some(*rate),
        Algorithm::TokenBucket { .. }
        | Algorithm::LeakyBucket { .. }
        | Algorithm::FixedWindow { .. }
        | Algorithm::SlidingWindowLog { .. }
        | Algorithm::SlidingWindowCounter { .. }
        | Algorithm::Concurrency { .. } => None,
    }
}

/// Returns a rate multiplied by exactly `numerator / denominator`, or `None` if the result is out
/// of bounds.
fn scaled(rate: Rate, numerator: u64, denominator: u64) -> Option<Rate> {
    let count = rate.count.checked_mul(numerator)?;
    let divisor = gcd(count, denominator);
    let period = rate.period.as_micros().checked_mul(denominator / divisor)?;
    let scaled = Rate {
        count: count / divisor,
        period: Span::from_micros(period),
    };
    let is_valid = scaled.count > 0
        && scaled.count <= bounds::MAX_COUNT
        && scaled.period <= bounds::MAX_PERIOD;
    is_valid.then_some(scaled)
}

/// Returns the greatest common divisor. `a` must not be zero.
fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> Rate {
        tidegate_core::notation::rate(text).unwrap()
    }

    #[test]
    fn rates_are_scaled_exactly() {
        for (text, numerator, denominator, expected) in [
            ("60/min", 1, 4, "15/min"),
            ("5/min", 3, 4, "15/4min"),
            ("1/s", 1, 2, "1/2s"),
            ("10/10s", 3, 2, "15/10s"),
            ("7/s", 4, 1, "28/s"),
        ] {
            let scaled = scaled(rate(text), numerator, denominator).unwrap();
            assert_eq!(scaled.to_string(), expected);
        }
        assert_eq!(scaled(rate("999999999999999/s"), 2, 1), None);
        assert_eq!(scaled(rate("1/3650d"), 1, 4), None);
    }

    #[test]
    fn the_backlog_is_counted_in_exact_fractions() {
        let algorithm = Algorithm::Gcra {
            rate: rate("3/s"),
            burst: 0,
        };
        let limits = Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap();
        let tried = tried_rates(&limits);
        let same = tried.iter().find(|tried| tried.multiple == DENOMINATOR);
        let same = same.unwrap();
        let mut backlog = Backlog::default();
        // One token is refilled exactly every 333,333 1/3 microseconds.
        for _ in 0..3 {
            backlog.count(same, Span::from_micros(333_333), 1);
        }
        assert_eq!(backlog.smallest_capacity(same), 2);
        let mut backlog = Backlog::default();
        for _ in 0..3 {
            backlog.count(same, Span::from_micros(333_334), 1);
        }
        assert_eq!(backlog.smallest_capacity(same), 1);
        // The backlog of an idle key decreases to zero, and does not become negative.
        backlog.count(same, Span::from_secs(3_600), 5);
        assert_eq!(backlog.smallest_capacity(same), 5);
    }
}
