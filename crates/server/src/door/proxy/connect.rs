//! From an address to a connection that takes requests: TCP, perhaps TLS, and HTTP.

use std::{io, time::Duration};

use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use super::{address::Address, exchange::Exchange, link::Sender, stall::Stalling};
use crate::{config::Proxy, net::Local};

/// The octets that an upstream may send on HTTP/2 before it waits: for one answer, and for all of a connection. Answers that
/// nobody takes keep theirs: there have to be 128 of them before the others on the connection wait too.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 128 * STREAM_WINDOW;

/// How often an upstream that speaks HTTP/2 must answer a ping, and in what time.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(10);

/// Connects to `address`.
pub(super) async fn connect(address: &Address, settings: &Proxy) -> io::Result<Sender> {
    let stream = TcpStream::connect((&*address.url.host, address.url.port)).await?;
    stream.set_nodelay(true)?;
    let Some(tls) = &address.tls else {
        return speak(stream, address, settings).await;
    };
    let name = ServerName::try_from(address.url.host.to_string()).map_err(io::Error::other)?;
    let stream = TlsConnector::from(tls.clone())
        .connect(name, stream)
        .await?;
    let agreed = stream.get_ref().1.alpn_protocol();
    if address.http2 && agreed != Some(b"h2") {
        return Err(io::Error::other("it does not speak HTTP/2"));
    }
    speak(stream, address, settings).await
}

async fn speak<S>(stream: S, address: &Address, settings: &Proxy) -> io::Result<Sender>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    if address.http2 {
        let stream = TokioIo::new(Stalling::new(stream, settings.timeouts.idle));
        let max_head = u32::try_from(settings.max_head).unwrap_or(u32::MAX);
        let (sender, connection) = http2::Builder::new(Local)
            .timer(TokioTimer::new())
            .max_header_list_size(max_head)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_WITHIN)
            .handshake(stream)
            .await
            .map_err(io::Error::other)?;
        drive(connection);
        return Ok(Sender::Http2(sender));
    }
    Ok(Sender::Http1(Box::new(Exchange::new(stream, settings))))
}

/// Moves the octets of a connection until it ends.
fn drive(connection: impl Future<Output = hyper::Result<()>> + 'static) {
    tokio::task::spawn_local(async {
        if let Err(error) = connection.await {
            tracing::debug!("a connection to an upstream ended: {error}");
        }
    });
}
