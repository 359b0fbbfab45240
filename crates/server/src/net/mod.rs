//! Workers and bounded listeners, the same for every door.
//!
//! A [`Server`] has one thread per core, each with a runtime of its own, and a connection lives on one of
//! them from its first byte to its last: no task moves between threads, nothing that a connection holds
//! is locked, and its future need not be `Send`. A decision takes nanoseconds, so doors decide on the
//! spot and never hand a request to another thread.
//!
//! A listener accepts in one place and deals its sockets to the workers in turn. `SO_REUSEPORT` would let
//! every worker accept for itself, but then the kernel deals by a hash of the addresses: of 50 pooled
//! connections on two workers, 30 may well end up on one. Pools connect seldom and stay long, so an even
//! deal is worth more than a cheaper `accept`.
//!
//! Everything is bounded: connections by the listener, time by whoever serves the connection, with the
//! [`Bounds`] that it is handed and a [`LazyTimer`], which costs nothing per request.
//!
//! ```no_run
//! use tidegate_server::net::{Bounds, Server};
//!
//! # async fn example() -> std::io::Result<()> {
//! let server = Server::start(Server::default_workers())?;
//! let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
//! let listener = server.listen(socket, Bounds::default(), |stream, connection| async move {
//!     // Serve `stream` until the client leaves or `connection.shutdown` begins.
//! #   drop((stream, connection));
//! })?;
//! println!("listening on {}", listener.local_addr());
//! let dropped = server.shutdown(std::time::Duration::from_secs(5)).await;
//! # let _ = dropped;
//! # Ok(())
//! # }
//! ```

mod client_name;
mod frame_meter;
mod held;
mod listener;
mod live;
mod local;
mod registry;
mod server;
mod shutdown;
mod stall;
mod timer;
mod tls;
mod worker;

use std::{net::SocketAddr, time::Duration};

pub(crate) use client_name::client_name;
pub(crate) use held::Held;
pub use listener::{Exempt, Listener};
pub(crate) use live::LiveStream;
pub(crate) use local::Local;
pub(crate) use registry::network;
pub use registry::{Activity, InFlight};
pub use server::Server;
pub use shutdown::Shutdown;
pub(crate) use stall::Stalling;
pub use timer::LazyTimer;
pub(crate) use tls::roots;
pub use tls::{Behind, Tls, TlsError};
pub use worker::Tasks;

/// The most header lines of a request over HTTP/1.1, unless a setting says otherwise: as many as hyper takes when it is told nothing. Told,
/// even of as many, it fills two arrays of so many places with each request.
pub(crate) const MAX_HEADERS: usize = 100;

/// What one listener and each of its connections may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The most connections at once. To make room for one more, the idlest is closed. Default 10,000.
    pub connections: usize,
    /// The most connections of one client, an address of IPv4 or a /64 of IPv6; one more is closed as soon as it is
    /// accepted. Default 1,000.
    pub connections_per_client: usize,
    /// How long a connection may be quiet between two requests. Default 5 minutes.
    pub idle: Duration,
    /// How long one request may take to arrive, from its first byte to its last. Default 10 seconds.
    pub request: Duration,
    /// How long a client may take to read what is ready for it. Default 10 seconds.
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

/// What a handler learns about the connection that it serves.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Who is at the other end.
    pub peer: SocketAddr,
    /// The number of the worker that serves it, from 0: it picks a counter that no other thread writes.
    pub worker: usize,
    /// The bounds of the listener. It sees to the number of connections; the times are the handler's duty.
    pub bounds: Bounds,
    /// What the handler tells of its requests, so that a connection at work is not closed to make room for another.
    pub activity: Activity,
    /// Begins when the server shuts down: finish the requests that have begun, then close.
    pub shutdown: Shutdown,
}
