//! Hands over open connections to another process of the same server.
//!
//! Only a plaintext connection can be handed over, because the keys of a TLS session cannot leave
//! their process. The protocol code decides when a connection can move, and describes its state in
//! bytes: for HTTP, the bytes of the next request that have been read already. The code of the same
//! protocol in the other process continues with this state.

use std::{io, net::SocketAddr, sync::Arc};

use tokio::{io::DuplexStream, net::TcpStream};
use tokio_rustls::server::TlsStream;

use super::{
    moved::{MAX_STATE_BYTES, MovedConnection},
    shutdown::{ConnectionCount, OpenConnection, Shutdown, Stage},
};

/// The part of a connection that concerns its handover to another process.
#[derive(Clone, Debug, Default)]
pub struct Handover {
    /// `None` if there is no listener, so that the connection cannot be handed over.
    pub(super) listener: Option<ListenerPart>,
    /// The state with which another process has handed over this connection. It is `None` for a new
    /// connection.
    pub resumed: Option<Vec<u8>>,
}

/// The part of a listener that its connections need.
#[derive(Clone, Debug)]
pub(super) struct ListenerPart {
    pub(super) address: SocketAddr,
    pub(super) movable: Arc<ConnectionCount>,
}

/// A stream that may be a plaintext TCP connection, which can be handed over. By default, a stream is
/// not.
pub trait MaybePlaintext: Sized {
    /// Whether streams of this type are plaintext TCP connections.
    const IS_PLAINTEXT: bool = false;

    /// Returns the TCP connection; `None` if it is not plaintext.
    fn into_plaintext(self) -> Option<TcpStream> {
        None
    }
}

impl MaybePlaintext for TcpStream {
    const IS_PLAINTEXT: bool = true;

    fn into_plaintext(self) -> Option<TcpStream> {
        Some(self)
    }
}

impl MaybePlaintext for TlsStream<TcpStream> {}

/// An in-process pipe has no socket.
impl MaybePlaintext for DuplexStream {}

/// A guard for an open connection that can be handed over. The server waits for such connections
/// only while they are handed over.
#[derive(Debug)]
pub struct MovableConnection {
    shutdown: Shutdown,
    listener: SocketAddr,
    _open: OpenConnection,
}

impl Handover {
    /// Returns a guard if a connection with a stream of type `S` can be handed over.
    #[must_use]
    pub fn movable<S: MaybePlaintext>(&self, shutdown: &Shutdown) -> Option<MovableConnection> {
        let listener = self.listener.as_ref().filter(|_| S::IS_PLAINTEXT)?;
        Some(MovableConnection {
            shutdown: shutdown.clone(),
            listener: listener.address,
            _open: listener.movable.increment(),
        })
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
    /// Hands over `stream` with `state`. The connection is closed if its state is too large, or if
    /// the socket is not usable any more.
    pub fn hand_over(self, stream: impl MaybePlaintext, state: Vec<u8>) {
        let moved = stream.into_plaintext().map(TcpStream::into_std);
        match moved {
            Some(Ok(socket)) if state.len() <= MAX_STATE_BYTES => {
                let listener = self.listener;
                self.shutdown.sink().give(MovedConnection {
                    listener,
                    socket,
                    state,
                });
            }
            Some(Ok(_)) => tracing::warn!(
                listener = %self.listener, bytes = state.len(),
                "connection closed instead of handed over: its state is too large"
            ),
            Some(Err(error)) => {
                tracing::debug!(%error, "connection lost before it was handed over")
            }
            None => {}
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
