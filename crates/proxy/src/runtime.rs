//! The settings and upstreams of the proxy. A reload replaces either all settings and upstreams, or
//! none of them.
//!
//! From start to finish, a request uses the settings that are active when it arrives. A client
//! connection keeps the settings that were active when it was accepted. An unchanged endpoint keeps
//! its connections, counters and health. A removed endpoint finishes its requests in flight, and is
//! freed after the last of them.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tidegate::Clock;
use tidegate_config::Proxy;
use tidegate_net::{
    Server, Tasks,
    prometheus::{self, Format, Metric, Page},
};

use super::{
    access_log::AccessLog,
    bad_request::BadRequests,
    upstream::{balancer::Upstreams, config::RuntimeConfig, health_check, tls::TrustAnchorError},
};

const LOG_DROPPED: Metric = Metric::counter(
    "tidegate_proxy_access_log_dropped_total",
    [],
    "Access log lines that were dropped.",
);

/// The proxy's active settings and upstreams, and the state that a reload does not replace.
#[derive(Debug)]
pub struct ProxyRuntime {
    /// The settings at startup. A reload cannot change some of these settings, which apply until a
    /// restart.
    started: Arc<Proxy>,
    current: Arc<ArcSwap<RuntimeConfig>>,
    tasks: Tasks,
    workers: usize,
    log: Option<AccessLog>,
    clock: Clock,
    bad_requests: Arc<BadRequests>,
    /// Each request that waits for its body before its decision holds a clone of this value.
    undecided: Arc<()>,
}

impl ProxyRuntime {
    /// Creates the runtime with `settings` on the workers of `server`. Requests are logged to
    /// `log`. `clock` measures response times.
    ///
    /// # Errors
    ///
    /// Returns an error if the trust anchors for TLS cannot be loaded.
    pub fn new(
        settings: Proxy,
        server: &Server,
        log: Option<AccessLog>,
        clock: Clock,
    ) -> Result<Self, TrustAnchorError> {
        let (tasks, workers) = (server.tasks(), server.workers());
        let first = RuntimeConfig::new(settings, workers, &Upstreams::default(), &clock)?;
        first.upstreams.activate(first.settings.timeouts.pool);
        let started = Arc::clone(&first.settings);
        let current = Arc::new(ArcSwap::from_pointee(first));
        health_check::start(&tasks, &current);
        Ok(Self {
            started,
            current,
            tasks,
            workers,
            log,
            clock,
            bad_requests: Arc::default(),
            undecided: Arc::default(),
        })
    }

    /// Returns the access log, if there is one.
    #[must_use]
    pub fn log(&self) -> Option<&AccessLog> {
        self.log.as_ref()
    }

    /// Returns the counters of rejected requests.
    pub(crate) const fn bad_requests(&self) -> &Arc<BadRequests> {
        &self.bad_requests
    }

    /// Marks a request as undecided until the returned guard is dropped.
    pub(crate) fn mark_undecided(&self) -> Arc<()> {
        Arc::clone(&self.undecided)
    }

    /// Returns whether any request waits for its body before its decision.
    #[must_use]
    pub fn has_undecided(&self) -> bool {
        Arc::strong_count(&self.undecided) > 1
    }

    /// Returns the active version of the settings and upstreams.
    pub(crate) fn current(&self) -> Arc<RuntimeConfig> {
        self.current.load_full()
    }

    /// Returns a short-lived reference to the active version. A call of this method is cheaper than
    /// a call of [`Self::current`].
    pub(crate) fn load(&self) -> Guard<Arc<RuntimeConfig>> {
        self.current.load()
    }

    /// Builds the next version from `settings` without activating it.
    ///
    /// # Errors
    ///
    /// Returns an error if the trust anchors for TLS cannot be loaded.
    pub fn prepare(&self, settings: Proxy) -> Result<RuntimeConfig, TrustAnchorError> {
        RuntimeConfig::new(
            settings,
            self.workers,
            &self.current().upstreams,
            &self.clock,
        )
    }

    /// Returns the names of settings that have changed since startup, but that only a restart can
    /// apply.
    #[must_use]
    pub fn restart_required(&self, settings: &Proxy) -> Vec<&'static str> {
        let started = &self.started;
        let others = [
            ("proxy.listen", started.listen == settings.listen),
            ("proxy.tls", started.tls == settings.tls),
            (
                "proxy.max_connections",
                started.max_connections == settings.max_connections,
            ),
            (
                "proxy.max_connections_per_client",
                started.max_connections_per_client == settings.max_connections_per_client,
            ),
            (
                "proxy.error_format",
                started.error_format == settings.error_format,
            ),
            (
                "proxy.access_log",
                started.access_log == settings.access_log,
            ),
        ];
        let changed = others.iter().filter(|(_, is_alike)| !is_alike);
        changed.map(|(setting, _)| *setting).collect()
    }

    /// Activates a prepared version.
    pub fn activate(&self, next: RuntimeConfig) {
        for concurrency in next.upstreams.concurrency_limits() {
            concurrency.activate();
        }
        next.upstreams.activate(next.settings.timeouts.pool);
        let next = Arc::new(next);
        let previous = self.current.swap(Arc::clone(&next));
        health_check::start(&self.tasks, &self.current);
        previous.upstreams.retire_removed(&next.upstreams);
    }

    /// Adds all metrics of the proxy to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        self.current().upstreams.collect(page);
        self.bad_requests.collect(page);
        if let Some(log) = &self.log {
            page.single(&LOG_DROPPED, log.lost());
        }
    }

    /// Returns all metrics of the proxy in the Prometheus text format.
    #[must_use]
    pub fn exposition(self: &Arc<Self>) -> String {
        let proxy = Arc::clone(self);
        prometheus::encode(Format::Text, move |page| proxy.collect(page))
    }
}
