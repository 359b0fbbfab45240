//! The timeouts of a body: an idle timeout, and a minimum average rate.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;

use super::LazyTimer;

/// The minimum transfer rate of a body, averaged over the time that the reader spends waiting for
/// data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinRate {
    /// `bytes_per_second`: 1 to 1 GiB; default 240.
    pub bytes_per_second: u64,
    /// `grace`: the time that a body may take in addition to its transfer time at the minimum rate;
    /// default 5 s.
    pub grace: Duration,
}

impl Default for MinRate {
    fn default() -> Self {
        Self {
            bytes_per_second: 240,
            grace: Duration::from_secs(5),
        }
    }
}

/// The timeouts of a body. A timeout runs only while the reader waits for the sender, so a slow
/// receiver does not cause a timeout.
#[derive(Debug)]
pub struct IdleTimeout {
    idle: Duration,
    rate: Option<RateTracker>,
    /// The timer, which is created at the first wait.
    timer: Option<Box<LazyTimer>>,
    is_waiting: bool,
}

/// A minimum average rate.
#[derive(Debug)]
struct RateTracker {
    min_rate: MinRate,
    bytes: u64,
    waited: Duration,
    since: Option<Instant>,
}

impl RateTracker {
    /// Returns the time that the reader may still wait. The time is the transfer time of the
    /// received bytes at the minimum rate, plus the grace period, minus the time already spent
    /// waiting.
    fn left(&self) -> Duration {
        let bytes_per_second = u128::from(self.min_rate.bytes_per_second.max(1));
        let micros = u128::from(self.bytes) * 1_000_000 / bytes_per_second;
        let micros = u64::try_from(micros).unwrap_or(u64::MAX);
        let earned = Duration::from_micros(micros).saturating_add(self.min_rate.grace);
        earned.saturating_sub(self.waited)
    }
}

impl IdleTimeout {
    /// Creates an idle timeout of `idle`.
    #[must_use]
    pub const fn new(idle: Duration) -> Self {
        Self {
            idle,
            rate: None,
            timer: None,
            is_waiting: false,
        }
    }

    /// Creates an idle timeout of `idle` with a minimum average rate.
    #[must_use]
    pub fn with_min_rate(idle: Duration, min_rate: Option<MinRate>) -> Self {
        let rate = min_rate.map(|min_rate| RateTracker {
            min_rate,
            bytes: 0,
            waited: Duration::ZERO,
            since: None,
        });
        Self {
            rate,
            ..Self::new(idle)
        }
    }

    /// Records that `bytes` have arrived, and ends the current wait.
    pub fn record_bytes(&mut self, bytes: usize) {
        if let Some(rate) = &mut self.rate {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            rate.bytes = rate.bytes.saturating_add(bytes);
            if let Some(since) = rate.since.take() {
                rate.waited = rate.waited.saturating_add(since.elapsed());
            }
        }
        self.is_waiting = false;
    }

    /// Returns ready once a timeout has passed. Call this function while no data has arrived. The
    /// first call begins the wait.
    pub fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_waiting {
            self.is_waiting = true;
            let idle = match &mut self.rate {
                None => self.idle,
                Some(rate) => {
                    rate.since = Some(Instant::now());
                    self.idle.min(rate.left())
                }
            };
            match &mut self.timer {
                Some(timer) => timer.set(idle),
                None => self.timer = Some(LazyTimer::new(idle).into()),
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
        let min_rate = MinRate {
            bytes_per_second: 10,
            grace: Duration::from_secs(5),
        };
        for (bytes, every, lasts) in [(100, 4, None), (10, 2, Some(11)), (0, 1, Some(6))] {
            let start = Instant::now();
            let mut idle_timeout =
                IdleTimeout::with_min_rate(Duration::from_secs(60), Some(min_rate));
            let mut pieces = 0;
            let is_too_slow = loop {
                let expired = poll_fn(|cx| idle_timeout.poll_expired(cx));
                if timeout(Duration::from_secs(every), expired).await.is_ok() {
                    break true;
                }
                pieces += 1;
                if pieces == 100 {
                    break false;
                }
                idle_timeout.record_bytes(bytes);
                // The timeout does not run during these seconds, because the reader is not waiting
                // for data.
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
        let mut idle_timeout =
            IdleTimeout::with_min_rate(Duration::from_secs(60), Some(MinRate::default()));
        idle_timeout.record_bytes(1 << 30);
        poll_fn(|cx| idle_timeout.poll_expired(cx)).await;
        assert_eq!(start.elapsed().as_secs(), 60);
    }
}
