//! Adaptive throttling: a client that is being refused stops most of its requests itself, and probes with the rest.
//!
//! The formula is that of Google's SRE book (chapter 21, "Handling Overload"): over the last two minutes a request is
//! rejected here with probability `max(0, (requests - K * accepts) / (requests + 1))`. Of a server that accepts everything nothing is
//! kept; of one that accepts nothing, nearly everything, and the first answers that are accepted open it again.

use tidegate_core::{Span, Timestamp};

use crate::{
    Rng,
    recent::{Counts, Recent},
};

/// Rejects locally what the server would most likely refuse.
///
/// With `K` = 2 a server that refuses a half or less gets every request, and one that refuses more gets up to two requests for each
/// that it accepts. A `K` nearer to 1 spares the server more and takes longer to notice that it is well again.
///
/// # Examples
///
/// ```
/// use tidegate_client::{AdaptiveThrottle, Rng, Timestamp};
///
/// let mut throttle = AdaptiveThrottle::default();
/// let (now, mut rng) = (Timestamp::from_micros(1), Rng::with_seed(1));
/// let mut sent = 0;
/// for _ in 0..1_000 {
///     if throttle.admits(now, &mut rng) {
///         sent += 1;
///         throttle.refused(now);
///     }
/// }
/// assert!(sent < 20, "nothing is accepted: {sent} of 1000 were sent");
/// ```
#[derive(Clone, Debug)]
pub struct AdaptiveThrottle {
    /// K as a fraction.
    k: (u32, u32),
    /// Requests and accepts.
    recent: Recent,
}

/// K = 2.
impl Default for AdaptiveThrottle {
    fn default() -> Self {
        Self::new(2, 1)
    }
}

impl AdaptiveThrottle {
    /// What is looked back on.
    pub const WINDOW: Span = Span::from_secs(120);

    /// A throttle with `K = numerator / denominator`. Less than 1 would reject although everything is accepted, so it
    /// counts as 1, and so does a denominator of 0.
    #[must_use]
    pub fn new(numerator: u32, denominator: u32) -> Self {
        let k = if numerator < denominator || denominator == 0 {
            (1, 1)
        } else {
            (numerator, denominator)
        };
        Self {
            k,
            recent: Recent::over(Self::WINDOW),
        }
    }

    /// Whether a request may be sent. One that may not counts as a request at once, one that may when it is known what came of
    /// it: of what is on its way nobody knows yet whether it is accepted.
    #[must_use]
    pub fn admits(&mut self, now: Timestamp, rng: &mut Rng) -> bool {
        let (rejected, of) = rejection(self.recent.sum(now), self.k);
        let may_be_sent = rng.u64(0..of) >= rejected;
        if !may_be_sent {
            self.refused(now);
        }
        may_be_sent
    }

    /// The server took a request on, whatever came of it.
    pub fn accepted(&mut self, now: Timestamp) {
        self.count(1, now);
    }

    /// The server did not take a request on, or gave no answer.
    pub fn refused(&mut self, now: Timestamp) {
        self.count(0, now);
    }

    fn count(&mut self, accepts: u64, now: Timestamp) {
        let counts = Counts {
            first: 1,
            second: accepts,
        };
        self.recent.add(counts, now);
    }
}

/// The probability of a rejection as a fraction, whose denominator is at least 1.
fn rejection(counts: Counts, (numerator, denominator): (u32, u32)) -> (u64, u64) {
    let (requests, of) = (counts.first, u64::from(denominator));
    let expected = requests.saturating_mul(of);
    let accepted = counts.second.saturating_mul(u64::from(numerator));
    (
        expected.saturating_sub(accepted),
        requests.saturating_add(1).saturating_mul(of),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The formula over a list of instants, in exact fractions: what is counted in the window's slots, and no cleverness.
    #[derive(Default)]
    struct Naive {
        requests: Vec<u64>,
        accepts: Vec<u64>,
    }

    impl Naive {
        fn rejection(&self, now: Timestamp, (num, den): (u32, u32)) -> (u128, u128) {
            let slot = |micros: u64| micros / 12_000_000;
            let recent = |instants: &[u64]| {
                let within = |at: &&u64| slot(**at) + 10 > slot(now.as_micros());
                instants.iter().filter(within).count() as u128
            };
            let (requests, accepts) = (recent(&self.requests), recent(&self.accepts));
            let (num, den) = (u128::from(num), u128::from(den));
            let above = (requests * den).saturating_sub(accepts * num);
            (above, (requests + 1) * den)
        }
    }

    proptest! {
        #[test]
        fn the_formula_is_that_of_the_book(
            num in 1..30_u32,
            den in 1..10_u32,
            seed: u64,
            steps in proptest::collection::vec((0..20_000_000_u64, any::<bool>()), 1..200),
        ) {
            let mut throttle = AdaptiveThrottle::new(num, den);
            let k = if num < den { (1, 1) } else { (num, den) };
            let (mut naive, mut now) = (Naive::default(), Timestamp::from_micros(1_700_000_000_000_000));
            let mut rng = fastrand::Rng::with_seed(seed);
            for (wait, accepted) in steps {
                now = now.after(Span::from_micros(wait));
                let (above, below) = rejection(throttle.recent.sum(now), k);
                prop_assert_eq!((u128::from(above), u128::from(below)), naive.rejection(now, k));
                let admitted = throttle.admits(now, &mut rng);
                naive.requests.push(now.as_micros());
                prop_assert!(admitted || above > 0, "a rejection of probability 0");
                if admitted && accepted {
                    throttle.accepted(now);
                    naive.accepts.push(now.as_micros());
                } else if admitted {
                    throttle.refused(now);
                }
            }
        }
    }

    /// A server that accepts one of ten: what is sent settles at K requests for each accepted.
    #[test]
    fn what_is_sent_settles_at_k_times_what_is_accepted() {
        let (mut throttle, mut rng) = (AdaptiveThrottle::default(), fastrand::Rng::with_seed(3));
        let (mut sent, mut accepted) = (0_u64, 0_u64);
        let mut now = Timestamp::from_micros(1_700_000_000_000_000);
        for second in 0..600_u64 {
            now = now.after(Span::from_secs(1));
            let admitted: u64 = (0..100)
                .map(|_| u64::from(throttle.admits(now, &mut rng)))
                .sum();
            // The server has room for ten a second.
            (0..admitted.min(10)).for_each(|_| throttle.accepted(now));
            (10..admitted).for_each(|_| throttle.refused(now));
            if second >= 300 {
                sent += admitted;
                accepted += admitted.min(10);
            }
        }
        assert!(accepted >= 2_950, "{accepted}");
        assert!((5_400..=6_600).contains(&sent), "{sent}");
    }

    #[test]
    fn an_accepting_server_gets_everything() {
        let (mut throttle, mut rng) = (AdaptiveThrottle::new(1, 1), fastrand::Rng::with_seed(3));
        for second in 0..1_000 {
            let now = Timestamp::from_micros(1_000_000 * second);
            assert!(throttle.admits(now, &mut rng));
            throttle.accepted(now);
        }
    }
}
