//! Limits the number of interim responses (1xx) to one request, for HTTP/1.1 and HTTP/2 upstreams.
//!
//! Some services send a `102 Processing` every few seconds while they work, or a few `103 Early
//! Hints`. The proxy reads and drops interim responses. Without a limit, an upstream that sends
//! only interim responses could keep a worker busy until `timeouts.head` expires.

use std::time::Duration;

use tokio::time::Instant;

/// The maximum number of interim responses in a burst. One more interim response is allowed every
/// [`REFILL_INTERVAL`].
pub(super) const MAX_INTERIM_RESPONSES: u32 = 100;

const REFILL_INTERVAL: Duration = Duration::from_secs(1);

/// The number of interim responses that one request may still receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct InterimAllowance {
    left: u32,
    /// The time when `left` was last refilled; `None` before the first interim response.
    refilled: Option<Instant>,
}

/// The error for an upstream that sends too many interim responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the upstream sent more than {MAX_INTERIM_RESPONSES} interim responses (1xx) before the final response"
)]
pub(super) struct TooManyInterim;

impl InterimAllowance {
    pub(super) const FULL: Self = Self {
        left: MAX_INTERIM_RESPONSES,
        refilled: None,
    };

    /// Counts an interim response that arrived at `now`.
    pub(super) fn spend(&mut self, now: Instant) -> Result<(), TooManyInterim> {
        let refilled = self.refilled.get_or_insert(now);
        while self.left < MAX_INTERIM_RESPONSES && now - *refilled >= REFILL_INTERVAL {
            *refilled += REFILL_INTERVAL;
            self.left += 1;
        }
        if self.left == MAX_INTERIM_RESPONSES {
            *refilled = now;
        }
        self.left = self.left.checked_sub(1).ok_or(TooManyInterim)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates one interim response every `interval`, and returns the number of responses before
    /// the first refused one.
    fn admitted(allowance: &mut InterimAllowance, from: Instant, interval: Duration) -> u32 {
        (0..10_000)
            .take_while(|number| allowance.spend(from + *number * interval).is_ok())
            .fold(0, |count, _| count + 1)
    }

    #[test]
    fn a_burst_is_bounded_and_time_refills_the_allowance() {
        let (start, mut allowance) = (Instant::now(), InterimAllowance::FULL);
        assert_eq!(admitted(&mut allowance, start, Duration::ZERO), 100);
        let later = start + Duration::from_millis(2_900);
        assert_eq!(admitted(&mut allowance, later, Duration::ZERO), 2);
        let much_later = start + Duration::from_secs(3_600);
        assert_eq!(admitted(&mut allowance, much_later, Duration::ZERO), 100);
        // At 2 interim responses per second and a refill of 1 per second, the burst lasts for twice
        // its number of responses.
        let mut allowance = InterimAllowance::FULL;
        let twice = admitted(&mut allowance, start, REFILL_INTERVAL / 2);
        assert!((190..=210).contains(&twice), "{twice}");
    }

    #[test]
    fn a_long_job_may_report_progress_for_as_long_as_it_takes() {
        let mut allowance = InterimAllowance::FULL;
        let every = Duration::from_secs(5);
        assert_eq!(admitted(&mut allowance, Instant::now(), every), 10_000);
    }
}
