//! Counts the connections to an endpoint, and enforces their maximum.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// The number of connections to one endpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionCount(Arc<AtomicUsize>);

impl ConnectionCount {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts one more connection, unless there are already `max`.
    pub(super) fn try_add(&self, max: usize) -> Option<ConnectionSlot> {
        let below = |count: usize| (count < max).then_some(count + 1);
        let added = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, below);
        added.ok().map(|_| ConnectionSlot(self.clone()))
    }
}

/// A slot of the endpoint's connection limit, held by one connection.
#[derive(Debug)]
pub(crate) struct ConnectionSlot(ConnectionCount);

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
