//! Relays a TLS connection to another process of the same server.
//!
//! The keys of a TLS session cannot leave their process. If a TLS connection is handed over, this
//! process therefore keeps the session, and the other process gets one end of a socket pair:
//!
//! ```text
//!            TLS                        plaintext
//!   client ◀─────▶ relay, old process ◀───────────▶ listener, new process
//! ```
//!
//! The new process decides the requests. A relay ends when either side closes the connection, and
//! at the latest when the old process shuts down.

use std::{
    io,
    net::SocketAddr,
    os::{fd::OwnedFd, unix::net::UnixStream as StdUnixStream},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::future::{Either, select};
use tokio::{
    io::{AsyncWriteExt as _, copy, split},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_rustls::server::TlsStream;

use super::{
    cert_identity::verified_name,
    shutdown::{ConnectionCount, Shutdown, Stage},
};

/// How long a relay waits for the client to close the connection after the last response. If it did
/// not wait, bytes that the client sends could reset the connection before the client has read the
/// response.
const LINGER: Duration = Duration::from_secs(1);

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

/// Relays `stream` in a task of its own, which `relays` counts. Returns the socket for the other
/// process. It has the type of a TCP stream because connections are served alike; a Unix socket
/// supports all of its operations that serving needs.
pub(super) fn start(
    stream: TlsStream<TcpStream>,
    shutdown: Shutdown,
    relays: &Arc<ConnectionCount>,
) -> io::Result<std::net::TcpStream> {
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let ours = UnixStream::from_std(ours)?;
    let open = relays.increment();
    tokio::task::spawn_local(async move {
        relay(stream, ours, shutdown).await;
        drop(open);
    });
    Ok(OwnedFd::from(theirs).into())
}

async fn relay(client: TlsStream<TcpStream>, server: UnixStream, shutdown: Shutdown) {
    let (mut from_client, mut to_client) = split(client);
    let (mut from_server, mut to_server) = server.into_split();
    // The reason for the end of either direction does not matter: the connection is closed.
    let requests = pin!(async {
        tokio::select! {
            _ = copy(&mut from_client, &mut to_server) => {}
            // The server finishes the requests in progress and closes the connection, as if the
            // client had closed its side.
            _ = shutdown.reached(|stage| stage == Stage::Ending) => {}
        }
        let _ = to_server.shutdown().await;
    });
    let responses = pin!(async {
        let _ = copy(&mut from_server, &mut to_client).await;
        let _ = to_client.shutdown().await;
    });
    match select(responses, requests).await {
        Either::Left(((), requests)) => drop(timeout(LINGER, requests).await),
        Either::Right(((), responses)) => responses.await,
    }
}
