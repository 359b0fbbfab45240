//! A request passed to one of the addresses of its upstream: the one with the least to do, and another where it takes nothing.

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

/// How many connections that had been kept a request may find closed in all. After that, one is enough to try the next address.
const MOST_STALE: u32 = 3;

/// By what a request is passed on, from beginning to end.
pub(super) struct Passing {
    pub(super) current: Arc<Current>,
    worker: usize,
    /// The address that was asked last, by its place; none is beyond them all.
    last: AtomicUsize,
}

/// How far a request has come before anything was waited for.
pub(super) enum Asked {
    /// It is being sent, on a connection that was kept.
    On(Lease, usize),
    /// There was none, or none that takes one request at a time.
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

    /// The address of `upstream` that was asked last.
    pub(super) fn asked_last<'u>(&self, upstream: &'u Upstream) -> Option<&'u Arc<Address>> {
        upstream.addresses.get(self.last.load(Ordering::Relaxed))
    }

    /// Sends `request` for `client` to the address with the least to do, if a connection that takes one at a time has been kept there.
    pub(super) fn ask_at_once(
        &self,
        upstream: &Upstream,
        request: Request<Upload>,
        client: &Forwarding,
    ) -> Asked {
        let times = &self.current.settings.timeouts;
        let turn = upstream.turn();
        // One that takes many requests has to be asked whether it has room, and perhaps to be made.
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

    /// The head of the answer to what was asked for `client`, and the connection on which it came.
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
        // Seldom, and much larger than the rest of what a request is while it waits.
        Box::pin(self.ask((upstream, turn), errand, client, progress)).await
    }

    /// Asks addresses of `upstream`, the one with the least to do first, until one has been sent the request.
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
            if std::mem::replace(&mut is_again, true) {
                upstream.tally.count_retry(self.worker);
            }
            let load = address.enter();
            let is_last = upstream.least_loaded(turn, tried | 1 << at).is_none();
            let linked = patience.spend(is_last, |until| self.link(address, &errand, until));
            let linked = linked.await;
            // Where there is no connection to be had, nobody was asked.
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
            // Of a kept connection it was to be expected; a new one that takes nothing is no address to ask.
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

    /// A connection to `address`, and whether it was there already. Where one that takes one request at a time ended under `errand`, the next is
    /// a new one.
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
        // Who makes it knows whose fault that is.
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

    /// The request for another connection, if it may be sent on one; else what it came to, which whoever was asked is held responsible for if it
    /// was his doing.
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
        // Where the client's body broke off, that is why the upstream gave no answer.
        let most = self.current.settings.max_body.unwrap_or(u64::MAX);
        Err(progress.failure(most).unwrap_or_else(|| {
            if let Some(refusal) = refusal {
                note_failure(lease.load.address(), refusal);
            }
            refusal.unwrap_or(Refusal::BadAnswer)
        }))
    }

    /// A connection for this request, which goes by what is in force for it.
    fn lease(&self, mut link: Box<Link>, load: Load) -> Lease {
        link.go_by(&self.current.settings);
        Lease {
            link,
            load,
            worker: self.worker,
        }
    }
}

/// The time that all tries to connect may take together, so that a row of addresses at which nobody answers holds no request
/// longer than one does.
struct Patience {
    whole: Duration,
    left: Duration,
}

impl Patience {
    const fn new(whole: Duration) -> Self {
        Self { whole, left: whole }
    }

    /// Tries until the time is over: half of what is left while there are others to try. `None` if there is too little left.
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
    async fn a_row_of_silent_addresses_takes_no_longer_than_one() {
        let start = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(8));
        let mut tries = 0;
        while patience.spend(false, sleep_until).await.is_some() {
            tries += 1;
        }
        assert_eq!((tries, start.elapsed().as_secs()), (3, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_address_has_all_the_time_that_is_left() {
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
