//! Which HTTP a client is going to speak.

use std::io;

use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// A version of HTTP, as far as it makes a difference here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// HTTP/1.0 or 1.1.
    Http1,
    /// HTTP/2.
    Http2,
}

/// How HTTP/2 begins, and nothing else does.
const PREFACE: &[u8] = b"PRI ";

/// What a client in the clear speaks, by its first octets, which stay where they are. HTTP/2 is known by its preface,
/// which a client sends in one piece.
pub(super) async fn of(stream: &TcpStream) -> io::Result<Version> {
    let mut first = [0; PREFACE.len()];
    let read = stream.peek(&mut first).await?;
    Ok(if &first[..read] == PREFACE {
        Version::Http2
    } else {
        Version::Http1
    })
}

/// What a client has agreed to speak.
pub(super) fn agreed(stream: &TlsStream<TcpStream>) -> Version {
    match stream.get_ref().1.alpn_protocol() {
        Some(b"h2") => Version::Http2,
        _ => Version::Http1,
    }
}
