//! Paces requests as a server demands. A server can tell its clients to send no requests until an
//! instant, or only a limited number of requests until an instant.

use tidegate_core::{Span, Timestamp};

use crate::{QuotaStatus, Wait};

/// A pacer, which spaces requests according to the advice in the server's responses.
///
/// ```text
///   no advice ──▶ unlimited
///   advice until t ──▶ spaced, or closed
///   t has passed ──▶ one probe, whose response brings new advice
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pacer {
    closed_until: Timestamp,
    /// The spacing between requests. The spacing is computed from the last [`QuotaStatus`].
    spacing: Span,
    /// The end of the period to which the advice applies. Without advice, the end is the epoch.
    advice_until: Timestamp,
    /// The instant until which requests wait for the response to the probe.
    probing_until: Timestamp,
    last_sent: Timestamp,
}

impl Pacer {
    /// The longest wait time that is honoured. Without a maximum, one response could stop all
    /// requests permanently.
    pub(crate) const MAX_CLOSED: Span = Span::from_secs(86_400);
    /// The maximum time for which other requests wait for the response to a probe.
    pub(crate) const PROBE: Span = Span::from_secs(1);

    /// Returns the earliest time at which the next request may be sent. A later response may change
    /// the returned time.
    pub(crate) fn next_at(&self, now: Timestamp) -> Timestamp {
        // The spacing applies only until `advice_until`.
        let spaced = self.last_sent.after(self.spacing).min(self.advice_until);
        let blocked_until = self.closed_until.max(self.probing_until);
        spaced.max(blocked_until).max(now)
    }

    /// Admits a request, or returns the time that the request has to wait.
    pub(crate) fn try_admit(&mut self, now: Timestamp) -> Result<(), Span> {
        let next = self.next_at(now);
        if next > now {
            return Err(next.since(now));
        }
        self.last_sent = now;
        // The first request after the end of the advice is the probe. Until the response to the
        // probe arrives, the limit is unknown, so other requests wait.
        if self.advice_until > Timestamp::default() && self.advice_until <= now {
            self.probing_until = now.after(Self::PROBE);
        }
        Ok(())
    }

    /// Returns the time until the server accepts requests again; zero if it accepts requests now.
    pub(crate) fn closed_for(&self, now: Timestamp) -> Span {
        self.closed_until.max(now).since(now)
    }

    /// Records that a response has arrived, with or without advice. After this call, requests do
    /// not wait for the response to a probe.
    pub(crate) fn record_response(&mut self, now: Timestamp) {
        self.probing_until = Timestamp::default();
        if self.advice_until <= now {
            self.advice_until = Timestamp::default();
        }
    }

    /// Records that the server accepts no requests until `wait` has elapsed.
    pub(crate) fn close(&mut self, wait: Wait, now: Timestamp) {
        // `Wait::Never` applies only to the refused request, so other requests may still be sent.
        if let Wait::After(span) = wait {
            let until = now.after(span.min(Self::MAX_CLOSED));
            self.closed_until = self.closed_until.max(until);
            self.advice_until = self.advice_until.max(until);
        }
    }

    /// Records that the server accepts `remaining` requests until the reset. The pacer spreads the
    /// remaining requests over the time until the reset. If `remaining` is zero, the pacer is
    /// closed until the reset.
    pub(crate) fn spread(&mut self, quota: QuotaStatus, now: Timestamp) {
        let QuotaStatus {
            remaining,
            reset_after,
        } = quota;
        if remaining == 0 {
            return self.close(Wait::After(reset_after), now);
        }
        let reset_after = reset_after.min(Self::MAX_CLOSED);
        self.spacing = Span::from_micros(reset_after.as_micros().div_ceil(remaining));
        self.advice_until = self.closed_until.max(now.after(reset_after));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000).after(Span::from_millis(millis))
    }

    fn quota(remaining: u64, secs: u64) -> QuotaStatus {
        QuotaStatus {
            remaining,
            reset_after: Span::from_secs(secs),
        }
    }

    #[test]
    fn remaining_quota_is_spread_and_no_quota_is_waited_for() {
        let mut pacer = Pacer::default();
        assert_eq!(
            (pacer.try_admit(at(0)), pacer.try_admit(at(0))),
            (Ok(()), Ok(())),
            "no advice yet"
        );
        pacer.spread(quota(4, 2), at(0));
        assert_eq!(pacer.try_admit(at(0)), Err(Span::from_millis(500)));
        assert_eq!(pacer.try_admit(at(500)), Ok(()));
        pacer.spread(quota(0, 3), at(500));
        assert_eq!(pacer.try_admit(at(1_000)), Err(Span::from_millis(2_500)));
        assert_eq!(pacer.try_admit(at(3_500)), Ok(()));
        let others = pacer.try_admit(at(3_500));
        assert_eq!(others, Err(Pacer::PROBE), "one probe is sent first");
        pacer.record_response(at(3_600));
        assert_eq!(
            (pacer.try_admit(at(3_600)), pacer.try_admit(at(3_600))),
            (Ok(()), Ok(()))
        );
    }

    #[test]
    fn no_advice_blocks_a_server_forever() {
        let mut pacer = Pacer::default();
        pacer.close(Wait::After(Span::from_micros(u64::MAX)), at(0));
        assert_eq!(pacer.next_at(at(0)), at(86_400_000));
        pacer.close(Wait::Never, at(0));
        pacer.spread(quota(1, u64::MAX / 2_000_000), at(86_400_000));
        assert!(pacer.next_at(at(86_400_000)) <= at(2 * 86_400_000));
    }

    proptest! {
        /// If `r` requests remain until `t`, at most `r` requests are sent before `t`. The limit on
        /// the number of requests holds whenever the requests arrive.
        #[test]
        fn no_more_requests_are_sent_than_remain(
            remaining in 0..50_u64,
            secs in 1..60_u64,
            steps in proptest::collection::vec(0..500_000_u64, 1..300),
        ) {
            let mut pacer = Pacer::default();
            pacer.try_admit(at(0)).unwrap();
            pacer.spread(quota(remaining, secs), at(0));
            let (mut now, mut gone) = (at(0), 0);
            for step in steps {
                now = now.after(Span::from_micros(step));
                if now < at(secs * 1_000) && pacer.try_admit(now).is_ok() {
                    gone += 1;
                }
            }
            prop_assert!(gone <= remaining, "{gone}");
        }
    }
}
