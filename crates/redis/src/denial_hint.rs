//! Remembers which limits have recently denied a request. Before the store charges limits that have
//! recently denied a request, it peeks: it evaluates the limits without charging them.

use std::sync::atomic::{AtomicU8, Ordering};

use tidegate_core::{Charge, remote_eval::parameters_digest};

/// After a denial, the store peeks this number of consecutive requests (evaluates them without a
/// charge) before it charges a request directly again.
const PEEKED_REQUESTS: u8 = 16;

/// Number of counters. Requests with the same limits share a counter. If unrelated limits share a
/// counter, the only cost is an extra peek.
const COUNTERS: usize = 64;

/// The counters. A counter is the number of upcoming requests that are peeked before they are
/// charged.
#[derive(Debug)]
pub(crate) struct DenialHints([AtomicU8; COUNTERS]);

impl Default for DenialHints {
    fn default() -> Self {
        Self([const { AtomicU8::new(0) }; COUNTERS])
    }
}

impl DenialHints {
    /// Returns the counter for requests on the same limits as `charges`.
    pub(crate) fn hint_for(&self, charges: &[Charge<'_>]) -> DenialHint<'_> {
        let hash = charges.iter().fold(0_u32, |hash, charge| {
            hash.rotate_left(5) ^ parameters_digest(charge.limits)
        });
        // A `usize` has at least 32 bits on all supported platforms.
        let hash = usize::try_from(hash).unwrap_or(0);
        DenialHint(&self.0[hash % COUNTERS])
    }
}

/// The counter for requests on the same limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DenialHint<'w>(&'w AtomicU8);

impl DenialHint<'_> {
    /// Returns whether to peek before the charge.
    pub(crate) fn should_peek(self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Records whether a request was admitted.
    pub(crate) fn record(self, admitted: bool) {
        if !admitted {
            self.0.store(PEEKED_REQUESTS, Ordering::Relaxed);
        } else if self.should_peek() {
            let _ = self
                .0
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    left.checked_sub(1)
                });
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{AlgorithmName, Cost, LimitSpec, Limits, notation};

    use super::*;

    #[test]
    fn a_denial_is_remembered_for_sixteen_requests_on_the_same_limits() {
        let limits = |rate: &str| {
            let rate = notation::rate(rate).unwrap();
            let limit = LimitSpec::shorthand(rate, AlgorithmName::TokenBucket);
            Limits::new(vec![limit.build().unwrap()]).unwrap()
        };
        let (one, other) = (limits("1/s"), limits("2/s"));
        let charge = |limits| Charge::new(b"key", limits, Cost::ONE).unwrap();
        let hints = DenialHints::default();
        assert!(!hints.hint_for(&[charge(&one)]).should_peek());
        hints.hint_for(&[charge(&one)]).record(false);
        assert!(!hints.hint_for(&[charge(&other)]).should_peek());
        for _ in 0..PEEKED_REQUESTS {
            assert!(hints.hint_for(&[charge(&one)]).should_peek());
            hints.hint_for(&[charge(&one)]).record(true);
        }
        assert!(!hints.hint_for(&[charge(&one)]).should_peek());
    }
}
