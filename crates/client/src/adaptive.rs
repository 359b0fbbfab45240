//! Client-side adaptive throttling. If the server refuses most requests, the client rejects most of
//! its requests locally, and sends the remaining requests as probes.
//!
//! The formula is from Google's SRE book (chapter 21, "Handling Overload"). A request is rejected
//! locally with probability `max(0, (requests - K * accepts) / (requests + 1))`, counted over the
//! last two minutes. If the server accepts all requests, the throttle rejects none. If the server
//! accepts no requests, the throttle rejects nearly all requests. As the server accepts more
//! requests again, the throttle rejects fewer.

use tidegate_core::{Span, Timestamp};

use crate::{
    Rng,
    rolling_window::{RollingWindow, WindowCounts},
};

/// A throttle that locally rejects requests that the server would most likely refuse.
///
/// With `K` = 2, a server that refuses at most half of the requests gets all requests. A server
/// that refuses more than half gets up to two requests for each request that it accepts. With a
/// smaller `K`, an overloaded server gets fewer requests, but the client takes longer to notice
/// that the server has recovered.
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
///     if throttle.admit(now, &mut rng) {
///         sent += 1;
///         throttle.record_refused(now);
///     }
/// }
/// assert!(sent < 20, "nothing is accepted: {sent} of 1000 were sent");
/// ```
#[derive(Clone, Debug)]
pub struct AdaptiveThrottle {
    k: Fraction,
    /// The number of all requests, and the number of accepted requests (as `events`).
    window: RollingWindow,
}

/// A non-negative rational number. The denominator is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fraction {
    numerator: u64,
    denominator: u64,
}

/// Uses K = 2.
impl Default for AdaptiveThrottle {
    fn default() -> Self {
        Self::new(2, 1)
    }
}

impl AdaptiveThrottle {
    /// The length of the window over which requests are counted.
    pub const WINDOW: Span = Span::from_secs(120);

    /// Creates a throttle with `K = numerator / denominator`. A `K` below 1 is treated as 1,
    /// because a lower `K` would reject requests even if the server accepts all requests. A
    /// denominator of 0 is also treated as 1.
    #[must_use]
    pub fn new(numerator: u32, denominator: u32) -> Self {
        let (numerator, denominator) = if numerator < denominator || denominator == 0 {
            (1, 1)
        } else {
            (numerator.into(), denominator.into())
        };
        Self {
            k: Fraction {
                numerator,
                denominator,
            },
            window: RollingWindow::new(Self::WINDOW),
        }
    }

    /// Decides whether a request may be sent. Returns false if the throttle rejects the request.
    ///
    /// A rejected request is counted immediately. A sent request is counted by
    /// [`Self::record_accepted`] or [`Self::record_refused`], because its outcome is unknown while
    /// it is in flight.
    #[must_use]
    pub fn admit(&mut self, now: Timestamp, rng: &mut Rng) -> bool {
        let rejection = rejection_probability(self.window.sum(now), self.k);
        let is_admitted = rng.u64(0..rejection.denominator) >= rejection.numerator;
        if !is_admitted {
            self.record_refused(now);
        }
        is_admitted
    }

    /// Records that the server accepted a request, even if the response is an error.
    pub fn record_accepted(&mut self, now: Timestamp) {
        self.record(1, now);
    }

    /// Records that the server refused a request, or did not respond.
    pub fn record_refused(&mut self, now: Timestamp) {
        self.record(0, now);
    }

    fn record(&mut self, accepts: u64, now: Timestamp) {
        let request = WindowCounts {
            requests: 1,
            events: accepts,
        };
        self.window.add(request, now);
    }
}

/// Returns `max(0, (requests - k * accepts) / (requests + 1))`.
fn rejection_probability(counts: WindowCounts, k: Fraction) -> Fraction {
    let WindowCounts {
        requests,
        events: accepts,
    } = counts;
    // Multiply the numerator and the denominator of the formula by the denominator of K, so that
    // all numbers are integers.
    let expected = requests.saturating_mul(k.denominator);
    let accepted = accepts.saturating_mul(k.numerator);
    let probability = Fraction {
        numerator: expected.saturating_sub(accepted),
        denominator: requests.saturating_add(1).saturating_mul(k.denominator),
    };
    debug_assert!(
        probability.numerator < probability.denominator,
        "the rejection probability is always below 1, so some requests are sent as probes"
    );
    probability
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A reference implementation. The reference keeps a list of instants and calculates with exact
    /// fractions, but divides time into the same slots as [`RollingWindow`].
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
        fn the_formula_is_that_of_the_sre_book(
            num in 1..30_u32,
            den in 1..10_u32,
            seed: u64,
            steps in proptest::collection::vec((0..20_000_000_u64, any::<bool>()), 1..200),
        ) {
            let mut throttle = AdaptiveThrottle::new(num, den);
            let k = if num < den { (1, 1) } else { (num, den) };
            let mut naive = Naive::default();
            let mut now = Timestamp::from_micros(1_700_000_000_000_000);
            let mut rng = fastrand::Rng::with_seed(seed);
            for (wait, accepted) in steps {
                now = now.after(Span::from_micros(wait));
                let Fraction { numerator: above, denominator: below } =
                    rejection_probability(throttle.window.sum(now), throttle.k);
                prop_assert_eq!((u128::from(above), u128::from(below)), naive.rejection(now, k));
                let admitted = throttle.admit(now, &mut rng);
                naive.requests.push(now.as_micros());
                prop_assert!(admitted || above > 0, "a rejection of probability 0");
                if admitted && accepted {
                    throttle.record_accepted(now);
                    naive.accepts.push(now.as_micros());
                } else if admitted {
                    throttle.record_refused(now);
                }
            }
        }
    }

    /// The server can accept only a tenth of the requests that the caller makes. The client then
    /// sends K requests for each accepted request.
    #[test]
    fn requests_settle_at_k_times_accepts() {
        let (mut throttle, mut rng) = (AdaptiveThrottle::default(), fastrand::Rng::with_seed(3));
        let (mut sent, mut accepted) = (0_u64, 0_u64);
        let mut now = Timestamp::from_micros(1_700_000_000_000_000);
        for second in 0..600_u64 {
            now = now.after(Span::from_secs(1));
            let admitted: u64 = (0..100)
                .map(|_| u64::from(throttle.admit(now, &mut rng)))
                .sum();
            // The simulated server has capacity for ten requests per second.
            (0..admitted.min(10)).for_each(|_| throttle.record_accepted(now));
            (10..admitted).for_each(|_| throttle.record_refused(now));
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
            assert!(throttle.admit(now, &mut rng));
            throttle.record_accepted(now);
        }
    }
}
