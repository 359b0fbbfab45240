//! One address of an upstream: how busy it is, and the connections that wait there for the next request.
//!
//! Every worker has a pool of its own, because a connection lives on the worker that made it. The lock around a pool
//! is therefore free whenever its worker wants it, but for one case: a worker that may make no connection more takes an
//! idle one of another's away.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use rustls::ClientConfig;
use tokio::time::{Instant, sleep};

use super::{authorities::Connector, health::Health, link::Link};
use crate::config::{Ejection, HealthCheck, Scheme, Timeouts, Upstream, Url};

/// How often those who wait are looked at, at least: a reload may have them wait for less.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// An address of an upstream.
#[derive(Debug)]
pub(super) struct Address {
    pub(super) url: Url,
    /// Whether it is spoken to in HTTP/2.
    pub(super) http2: bool,
    tls: Option<Connector>,
    /// What the configuration says of it at the moment.
    terms: ArcSwap<Terms>,
    is_watched: AtomicBool,
    /// Whether the configuration has left it out, so that nothing is kept there any more.
    is_left: AtomicBool,
    /// For how long connections are kept, in microseconds.
    longest: AtomicU64,
    connections: AtomicUsize,
    in_flight: AtomicUsize,
    pools: Box<[Pool]>,
    pub(super) health: Health,
}

/// What an address has of its upstream, and a reload may change.
#[derive(Debug)]
pub(super) struct Terms {
    /// What the upstream is called.
    pub(super) name: Box<str>,
    /// The most connections at once.
    most: usize,
    pub(super) eject: Option<Ejection>,
    pub(super) health: Option<HealthCheck>,
}

impl Terms {
    pub(super) fn of(upstream: &Upstream) -> Self {
        Self {
            name: upstream.name.clone(),
            most: upstream.max_connections,
            // Where there is nobody else, whoever does not answer is asked all the same.
            eject: upstream.eject.filter(|_| upstream.urls.len() > 1),
            health: upstream.health.clone(),
        }
    }
}

/// What one worker has here.
#[derive(Debug, Default)]
struct Pool {
    kept: Mutex<Kept>,
    /// Held by who makes a connection that takes many requests, while the others wait for it.
    making: tokio::sync::Mutex<()>,
}

/// Connections that wait for a request, the latest last, and those that take more than they have.
#[derive(Debug, Default)]
struct Kept {
    idle: Vec<(Instant, Box<Link>)>,
    /// Whether somebody closes those that wait for too long.
    is_tended: bool,
}

impl Address {
    /// `url`, one of those of `upstream`, which has these `terms`, asked by so many workers.
    pub(super) fn new(
        url: Url,
        (upstream, terms): (&Upstream, &Arc<Terms>),
        tls: Option<&Connector>,
        workers: usize,
    ) -> Self {
        Self {
            tls: tls_of(&url, tls).cloned(),
            url,
            http2: upstream.http2,
            terms: ArcSwap::new(Arc::clone(terms)),
            is_watched: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            longest: AtomicU64::new(0),
            connections: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            pools: (0..workers).map(|_| Pool::default()).collect(),
            health: Health::default(),
        }
    }

