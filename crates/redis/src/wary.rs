//! Remembers which limits have recently denied a request. Their slots are peeked before any slot is
//! charged.

use std::sync::atomic::{AtomicU8, Ordering};

use tidegate_core::{Charge, remote_eval::fingerprint};

/// After a denial, this many requests in a row are peeked before they are charged.
const LASTS: u8 = 16;

/// Number of counters. Requests on the same limits share a counter. If unrelated limits share a
/// counter, the only cost is an extra peek.
const COUNTS: usize = 64;

/// The number of further requests that are peeked first, per counter.
#[derive(Debug)]
pub(crate) struct Wariness([AtomicU8; COUNTS]);

impl Default for Wariness {
    fn default() -> Self {
        Self([const { AtomicU8::new(0) }; COUNTS])
    }
}

impl Wariness {
    /// Returns the counter for requests on the same limits as `charges`.
    pub(crate) fn of(&self, charges: &[Charge<'_>]) -> Wary<'_> {
        let mixed = charges.iter().fold(0_u32, |mixed, charge| {
            mixed.rotate_left(5) ^ fingerprint(charge.limits)
        });
        // A `usize` has at least 32 bits on all supported platforms.
        let mixed = usize::try_from(mixed).unwrap_or(0);
        Wary(&self.0[mixed % COUNTS])
    }
}

/// The counter for requests on the same limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wary<'w>(&'w AtomicU8);

impl Wary<'_> {
    /// Returns whether to peek before charging.
    pub(crate) fn asks_first(self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Records whether a request was admitted.
    pub(crate) fn note(self, admitted: bool) {
        if !admitted {
            self.0.store(LASTS, Ordering::Relaxed);
        } else if self.asks_first() {
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
        let wariness = Wariness::default();
        assert!(!wariness.of(&[charge(&one)]).asks_first());
        wariness.of(&[charge(&one)]).note(false);
        assert!(!wariness.of(&[charge(&other)]).asks_first());
        for _ in 0..LASTS {
            assert!(wariness.of(&[charge(&one)]).asks_first());
            wariness.of(&[charge(&one)]).note(true);
        }
        assert!(!wariness.of(&[charge(&one)]).asks_first());
    }
}
