//! A bounded queue, which delays requests and sends them in order, at the pace that the server
//! sets.

use super::{Guard, QueueLayer, QueueSettings, RequestInfo, wait_queue::WaitQueue};
use crate::{Advice, Error, TokioClock, per_host::PerHost, retry::AttemptOutcome};

/// How a queue uses the number of remaining requests that the server reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pacing {
    /// Spreads the remaining requests over the time until the reset. If no requests remain, waits
    /// for the reset.
    ///
    /// Servers report whole seconds. For example, a server reports a limit of ten per 100 ms as ten
    /// per 1 s, and the queue then sends ten requests per second. For a limit with a window below
    /// one second, a [`ThrottleLayer`](crate::ThrottleLayer) with the exact limit is better.
    #[default]
    Spread,
    /// Waits for the reset if no requests remain. If requests remain, sends requests immediately.
    Burst,
    /// Waits only after a refusal.
    Off,
}

/// A guard with a queue per host. Requests that must not be sent yet wait in order of arrival.
///
/// The server determines the wait in one of two ways. The server can tell the client to send no
/// requests before an instant, with `Retry-After` or an equivalent header in a response of any
/// status. Alternatively, the server can allow a number of requests until an instant. After that
/// instant, the queue first sends a single request. Later requests wait for the response to this
/// request, but for at most one second.
///
/// The queue does not send refused requests again. To retry refused requests, put the queue inside
/// a [`RetryLayer`](crate::RetryLayer), so that retries wait in the same queue.
#[derive(Debug)]
pub struct QueueGuard {
    hosts: PerHost<WaitQueue>,
    pacing: Pacing,
    clock: TokioClock,
}

impl QueueLayer {
    /// Creates a layer with a queue per host, with these settings and this pacing.
    #[must_use]
    pub fn new(settings: QueueSettings, pacing: Pacing) -> Self {
        Self::with_clock(settings, pacing, TokioClock::system())
    }

    /// Creates a layer with a queue per host, with these settings and this pacing. The layer reads
    /// the time from `clock`.
    #[must_use]
    pub fn with_clock(settings: QueueSettings, pacing: Pacing, clock: TokioClock) -> Self {
        let guard = QueueGuard {
            hosts: PerHost::new(move || WaitQueue::new(settings, clock)),
            pacing,
            clock,
        };
        Self::from_guard(guard, clock)
    }
}

impl Guard for QueueGuard {
    type Permit = ();

    async fn admit(&self, request: RequestInfo<'_>) -> Result<(), Error> {
        // The request waits only for its turn in the queue and for the pacer. No other admission is
        // needed.
        let admission = std::future::ready(Ok(()));
        self.hosts.get(request.host).wait(admission).await
    }

    async fn record(
        &self,
        request: RequestInfo<'_>,
        (): (),
        _: AttemptOutcome<'_>,
        advice: &Advice,
    ) {
        let now = self.clock.now();
        self.hosts.get(request.host).update_pacer(|pacer| {
            pacer.record_response(now);
            if let Some(wait) = advice.wait {
                pacer.close(wait, now);
            }
            match (advice.quota, self.pacing) {
                (Some(quota), Pacing::Spread) => pacer.spread(quota, now),
                (Some(quota), Pacing::Burst) if quota.remaining == 0 => {
                    pacer.spread(quota, now);
                }
                (Some(_) | None, _) => {}
            }
        });
    }
}
