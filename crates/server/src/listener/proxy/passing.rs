//! Load balancing and retries: sends a request to the endpoint with the fewest requests in flight,
//! and to another one if that endpoint does not take it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hyper::{Request, Response};
use tokio::time::{Duration, Instant, timeout_at};

use super::{
    address::{Address, Load},
    body::{Progress, Source, Upload},
    forwarded::Forwarding,
    health::{note_answer, note_failure},
    lease::Lease,
    link::{Errand, Link, Unanswered},
    live::Current,
    refusal::Refusal,
    upstreams::Upstream,
};

/// How many stale pooled connections a request may find, over all endpoints, before one more rules
/// out its endpoint. Concerns HTTP/2 only: after a stale HTTP/1.1 connection, the next one is new.
const MOST_STALE: u32 = 3;

/// The load balancing state of one request. It keeps the settings that were in force when the
/// request came.
pub(super) struct Passing {
    pub(super) current: Arc<Current>,
    worker: usize,
    /// The index of the endpoint that was asked last; `usize::MAX` if there is none.
    last: AtomicUsize,
}

/// A request after the synchronous attempt to send it, with the round robin position it drew.
pub(super) enum Asked {
    /// It is being sent on a pooled connection.
    On(Lease, usize),
    /// There was no pooled connection, or the upstream speaks HTTP/2. The asynchronous path sends
    /// it.
    Later(Errand, usize),
}

impl Passing {
    pub(super) const fn new(current: Arc<Current>, worker: usize) -> Self {
        Self {
            current,
            worker,
            last: AtomicUsize::new(usize::MAX),
        }
    }

