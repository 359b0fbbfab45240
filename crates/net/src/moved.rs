//! Connections on their way to another process, and where they go.

use std::{
    fmt,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
};

/// The maximum length of the state of a connection that is handed over.
pub const MAX_STATE_BYTES: usize = 2 << 20;

/// A connection on its way to another process.
#[derive(Debug)]
pub struct MovedConnection {
    /// The address of the listener that accepted the connection.
    pub listener: SocketAddr,
    /// The socket.
    pub socket: std::net::TcpStream,
    /// The state of the protocol, at most [`MAX_STATE_BYTES`].
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
