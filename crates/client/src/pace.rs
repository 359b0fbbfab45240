//! How fast a server wants to be asked, by what it says: not at all until then, or so many more until then.

use tidegate_core::{Span, Timestamp};

use crate::{Standing, Wait};

/// A pace that answers set.
///
/// ```text
///   nothing said ──▶ all go        said, until t ──▶ spaced, or none        t is over ──▶ one goes, and its answer says more
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pace {
    closed_until: Timestamp,
    /// The spacing that the last standing comes to.
    every: Span,
    /// Until when what was said holds; the epoch where nothing was.
    said_until: Timestamp,
    /// Until when an answer is waited for that says how things stand now.
    probing_until: Timestamp,
    last: Timestamp,
}

impl Pace {
    /// The longest that is believed: what a server says once should not shut it off for good.
    pub(crate) const MAX_CLOSED: Span = Span::from_secs(86_400);
    /// How long the others wait for the answer to the one that went first.
    pub(crate) const PROBE: Span = Span::from_secs(1);

    /// When the next request may go, if nothing else is learnt.
    pub(crate) fn next(&self, now: Timestamp) -> Timestamp {
        // Nobody has to keep a spacing beyond the time that it was meant for.
        let spaced = self.last.after(self.every).min(self.said_until);
        let held = self.closed_until.max(self.probing_until);
        spaced.max(held).max(now)
    }

    /// Lets a request go, or says how long it has to wait.
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

    /// How long the server wants to be left alone yet.
    pub(crate) fn closed_for(&self, now: Timestamp) -> Span {
        self.closed_until.max(now).since(now)
    }

    /// An answer has come, whatever it says: nobody waits for it any more.
    pub(crate) fn hear(&mut self, now: Timestamp) {
        self.probing_until = Timestamp::default();
        if self.said_until <= now {
            self.said_until = Timestamp::default();
        }
    }

    /// The server wants to be left alone.
    pub(crate) fn close(&mut self, wait: Wait, now: Timestamp) {
        if let Wait::After(span) = wait {
            let until = now.after(span.min(Self::MAX_CLOSED));
            self.closed_until = self.closed_until.max(until);
            self.said_until = self.said_until.max(until);
        }
    }

    /// The server takes so many more until then: none closes it, some are spread over the time.
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
    fn what_is_left_is_spread_and_nothing_left_is_waited_for() {
        let mut pace = Pace::default();
        assert_eq!(
            (pace.take(at(0)), pace.take(at(0))),
            (Ok(()), Ok(())),
            "nothing was said yet"
        );
        pace.spread(standing(4, 2), at(0));
        assert_eq!(pace.take(at(0)), Err(Span::from_millis(500)));
        assert_eq!(pace.take(at(500)), Ok(()));
        pace.spread(standing(0, 3), at(500));
        assert_eq!(pace.take(at(1_000)), Err(Span::from_millis(2_500)));
        assert_eq!(pace.take(at(3_500)), Ok(()));
        let others = pace.take(at(3_500));
        assert_eq!(others, Err(Pace::PROBE), "one goes first");
        pace.hear(at(3_600));
        assert_eq!(
            (pace.take(at(3_600)), pace.take(at(3_600))),
            (Ok(()), Ok(()))
        );
    }

    #[test]
    fn no_server_shuts_itself_off_for_good() {
        let mut pace = Pace::default();
        pace.close(Wait::After(Span::from_micros(u64::MAX)), at(0));
        assert_eq!(pace.next(at(0)), at(86_400_000));
        pace.close(Wait::Never, at(0));
        pace.spread(standing(1, u64::MAX / 2_000_000), at(86_400_000));
        assert!(pace.next(at(86_400_000)) <= at(2 * 86_400_000));
    }

    proptest! {
        /// After `r` more until `t` was said, no more than r go before t, however they come.
        #[test]
        fn no_more_go_than_were_said_to_be_left(
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