    /// Returns the endpoint of `upstream` that was asked last.
    pub(super) fn asked_last<'u>(&self, upstream: &'u Upstream) -> Option<&'u Arc<Address>> {
        upstream.addresses.get(self.last.load(Ordering::Relaxed))
    }

    /// Sends `request` for `client` to the least loaded endpoint if an HTTP/1.1 connection to it is
    /// idle in the pool.
    pub(super) fn ask_at_once(
        &self,
        upstream: &Upstream,
        request: Request<Upload>,
        client: &Forwarding,
    ) -> Asked {
        let times = &self.current.settings.timeouts;
        let turn = upstream.turn();
        // An HTTP/2 connection may be out of streams or may need to be opened first.
        if upstream.http2.is_some() {
            return Asked::Later(Errand::Whole(Box::new(request)), turn);
        }
        let now = Instant::now();
        let kept = upstream.least_loaded(turn, 0).and_then(|(at, address)| {
            let load = address.enter();
            let link = address.take(self.worker, times, now)?;
            Some((at, self.lease(link, load)))
        });
        let Some((at, mut lease)) = kept else {
            return Asked::Later(Errand::Whole(Box::new(request)), turn);
        };
        match lease.link.begin(request, client, times, now) {
            Ok(()) => {
                self.last.store(at, Ordering::Relaxed);
                Asked::On(lease, turn)
            }
            Err(request) => Asked::Later(Errand::Whole(request), turn),
        }
    }

    /// Returns the response head for the request `asked`, and the connection on which it came.
    /// Retries if that is safe.
    pub(super) async fn answer(
        &self,
        upstream: &Upstream,
        asked: Asked,
        client: &Forwarding,
        progress: &Progress,
    ) -> Result<(Response<Source>, Lease), Refusal> {
        let (errand, turn) = match asked {
            Asked::On(mut lease, turn) => {
                let times = &self.current.settings.timeouts;
                match lease.link.answer(progress, times).await {
                    Ok(answer) => {
                        note_answer(lease.load.address());
                        return Ok((answer, lease));
                    }
                    Err(unanswered) => {
                        let errand = self.unsent(unanswered, &lease, progress)?;
                        upstream.tally.count_retry(self.worker);
                        (errand, turn)
                    }
                }
            }
            Asked::Later(errand, turn) => (errand, turn),
        };
        // Rare path with a large future; box it to keep the common future small.
        Box::pin(self.ask((upstream, turn), errand, client, progress)).await
    }

    /// Tries the endpoints of `upstream`, the least loaded first, until one has answered or the
    /// request may not be sent again.
    async fn ask(
        &self,
        (upstream, turn): (&Upstream, usize),
        mut errand: Errand,
        client: &Forwarding,
        progress: &Progress,
    ) -> Result<(Response<Source>, Lease), Refusal> {
        let times = &self.current.settings.timeouts;
        let mut patience = Patience::new(times.connect);
        let (mut tried, mut refusal) = (0_u64, Refusal::Unreachable);
        let (mut is_again, mut stale) = (false, 0);
        while let Some((at, address)) = upstream.least_loaded(turn, tried) {
            // Every iteration but the first is a retry.
            if std::mem::replace(&mut is_again, true) {
                upstream.tally.count_retry(self.worker);
            }
            let load = address.enter();
            let is_last = upstream.least_loaded(turn, tried | 1 << at).is_none();
            let linked = patience.spend(is_last, |until| self.link(address, &errand, until));
            let linked = linked.await;
            // Without a connection attempt, the endpoint was not asked.
            if !matches!(linked, None | Some(Err(Refusal::Full | Refusal::Local))) {
                self.last.store(at, Ordering::Relaxed);
            }
            let (link, is_kept) = match linked {
                Some(Ok(linked)) => linked,
                Some(Err(problem)) => {
                    (tried, refusal) = (tried | 1 << at, problem);
                    continue;
                }
                None => return Err(refusal),
            };
            let mut lease = self.lease(link, load);
            match lease.link.ask(errand, client, progress, times).await {
                Ok(answer) => {
                    note_answer(address);
                    return Ok((answer, lease));
                }
                Err(unanswered) => errand = self.unsent(unanswered, &lease, progress)?,
            }
            // A pooled connection may be stale. A new connection that takes nothing means that the
            // endpoint is bad.
            stale += u32::from(is_kept);
            if !is_kept || stale > MOST_STALE {
                (tried, refusal) = (tried | 1 << at, Refusal::BadAnswer);
            }
            if !is_kept {
                note_failure(address, refusal);
            }
        }
        Err(refusal)
    }

    /// Returns a connection to `address`, and whether it came from the pool. If a pooled HTTP/1.1
    /// connection was closed under `errand`, the next one is new.
    async fn link(
        &self,
        address: &Arc<Address>,
        errand: &Errand,
        until: Instant,
    ) -> Result<(Box<Link>, bool), Refusal> {
        let times = &self.current.settings.timeouts;
        let take = || address.take(self.worker, times, Instant::now());
        if !matches!(errand, Errand::Written(_))
            && let Some(kept) = take()
        {
            return Ok((kept, true));
        }
        if !address.http2 {
            return Ok((self.make(address, until).await?, false));
        }
        let making = timeout_at(until, address.making(self.worker)).await;
        // The task that opens the connection records the failure for outlier detection.
        let _making = making.map_err(|_| Refusal::ConnectTimeout)?;
        if let Some(kept) = take() {
            return Ok((kept, true));
        }
        let link = self.make(address, until).await?;
        let shared = link.share(times).ok_or(Refusal::Full)?;
        address.keep(self.worker, link);
        Ok((Box::new(shared), false))
    }

    async fn make(&self, address: &Arc<Address>, until: Instant) -> Result<Box<Link>, Refusal> {
        let made = Link::make(address, &self.current.settings, until).await;
        made.map(Box::new)
            .inspect_err(|refusal| note_failure(address, *refusal))
    }

    /// Returns the request if it may be sent on another connection. Otherwise returns the error,
    /// and records it against the endpoint if the endpoint caused it.
    fn unsent(
        &self,
        unanswered: Unanswered,
        lease: &Lease,
        progress: &Progress,
    ) -> Result<Errand, Refusal> {
        let refusal = match unanswered {
            Unanswered::Unsent(errand) => return Ok(errand),
            Unanswered::Lost => None,
            Unanswered::Refused(refusal) => Some(refusal),
        };
        // If the client's body broke off, that is why the upstream gave no response.
        let most = self.current.settings.max_body.unwrap_or(u64::MAX);
        Err(progress.failure(most).unwrap_or_else(|| {
            if let Some(refusal) = refusal {
                note_failure(lease.load.address(), refusal);
            }
            refusal.unwrap_or(Refusal::BadAnswer)
        }))
    }

    /// Wraps `link` for this request and applies the settings in force for the request.
    fn lease(&self, mut link: Box<Link>, load: Load) -> Lease {
        link.go_by(&self.current.settings);
        Lease {
            link,
            load,
            worker: self.worker,
        }
    }
}

/// The connect timeout budget of a request, shared by all attempts. Several unresponsive endpoints
/// thus delay a request no longer than one does.
struct Patience {
    whole: Duration,
    left: Duration,
}

impl Patience {
    const fn new(whole: Duration) -> Self {
        Self { whole, left: whole }
    }

    /// Runs `attempt` with a deadline: all of the remaining budget for the last endpoint, otherwise
    /// half of it. Returns `None` if an eighth of the budget or less is left.
    async fn spend<T>(
        &mut self,
        is_last: bool,
        attempt: impl AsyncFnOnce(Instant) -> T,
    ) -> Option<T> {
        if self.left <= self.whole / 8 {
            return None;
        }
        let start = Instant::now();
        let tried = attempt(start + if is_last { self.left } else { self.left / 2 }).await;
        self.left = self.left.saturating_sub(start.elapsed());
        Some(tried)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep_until;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn several_unresponsive_endpoints_take_no_longer_than_one() {
        let start = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(8));
        let mut tries = 0;
        while patience.spend(false, sleep_until).await.is_some() {
            tries += 1;
        }
        assert_eq!((tries, start.elapsed().as_secs()), (3, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_endpoint_gets_all_remaining_time() {
        for others in 0..=2 {
            let start = Instant::now();
            let mut patience = Patience::new(Duration::from_secs(8));
            for at in 0..=others {
                assert!(patience.spend(at == others, sleep_until).await.is_some());
            }
            assert!(patience.spend(true, sleep_until).await.is_none());
            assert_eq!(start.elapsed().as_secs(), 8);
        }
    }
}
