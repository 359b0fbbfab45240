//! The pace that a server asks for: no requests until an instant, or a number of requests until an
//! instant.

use tidegate_core::{Span, Timestamp};

use crate::{Standing, Wait};

/// A pace, set by the server's responses.
///
/// ```text
///   no advice ──▶ unlimited
///   advice until t ──▶ spaced, or closed
///   t has passed ──▶ one probe, whose response brings new advice
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pace {
    closed_until: Timestamp,
    /// The spacing between requests that the last [`Standing`] results in.
    every: Span,
    /// Until when the advice holds; the epoch if there is none.
    said_until: Timestamp,
    /// Until when requests wait for the response to the probe.
    probing_until: Timestamp,
    last: Timestamp,
}

impl Pace {
    /// The longest time that is honored, so that one response cannot stop all requests for good.
    pub(crate) const MAX_CLOSED: Span = Span::from_secs(86_400);
    /// How long other requests wait for the response to the probe.
    pub(crate) const PROBE: Span = Span::from_secs(1);

    /// Returns when the next request may be sent, if no response arrives before.
    pub(crate) fn next(&self, now: Timestamp) -> Timestamp {
        // The spacing does not apply beyond the time that it was computed for.
        let spaced = self.last.after(self.every).min(self.said_until);
        let held = self.closed_until.max(self.probing_until);
        spaced.max(held).max(now)
    }

    /// Admits a request, or returns how long it has to wait.
    pub(crate) fn take(&mut self, now: Timestamp) -> Result<(), Span> {
        let next = self.next(now);
        if next > now {
            return Err(next.since(now));
        }
        self.last = now;
        if self.said_until > Timestamp::default() && self.said_until <= now {
            self.probing_until = now.after(Self::PROBE);
        }
        Ok(())
    }

    /// Returns how long the server still wants no requests.
    pub(crate) fn closed_for(&self, now: Timestamp) -> Span {
        self.closed_until.max(now).since(now)
    }

    /// Records that a response has arrived, with or without advice, so that no request waits for it
    /// any longer.
    pub(crate) fn hear(&mut self, now: Timestamp) {
        self.probing_until = Timestamp::default();
        if self.said_until <= now {
            self.said_until = Timestamp::default();
        }
    }

    /// Records that the server wants no requests for a time.
    pub(crate) fn close(&mut self, wait: Wait, now: Timestamp) {
        if let Wait::After(span) = wait {
            let until = now.after(span.min(Self::MAX_CLOSED));
            self.closed_until = self.closed_until.max(until);
            self.said_until = self.said_until.max(until);
        }
    }

    /// Records that the server accepts `remaining` requests until the reset. They are spread over
    /// that time; zero closes the pace.
    pub(crate) fn spread(&mut self, standing: Standing, now: Timestamp) {
        let Standing {
            remaining,
            reset_after,
        } = standing;
        if remaining == 0 {
            return self.close(Wait::After(reset_after), now);
        }
        let reset_after = reset_after.min(Self::MAX_CLOSED);
        self.every = Span::from_micros(reset_after.as_micros().div_ceil(remaining));
        self.said_until = self.closed_until.max(now.after(reset_after));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000).after(Span::from_millis(millis))
    }

    fn standing(remaining: u64, secs: u64) -> Standing {
        Standing {
            remaining,
            reset_after: Span::from_secs(secs),
        }
    }

    #[test]
    fn remaining_quota_is_spread_and_no_quota_is_waited_for() {
        let mut pace = Pace::default();
        assert_eq!(
            (pace.take(at(0)), pace.take(at(0))),
            (Ok(()), Ok(())),
            "no advice yet"
        );
        pace.spread(standing(4, 2), at(0));
        assert_eq!(pace.take(at(0)), Err(Span::from_millis(500)));
        assert_eq!(pace.take(at(500)), Ok(()));
        pace.spread(standing(0, 3), at(500));
        assert_eq!(pace.take(at(1_000)), Err(Span::from_millis(2_500)));
        assert_eq!(pace.take(at(3_500)), Ok(()));
        let others = pace.take(at(3_500));
        assert_eq!(others, Err(Pace::PROBE), "one probe is sent first");
        pace.hear(at(3_600));
        assert_eq!(
            (pace.take(at(3_600)), pace.take(at(3_600))),
            (Ok(()), Ok(()))
        );
    }

    #[test]
    fn no_advice_blocks_a_server_forever() {
        let mut pace = Pace::default();
        pace.close(Wait::After(Span::from_micros(u64::MAX)), at(0));
        assert_eq!(pace.next(at(0)), at(86_400_000));
        pace.close(Wait::Never, at(0));
        pace.spread(standing(1, u64::MAX / 2_000_000), at(86_400_000));
        assert!(pace.next(at(86_400_000)) <= at(2 * 86_400_000));
    }

    proptest! {
        /// If `r` requests remain until `t`, at most `r` are sent before `t`, however they arrive.
        #[test]
        fn no_more_requests_are_sent_than_remain(
            remaining in 0..50_u64,
            secs in 1..60_u64,
            steps in proptest::collection::vec(0..500_000_u64, 1..300),
        ) {
            let mut pace = Pace::default();
            pace.take(at(0)).unwrap();
            pace.spread(standing(remaining, secs), at(0));
            let (mut now, mut gone) = (at(0), 0);
            for step in steps {
                now = now.after(Span::from_micros(step));
                if now < at(secs * 1_000) && pace.take(now).is_ok() {
                    gone += 1;
                }
            }
            prop_assert!(gone <= remaining, "{gone}");
        }
    }
}
