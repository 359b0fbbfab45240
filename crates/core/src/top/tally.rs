//! Exact totals of requests, denials and cost.

use std::ops::AddAssign;

/// The exact number of requests and denials, and the total cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The number of requests.
    pub requests: u64,
    /// The number of denied requests.
    pub denied: u64,
    /// The cost of all requests, denied or not; saturates at 2⁶⁴ − 1.
    pub cost: u64,
}

impl Tally {
    #[inline]
    pub(super) fn count(&mut self, cost: u64, denied: bool) {
        self.requests += 1;
        self.denied += u64::from(denied);
        self.cost = self.cost.saturating_add(cost);
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.denied = self.denied.saturating_add(other.denied);
        self.cost = self.cost.saturating_add(other.cost);
    }
}
