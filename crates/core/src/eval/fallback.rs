//! A rule's fallback policy, which applies while the store is unreachable, and the share of each
//! limit that a node enforces locally.

use crate::limit::{Limit, Ratio};

/// A rule's fallback policy: what happens to requests while the store is unreachable.
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

/// The fraction of every limit that a node enforces locally while the store is unreachable; the
/// default is one half.
///
/// With `n` nodes and a share of 1 / `n`, all nodes together admit at most the limit. If the share
/// of a small limit would be rounded down to 0, each node admits 1 unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FallbackShare(Ratio);

impl Default for FallbackShare {
    fn default() -> Self {
        Self(Ratio::new(1, 2))
    }
}

impl FallbackShare {
    /// Returns a share of `percent`, or `None` if `percent` is not between 1 and 100.
    #[must_use]
    pub const fn percent(percent: u32) -> Option<Self> {
        match percent {
            1..=100 => Some(Self(Ratio::new(percent, 100))),
            _ => None,
        }
    }

    /// Returns a share of 1 / `nodes`, or `None` if `nodes` is 0.
    #[must_use]
    pub const fn one_of(nodes: u32) -> Option<Self> {
        match nodes {
            0 => None,
            denominator => Some(Self(Ratio::new(1, denominator))),
        }
    }

    /// Returns this share of `limit`, rounded down. A number of units above 0 is never rounded down
    /// to 0.
    #[must_use]
    pub fn of(self, limit: &Limit) -> Limit {
        // The scaled limit can be invalid only if an extreme value was rounded. If the scaled limit
        // is invalid, use the unscaled limit.
        self.0.of(limit).unwrap_or_else(|_| limit.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        limit::{Algorithm, Counting, Rate, RefillMode, Window, bounds},
        time::Span,
    };

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

    /// Regression test for two bugs. A share of a queue admitted one request too many on every
    /// node. A share of a limit lost the option to count denied requests in full.
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
