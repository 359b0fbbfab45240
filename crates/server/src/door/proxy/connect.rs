//! From an address to a connection that takes requests: TCP, perhaps TLS, and HTTP.

use std::io;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{
    address::Address,
    exchange::{Exchange, Socket},
    link::Sender,
    shared::Shared,
};
use crate::config::Proxy;

/// Connects to `address`.
pub(super) async fn connect(address: &Address, settings: &Proxy) -> io::Result<Sender> {
    let stream = TcpStream::connect((&*address.url.host, address.url.port)).await?;
    stream.set_nodelay(true)?;
    let Some(tls) = address.tls() else {
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
    S: Socket + 'static,
{
    if address.http2 {
        return Shared::begin(stream, settings).await.map(Sender::Http2);
    }
    Ok(Sender::Http1(Box::new(Exchange::new(stream, settings))))
}
