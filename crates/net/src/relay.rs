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
//! The new process decides the requests. A relay ends when either side closes the connection or the
//! client does not read, and at the latest when the old process shuts down.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream as StdUnixStream},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::future::{Either, select};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy, sink, split},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_rustls::server::TlsStream;

use super::{
    TimedStream, WriteTimeout,
    shutdown::{ConnectionCount, Shutdown, Stage},
};

/// After the last response, a relay waits for this time for the client to close the connection.
/// During this time, the relay discards what the client sends: unread bytes would reset the
/// connection before the client has read the response.
const LINGER: Duration = Duration::from_secs(1);

/// Relays `stream` in its own task, and counts the task in `relays` until the relay ends. The relay
/// ends if the client reads nothing for `write_timeout`. Returns the socket for the other process.
/// The socket has the type of a TCP stream, because all connections are served in the same way; a
/// Unix socket supports all operations that serving needs.
pub(super) fn start(
    stream: TlsStream<TcpStream>,
    write_timeout: Duration,
    shutdown: Shutdown,
    relays: &Arc<ConnectionCount>,
) -> io::Result<std::net::TcpStream> {
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let ours = UnixStream::from_std(ours)?;
    let open = relays.increment();
    tokio::task::spawn_local(async move {
        relay(stream, ours, write_timeout, shutdown).await;
        drop(open);
    });
    Ok(OwnedFd::from(theirs).into())
}

async fn relay(
    client: impl AsyncRead + AsyncWrite + Unpin,
    server: UnixStream,
    write_timeout: Duration,
    shutdown: Shutdown,
) {
    // A response may have any length, so the timeout applies to its progress.
    let write_timeout = WriteTimeout::Stall(write_timeout);
    let client = TimedStream::without_read_timeout(client, write_timeout);
    let (mut from_client, mut to_client) = split(client);
    let (mut from_server, mut to_server) = server.into_split();
    // The reason for the end of either direction does not matter: the connection is closed.
    let requests = pin!(async {
        tokio::select! {
            // Copying also ends if the server has closed its side.
            _ = copy(&mut from_client, &mut to_server) => {}
            // The server finishes the requests in progress and closes the connection, as if the
            // client had closed its side.
            _ = shutdown.reached(|stage| stage == Stage::Ending) => {}
        }
        let _ = to_server.shutdown().await;
        let _ = copy(&mut from_client, &mut sink()).await;
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

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, DuplexStream, duplex},
        task::JoinHandle,
        time::Instant,
    };

    use super::*;

    /// The size of the buffer between the client and the relay, in bytes.
    const BUFFER: usize = 64;

    const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

    const RESPONSE: &[u8] = b"response";

    /// More bytes than fit into the buffer, so that they are sent only if the relay reads them.
    const FURTHER_REQUESTS: &[u8] = &[b'r'; 4 * BUFFER];

    /// A relay of a connection between `client` and `server`.
    struct Relayed {
        client: DuplexStream,
        server: UnixStream,
        shutdown: Shutdown,
        relay: JoinHandle<()>,
    }

    fn start_relay() -> Relayed {
        let (ours, client) = duplex(BUFFER);
        let (to_server, server) = UnixStream::pair().unwrap();
        let shutdown = Shutdown::default();
        let relay = relay(ours, to_server, WRITE_TIMEOUT, shutdown.clone());
        Relayed {
            client,
            server,
            shutdown,
            relay: tokio::spawn(relay),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_after_the_last_response_are_discarded() {
        let mut relayed = start_relay();
        relayed.client.write_all(b"request").await.unwrap();
        relayed.server.read_exact(&mut [0; 7]).await.unwrap();
        relayed.server.write_all(RESPONSE).await.unwrap();
        drop(relayed.server);
        let client = &mut relayed.client;
        client.write_all(FURTHER_REQUESTS).await.unwrap();
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, RESPONSE);
        client.write_all(FURTHER_REQUESTS).await.unwrap();
        // The client does not close the connection.
        let begun = Instant::now();
        relayed.relay.await.unwrap();
        assert_eq!(begun.elapsed().as_secs(), LINGER.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_after_the_shutdown_are_discarded() {
        let mut relayed = start_relay();
        relayed.shutdown.begin();
        let mut requests = Vec::new();
        relayed.server.read_to_end(&mut requests).await.unwrap();
        assert_eq!(requests, b"");
        let written = relayed.client.write_all(FURTHER_REQUESTS);
        timeout(LINGER, written).await.unwrap().unwrap();
        relayed.server.write_all(RESPONSE).await.unwrap();
        drop(relayed.server);
        let mut received = Vec::new();
        relayed.client.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, RESPONSE);
        drop(relayed.client);
        relayed.relay.await.unwrap();
    }

    /// The client keeps the connection open.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_reads_ends_the_relay() {
        let mut relayed = start_relay();
        relayed.server.write_all(&[b'r'; 4 * BUFFER]).await.unwrap();
        let longest = WRITE_TIMEOUT + 2 * LINGER;
        timeout(longest, relayed.relay).await.unwrap().unwrap();
    }
}
