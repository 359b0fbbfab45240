//! Suggests bursts: for several rates of a token bucket, the smallest burst that denies at most a
//! given share of the keys.
//!
//! The backlog of a key is the number of tokens that are missing from a bucket which admits every
//! request of the key. The bucket denies none of these requests exactly if its capacity is at least
//! the largest backlog:
//!
//! ```text
//! backlog
//!    4 ┤      ┌╲                 capacity 4: no request is denied
//!    3 ┤   ┌──┘ ╲   ┌╲           capacity 3: a request is denied
//!    2 ┤ ┌─┘     ╲  │ ╲
//!    1 ┤┌┘        ╲ │  ╲
//!      └┴──────────╲┴───╲───▶ time
//! ```

use serde::Serialize;
use tidegate_core::{Algorithm, Limit, LimitError, Limits, Rate, RefillMode, Span, bounds};

use crate::{
    replay::{KeyCounts, Replay},
    share::Share,
};

/// The rates that are tried, as multiples (numerator, denominator) of the rate in the file.
const MULTIPLES: [(u64, u64); 7] = [(1, 4), (1, 2), (3, 4), (1, 1), (3, 2), (2, 1), (4, 1)];

/// The common denominator of the multiples.
const DENOMINATOR: u64 = 4;

/// The smallest bursts of one limit of a rule, for several rates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Frontier {
    /// The rule.
    pub rule: String,
    /// The limit in the file, in short notation.
    pub limit: String,
    /// The largest share of the keys that may be denied, such as `1%`.
    pub share: String,
    /// The number of keys.
    pub keys: u64,
    /// The rates, ascending.
    pub points: Vec<FrontierPoint>,
}

/// A rate, and the smallest burst for the rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FrontierPoint {
    /// The rate.
    pub rate: String,
    /// The smallest `burst` (`gcra`) or `capacity` (`token_bucket` and `leaky_bucket`) that denies
    /// at most the share of the keys.
    pub burst: u64,
    /// The rate and the burst in the notation of the rules file.
    pub limit: String,
    /// The number of keys that this limit denies.
    pub keys_denied: u64,
    /// The position on the axis of the chart.
    #[serde(skip)]
    pub(crate) position: u64,
}

/// A rate that is tried for a limit.
#[derive(Clone, Debug)]
pub(crate) struct TriedRate {
    /// The position of the limit in its rule.
    limit: usize,
    rate: Rate,
    /// The multiple of the rate in the file, in parts of [`DENOMINATOR`].
    multiple: u64,
    /// One token takes `p / l` microseconds, in lowest terms.
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
    /// Counts a request `elapsed` after the request before, under the assumption that it is
    /// admitted.
    pub(crate) fn count(&mut self, rate: &TriedRate, elapsed: Span, units: u64) {
        let drained = u128::from(elapsed.as_micros()) * u128::from(rate.l);
        let charged = u128::from(units) * u128::from(rate.p);
        self.now = self.now.saturating_sub(drained).saturating_add(charged);
        self.peak = self.peak.max(self.now);
    }

    /// Returns the smallest capacity that denies no request of the key.
    fn smallest_capacity(&self, rate: &TriedRate) -> u128 {
        self.peak.div_ceil(u128::from(rate.p))
    }
}

/// Returns the rates that are tried for the buckets among `limits`.
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

/// Returns the rate of a bucket that is refilled continuously and denies without a delay.
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

/// Returns exactly this multiple of a rate, or `None` if the result is out of bounds.
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

/// Returns the greatest common divisor; `a` is not zero.
fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Suggests bursts for each bucket of each rule.
pub(crate) fn frontiers(replay: &Replay<'_>, share: Share) -> Vec<Frontier> {
    let mut frontiers = Vec::new();
    for (rule, counts) in replay.rule_set.iter().zip(&replay.rules) {
        let keys: Vec<&KeyCounts> = counts.keys.values().collect();
        if keys.is_empty() {
            continue;
        }
        for (at, limit) in rule.limits().iter().enumerate() {
            let tried = counts.tried_rates.iter().enumerate();
            let tried = tried.filter(|(_, rate)| rate.limit == at);
            let points: Vec<FrontierPoint> = tried
                .filter_map(|(index, rate)| point(limit, rate, index, &keys, share))
                .collect();
            if !points.is_empty() {
                frontiers.push(Frontier {
                    rule: rule.name().to_owned(),
                    limit: limit.policy().to_string(),
                    share: share.to_string(),
                    keys: keys.len() as u64,
                    points,
                });
            }
        }
    }
    frontiers
}

/// Returns the smallest burst at this rate, which has number `index`. Returns `None` if a bucket
/// with this burst would be out of bounds.
fn point(
    limit: &Limit,
    rate: &TriedRate,
    index: usize,
    keys: &[&KeyCounts],
    share: Share,
) -> Option<FrontierPoint> {
    let backlogs = keys.iter().filter_map(|key| key.backlogs.get(index));
    let mut needed: Vec<u128> = backlogs
        .map(|backlog| backlog.smallest_capacity(rate))
        .collect();
    needed.sort_unstable();
    // All but this number of keys must need at most the capacity. If every key may be denied, the
    // smallest valid capacity is enough.
    let may_be_denied = usize::try_from(share.of(needed.len() as u64)).ok()?;
    let rank = needed.len().saturating_sub(may_be_denied);
    let hard = rank.checked_sub(1).map_or(1, |last| needed[last]);
    // `quota + quota * soft / 100`, rounded down, is at least `hard`.
    let soft = u128::from(limit.soft_percent());
    let quota = hard.checked_mul(100)?.div_ceil(100 + soft);
    let quota = u64::try_from(quota).ok()?;
    let limit = with_quota(limit, rate.rate, quota).ok()?;
    let admitted = u128::from(limit.quota().saturating_add(limit.soft_allowance()));
    Some(FrontierPoint {
        rate: rate.rate.to_string(),
        burst: match limit.algorithm() {
            Algorithm::Gcra { burst, .. } => *burst,
            _ => quota,
        },
        limit: limit.policy().to_string(),
        keys_denied: needed.iter().filter(|needed| **needed > admitted).count() as u64,
        position: rate.multiple,
    })
}

/// Returns a bucket with the algorithm and the options of `like`, and another rate and quota.
fn with_quota(like: &Limit, rate: Rate, quota: u64) -> Result<Limit, LimitError> {
    let algorithm = match like.algorithm() {
        Algorithm::TokenBucket { mode, .. } => Algorithm::TokenBucket {
            capacity: quota,
            refill: rate,
            mode: *mode,
        },
        Algorithm::LeakyBucket { queue, .. } => Algorithm::LeakyBucket {
            capacity: quota,
            leak: rate,
            queue: *queue,
        },
        _ => Algorithm::Gcra {
            rate,
            burst: quota.saturating_sub(1),
        },
    };
    let limit = Limit::new(algorithm)?.with_soft_percent(like.soft_percent())?;
    Ok(limit.counting_denied(like.count_denied()))
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
        // Exactly one token returns every 333,333 and 1/3 microseconds.
        for _ in 0..3 {
            backlog.count(same, Span::from_micros(333_333), 1);
        }
        assert_eq!(backlog.smallest_capacity(same), 2);
        let mut backlog = Backlog::default();
        for _ in 0..3 {
            backlog.count(same, Span::from_micros(333_334), 1);
        }
        assert_eq!(backlog.smallest_capacity(same), 1);
        // The backlog of an idle key is zero, and does not become negative.
        backlog.count(same, Span::from_secs(3_600), 5);
        assert_eq!(backlog.smallest_capacity(same), 5);
    }
}
