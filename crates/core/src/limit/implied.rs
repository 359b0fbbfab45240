//! Recognises limits that have no effect, because another limit of the same rule is stricter.

use super::{Algorithm, Limit, Rate, Window};
use crate::time::Span;

impl Limit {
    /// Returns whether `other` is redundant in a rule that also has this limit: `other` never
    /// denies, delays or marks a request that this limit admits. For example, `10/min` implies
    /// `20/min`, and `10/s` implies `1000/min`.
    ///
    /// The result is true only if it is certain, so it can be false for a redundant limit. It is
    /// about limits that do not change. An elastic limit, a plan and an override change limits, and
    /// so does a Redis outage, in which each server enforces its share. The units that were
    /// admitted under other limits can make `other` deny a request.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::Limit;
    ///
    /// let limit: Limit = "10/s".parse()?;
    /// assert!(limit.implies(&"20/s".parse()?));
    /// assert!(limit.implies(&"600/min".parse()?));
    /// assert!(!limit.implies(&"599/min".parse()?));
    /// # Ok::<(), tidegate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn implies(&self, other: &Self) -> bool {
        // Denied requests can exhaust a limit that counts them, or start its window.
        if [self, other]
            .iter()
            .any(|limit| limit.count_denied || limit.in_full)
        {
            return false;
        }
        // A request waits for a slot only if all limits that deny it let it wait.
        if self.slot_wait != other.slot_wait {
            return false;
        }
        let (most, quota) = (u128::from(self.hard_quota()), u128::from(other.quota()));
        // Buckets and GCRA need the same rate: with a faster rate, instants are rounded
        // differently, so even a larger limit can deny a request a microsecond too early.
        let has_same_rate = bucket_rate(&self.algorithm) == bucket_rate(&other.algorithm);
        let times = match (&self.algorithm, &other.algorithm) {
            _ if has_same_rate && self.shares_state_with(other) => 1,
            (
                Algorithm::FixedWindow {
                    window: Window::Epoch(own),
                    ..
                },
                Algorithm::FixedWindow {
                    window: Window::Epoch(other),
                    ..
                },
            ) if other.as_micros().is_multiple_of(own.as_micros()) => periods(*own, *other),
            (
                Algorithm::SlidingWindowLog { window: own, .. },
                Algorithm::SlidingWindowLog { window: other, .. },
            ) => periods(*own, *other),
            _ => return false,
        };
        quota >= most.saturating_mul(u128::from(times))
    }
}

/// Returns how many windows with the length `own` cover a window with the length `other`.
fn periods(own: Span, other: Span) -> u64 {
    other.as_micros().div_ceil(own.as_micros().max(1))
}

/// Returns the rate of a bucket or of GCRA.
fn bucket_rate(algorithm: &Algorithm) -> Option<Rate> {
    match algorithm {
        Algorithm::Gcra { rate, .. }
        | Algorithm::TokenBucket { refill: rate, .. }
        | Algorithm::LeakyBucket { leak: rate, .. } => Some(*rate),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{AlgorithmName, LimitSpec, SlotWait};

    fn implies(algorithm: Option<AlgorithmName>, own: &str, other: &str) -> bool {
        let limit = |text| {
            LimitSpec::parse_shorthand(text, algorithm)?
                .build()
                .map_err(|mut wrong| wrong.swap_remove(0))
        };
        let limit = |text| limit(text).unwrap();
        limit(own).implies(&limit(other))
    }

    #[test]
    fn only_certainly_redundant_limits_are_implied() {
        use AlgorithmName::{FixedWindow, Gcra, SlidingWindowCounter, TokenBucket};
        for (algorithm, own, other, is_implied) in [
            (None, "10/min", "20/min", true),
            (None, "10/min", "10/min", true),
            (None, "20/min", "10/min", false),
            (None, "10/s", "600/min", true),
            (None, "10/s", "599/min", false),
            (None, "10/min", "10/s", true),
            (None, "10/7s", "90/min", true),
            (None, "10/7s", "89/min", false),
            (None, "2000/min", "3000/min", true),
            (None, "2000/min", "300000/h", false),
            (None, "100/s burst 5", "100/s burst 20", true),
            (None, "100/s burst 20", "100/s burst 5", false),
            (None, "100/s burst 5", "200/s burst 20", false),
            (None, "100/s burst 5", "100/s capacity 20", false),
            (None, "100/s capacity 5", "100/s capacity 20", true),
            (Some(Gcra), "10/min", "20/min", false),
            (Some(TokenBucket), "10/min", "20/min", false),
            (Some(FixedWindow), "10/min", "600/h", true),
            (Some(FixedWindow), "10/min", "599/h", false),
            (Some(FixedWindow), "10/h", "10/min", false),
            (Some(FixedWindow), "10/7s", "1000/min", false),
            (Some(SlidingWindowCounter), "10/min", "20/min", true),
            (Some(SlidingWindowCounter), "10/min", "6000/h", false),
        ] {
            let found = implies(algorithm, own, other);
            assert_eq!(found, is_implied, "{algorithm:?}: {own}, {other}");
        }
    }

    #[test]
    fn limits_that_let_requests_wait_for_slots_must_wait_alike() {
        let slots = |count: u64| {
            let lease = Span::from_secs(30);
            Limit::new(Algorithm::Concurrency {
                limit: count,
                lease,
            })
            .unwrap()
        };
        let waiting = |count: u64| {
            slots(count)
                .with_slot_wait(SlotWait {
                    longest: Span::from_secs(2),
                    queue: SlotWait::DEFAULT_QUEUE,
                })
                .unwrap()
        };
        assert!(slots(4).implies(&slots(9)) && waiting(4).implies(&waiting(9)));
        assert!(!waiting(4).implies(&slots(9)) && !slots(4).implies(&waiting(9)));
    }

    #[test]
    fn a_soft_allowance_counts_and_a_limit_that_counts_denials_is_not_implied() {
        let limit = |text: &str| text.parse::<Limit>().unwrap();
        let soft = limit("10/min").with_soft_percent(50).unwrap();
        assert!(!soft.implies(&limit("14/min")) && soft.implies(&limit("15/min")));
        let counting = limit("20/min").counting_denied(true);
        assert!(!limit("10/min").implies(&counting) && !counting.implies(&limit("30/min")));
    }
}
