//! An endpoint of an upstream: its connection pool, load, health and limits.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use tidegate_config::Proxy;
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    address::EndpointAddress,
    connect,
    connection::UpstreamConnection,
    connection_slot::{ConnectionCount, ConnectionSlot},
    endpoint_settings::EndpointSettings,
    failure_log::LogDecision,
    outlier::EndpointHealth,
    pool::{ConnectionPool, reap_idle},
};
use crate::error::ProxyError;

/// An endpoint of an upstream.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) address: EndpointAddress,
    /// The active settings. A reload replaces the settings.
    settings: ArcSwap<EndpointSettings>,
    has_health_checks: AtomicBool,
    connections: ConnectionCount,
    in_flight: AtomicUsize,
    pub(super) pool: Arc<ConnectionPool>,
    pub(crate) health: EndpointHealth,
}

impl Endpoint {
    /// Creates an endpoint with these `settings`, and a connection pool for each of `workers`.
    pub(crate) fn new(
        address: EndpointAddress,
        settings: &Arc<EndpointSettings>,
        workers: usize,
    ) -> Self {
        Self {
            pool: Arc::new(ConnectionPool::new(address.http2, workers)),
            address,
            settings: ArcSwap::new(Arc::clone(settings)),
            has_health_checks: AtomicBool::new(false),
            connections: ConnectionCount::default(),
            in_flight: AtomicUsize::new(0),
            health: EndpointHealth::default(),
        }
    }

    /// Returns the active settings.
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
    /// in flight are completed.
    pub(crate) fn retire(&self) {
        self.pool.retire();
    }

    /// Marks active health checks as running, if they are configured. Returns true if the checks
    /// were not running before, so that the caller must start them.
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
        self.connections.get()
    }

    /// Returns `connection` to the pool of `worker`.
    pub(crate) fn put_back(&self, worker: usize, connection: Box<UpstreamConnection>) {
        if self.pool.put_back(worker, connection) {
            tokio::task::spawn_local(reap_idle(Arc::downgrade(&self.pool), worker));
        }
    }

    /// Reserves a slot for a new connection. At the connection limit, closes an idle connection to
    /// free a slot. Returns `None` if no connection is idle.
    fn reserve_connection(&self) -> Option<ConnectionSlot> {
        let max_connections = self.settings().max_connections;
        if let Some(slot) = self.connections.try_add(max_connections) {
            return Some(slot);
        }
        drop(self.pool.evict_idle()?);
        self.connections.try_add(max_connections)
    }

    /// Opens a connection.
    ///
    /// # Errors
    ///
    /// - [`ProxyError::Full`] if the endpoint is at its connection limit.
    /// - [`ProxyError::Local`] if the proxy's machine is out of resources.
    /// - [`ProxyError::ConnectTimeout`] if the connection is not open by the time `until`.
    /// - [`ProxyError::Unreachable`] if the attempt fails for another reason.
    pub(crate) async fn connect(
        &self,
        settings: &Proxy,
        until: Instant,
    ) -> Result<UpstreamConnection, ProxyError> {
        let slot = self.reserve_connection().ok_or(ProxyError::Full)?;
        let protocol = timeout_at(until, connect::connect(&self.address, settings))
            .await
            .map_err(|_| ProxyError::ConnectTimeout)?
            .map_err(|error| {
                tracing::debug!(endpoint = %self.address.url, "cannot connect: {error}");
                if connect::is_out_of_resources(&error) {
                    tracing::warn!(upstream = %self.settings().name, %error, "cannot connect to the upstream: this host has no free file descriptor, port or memory");
                    return ProxyError::Local;
                }
                self.health.record_connect_error(&error);
                ProxyError::Unreachable
            })?;
        Ok(UpstreamConnection::new(protocol, slot, settings))
    }

    /// Records that the endpoint has responded to a request, regardless of the response status.
    pub(crate) fn record_success(&self) {
        if self.health.record_success() == LogDecision::Log {
            tracing::info!(upstream = %self.settings().name, endpoint = %self.address.url, "upstream endpoint recovered");
        }
    }

    /// Records a failed request to the endpoint, if `error` is one of [`ProxyError::OF_UPSTREAM`].
    /// Ejects the endpoint after too many consecutive failures.
    pub(crate) fn record_failure(self: &Arc<Self>, error: ProxyError) {
        let at = ProxyError::OF_UPSTREAM
            .iter()
            .position(|blamed| *blamed == error);
        let Some(failed) = at.and_then(|at| self.health.failed.get(at)) else {
            return;
        };
        failed.fetch_add(1, Ordering::Relaxed);
        if self.health.record_failure() == LogDecision::Log {
            tracing::warn!(
                upstream = %self.settings().name,
                endpoint = %self.address.url,
                failure = error.as_str(),
                cause = self.health.cause(error),
                "upstream endpoint failing (further failures suppressed until it recovers)"
            );
        }
        let Some(ejection) = self.settings().eject else {
            return;
        };
        if !self.health.try_eject(ejection) {
            return;
        }
        tracing::warn!(
            upstream = %self.settings().name,
            endpoint = %self.address.url,
            duration = ?ejection.time,
            "endpoint ejected after {} consecutive failures", ejection.failures
        );
        let endpoint = Arc::downgrade(self);
        tokio::task::spawn_local(async move {
            sleep(ejection.time).await;
            if let Some(endpoint) = endpoint.upgrade() {
                endpoint.health.end_ejection(ejection);
                tracing::info!(upstream = %endpoint.settings().name, endpoint = %endpoint.address.url, "endpoint re-admitted");
            }
        });
    }

    /// Counts a request as in flight until the returned value is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        ActiveRequest(Arc::clone(self))
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
