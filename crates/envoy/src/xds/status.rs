//! The status of the control plane and its configuration, for status pages and metrics.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use tidegate_core::Timestamp;

/// A counter that other threads can read.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(super) fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The numbers of connections and responses since the server started.
#[derive(Debug, Default)]
pub(crate) struct XdsCounts {
    pub(crate) connections: Count,
    pub(crate) failed_connections: Count,
    /// The number of closed streams.
    pub(crate) ended_streams: Count,
    pub(crate) accepted: Count,
    pub(crate) rejected: Count,
    /// The number of responses with resources of another type.
    pub(crate) ignored: Count,
}

/// The state of the xDS client.
#[derive(Debug, Default)]
pub(crate) struct XdsState {
    /// Whether a stream is open.
    pub(crate) is_connected: bool,
    /// The version of the active configuration; `None` before the first configuration.
    pub(crate) version: Option<String>,
    /// The number of resources in the active configuration.
    pub(crate) resources: usize,
    /// The time of the last response.
    pub(crate) last_response: Option<Timestamp>,
    /// The errors in the last response; empty if it was accepted.
    pub(crate) mistakes: Vec<String>,
    /// The warnings about the active configuration.
    pub(crate) warnings: Vec<String>,
    /// The reason why no stream is open, or why no configuration has arrived on it.
    pub(crate) problem: Option<String>,
}

/// The state and the counts of the xDS client.
#[derive(Debug, Default)]
pub(crate) struct XdsStatus {
    pub(crate) counts: XdsCounts,
    state: Mutex<XdsState>,
}

impl XdsStatus {
    pub(crate) fn lock(&self) -> MutexGuard<'_, XdsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
