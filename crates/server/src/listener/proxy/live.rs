//! The hot-swappable settings and upstreams of the proxy. A reload changes all of them or none.
//!
//! A request uses the settings in force when it arrives, from beginning to end. A client connection
//! keeps the settings in force when it was accepted. An endpoint that is unchanged keeps its
//! connections, counters and health. A removed endpoint finishes its requests in flight, and is
//! freed with the last of them.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tidegate_http::Clock;

use super::{AccessLog, AuthoritiesError, Upstreams, rejected::Rejected};
use crate::{
    config::Proxy,
    metrics::Text,
    net::{Server, Tasks},
};

/// The proxy's current settings and upstreams, and the parts that outlive a reload.
#[derive(Debug)]
pub struct Live {
    current: Arc<ArcSwap<Current>>,
    tasks: Tasks,
    workers: usize,
    log: Option<AccessLog>,
    clock: Clock,
    rejected: Arc<Rejected>,
}

/// One consistent version of settings and upstreams.
#[derive(Debug)]
pub struct Current {
    pub(super) settings: Arc<Proxy>,
    pub(super) upstreams: Upstreams,
}

impl Live {
    /// Activates `settings` on the workers of `server`. Requests are logged to `log`; `clock`
    /// measures how long responses take.
    ///
    /// # Errors
    ///
    /// The trust anchors for TLS cannot be loaded.
    pub fn new(
        settings: Proxy,
        server: &Server,
        log: Option<AccessLog>,
        clock: Clock,
    ) -> Result<Self, AuthoritiesError> {
        let (tasks, workers) = (server.tasks(), server.workers());
        let first = Current::new(settings, workers, &Upstreams::default(), &clock)?;
        first.upstreams.put_in_force(first.settings.timeouts.pool);
        let current = Arc::new(ArcSwap::from_pointee(first));
        current.load().upstreams.watch(&tasks, &current);
        Ok(Self {
            current,
            tasks,
            workers,
            log,
            clock,
            rejected: Arc::default(),
        })
    }

    /// Returns the access log, if there is one.
    #[must_use]
    pub fn log(&self) -> Option<&AccessLog> {
        self.log.as_ref()
    }

    /// Returns the counters of rejected and refused requests.
    pub(super) const fn rejected(&self) -> &Arc<Rejected> {
        &self.rejected
    }

    /// Returns the current version.
    pub(super) fn now(&self) -> Arc<Current> {
        self.current.load_full()
    }

    /// Returns a short-lived reference to the current version; cheaper than [`Self::now`].
    pub(super) fn glance(&self) -> Guard<Arc<Current>> {
        self.current.load()
    }

    /// Builds the next version from `settings`, without activating it.
    ///
    /// # Errors
    ///
    /// The trust anchors for TLS cannot be loaded.
    pub fn prepare(&self, settings: Proxy) -> Result<Current, AuthoritiesError> {
        Current::new(settings, self.workers, &self.now().upstreams, &self.clock)
    }

    /// Activates a prepared version. Logs a warning if a setting has changed that requires a
    /// restart.
    pub fn put_in_force(&self, next: Current) {
        let (was, is) = (&self.now().settings, &next.settings);
        // The settings that only a restart can change.
        let lasting = |settings: &Proxy| {
            let (tls, log) = (settings.tls.clone(), settings.access_log.clone());
            let bounds = (
                settings.max_connections,
                settings.max_connections_per_client,
            );
            (settings.listen, bounds, tls, log)
        };
        if lasting(was) != lasting(is) {
            tracing::warn!(
                "changes to proxy.listen, proxy.tls, proxy.max_connections, proxy.max_connections_per_client and proxy.access_log require a restart"
            );
        }
        for capacity in next.upstreams.capacities() {
            capacity.put_in_force();
        }
        next.upstreams.put_in_force(next.settings.timeouts.pool);
        let next = Arc::new(next);
        let previous = self.current.swap(Arc::clone(&next));
        next.upstreams.watch(&self.tasks, &self.current);
        previous.upstreams.leave(&next.upstreams);
    }

    /// Returns all metrics of the proxy, in the Prometheus text format.
    #[must_use]
    pub fn exposition(&self) -> String {
        let mut text = self.now().upstreams.exposition();
        text.push_str(&self.rejected.exposition());
        if let Some(log) = &self.log {
            let mut lost = Text::default();
            let help = "Access log lines that were dropped.";
            lost.single(
                "tidegate_proxy_access_log_dropped_total",
                "counter",
                help,
                log.lost(),
            );
            text.push_str(&lost.finish());
        }
        text
    }
}

impl Current {
    fn new(
        settings: Proxy,
        workers: usize,
        previous: &Upstreams,
        clock: &Clock,
    ) -> Result<Self, AuthoritiesError> {
        Ok(Self {
            upstreams: Upstreams::succeeding(&settings.upstreams, workers, previous, clock)?,
            settings: Arc::new(settings),
        })
    }
}
