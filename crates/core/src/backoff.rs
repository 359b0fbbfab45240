//! Exponential backoff with jitter, for retries and reconnects.
//!
//! Clients that failed at the same time must not all retry at the same time. A plot in
//! `docs/client.md` shows the effect of each kind of jitter.

use crate::Span;

/// How the wait before a retry is randomised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jitter {
    /// The wait is random between zero and the full backoff. Full jitter spreads retries best and
    /// is recommended.
    #[default]
    Full,
    /// The wait is random between half and all of the full backoff. Retries wait longer on average
    /// than with full jitter, so clients finish later under the same load.
    Equal,
    /// The wait is always the full backoff. Clients that failed at the same time retry at the same
    /// time.
    None,
}

/// Exponential backoff: the wait is `base` after the first attempt, doubles after each further
/// attempt, and is at most `cap`.
///
/// The cap is applied before the jitter, so that late retries are as random as early retries. Waits
/// are whole microseconds, and all arithmetic saturates. The argument `random` is a number that the
/// caller draws uniformly from the whole range of `u64`.
///
/// # Examples
///
/// ```
/// use tidegate_core::{Backoff, Jitter, Span};
///
/// let backoff = Backoff::new(Span::from_millis(50), Span::from_secs(20), Jitter::Full);
/// let random = 0x8000_0000_0000_0000;
/// assert_eq!(backoff.wait(3, random), Span::from_millis(200));
/// assert_eq!(backoff.longest(3), Span::from_millis(400));
/// assert_eq!(backoff.longest(60), Span::from_secs(20));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    base: Span,
    cap: Span,
    jitter: Jitter,
}

/// The default backoff grows from 50 ms to 20 s with full jitter.
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
    /// Creates a backoff from `base` to `cap`. If `base` is above `cap`, `cap` replaces `base`.
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
    #[must_use]
    pub fn wait(&self, retry: u32, random: u64) -> Span {
        self.jittered(self.longest(retry), random)
    }

    /// Returns the wait before retry number `retry`, counted from 0, if the server asked the client
    /// to wait for `server_wait`.
    ///
    /// The result is `server_wait` plus a backoff wait. Unless jitter is off, the backoff wait is
    /// raised to at least half of `server_wait` before jitter is applied. Jitter of a few
    /// milliseconds after a wait of several seconds would not spread the retries of clients that
    /// got the same `server_wait`.
    #[must_use]
    pub fn wait_after(&self, server_wait: Span, retry: u32, random: u64) -> Span {
        let longest = match self.jitter {
            Jitter::None => self.longest(retry),
            Jitter::Full | Jitter::Equal => self
                .longest(retry)
                .max(Span::from_micros(server_wait.as_micros() / 2)),
        };
        let extra = self.jittered(longest, random);
        Span::from_micros(server_wait.as_micros().saturating_add(extra.as_micros()))
    }

    fn jittered(&self, longest: Span, random: u64) -> Span {
        let longest = longest.as_micros();
        let wait = match self.jitter {
            Jitter::None => longest,
            Jitter::Equal => longest - scale(random, longest / 2),
            Jitter::Full => scale(random, longest),
        };
        debug_assert!(wait <= longest, "jitter only shortens a wait");
        Span::from_micros(wait)
    }
}

/// Maps a random `u64` to the range `0..=most`. The result is uniform except for a bias of less
/// than `most / 2^64`.
fn scale(random: u64, most: u64) -> u64 {
    // The first factor is below 2^64 and the second factor is at most 2^64, so the product fits in
    // a u128. The upper 64 bits of the product are at most `most`.
    let product = u128::from(random) * (u128::from(most) + 1);
    u64::try_from(product >> 64).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_wait_stays_within_its_bounds(base: u64, cap: u64, retry in 0..200_u32, random: u64) {
            let exact = u128::from(base)
                .saturating_mul(1_u128.checked_shl(retry).unwrap_or(u128::MAX))
                .min(u128::from(cap));
            let spans = (Span::from_micros(base), Span::from_micros(cap));
            let wait = |jitter| {
                u128::from(Backoff::new(spans.0, spans.1, jitter).wait(retry, random).as_micros())
            };
            prop_assert_eq!(wait(Jitter::None), exact);
            prop_assert!(wait(Jitter::Full) <= exact);
            let equal = wait(Jitter::Equal);
            prop_assert!(equal <= exact && equal >= exact / 2);
        }
    }

    #[test]
    fn full_jitter_reaches_both_ends_evenly() {
        let backoff = Backoff::new(Span::from_micros(3), Span::from_micros(3), Jitter::Full);
        let mut counts = [0_u32; 4];
        // The loop uses a thousand evenly spaced numbers, from 0 to almost 2^64.
        for step in 0..1_000 {
            let wait = backoff.wait(0, step * (u64::MAX / 1_000)).as_micros();
            counts[usize::try_from(wait).unwrap()] += 1;
        }
        assert_eq!(counts, [251, 250, 250, 249]);
        assert_eq!(backoff.wait(0, 0), Span::ZERO);
        assert_eq!(backoff.wait(0, u64::MAX), Span::from_micros(3));
    }

    #[test]
    fn a_wait_after_a_request_of_the_server_is_never_earlier() {
        let backoff = Backoff::new(Span::from_millis(1), Span::from_secs(1), Jitter::Full);
        let server_wait = Span::from_secs(10);
        assert_eq!(backoff.wait_after(server_wait, 0, 0), server_wait);
        assert_eq!(
            backoff.wait_after(server_wait, 0, u64::MAX),
            Span::from_secs(15)
        );
    }
}
