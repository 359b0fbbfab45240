//! A client of listeners with TLS, and a server with such listeners.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

use super::{
    PATIENT,
    connections::{TIMEOUT, proxy_in_front_of, upstream},
};
use crate::support::{Scratch, Server, authority, signed};

/// A TLS stream of a client.
type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// A client of a listener with TLS.
pub(super) struct TlsClient {
    pub(super) stream: TlsStream,
}

impl TlsClient {
    /// Connects, and begins the handshake: the server has sent its part. The handshake ends when
    /// the client sends or receives.
    pub(super) fn connect(server: &Server, address: SocketAddr) -> Self {
        let file = |name: &str| server.directory().join(name);
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_file(file("ours.pem"));
        roots.add(authority.unwrap()).unwrap();
        let certificate = CertificateDer::from_pem_file(file("client.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(file("client.key")).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)
            .unwrap();
        let name = "localhost".try_into().unwrap();
        let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        connection.write_tls(&mut socket).unwrap();
        assert_eq!(socket.peek(&mut [0]).unwrap(), 1);
        let stream = StreamOwned::new(connection, socket);
        Self { stream }
    }

    /// Ends the handshake. The server has then received the whole handshake.
    pub(super) fn end_handshake(&mut self) {
        // The server sends its session tickets after the handshake.
        let StreamOwned { conn, sock } = &mut self.stream;
        while conn.is_handshaking() {
            conn.complete_io(sock).unwrap();
        }
        assert_eq!(sock.peek(&mut [0]).unwrap(), 1);
    }

    pub(super) fn send(&mut self, bytes: &str) {
        self.stream.write_all(bytes.as_bytes()).unwrap();
        self.stream.flush().unwrap();
    }

    /// Reads up to and including `end`.
    pub(super) fn read_until(&mut self, end: &str) -> String {
        let mut received = Vec::new();
        while !received.ends_with(end.as_bytes()) {
            let mut byte = [0];
            let read = self.stream.read(&mut byte).unwrap();
            assert_eq!(read, 1, "{}", String::from_utf8_lossy(&received));
            received.extend(byte);
        }
        String::from_utf8(received).unwrap()
    }

    /// Reads until the server ends the TLS session.
    pub(super) fn read_until_closed(mut self) -> String {
        let mut rest = String::new();
        self.stream.read_to_string(&mut rest).unwrap();
        rest
    }
}

/// Creates a directory with the files of [`tls_config`] and of [`TlsClient`].
pub(super) fn directory_with_certificates() -> Scratch {
    let scratch = Scratch::new();
    authority(scratch.path(), "ours");
    for name in ["server", "client"] {
        signed(scratch.path(), "ours", name);
    }
    scratch
}

/// Returns a configuration in which every listener has a certificate, except the admin listener.
/// The proxy also requires a certificate of its clients.
pub(super) fn tls_config(rules: &str) -> String {
    let tls = "certificate: server.pem, key: server.key";
    let listener = |name: &str| format!("{name}: {{address: '127.0.0.1:0', tls: {{{tls}}}}}");
    let listeners = ["http", "resp", "spop"].map(listener).join(", ");
    let listen = format!("{listeners}, grpc: '127.0.0.1:0', admin: '127.0.0.1:0'");
    let tls_of_proxy = format!("{{tls: {{{tls}, client_ca: ours.pem}}, ");
    let proxy = proxy_in_front_of(upstream()).replacen('{', &tls_of_proxy, 1);
    format!("listen: {{{listen}}}\ngrpc: {{tls: {{{tls}}}}}\n{proxy}{PATIENT}{rules}")
}

pub(super) const CHECK: &str = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 27\r\n\r\n{\"entries\": {\"user\": \"u1\"}}";

/// Returns the response to [`CHECK`], and whether it announces the end of the connection.
pub(super) fn check(client: &mut TlsClient) -> (String, bool) {
    client.send(CHECK);
    let response = client.read_until("}]}");
    let closes = response.contains("\r\nconnection: close\r\n");
    (response, closes)
}

pub(super) fn assert_admitted(response: &str, remaining: usize) {
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    let remaining = format!("\"remaining\":{remaining}");
    assert!(response.contains(&remaining), "{response}");
}