    /// How it is connected to behind TLS, if it is.
    pub(super) fn tls(&self) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref().map(|tls| &tls.config)
    }

    /// What the configuration says of it at the moment.
    pub(super) fn terms(&self) -> Guard<Arc<Terms>> {
        self.terms.load()
    }

    /// Goes by these `terms` from now on, and keeps connections for so long at most.
    pub(super) fn go_by(&self, terms: &Arc<Terms>, longest: Duration) {
        self.terms.store(Arc::clone(terms));
        self.health.settle(terms);
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        self.longest.store(micros, Ordering::Relaxed);
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.longest.load(Ordering::Relaxed))
    }

    /// Closes what waits here, and keeps nothing any more. Whoever is on the way arrives.
    pub(super) fn leave(&self) {
        self.is_left.store(true, Ordering::SeqCst);
        for pool in &self.pools {
            drop(std::mem::take(&mut lock(pool).idle));
        }
    }

    /// Whether it is what `upstream` has at `url`, and `tls` believes whom it believes.
    pub(super) fn is_as(&self, url: &Url, upstream: &Upstream, tls: Option<&Connector>) -> bool {
        self.url == *url && self.http2 == upstream.http2 && self.tls.as_ref() == tls_of(url, tls)
    }

    /// Whether somebody is to ask it how it is whom nobody has told to yet; he is told by this.
    pub(super) fn begin_watch(&self) -> bool {
        self.terms().health.is_some() && !self.is_watched.swap(true, Ordering::SeqCst)
    }

    /// Nobody asks it how it is any more.
    pub(super) fn end_watch(&self) {
        self.is_watched.store(false, Ordering::SeqCst);
    }

    /// How many requests are on their way.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// How many connections there are, with those that wait.
    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// A connection that `worker` has kept until `now`: the one that was used last, or one that takes many requests.
    pub(super) fn take(&self, worker: usize, times: &Timeouts, now: Instant) -> Option<Box<Link>> {
        let mut kept = lock(self.pools.get(worker)?);
        if self.http2 {
            kept.idle.retain_mut(|(_, link)| !link.is_over());
            // The first that has room, so that those behind it come to rest.
            return kept.idle.iter_mut().find_map(|(since, link)| {
                let shared = link.share(times)?;
                *since = now;
                Some(Box::new(shared))
            });
        }
        // Those that the upstream has closed meanwhile, or is about to, are dropped on the way.
        std::iter::from_fn(|| kept.idle.pop()).find_map(|(since, mut link)| {
            let is_fresh = now.duration_since(since) < times.pool;
            (is_fresh && !link.is_over()).then_some(link)
        })
    }

    /// Leave for `worker` to make a connection that takes many requests: one at a time, so that who comes meanwhile has
    /// that one, and makes none.
    pub(super) async fn making(&self, worker: usize) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        Some(self.pools.get(worker)?.making.lock().await)
    }

    /// Keeps `link` for the next request of `worker`.
    pub(super) fn keep(self: &Arc<Self>, worker: usize, link: Box<Link>) {
        let Some(pool) = self.pools.get(worker) else {
            return;
        };
        let mut kept = lock(pool);
        if self.is_left.load(Ordering::SeqCst) {
            return;
        }
        kept.idle.push((Instant::now(), link));
        if !kept.is_tended {
            kept.is_tended = true;
            tokio::task::spawn_local(tend(Arc::downgrade(self), worker));
        }
    }

    /// Leave to make one connection more; `None` if there are as many as may be, and none of them waits.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Admitted> {
        let most = self.terms().most;
        let below = |count: usize| (count < most).then_some(count + 1);
        let step = || {
            self.connections
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, below)
        };
        if step().is_err() {
            let mut pools = self.pools.iter();
            let idle = pools.find_map(|pool| {
                let mut kept = lock(pool);
                // The one that has waited longest is used least.
                let at = kept.idle.iter().position(|(_, link)| !link.is_busy())?;
                Some(kept.idle.remove(at))
            });
            drop(idle?);
            step().ok()?;
        }
        Some(Admitted(Arc::clone(self)))
    }

    /// Counts a request as on its way for as long as the result lives.
    pub(super) fn enter(self: &Arc<Self>) -> Load {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        Load(Arc::clone(self))
    }

    /// Closes what has waited for too long; answers whether nothing is left to wait.
    fn tidy(&self, worker: usize) -> bool {
        let longest = self.longest();
        let Some(pool) = self.pools.get(worker) else {
            return true;
        };
        let mut kept = lock(pool);
        let now = Instant::now();
        kept.idle.retain_mut(|(since, link)| {
            !link.is_over() && (link.is_busy() || now.duration_since(*since) < longest)
        });
        kept.is_tended = !kept.idle.is_empty();
        !kept.is_tended
    }
}

/// Closes connections that wait for too long, until none waits any more.
async fn tend(address: std::sync::Weak<Address>, worker: usize) {
    while let Some(longest) = address.upgrade().map(|address| address.longest()) {
        sleep(longest.min(LOOK_EVERY)).await;
        if address.upgrade().is_none_or(|address| address.tidy(worker)) {
            return;
        }
    }
}

fn lock(pool: &Pool) -> MutexGuard<'_, Kept> {
    pool.kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How `url` is connected to, where that is behind TLS.
fn tls_of<'t>(url: &Url, tls: Option<&'t Connector>) -> Option<&'t Connector> {
    tls.filter(|_| url.scheme == Scheme::Https)
}

/// One of the connections that an address may have.
#[derive(Debug)]
pub(super) struct Admitted(Arc<Address>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that is on its way to an address.
#[derive(Debug)]
pub(super) struct Load(Arc<Address>);

impl Load {
    pub(super) fn address(&self) -> &Arc<Address> {
        &self.0
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
