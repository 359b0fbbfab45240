//! A retry budget, which bounds the load that retries add even if many requests fail.
//!
//! Retries help against occasional failures. However, if all requests fail, retries multiply the
//! load on an overloaded server: if each of three layers tries a request three times, the server
//! gets twenty-seven times as many requests. A budget limits retries in proportion to the number of
//! requests. Each request deposits a fraction of a retry, and each retry withdraws one full retry.
//! Deposits expire. A few retries per second need no deposits, so that a client with little traffic
//! can retry too.

use tidegate_core::{Span, Timestamp};

use crate::rolling_window::{RollingWindow, WindowCounts};

/// A retry budget.
///
/// The maximum number of retries depends on `percent`, `min_per_sec` and `ttl`. Consider any ten
/// consecutive slots of length `ttl / 10`, the last of which contains a retry. The number of
/// retries in these slots is at most `percent / 100 * requests + min_per_sec * ttl`. `requests` is
/// the number of requests in these slots, without retries. Over a time `T`, the number of retries
/// is at most `percent / 100 * requests + min_per_sec * ttl * (T / (0.9 * ttl) + 1)`.
///
/// # Examples
///
/// ```
/// use tidegate_client::{RetryBudget, Span, Timestamp};
///
/// let mut budget = RetryBudget::new(Span::from_secs(10), 0, 20);
/// let now = Timestamp::from_micros(1_000_000);
/// (0..10).for_each(|_| budget.deposit(now));
/// assert!(budget.withdraw(now));
/// assert!(budget.withdraw(now));
/// assert!(!budget.withdraw(now), "ten requests pay for two retries");
/// ```
#[derive(Clone, Debug)]
pub struct RetryBudget {
    percent: u64,
    /// The number of retries per window that need no deposits.
    reserve: u64,
    /// The number of requests, and the number of retries (as `events`).
    window: RollingWindow,
}

/// Creates a budget with the defaults of tower and Finagle: a window of 10 s, 10 free retries per
/// second, and additional retries for 20 % of the requests.
impl Default for RetryBudget {
    fn default() -> Self {
        Self::new(Span::from_secs(10), 10, 20)
    }
}

impl RetryBudget {
    /// The longest time for which deposits are kept.
    pub const MAX_TTL: Span = Span::from_secs(60);

    /// Creates a budget whose deposits last for `ttl`. `ttl` is clamped to between 1 s and
    /// [`Self::MAX_TTL`]. The budget allows `min_per_sec` free retries per second, plus `percent`
    /// of the number of requests. If `min_per_sec` and `percent` are both 0, the budget is always
    /// empty.
    #[must_use]
    pub fn new(ttl: Span, min_per_sec: u32, percent: u32) -> Self {
        let ttl = ttl.clamp(Span::from_secs(1), Self::MAX_TTL);
        Self {
            percent: u64::from(percent),
            reserve: u64::from(min_per_sec).saturating_mul(ttl.as_micros()) / 1_000_000,
            window: RollingWindow::new(ttl),
        }
    }

    /// Records the first attempt of a request.
    pub fn deposit(&mut self, now: Timestamp) {
        let request = WindowCounts {
            requests: 1,
            events: 0,
        };
        self.window.add(request, now);
    }

    /// Withdraws one retry. Returns false, and withdraws nothing, if the budget is exhausted.
    #[must_use]
    pub fn withdraw(&mut self, now: Timestamp) -> bool {
        if !self.has_balance(now) {
            return false;
        }
        let retry = WindowCounts {
            requests: 0,
            events: 1,
        };
        self.window.add(retry, now);
        true
    }

    /// Returns whether the deposits of the window allow one more retry.
    fn has_balance(&mut self, now: Timestamp) -> bool {
        let WindowCounts {
            requests,
            events: retries,
        } = self.window.sum(now);
        let earned = requests.saturating_mul(self.percent) / 100;
        // A deposit may leave the window before the retry that it paid for, so `retries` can exceed
        // what the remaining deposits allow.
        retries < earned.saturating_add(self.reserve)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TTL: Span = Span::from_secs(10);

    proptest! {
        /// For any sequence of requests, the number of retries stays within the documented bound.
        #[test]
        fn retries_stay_within_the_bound(
            percent in 0..200_u32,
            min in 0..20_u32,
            steps in proptest::collection::vec((0..2_000_000_u64, 0..20_u32, 0..20_u32), 1..200),
        ) {
            let mut budget = RetryBudget::new(TTL, min, percent);
            let start = Timestamp::from_micros(1_700_000_000_000_000);
            let (mut now, mut requests, mut retries) = (start, 0_u64, 0_u64);
            for (wait, sent, failed) in steps {
                now = now.after(Span::from_micros(wait));
                (0..sent).for_each(|_| budget.deposit(now));
                requests += u64::from(sent);
                retries += (0..failed).filter(|_| budget.withdraw(now)).count() as u64;
                let windows = now.since(start).as_micros() / (TTL.as_micros() * 9 / 10) + 1;
                let bound = requests * u64::from(percent) / 100 + u64::from(min) * 10 * windows;
                prop_assert!(retries <= bound, "{retries} retries over {bound}");
            }
        }
    }

    #[test]
    fn deposits_expire() {
        let mut budget = RetryBudget::new(TTL, 0, 100);
        let now = Timestamp::from_micros(5_000_000);
        budget.deposit(now);
        assert!(!budget.clone().withdraw(now.after(TTL)));
        assert!(budget.withdraw(now));
    }

    #[test]
    fn an_empty_budget_never_allows_a_retry() {
        let mut budget = RetryBudget::new(TTL, 0, 0);
        budget.deposit(Timestamp::default());
        assert!(!budget.withdraw(Timestamp::default()));
    }
}
