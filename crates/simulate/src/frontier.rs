//! Suggests bursts: for several token bucket rates, finds the smallest burst that denies at most a
//! given share of the keys. The bursts are computed from the keys' [backlogs](crate::backlog).

use serde::Serialize;
use tidegate_core::{Algorithm, Limit, LimitError, Rate};

use crate::{
    backlog::TriedRate,
    replay::{KeyCounts, RuleSetReplay},
    share::Share,
};

/// The smallest bursts at several rates, for one limit of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Frontier {
    /// The rule.
    pub rule: String,
    /// The limit in the file, in short notation.
    pub limit: String,
    /// The maximum share of the keys that may have denied requests, such as `1%`.
    pub share: String,
    /// The number of keys.
    pub keys: u64,
    /// The rates in ascending order, each with its smallest burst.
    pub points: Vec<FrontierPoint>,
}

/// A rate, and the smallest burst at this rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FrontierPoint {
    /// The rate.
    pub rate: String,
    /// The smallest `burst` (`gcra`) or `capacity` (`token_bucket` and `leaky_bucket`) that denies
    /// at most the given share of the keys.
    pub burst: u64,
    /// The rate and the burst in the notation of the rules file.
    pub limit: String,
    /// The number of keys that this limit denies.
    pub keys_denied: u64,
    /// The position on the axis of the chart.
    #[serde(skip)]
    pub(crate) position: u64,
}

/// Suggests bursts for each bucket of each rule.
pub(crate) fn frontiers(replay: &RuleSetReplay<'_>, share: Share) -> Vec<Frontier> {
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

/// Returns the smallest burst at this rate. `index` is the position of the rate among the tried
/// rates. Returns `None` if a bucket with this burst would be out of bounds.
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
    // At most this number of keys may need more than the capacity. If every key may be denied, the
    // smallest valid capacity is sufficient.
    let may_be_denied = usize::try_from(share.of(needed.len() as u64)).ok()?;
    let rank = needed.len().saturating_sub(may_be_denied);
    let hard = rank.checked_sub(1).map_or(1, |last| needed[last]);
    // The smallest quota for which `quota + quota * soft / 100`, rounded down, is at least `hard`.
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

/// Returns a bucket with the algorithm and the options of `like`, but with the given rate and
/// quota.
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
