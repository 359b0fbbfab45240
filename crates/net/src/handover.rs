//! Hands over open connections to another process of the same server.
//!
//! The socket of a plaintext connection moves. The keys of a TLS session cannot leave their
//! process, so this process relays the bytes of a TLS connection to the other process (`relay`).
//! The protocol code decides when a connection can move, and describes the state of the connection
//! in bytes: for HTTP, the bytes of the next request that have already been read. The code of the
//! same protocol in the other process continues with this state.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{io::DuplexStream, net::TcpStream};
use tokio_rustls::server::TlsStream;

use super::{
    moved::{MAX_STATE_BYTES, MovedConnection, RelayedClient},
    relay,
    shutdown::{ConnectionCount, OpenConnection, Shutdown, Stage},
};

/// The part of a connection that concerns its handover to another process.
#[derive(Clone, Debug, Default)]
pub struct Handover {
    /// The listener that accepted the connection. `None` if the connection cannot be handed over.
    pub(super) listener: Option<ListenerPart>,
    /// The state with which another process has handed over this connection. The state is `None`
    /// for a new connection.
    pub resumed: Option<Vec<u8>>,
    /// The client, if another process has the TLS session of this connection and relays its bytes.
    /// A relayed connection begins without a handshake, and must end as soon as its protocol
    /// permits.
    pub relayed: Option<RelayedClient>,
}

/// The part of a listener that its connections need.
#[derive(Clone, Debug)]
pub(super) struct ListenerPart {
    pub(super) address: SocketAddr,
    pub(super) movable: Arc<ConnectionCount>,
    pub(super) handshaking: Arc<ConnectionCount>,
    /// The number of TLS connections whose bytes this server relays to another process.
    pub(super) relays: Arc<ConnectionCount>,
    /// The maximum time during which the client of a relayed connection reads nothing.
    pub(super) write_timeout: Duration,
}

/// A stream that can be handed over to another process.
#[derive(Debug)]
pub enum MovableStream {
    /// A plaintext connection, whose socket moves.
    Plaintext(TcpStream),
    /// A TLS connection whose bytes this process relays.
    Tls(Box<TlsStream<TcpStream>>),
}

/// A stream whose type may support the handover to another process. By default, a type does not
/// support the handover.
pub trait MaybeMovable: Sized {
    /// Whether streams of this type can be handed over.
    const IS_MOVABLE: bool = false;

    /// Returns the stream; `None` if the stream cannot be handed over.
    fn into_movable(self) -> Option<MovableStream> {
        None
    }
}

impl MaybeMovable for TcpStream {
    const IS_MOVABLE: bool = true;

    fn into_movable(self) -> Option<MovableStream> {
        Some(MovableStream::Plaintext(self))
    }
}

impl MaybeMovable for TlsStream<TcpStream> {
    const IS_MOVABLE: bool = true;

    fn into_movable(self) -> Option<MovableStream> {
        Some(MovableStream::Tls(Box::new(self)))
    }
}

/// An in-process pipe has no socket.
impl MaybeMovable for DuplexStream {}

/// A guard for an open connection that can be handed over. The server waits only for connections
/// with this guard while it hands over its connections.
#[derive(Debug)]
pub struct MovableConnection {
    shutdown: Shutdown,
    listener: ListenerPart,
    relayed: Option<RelayedClient>,
    _open: OpenConnection,
}

impl Handover {
    /// Returns a guard if a connection with a stream of type `S` can be handed over.
    #[must_use]
    pub fn movable<S: MaybeMovable>(&self, shutdown: &Shutdown) -> Option<MovableConnection> {
        let listener = self.listener.as_ref().filter(|_| S::IS_MOVABLE)?;
        Some(MovableConnection {
            shutdown: shutdown.clone(),
            _open: listener.movable.increment(),
            listener: listener.clone(),
            relayed: self.relayed.clone(),
        })
    }

    /// Returns a guard for a connection that performs its TLS handshake. The server does not wait
    /// for it, because the connection is handed over after the handshake.
    pub(super) fn handshaking(&self) -> Option<OpenConnection> {
        let listener = self.listener.as_ref();
        listener.map(|listener| listener.handshaking.increment())
    }
}

impl Stage {
    /// Returns whether a connection must finish its requests and close. `movable` is `None` if the
    /// connection cannot be handed over.
    #[must_use]
    pub const fn must_close(self, movable: Option<&MovableConnection>) -> bool {
        match movable {
            Some(_) => matches!(self, Self::Ending),
            None => self.is_closing(),
        }
    }

    /// Returns whether a connection must be handed over as soon as it is between two requests.
    #[must_use]
    pub const fn must_hand_over(self, movable: Option<&MovableConnection>) -> bool {
        movable.is_some() && self.is_handing_over()
    }
}

impl MovableConnection {
    /// Hands over `stream` with `state`, which is empty for a new connection. The connection is
    /// closed if its state is too large, or if the socket is no longer usable.
    ///
    /// A TLS connection is relayed by a task on the current thread, which must be a worker.
    pub fn hand_over(self, stream: impl MaybeMovable, state: Vec<u8>) {
        let listener = self.listener.address;
        if state.len() > MAX_STATE_BYTES {
            return tracing::warn!(
                %listener, bytes = state.len(),
                "connection closed instead of handed over: its state is too large"
            );
        }
        let Some(stream) = stream.into_movable() else {
            return;
        };
        let moving = match stream {
            // The socket may itself lead to a process that relays the connection.
            MovableStream::Plaintext(stream) => {
                stream.into_std().map(|socket| (socket, self.relayed))
            }
            MovableStream::Tls(stream) => RelayedClient::of(&stream).and_then(|client| {
                let listener = &self.listener;
                let shutdown = self.shutdown.clone();
                let timeout = listener.write_timeout;
                let socket = relay::start(*stream, timeout, shutdown, &listener.relays)?;
                Ok((socket, Some(client)))
            }),
        };
        match moving {
            Ok((socket, relayed)) => self.shutdown.sink().give(MovedConnection {
                listener,
                socket,
                relayed,
                state,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                tracing::debug!(%listener, %error, "connection lost before it was handed over");
            }
            // For example, the process has too many open files.
            Err(error) => tracing::warn!(
                %listener, %error,
                "connection closed, because it could not be handed over to the new process"
            ),
        }
    }
}

/// The error of a connection that no listener can take.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// No listener has this address.
    #[error("no listener has the address {0}")]
    NoListener(SocketAddr),
    /// The socket is not a connected TCP socket.
    #[error("the socket is not a connected TCP socket: {0}")]
    Socket(#[from] io::Error),
}
