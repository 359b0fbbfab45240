//! What the proxy does at the moment. A reload changes all of it, or nothing.
//!
//! Every request is passed on from beginning to end by what is in force when it comes; a connection of a client keeps what
//! was in force when it was made. An address that stands there as before stays as it is, with its connections, its counts and what is
//! known of its health; whoever is on the way to one that stands there no more arrives, and the address goes with the last of them.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::{AuthoritiesError, Upstreams};
use crate::{
    config::Proxy,
    net::{Server, Tasks},
};

/// The proxy's settings and what stands behind it, which a reload may change.
#[derive(Debug)]
pub struct Live {
    current: ArcSwap<Current>,
    tasks: Tasks,
    workers: usize,
}

/// What is in force at one moment.
#[derive(Debug)]
pub struct Current {
    pub(super) settings: Arc<Proxy>,
    pub(super) upstreams: Upstreams,
}

impl Live {
    /// `settings`, on the workers of `server`.
    ///
    /// # Errors
    ///
    /// Authorities for TLS that cannot be had.
    pub fn new(settings: Proxy, server: &Server) -> Result<Self, AuthoritiesError> {
        let (tasks, workers) = (server.tasks(), server.workers());
        let first = Current::new(settings, workers, &Upstreams::default())?;
        first.watch(&tasks);
        Ok(Self {
            current: ArcSwap::from_pointee(first),
            tasks,
            workers,
        })
    }

    /// What is in force now.
    pub(super) fn now(&self) -> Arc<Current> {
        self.current.load_full()
    }

    /// What is going to be in force with `settings`.
    ///
    /// # Errors
    ///
    /// Authorities for TLS that cannot be had.
    pub fn prepare(&self, settings: Proxy) -> Result<Current, AuthoritiesError> {
        Current::new(settings, self.workers, &self.now().upstreams)
    }

    /// Puts in force what was prepared.
    pub fn put_in_force(&self, next: Current) {
        let (was, is) = (&self.now().settings, &next.settings);
        if (was.listen, &was.tls, was.max_connections) != (is.listen, &is.tls, is.max_connections) {
            tracing::warn!(
                "proxy.listen, proxy.tls and proxy.max_connections are those of the start until the server starts again"
            );
        }
        next.watch(&self.tasks);
        self.current.store(Arc::new(next));
    }

    /// Everything that was counted of upstreams, in the Prometheus text format.
    #[must_use]
    pub fn exposition(&self) -> String {
        self.now().upstreams.exposition()
    }
}

impl Current {
    fn new(
        settings: Proxy,
        workers: usize,
        previous: &Upstreams,
    ) -> Result<Self, AuthoritiesError> {
        Ok(Self {
            upstreams: Upstreams::succeeding(&settings.upstreams, workers, previous)?,
            settings: Arc::new(settings),
        })
    }

    fn watch(&self, tasks: &Tasks) {
        self.upstreams.watch(tasks, &self.settings);
    }
}
