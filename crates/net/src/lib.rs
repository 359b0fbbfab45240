//! Code that the servers of all protocols share: workers, bounded listeners, TLS, timeouts,
//! authentication, problem details (RFC 9457), and metrics for Prometheus.
//!
//! A [`Server`] has one thread per core, each with its own runtime. A connection stays on one
//! thread for its lifetime. Therefore, tasks do not move between threads, per-connection state
//! needs no locks, and the handler's future does not have to be `Send`. A rate limit decision takes
//! nanoseconds, so it is made on the same thread.
//!
//! One accept loop per listener distributes the connections to the workers in round-robin order.
//! With `SO_REUSEPORT`, each worker could accept connections itself, but the kernel would choose
//! the worker by a hash of the addresses. The distribution would be uneven: for example, one of two
//! workers could have 30 of 50 pooled connections. Connection pools connect rarely and keep their
//! connections for a long time, so an even distribution matters more than a cheaper `accept`.
//!
//! All resources are bounded. The listener limits the number of connections. The handler uses a
//! [`TimedStream`] to enforce the timeouts in its connection's [`Bounds`], which costs almost no
//! time per request. The handler reads request bodies through a [`BoundedBody`].
//!
//! ```no_run
//! use tidegate_net::{Bounds, Server};
//!
//! # async fn example() -> std::io::Result<()> {
//! let server = Server::start(Server::default_workers())?;
//! let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
//! let listener = server.listen(socket, Bounds::default(), |stream, connection| async move {
//!     // Serve `stream` until the client closes it or `connection.shutdown` begins.
//! #   drop((stream, connection));
//! })?;
//! println!("listening on {}", listener.local_addr());
//! let dropped = server.shutdown(std::time::Duration::from_secs(5)).await;
//! # let _ = dropped;
//! # Ok(())
//! # }
//! ```

pub mod auth;
mod body_guard;
mod bounded_body;
mod cert_identity;
pub mod file_watch;
mod frame_meter;
mod frame_parser;
mod handover;
mod http1_serving;
mod http2_stream;
mod idle_timeout;
pub mod input;
pub mod json;
pub mod line_log;
mod listener;
mod local_executor;
pub mod log_throttle;
mod moved;
mod peer_closed;
mod problem;
pub mod prometheus;
mod registry;
mod relay;
pub mod response;
mod send_windows;
mod server;
mod shutdown;
mod timed_stream;
mod timer;
mod tls;
mod tls_client;
mod worker;

use std::{net::SocketAddr, sync::Arc, time::Duration};

pub use body_guard::GuardedBody;
pub use bounded_body::{BodyReadError, BoundedBody, ReadBody};
pub use cert_identity::{cert_identity, verified_name};
pub use frame_parser::{FrameHeader, FrameParser};
pub use handover::{AdoptError, Handover, MaybeMovable, MovableConnection, MovableStream};
pub use http1_serving::{Http1Connection, Http1End, Http1State};
pub use http2_stream::Http2Stream;
pub use idle_timeout::{IdleTimeout, MinRate};
pub use listener::{Exempt, Listener};
pub use local_executor::LocalExecutor;
pub use moved::{MAX_STATE_BYTES, MoveConnection, MovedConnection, RelayedClient, StateFormat};
pub use peer_closed::PeerClosed;
pub use problem::Problem;
pub use registry::{Activity, InFlight};
pub use server::{Adopter, Server};
pub use shutdown::{Shutdown, Stage};
pub use timed_stream::{Phase, ResponsePhase, StreamTimeouts, TimedStream, WriteTimeout};
pub use timer::LazyTimer;
pub use tls::{Tls, TlsError, TlsFiles, TlsListener, roots};
pub use tls_client::{ClientTlsError, ClientTlsFiles, client_config};
pub use worker::Tasks;

/// The default maximum number of header lines in an HTTP/1.1 request. The maximum equals hyper's
/// own default, so it is not passed to hyper. With an explicit maximum, hyper would initialise two
/// arrays of that size for each request.
pub const MAX_HEADERS: usize = 100;

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
    /// Returns `tls` unless another process relays the connection and has already performed the
    /// handshake.
    #[must_use]
    pub fn tls_to_accept<'t>(&self, tls: Option<&'t Arc<Tls>>) -> Option<&'t Tls> {
        let tls = tls.filter(|_| self.handover.relayed.is_none());
        tls.map(|tls| &**tls)
    }

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
