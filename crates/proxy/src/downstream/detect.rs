//! Protocol detection: HTTP/1 or HTTP/2.

use std::io;

use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// The HTTP version of a connection. HTTP/1.0 and HTTP/1.1 are not distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// HTTP/1.0 or 1.1.
    Http1,
    /// HTTP/2.
    Http2,
}

/// The first bytes of the HTTP/2 connection preface. No HTTP/1 request begins with these bytes.
const PREFACE: &[u8] = b"PRI ";

/// Detects the protocol of a plaintext or relayed connection. Peeks at the first bytes without
/// consuming them. A client sends the HTTP/2 preface in one packet, so a shorter read is treated as
/// HTTP/1.
pub(super) async fn peek(stream: &TcpStream) -> io::Result<Version> {
    let mut first = [0; PREFACE.len()];
    let read = stream.peek(&mut first).await?;
    Ok(if &first[..read] == PREFACE {
        Version::Http2
    } else {
        Version::Http1
    })
}

/// Returns the protocol negotiated with ALPN.
pub(super) fn negotiated(stream: &TlsStream<TcpStream>) -> Version {
    match stream.get_ref().1.alpn_protocol() {
        Some(b"h2") => Version::Http2,
        _ => Version::Http1,
    }
}
