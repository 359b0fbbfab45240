//! An endpoint of an upstream: its connection pool, its load and its limits.
//!
//! Every worker has its own pool, because a connection lives on the worker that opened it. The lock
//! around a pool is therefore uncontended, with one exception: at the connection limit, a worker
//! closes an idle connection of another worker to open its own.

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

/// The longest interval between two runs of the idle reaper. A reload may shorten the idle timeout,
/// and the reaper has to notice.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// An endpoint of an upstream.
#[derive(Debug)]
pub(super) struct Address {
    pub(super) url: Url,
    /// Whether requests use HTTP/2.
    pub(super) http2: bool,
    tls: Option<Connector>,
    /// The current settings, which a reload replaces.
    terms: ArcSwap<Terms>,
    is_watched: AtomicBool,
    /// Whether a reload has removed the endpoint; its pool then keeps nothing.
    is_left: AtomicBool,
    /// The idle timeout of pooled connections, in microseconds.
    longest: AtomicU64,
    connections: AtomicUsize,
    in_flight: AtomicUsize,
    pools: Box<[Pool]>,
    pub(super) health: Health,
}

/// The settings that an endpoint takes from its upstream; a reload may change them.
#[derive(Debug)]
pub(super) struct Terms {
    /// The upstream's name.
    pub(super) name: Box<str>,
    /// The maximum number of connections to the endpoint.
    most: usize,
    pub(super) eject: Option<Ejection>,
    pub(super) health: Option<HealthCheck>,
}

impl Terms {
    pub(super) fn of(upstream: &Upstream) -> Self {
        Self {
            name: upstream.name.clone(),
            most: upstream.max_connections,
            // With a single endpoint, ejection would leave nothing to send requests to.
            eject: upstream.eject.filter(|_| upstream.urls.len() > 1),
            health: upstream.health.clone(),
        }
    }
}

/// One worker's share of the pool.
#[derive(Debug, Default)]
struct Pool {
    kept: Mutex<Kept>,
    /// Held while a worker opens an HTTP/2 connection; other requests wait for that connection.
    making: tokio::sync::Mutex<()>,
}

/// Idle HTTP/1.1 connections, the most recently used last, and all HTTP/2 connections.
#[derive(Debug, Default)]
struct Kept {
    idle: Vec<(Instant, Box<Link>)>,
    /// Whether an idle reaper runs for this pool.
    is_tended: bool,
}

impl Address {
    /// Creates the endpoint at `url` of `upstream`, with these `terms` and a pool for each of
    /// `workers`.
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

    /// Returns the TLS settings for `https` endpoints.
    pub(super) fn tls(&self) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref().map(|tls| &tls.config)
    }

    /// Returns the current settings.
    pub(super) fn terms(&self) -> Guard<Arc<Terms>> {
        self.terms.load()
    }

    /// Replaces the settings with `terms`, and the idle timeout of pooled connections with
    /// `longest`.
    pub(super) fn go_by(&self, terms: &Arc<Terms>, longest: Duration) {
        self.terms.store(Arc::clone(terms));
        self.health.settle(terms);
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        self.longest.store(micros, Ordering::Relaxed);
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.longest.load(Ordering::Relaxed))
    }

    /// Retires the endpoint: closes idle connections and keeps no others. Requests in flight
    /// finish.
    pub(super) fn leave(&self) {
        // Set before the pools are emptied: `keep` checks it under the pool's lock.
        self.is_left.store(true, Ordering::SeqCst);
        for pool in &self.pools {
            drop(std::mem::take(&mut lock(pool).idle));
        }
    }

    /// Returns whether this endpoint is `upstream`'s endpoint at `url`, with the same protocol and
    /// the same trust anchors as `tls`.
    pub(super) fn is_as(&self, url: &Url, upstream: &Upstream, tls: Option<&Connector>) -> bool {
        self.url == *url && self.http2 == upstream.http2 && self.tls.as_ref() == tls_of(url, tls)
    }

    /// Returns true if the caller is to start active health checks: they are configured and not
    /// running yet. Marks them as running.
    pub(super) fn begin_watch(&self) -> bool {
        self.terms().health.is_some() && !self.is_watched.swap(true, Ordering::SeqCst)
    }

    /// Marks active health checks as stopped.
    pub(super) fn end_watch(&self) {
        self.is_watched.store(false, Ordering::SeqCst);
    }

    /// Returns the number of requests in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the number of connections, idle ones included.
    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns a pooled connection of `worker` that has not exceeded the idle timeout at `now`: the
    /// most recently used HTTP/1.1 connection, or an HTTP/2 connection with a free stream.
    pub(super) fn take(&self, worker: usize, times: &Timeouts, now: Instant) -> Option<Box<Link>> {
        let mut kept = lock(self.pools.get(worker)?);
        if self.http2 {
            kept.idle.retain_mut(|(_, link)| !link.is_over());
            // Prefers the first connection with a free stream, so that the later ones become idle.
            return kept.idle.iter_mut().find_map(|(since, link)| {
                let shared = link.share(times)?;
                *since = now;
                Some(Box::new(shared))
            });
        }
        // Skips connections that the upstream has closed or is about to close.
        std::iter::from_fn(|| kept.idle.pop()).find_map(|(since, mut link)| {
            let is_fresh = now.duration_since(since) < times.pool;
            (is_fresh && !link.is_over()).then_some(link)
        })
    }

    /// Waits for permission to open an HTTP/2 connection on `worker`. Permission is exclusive:
    /// requests that arrive in the meantime share the new connection instead of opening more.
    pub(super) async fn making(&self, worker: usize) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        Some(self.pools.get(worker)?.making.lock().await)
    }

    /// Returns `link` to the pool of `worker`.
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

    /// Reserves one more connection. At the limit it closes an idle connection to make room;
    /// returns `None` if none is idle.
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
                // The first one has been idle longest.
                let at = kept.idle.iter().position(|(_, link)| !link.is_busy())?;
                Some(kept.idle.remove(at))
            });
            drop(idle?);
            step().ok()?;
        }
        Some(Admitted(Arc::clone(self)))
    }

    /// Counts a request as in flight until the result is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Load {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        Load(Arc::clone(self))
    }

    /// Closes connections that have exceeded the idle timeout. Returns true if none is left in the
    /// pool.
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

/// Runs the idle reaper of one pool, until the pool is empty or the endpoint is gone.
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

/// Returns `tls` if `url` is an `https` URL.
fn tls_of<'t>(url: &Url, tls: Option<&'t Connector>) -> Option<&'t Connector> {
    tls.filter(|_| url.scheme == Scheme::Https)
}

/// A connection that counts towards the endpoint's maximum.
#[derive(Debug)]
pub(super) struct Admitted(Arc<Address>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request in flight to an endpoint.
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
