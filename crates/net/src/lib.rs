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
mod connection;
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

pub use body_guard::GuardedBody;
pub use bounded_body::{BodyReadError, BoundedBody, ReadBody};
pub use cert_identity::{cert_identity, verified_name};
pub use connection::{Bounds, Connection};
pub use frame_parser::{FrameHeader, FrameParser};
pub use handover::{AdoptError, Handover, MaybeMovable, MovableConnection, MovableStream};
pub use http1_serving::{Http1End, Http1ServerConnection, Http1State};
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
