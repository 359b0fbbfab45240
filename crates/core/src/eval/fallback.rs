//! The fallback policy of a rule, which applies while the store is unreachable, and the share of
//! each limit that one node enforces locally.

use crate::{
    algorithm::gcd,
    limit::{Algorithm, Limit, Rate, RefillMode, bounds},
    time::Span,
};

/// The fallback policy of a rule: how a request is decided while the store is unreachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnFailure {
    /// Fails open: requests are admitted and not counted.
    Open,
    /// Fails closed: requests are denied.
    Closed,
    /// Requests are decided locally, with this node's [`FallbackShare`] of the limits.
    #[default]
    Local,
}

impl OnFailure {
    /// Returns the name of the policy in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local => "local",
        }
    }
}

/// The fraction of every limit that one node enforces locally while the store is unreachable; the
/// default is one half.
///
/// With `n` nodes and a share of 1 / `n`, all nodes together admit at most the limit. If a limit is
/// so small that the share rounds down to 0, each node admits 1 unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FallbackShare {
    /// The numerator of the fraction, which is a reduced fraction of at most 1.
    numerator: u32,
    denominator: u32,
}

impl Default for FallbackShare {
    fn default() -> Self {
        Self {
            numerator: 1,
            denominator: 2,
        }
    }
}

impl FallbackShare {
    /// Returns a share of `percent`, or `None` if `percent` is not between 1 and 100.
    #[must_use]
    pub const fn percent(percent: u32) -> Option<Self> {
        match percent {
            1..=100 => {
                let divisor = gcd32(percent, 100);
                Some(Self {
                    numerator: percent / divisor,
                    denominator: 100 / divisor,
                })
            }
            _ => None,
        }
    }

    /// Returns a share of 1 / `nodes`, or `None` if `nodes` is 0.
    #[must_use]
    pub const fn one_of(nodes: u32) -> Option<Self> {
        match nodes {
            0 => None,
            denominator => Some(Self {
                numerator: 1,
                denominator,
            }),
        }
    }

    /// Returns this share of `limit`, rounded down. A count above 0 is never reduced below 1.
    #[must_use]
    pub fn of(self, limit: &Limit) -> Limit {
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
        // The scaled limit is valid, except if rounding an extreme value makes the limit invalid.
        // If the scaled limit is invalid, use the unscaled limit.
        let Ok(scaled) = scaled else {
            return limit.clone();
        };
        let scaled = scaled.counting_denied(limit.count_denied());
        if limit.counts_in_full() {
            scaled.clone().counting_in_full().unwrap_or(scaled)
        } else {
            scaled
        }
    }

    fn floor(self, count: u64) -> u64 {
        let share = u128::from(count) * u128::from(self.numerator) / u128::from(self.denominator);
        // The fraction is at most 1, so the result is at most `count` and fits in a u64.
        u64::try_from(share).unwrap_or(count)
    }

    /// Scales a count. A count of 0 stays 0, and the result for any other count is at least 1.
    fn of_count(self, count: u64) -> u64 {
        self.floor(count).max(count.min(1))
    }

    /// Scales a rate exactly, if necessary with a longer period: a third of 10/s is 10/3s. If the
    /// count or the period of the exact rate is over its maximum, scales only the count.
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

/// Returns the greatest common divisor of two numbers greater than 0.
const fn gcd32(one: u32, other: u32) -> u32 {
    let (mut one, mut other) = (one, other);
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Counting, Window};

    fn of(percent: u32, algorithm: Algorithm) -> Algorithm {
        let limit = Limit::new(algorithm).unwrap();
        FallbackShare::percent(percent)
            .unwrap()
            .of(&limit)
            .algorithm()
            .clone()
    }

    fn per_second(count: u64) -> Rate {
        Rate {
            count,
            period: Span::from_secs(1),
        }
    }

    #[test]
    fn a_share_is_a_smaller_limit_of_the_same_kind() {
        let gcra = |rate, burst| Algorithm::Gcra { rate, burst };
        assert_eq!(of(25, gcra(per_second(100), 19)), gcra(per_second(25), 4));
        let third = Rate {
            count: 33,
            period: Span::from_secs(10),
        };
        assert_eq!(of(33, gcra(per_second(10), 0)), gcra(third, 0));
        let window = Window::Epoch(Span::from_secs(60));
        let fixed = |limit| Algorithm::FixedWindow {
            limit,
            window: window.clone(),
        };
        assert_eq!(of(50, fixed(7)), fixed(3));
        assert_eq!(of(50, fixed(1)), fixed(1));
        assert_eq!(of(50, fixed(0)), fixed(0));
        let counter = |limit| Algorithm::SlidingWindowCounter {
            limit,
            window: Span::from_secs(60),
            counting: Counting::Weighted,
        };
        assert_eq!(of(100, counter(9)), counter(9));
        let bucket = |capacity, refill| Algorithm::TokenBucket {
            capacity,
            refill,
            mode: RefillMode::Interval,
        };
        assert_eq!(
            of(10, bucket(100, per_second(55))),
            bucket(10, per_second(5))
        );
        let slow = Rate {
            count: 1,
            period: Span::from_secs(10),
        };
        assert_eq!(of(10, bucket(1, per_second(1))), bucket(1, slow));
    }

    /// Regression test for two bugs. The share of a queue admitted one request too many on every
    /// node. The share of a limit lost the option to count denied requests in full.
    #[test]
    fn the_shares_of_all_nodes_sum_to_at_most_the_limit() {
        for capacity in 0..40 {
            let leak = per_second(3);
            let queue = Algorithm::LeakyBucket {
                capacity,
                leak,
                queue: true,
            };
            let whole = Limit::new(queue).unwrap();
            for nodes in [1, 2, 4, 5] {
                let share = FallbackShare::percent(100 / nodes)
                    .unwrap()
                    .of(&whole)
                    .quota();
                let together = share * u64::from(nodes);
                assert!(
                    together <= whole.quota() || share == 1,
                    "{share} of {capacity}"
                );
            }
        }
        let window = Window::Epoch(Span::from_secs(60));
        let fixed = Limit::new(Algorithm::FixedWindow { limit: 9, window }).unwrap();
        for (limit, in_full) in [
            (fixed.clone(), false),
            (fixed.counting_in_full().unwrap(), true),
        ] {
            assert_eq!(
                FallbackShare::default().of(&limit).counts_in_full(),
                in_full
            );
        }
    }

    #[test]
    fn extreme_limits_have_shares() {
        let most = Rate {
            count: bounds::MAX_COUNT,
            period: bounds::MAX_PERIOD,
        };
        for percent in [1, 33, 50, 99, 100] {
            let Algorithm::Gcra { rate, burst } = of(
                percent,
                Algorithm::Gcra {
                    rate: most,
                    burst: 0,
                },
            ) else {
                panic!("another algorithm");
            };
            assert!(rate.count >= 1 && rate.count <= bounds::MAX_COUNT && burst == 0);
        }
        assert_eq!(FallbackShare::one_of(0), None);
        assert_eq!(FallbackShare::one_of(2), Some(FallbackShare::default()));
        assert_eq!(FallbackShare::one_of(4), FallbackShare::percent(25));
        assert_eq!(FallbackShare::percent(0), None);
        assert_eq!(FallbackShare::percent(101), None);
    }
}
