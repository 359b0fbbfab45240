//! Opens connections to upstreams: TCP, then TLS if configured, then HTTP/1.1 or HTTP/2.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
};

use rustls::pki_types::ServerName;
use tidegate_config::Proxy;
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;

use super::{
    address::EndpointAddress,
    h1::{Http1Connection, Socket},
    h2::Http2Connection,
};

/// The HTTP client of a connection.
#[derive(Debug)]
pub(crate) enum Protocol {
    /// An HTTP/1.1 client, for one request at a time.
    Http1(Box<Http1Connection>),
    /// A client for many concurrent requests.
    Http2(Http2Connection),
}

/// Connects to `endpoint`.
pub(crate) async fn connect(address: &EndpointAddress, settings: &Proxy) -> io::Result<Protocol> {
    let addresses = lookup_host((&*address.url.host, address.url.port)).await;
    let addresses: Vec<SocketAddr> = addresses.map_err(shortage_behind)?.collect();
    let stream = TcpStream::connect(&*addresses).await?;
    stream.set_nodelay(true)?;
    let Some(tls) = address.tls() else {
        return handshake(stream, address, settings).await;
    };
    let name = ServerName::try_from(address.url.host.to_string()).map_err(io::Error::other)?;
    let stream = TlsConnector::from(tls.clone())
        .connect(name, stream)
        .await?;
    let agreed = stream.get_ref().1.alpn_protocol();
    if address.http2 && agreed != Some(b"h2") {
        return Err(io::Error::other("the upstream does not support HTTP/2"));
    }
    handshake(stream, address, settings).await
}

async fn handshake<S>(
    stream: S,
    address: &EndpointAddress,
    settings: &Proxy,
) -> io::Result<Protocol>
where
    S: Socket + 'static,
{
    if address.http2 {
        return Http2Connection::open(stream, settings)
            .await
            .map(Protocol::Http2);
    }
    Ok(Protocol::Http1(Box::new(Http1Connection::new(
        stream, settings,
    ))))
}

/// Returns whether a connection attempt failed because this machine ran out of descriptors, ports
/// or memory. A lack of resources does not indicate a problem with the endpoint.
pub(crate) fn is_out_of_resources(error: &io::Error) -> bool {
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

/// Checks whether a file descriptor shortage caused the resolver error `error`. Returns the
/// shortage error if there is a shortage, and `error` otherwise. Without a free descriptor, some
/// resolvers report an unknown host or a refused connection (for example, with `mymachines` in
/// `/etc/nsswitch.conf`).
fn shortage_behind(error: io::Error) -> io::Error {
    match UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)) {
        Err(shortage) if is_out_of_resources(&shortage) => shortage,
        _ => error,
    }
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
            assert_eq!(is_out_of_resources(&error), expected, "{error}");
        }
        assert!(!is_out_of_resources(&io::Error::other(
            "the upstream does not support HTTP/2"
        )));
    }
}
