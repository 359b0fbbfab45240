//! A queue that sends later: in order, bounded, and at the pace that the server sets.

use super::{Call, Guard, LaneSettings, QueueLayer, lane::Lane};
use crate::{Advice, Clock, Error, host::PerHost, retry::Seen};

/// What a queue makes of a server that says how much is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pacing {
    /// So many more until then are spread over that time, and nothing left is waited for. Servers speak in whole seconds: one
    /// that allows ten in 100 ms says ten in 1 s, and is asked so. For such limits rather take a
    /// self-throttle with the limit itself.
    #[default]
    Spread,
    /// Nothing left is waited for, and otherwise all is sent at once.
    Burst,
    /// Only refusals are waited for.
    Off,
}

/// A queue for each host: what must not be sent now waits for its turn, in the order in which it came.
///
/// What must wait is what the server said: not before then (any status with `Retry-After` and its like), or so many more until
/// then. When that time is over one goes first, and the others wait for its answer (for a second, if it does not come). It does not send again what was refused; put it inside of a [`Retry`](crate::Retry) for that, which then need not wait for
/// itself alone.
#[derive(Debug)]
pub struct QueueGuard {
    hosts: PerHost<Lane>,
    pacing: Pacing,
    clock: Clock,
}

impl QueueLayer {
    /// Queues of this size, and this pace.
    #[must_use]
    pub fn new(settings: LaneSettings, pacing: Pacing) -> Self {
        Self::on(settings, pacing, Clock::system())
    }

    /// The same, with the time from `clock`.
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
