//! Opens connections to upstreams: TCP, then TLS where configured, then HTTP/1.1 or HTTP/2.

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
        return Err(io::Error::other("the upstream does not support HTTP/2"));
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

/// Returns whether a connect failed because this machine ran out of descriptors, ports or memory.
/// Such an error says nothing about the endpoint.
pub(super) fn is_local(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let local = [
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
        Errno::ADDRNOTAVAIL,
    ];
    let code = error.raw_os_error();
    code.is_some_and(|code| local.iter().any(|errno| errno.raw_os_error() == code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_local_resources_do_not_count_against_the_endpoint() {
        for (code, expected) in [
            (24, true),
            (23, true),
            (99, true),
            (111, false),
            (113, false),
        ] {
            let error = io::Error::from_raw_os_error(code);
            assert_eq!(is_local(&error), expected, "{error}");
        }
        assert!(!is_local(&io::Error::other(
            "the upstream does not support HTTP/2"
        )));
    }
}
