//! The connection that a listener passes to its handler.

use std::{net::SocketAddr, time::Duration};

use crate::{Activity, Handover, Shutdown};

/// The limits of a listener and of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The maximum number of open connections. When the maximum is reached, the longest-idle
    /// connection is closed to make room for a new one. Default 10,000.
    pub connections: usize,
    /// The maximum number of connections per client, where a client is an IPv4 address or an IPv6
    /// /64. Connections above the maximum are closed as soon as they are accepted. Default 1,000.
    pub connections_per_client: usize,
    /// The idle timeout between two requests. Default 5 minutes.
    pub idle: Duration,
    /// The timeout for receiving one request, from its first byte to its last byte. Default 10
    /// seconds.
    pub request: Duration,
    /// The maximum time that a client may take to read pending output. Default 10 seconds.
    pub write: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections: 10_000,
            connections_per_client: 1_000,
            idle: Duration::from_secs(300),
            request: Duration::from_secs(10),
            write: Duration::from_secs(10),
        }
    }
}

/// The properties of a connection that its handler receives.
#[derive(Clone, Debug)]
pub struct Connection {
    /// The address of the client.
    pub peer: SocketAddr,
    /// The index of the worker that serves the connection, from 0. A handler can use the index to
    /// select a counter that only this worker's thread writes.
    pub worker: usize,
    /// The listener's bounds. The listener enforces the limits on connections, and the handler must
    /// enforce the timeouts.
    pub bounds: Bounds,
    /// The activity of the connection. The handler reports its requests to the activity, so that
    /// the registry does not evict a busy connection.
    pub activity: Activity,
    /// The shutdown signal. When the shutdown begins, the handler must finish its requests and
    /// close the connection.
    pub shutdown: Shutdown,
    /// Whether and how the connection can be handed over to another process.
    pub handover: Handover,
}

impl Connection {
    /// Waits until this connection must finish its requests and close, unless it can be handed
    /// over. Does not wait if another process relays the connection.
    pub async fn shutdown_begun(&self) {
        // The process that relays the connection ends soon.
        if self.handover.relayed.is_none() {
            self.shutdown.begun().await;
        }
    }

    /// Logs that the handler closes the connection, because it cannot use the state with which
    /// another process has handed over the connection.
    pub fn log_unknown_state(&self) {
        tracing::error!(
            peer = %self.peer,
            "connection closed: cannot read the connection state that the old process sent"
        );
    }
}
