//! What the proxy does at the moment. A reload changes all of it, or nothing.
//!
//! Every request is passed on from beginning to end by what is in force when it comes; a connection of a client keeps what
//! was in force when it was made. An address that stands there as before, spoken to as before, stays as it is, with its connections, its
//! counts and what is known of its health; whoever is on the way to one that stands there no more arrives, and the address goes with the last of them.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tidegate_http::Clock;

use super::{AccessLog, AuthoritiesError, Upstreams, rejected::Rejected};
use crate::{
    config::Proxy,
    metrics::Text,
    net::{Server, Tasks},
};

/// The proxy's settings and what stands behind it, which a reload may change.
#[derive(Debug)]
pub struct Live {
    current: Arc<ArcSwap<Current>>,
    tasks: Tasks,
    workers: usize,
    log: Option<AccessLog>,
    clock: Clock,
    rejected: Arc<Rejected>,
}

/// What is in force at one moment.
#[derive(Debug)]
pub struct Current {
    pub(super) settings: Arc<Proxy>,
    pub(super) upstreams: Upstreams,
}

impl Live {
    /// `settings`, on the workers of `server`, with requests written to `log`; `clock` says how long answers take.
    ///
    /// # Errors
    ///
    /// Authorities for TLS that cannot be had.
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

    /// The access log, if there is one.
    #[must_use]
    pub fn log(&self) -> Option<&AccessLog> {
        self.log.as_ref()
    }

    /// What becomes of heads that are no request.
    pub(super) const fn rejected(&self) -> &Arc<Rejected> {
        &self.rejected
    }

    /// What is in force now.
    pub(super) fn now(&self) -> Arc<Current> {
        self.current.load_full()
    }

    /// The same for a moment, at less cost.
    pub(super) fn glance(&self) -> Guard<Arc<Current>> {
        self.current.load()
    }

    /// What is going to be in force with `settings`.
    ///
    /// # Errors
    ///
    /// Authorities for TLS that cannot be had.
    pub fn prepare(&self, settings: Proxy) -> Result<Current, AuthoritiesError> {
        Current::new(settings, self.workers, &self.now().upstreams, &self.clock)
    }

    /// Puts in force what was prepared.
    pub fn put_in_force(&self, next: Current) {
        let (was, is) = (&self.now().settings, &next.settings);
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

    /// Everything that was counted, in the Prometheus text format.
    #[must_use]
    pub fn exposition(&self) -> String {
        let mut text = self.now().upstreams.exposition();
        text.push_str(&self.rejected.exposition());
        if let Some(log) = &self.log {
            let mut lost = Text::default();
            let help = "Lines of the access log that were left out.";
            lost.single(
                "tidegate_proxy_access_log_lost_total",
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
