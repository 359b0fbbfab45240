//! An endpoint of an upstream: its connection pool, its load, its health and its limits.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use rustls::ClientConfig;
use tidegate_config::{Ejection, HealthCheck, Scheme, Upstream, Url};

use super::{
    connection::UpstreamConnection,
    outlier::EndpointHealth,
    pool::{ConnectionPool, reap_idle},
    tls::UpstreamTls,
};

/// An endpoint of an upstream.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) url: Url,
    /// Whether requests use HTTP/2.
    pub(crate) http2: bool,
    tls: Option<UpstreamTls>,
    /// The current settings. A reload replaces them.
    settings: ArcSwap<EndpointSettings>,
    has_health_checks: AtomicBool,
    connections: AtomicUsize,
    in_flight: AtomicUsize,
    pub(super) pool: ConnectionPool,
    pub(crate) health: EndpointHealth,
}

/// The settings that an endpoint takes from its upstream. A reload may change them.
#[derive(Debug)]
pub(crate) struct EndpointSettings {
    /// The upstream's name.
    pub(crate) name: Box<str>,
    /// The maximum number of connections to the endpoint.
    max_connections: usize,
    pub(crate) eject: Option<Ejection>,
    pub(crate) health: Option<HealthCheck>,
}

impl EndpointSettings {
    pub(crate) fn of(upstream: &Upstream) -> Self {
        Self {
            name: upstream.name.clone(),
            max_connections: upstream.max_connections,
            // With a single endpoint, ejection would leave no endpoint for requests.
            eject: upstream.eject.filter(|_| upstream.urls.len() > 1),
            health: upstream.health.clone(),
        }
    }
}

impl Endpoint {
    /// Creates the endpoint at `url` of `upstream`. The endpoint gets these `settings`, and a
    /// connection pool for each of `workers`.
    pub(crate) fn new(
        url: Url,
        upstream: &Upstream,
        settings: &Arc<EndpointSettings>,
        tls: Option<&UpstreamTls>,
        workers: usize,
    ) -> Self {
        Self {
            tls: tls_of(&url, tls).cloned(),
            url,
            http2: upstream.http2,
            settings: ArcSwap::new(Arc::clone(settings)),
            has_health_checks: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            pool: ConnectionPool::new(upstream.http2, workers),
            health: EndpointHealth::default(),
        }
    }

    /// Returns the TLS settings, if the endpoint is an `https` URL.
    pub(crate) fn tls(&self) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref().map(|tls| &tls.config)
    }

    /// Returns the current settings.
    pub(crate) fn settings(&self) -> Guard<Arc<EndpointSettings>> {
        self.settings.load()
    }

    /// Replaces the settings with `settings`, and the idle timeout of pooled connections with
    /// `idle_timeout`.
    pub(crate) fn update_settings(&self, settings: &Arc<EndpointSettings>, idle_timeout: Duration) {
        self.settings.store(Arc::clone(settings));
        self.health.clear_unconfigured(settings);
        self.pool.set_idle_timeout(idle_timeout);
    }

    /// Retires the endpoint: closes its idle connections, and pools no more connections. Requests
    /// in flight finish.
    pub(crate) fn retire(&self) {
        self.pool.retire();
    }

    /// Returns whether this endpoint equals `upstream`'s endpoint at `url`. Equal endpoints also
    /// have the same protocol and the same trust anchors as `tls`.
    pub(crate) fn is_same(
        &self,
        url: &Url,
        upstream: &Upstream,
        tls: Option<&UpstreamTls>,
    ) -> bool {
        self.url == *url && self.http2 == upstream.http2 && self.tls.as_ref() == tls_of(url, tls)
    }

    /// Marks active health checks as running, if they are configured. Returns true if the caller
    /// must start them, because they were not running before.
    pub(crate) fn claim_health_checks(&self) -> bool {
        self.settings().health.is_some() && !self.has_health_checks.swap(true, Ordering::SeqCst)
    }

    /// Marks active health checks as stopped.
    pub(crate) fn release_health_checks(&self) {
        self.has_health_checks.store(false, Ordering::SeqCst);
    }

    /// Returns the number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the number of connections, including idle ones.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns `connection` to the pool of `worker`.
    pub(crate) fn put_back(self: &Arc<Self>, worker: usize, connection: Box<UpstreamConnection>) {
        if self.pool.put_back(worker, connection) {
            tokio::task::spawn_local(reap_idle(Arc::downgrade(self), worker));
        }
    }

    /// Reserves a slot for a new connection. At the connection limit, closes an idle connection to
    /// free a slot, and returns `None` if no connection is idle.
    pub(crate) fn reserve_connection(self: &Arc<Self>) -> Option<ConnectionSlot> {
        let max_connections = self.settings().max_connections;
        let below = |count: usize| (count < max_connections).then_some(count + 1);
        let increment = || {
            self.connections
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, below)
        };
        if increment().is_err() {
            drop(self.pool.evict_idle()?);
            increment().ok()?;
        }
        Some(ConnectionSlot(Arc::clone(self)))
    }

    /// Counts a request as in flight until the returned value is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        ActiveRequest(Arc::clone(self))
    }
}

/// Returns `tls` if `url` is an `https` URL.
fn tls_of<'t>(url: &Url, tls: Option<&'t UpstreamTls>) -> Option<&'t UpstreamTls> {
    tls.filter(|_| url.scheme == Scheme::Https)
}

/// A slot of the endpoint's connection limit, held by one connection.
#[derive(Debug)]
pub(crate) struct ConnectionSlot(Arc<Endpoint>);

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request to an endpoint that counts as in flight until this value is dropped.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<Endpoint>);

impl ActiveRequest {
    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
