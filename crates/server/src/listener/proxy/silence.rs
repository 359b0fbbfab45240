//! The read timeout of a body: an idle timeout, and a minimum average rate.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;

use crate::{config::MinRate, net::LazyTimer};

/// The read timeout of a body. Only time spent waiting for the sender counts, so a sender is not
/// blamed for a slow receiver.
#[derive(Debug)]
pub(super) struct Silence {
    longest: Duration,
    pace: Option<Pace>,
    /// Created at the first wait.
    timer: Option<Box<LazyTimer>>,
    is_awaited: bool,
}

/// A minimum average rate.
#[derive(Debug)]
struct Pace {
    least: MinRate,
    bytes: u64,
    waited: Duration,
    since: Option<Instant>,
}

impl Pace {
    /// Returns how much longer the reader may wait: the time that the bytes so far take at the
    /// minimum rate, plus the grace period, less the time already waited.
    fn left(&self) -> Duration {
        let micros = u128::from(self.bytes) * 1_000_000 / u128::from(self.least.bytes_per_second);
        let micros = u64::try_from(micros).unwrap_or(u64::MAX);
        let earned = Duration::from_micros(micros).saturating_add(self.least.grace);
        earned.saturating_sub(self.waited)
    }
}

impl Silence {
    /// Creates an idle timeout of `longest`.
    pub(super) const fn new(longest: Duration) -> Self {
        Self {
            longest,
            pace: None,
            timer: None,
            is_awaited: false,
        }
    }

    /// Creates an idle timeout of `longest` with a minimum average rate.
    pub(super) fn paced(longest: Duration, least: Option<MinRate>) -> Self {
        let pace = least.map(|least| Pace {
            least,
            bytes: 0,
            waited: Duration::ZERO,
            since: None,
        });
        Self {
            pace,
            ..Self::new(longest)
        }
    }

    /// Records that `bytes` have arrived, and ends the current wait.
    pub(super) fn broken(&mut self, bytes: usize) {
        if let Some(pace) = &mut self.pace {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            pace.bytes = pace.bytes.saturating_add(bytes);
            if let Some(since) = pace.since.take() {
                pace.waited = pace.waited.saturating_add(since.elapsed());
            }
        }
        self.is_awaited = false;
    }

    /// Waits for the timeout; call it while nothing has arrived. The first call begins the wait.
    pub(super) fn poll_too_long(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_awaited {
            self.is_awaited = true;
            let longest = match &mut self.pace {
                None => self.longest,
                Some(pace) => {
                    pace.since = Some(Instant::now());
                    self.longest.min(pace.left())
                }
            };
            match &mut self.timer {
                Some(timer) => timer.set(longest),
                None => self.timer = Some(LazyTimer::new(longest).into()),
            }
        }
        match &mut self.timer {
            Some(timer) => timer.poll_due(cx),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{sleep, timeout};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_meets_its_minimum_rate_on_average() {
        let least = MinRate {
            bytes_per_second: 10,
            grace: Duration::from_secs(5),
        };
        for (bytes, every, lasts) in [(100, 4, None), (10, 2, Some(11)), (0, 1, Some(6))] {
            let start = Instant::now();
            let mut silence = Silence::paced(Duration::from_secs(60), Some(least));
            let mut pieces = 0;
            let is_too_slow = loop {
                let too_long = poll_fn(|cx| silence.poll_too_long(cx));
                if timeout(Duration::from_secs(every), too_long).await.is_ok() {
                    break true;
                }
                pieces += 1;
                if pieces == 100 {
                    break false;
                }
                silence.broken(bytes);
                // The reader is busy elsewhere; this time does not count.
                sleep(Duration::from_secs(7)).await;
            };
            let waited = start.elapsed().as_secs() - pieces * 7;
            assert_eq!(is_too_slow, lasts.is_some(), "{bytes} every {every}");
            assert!(lasts.is_none_or(|lasts| waited <= lasts), "{waited}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_fast_body_cannot_stall_for_long() {
        let start = Instant::now();
        let mut silence = Silence::paced(Duration::from_secs(60), Some(MinRate::default()));
        silence.broken(1 << 30);
        poll_fn(|cx| silence.poll_too_long(cx)).await;
        assert_eq!(start.elapsed().as_secs(), 60);
    }
}
