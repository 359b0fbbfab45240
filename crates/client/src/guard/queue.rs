//! A queue that delays requests: in order, bounded, and at the pace that the server sets.

use super::{Call, Guard, LaneSettings, QueueLayer, lane::Lane};
use crate::{Advice, Clock, Error, host::PerHost, retry::Seen};

/// How a queue uses the remaining requests that a server reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pacing {
    /// Spreads the remaining requests over the time until the reset, and waits for it if none
    /// remain. Servers report whole seconds: a limit of ten per 100 ms is reported as ten per 1 s,
    /// and is used at that rate. For such limits, a [`ThrottleLayer`](crate::ThrottleLayer) with
    /// the limit itself is better.
    #[default]
    Spread,
    /// Waits for the reset if no requests remain, and otherwise sends everything at once.
    Burst,
    /// Waits only after refusals.
    Off,
}

/// A queue per host. Requests that must not be sent yet wait in order of arrival.
///
/// The server determines the wait: not before an instant (any status with `Retry-After` or an
/// equivalent), or a number of requests until an instant. After that time one request is sent
/// first, and the others wait for its response, at most one second. Refused requests are not sent
/// again. Put the queue inside of a [`Retry`](crate::Retry) for that, so that retries wait in the
/// same queue.
#[derive(Debug)]
pub struct QueueGuard {
    hosts: PerHost<Lane>,
    pacing: Pacing,
    clock: Clock,
}

impl QueueLayer {
    /// Creates a layer with queues of this size and this pacing.
    #[must_use]
    pub fn new(settings: LaneSettings, pacing: Pacing) -> Self {
        Self::on(settings, pacing, Clock::system())
    }

    /// Does the same with the time from `clock`.
    #[must_use]
    pub fn on(settings: LaneSettings, pacing: Pacing, clock: Clock) -> Self {
        let guard = QueueGuard {
            hosts: PerHost::new(move || Lane::new(settings)),
            pacing,
            clock,
        };
        Self::by(guard, clock)
    }
}

impl Guard for QueueGuard {
    type Pass = ();

    async fn enter(&self, call: Call<'_>) -> Result<(), Error> {
        let lane = self.hosts.of(call.host);
        lane.pass(&self.clock, std::future::ready(Ok(()))).await
    }

    async fn leave(&self, call: Call<'_>, (): (), _: Seen<'_>, advice: &Advice) {
        let now = self.clock.now();
        self.hosts.of(call.host).learn(|pace| {
            pace.hear(now);
            if let Some(wait) = advice.wait {
                pace.close(wait, now);
            }
            match (advice.standing, self.pacing) {
                (Some(standing), Pacing::Spread) => pace.spread(standing, now),
                (Some(standing), Pacing::Burst) if standing.remaining == 0 => {
                    pace.spread(standing, now);
                }
                (Some(_) | None, _) => {}
            }
        });
    }
}
