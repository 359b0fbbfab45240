//! Connections that are being moved to another process, and the receiving side of the move.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
};

use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::cert_identity::verified_name;

/// The maximum length of the state of a connection that is handed over.
pub const MAX_STATE_BYTES: usize = 2 << 20;

/// The first bytes of the state of a connection. These bytes identify the protocol and the version
/// of the encoding.
#[derive(Clone, Copy, Debug)]
pub struct StateFormat {
    /// A letter for the protocol.
    pub protocol: u8,
    /// The version of the encoding.
    pub version: u8,
}

impl StateFormat {
    /// Returns the first bytes of the state.
    #[must_use]
    pub const fn header(self) -> [u8; 2] {
        [self.protocol, self.version]
    }

    /// Returns `state` without its first bytes; `None` if these bytes name another format.
    #[must_use]
    pub fn strip(self, state: &[u8]) -> Option<&[u8]> {
        state.strip_prefix(&self.header())
    }
}

/// The client of a connection that another process relays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayedClient {
    /// The client's address. The socket of the connection is a Unix socket, which has none.
    pub address: SocketAddr,
    /// The name in the client's certificate.
    pub name: Option<String>,
}

impl RelayedClient {
    /// Returns the client of `stream`.
    pub(super) fn of(stream: &TlsStream<TcpStream>) -> io::Result<Self> {
        let (socket, session) = stream.get_ref();
        Ok(Self {
            address: socket.peer_addr()?,
            name: verified_name(session),
        })
    }
}

/// A connection that is being moved to another process.
#[derive(Debug)]
pub struct MovedConnection {
    /// The address of the listener that accepted the connection.
    pub listener: SocketAddr,
    /// The socket.
    pub socket: std::net::TcpStream,
    /// The client, if the socket leads to a process that relays a TLS connection.
    pub relayed: Option<RelayedClient>,
    /// The state of the protocol, at most [`MAX_STATE_BYTES`]; empty for a new connection.
    pub state: Vec<u8>,
}

/// The function that takes the connections that are handed over.
pub type MoveConnection = Box<dyn Fn(MovedConnection) + Send>;

/// Holds the function that takes the connections, while there is one.
#[derive(Default)]
pub(super) struct Sink(Mutex<Option<MoveConnection>>);

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sink")
    }
}

impl Sink {
    pub(super) fn set(&self, sink: Option<MoveConnection>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = sink;
    }

    pub(super) fn give(&self, moved: MovedConnection) {
        let sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sink) = &*sink {
            sink(moved);
        }
    }
}
