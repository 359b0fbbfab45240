//! How long to wait before a retry if the server does not say.
//!
//! The backoff is exponential with jitter, because clients that failed together must not retry
//! together. `docs/client.md` has a plot of the effect of each kind of jitter.

use fastrand::Rng;
use tidegate_core::Span;

/// How much of a wait is random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jitter {
    /// Between zero and the whole wait. It spreads best, and is the recommended choice.
    #[default]
    Full,
    /// Between half and the whole wait. Each retry waits at least half, so it finishes later under
    /// the same load.
    Equal,
    /// Always the whole wait. Clients that failed together retry together.
    None,
}

/// Exponential backoff: `base` after the first try, doubled after each further try, at most `cap`.
///
/// The cap is applied before the jitter, so that late waits are spread as widely as early ones.
/// Waits are whole microseconds, and all arithmetic saturates.
///
/// # Examples
///
/// ```
/// use tidegate_client::{Backoff, Jitter, Span};
///
/// let backoff = Backoff::new(Span::from_millis(50), Span::from_secs(20), Jitter::Full);
/// let mut rng = fastrand::Rng::with_seed(7);
/// assert!(backoff.wait(3, &mut rng) <= Span::from_millis(400));
/// assert_eq!(backoff.longest(3), Span::from_millis(400));
/// assert_eq!(backoff.longest(60), Span::from_secs(20));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    base: Span,
    cap: Span,
    jitter: Jitter,
}

/// From 50 ms to 20 s, with full jitter.
impl Default for Backoff {
    fn default() -> Self {
        Self::new(
            Span::from_millis(50),
            Span::from_secs(20),
            Jitter::default(),
        )
    }
}

impl Backoff {
    /// Creates a backoff from `base` to `cap`. A base above the cap counts as the cap.
    #[must_use]
    pub const fn new(base: Span, cap: Span, jitter: Jitter) -> Self {
        Self { base, cap, jitter }
    }

    /// Returns the longest wait before retry number `retry`, counted from 0.
    #[must_use]
    pub fn longest(&self, retry: u32) -> Span {
        let factor = 1_u64.checked_shl(retry).unwrap_or(u64::MAX);
        let doubled = self.base.as_micros().saturating_mul(factor);
        Span::from_micros(doubled.min(self.cap.as_micros()))
    }

    /// Returns the wait before retry number `retry`, counted from 0.
    pub fn wait(&self, retry: u32, rng: &mut Rng) -> Span {
        self.spread(self.longest(retry), rng)
    }

    /// Returns the wait before retry number `retry`, counted from 0, if the server asked to wait
    /// for `asked`.
    ///
    /// It is `asked` plus a usual wait, but with jitter over at least half of `asked`. The server
    /// tells all clients the same time, and a jitter of milliseconds after a wait of seconds would
    /// not spread them.
    pub fn wait_after(&self, asked: Span, retry: u32, rng: &mut Rng) -> Span {
        let extent = match self.jitter {
            Jitter::None => self.longest(retry),
            Jitter::Full | Jitter::Equal => self
                .longest(retry)
                .max(Span::from_micros(asked.as_micros() / 2)),
        };
        let extra = self.spread(extent, rng);
        Span::from_micros(asked.as_micros().saturating_add(extra.as_micros()))
    }

    fn spread(&self, extent: Span, rng: &mut Rng) -> Span {
        let extent = extent.as_micros();
        Span::from_micros(match self.jitter {
            Jitter::None => extent,
            Jitter::Equal => extent - rng.u64(0..=extent / 2),
            Jitter::Full => rng.u64(0..=extent),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_wait_stays_within_its_bounds(base: u64, cap: u64, retry in 0..200_u32, seed: u64) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let exact = u128::from(base)
                .saturating_mul(1_u128.checked_shl(retry).unwrap_or(u128::MAX))
                .min(u128::from(cap));
            let spans = (Span::from_micros(base), Span::from_micros(cap));
            let wait = |jitter, rng: &mut fastrand::Rng| {
                u128::from(Backoff::new(spans.0, spans.1, jitter).wait(retry, rng).as_micros())
            };
            prop_assert_eq!(wait(Jitter::None, &mut rng), exact);
            prop_assert!(wait(Jitter::Full, &mut rng) <= exact);
            let equal = wait(Jitter::Equal, &mut rng);
            prop_assert!(equal <= exact && equal >= exact / 2);
        }
    }

    #[test]
    fn full_jitter_reaches_both_ends() {
        let backoff = Backoff::new(Span::from_micros(3), Span::from_micros(3), Jitter::Full);
        let mut rng = fastrand::Rng::with_seed(1);
        let mut seen = [0_u32; 4];
        for _ in 0..1_000 {
            let wait = backoff.wait(0, &mut rng).as_micros();
            seen[usize::try_from(wait).unwrap()] += 1;
        }
        assert!(seen.iter().all(|count| *count > 200), "{seen:?}");
    }
}
