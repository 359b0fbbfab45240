//! Tests of rate limiting mTLS clients by the name in their certificate.

use std::{path::Path, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring::default_provider,
        pki_types::{PrivateKeyDer, ServerName},
    },
};

use crate::{listener::TestListener, upstream::Upstream};

/// A certificate authority for servers and clients.
type CertificateAuthority = CertifiedIssuer<'static, KeyPair>;

/// Creates a certificate authority and a server certificate in `folder`.
fn authority(folder: &Path) -> CertificateAuthority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let server = server.signed_by(&key, &authority).unwrap();
    for (file, text) in [
        ("clients.pem", authority.pem()),
        ("server.pem", server.pem()),
        ("server.key", key.serialize_pem()),
    ] {
        std::fs::write(folder.join(file), text).unwrap();
    }
    authority
}

/// Opens a proxy that accepts clients with a certificate issued by the authority in `folder`. The
/// limit is one request per hour for each certificate name.
fn listener(folder: &Path, upstream: &Upstream) -> TestListener {
    let path = |name: &str| folder.join(name).display().to_string();
    TestListener::open(&format!(
        "rules: [{{name: clients, key: [tls.client], limits: [1/h]}}]
proxy:
  listen: 127.0.0.1:0
  upstreams: [{{name: app, urls: '{}'}}]
  tls: {{certificate: '{}', key: '{}', client_ca: '{}'}}
",
        upstream.url(),
        path("server.pem"),
        path("server.key"),
        path("clients.pem")
    ))
}

/// Sends a request with a client certificate for `name` and a header that claims another name.
/// Returns the status line.
async fn response_as(
    listener: &TestListener,
    authority: &CertificateAuthority,
    name: &str,
) -> String {
    let key = KeyPair::generate().unwrap();
    let client = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let client = client.signed_by(&key, authority).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let config = config
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![client.der().clone()], key)
        .unwrap();
    let stream = TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    let server = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(server, stream).await.unwrap();
    let request = "GET / HTTP/1.1\r\nhost: h\r\nx-tls.client: other\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn clients_are_counted_by_the_names_in_their_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let authority = authority(folder.path());
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let listener = listener(folder.path(), &upstream);
    for (name, status) in [
        ("billing.test", "200 OK"),
        ("Billing.test", "429 Too Many Requests"),
        ("search.test", "200 OK"),
        ("search.test", "429 Too Many Requests"),
    ] {
        let line = response_as(&listener, &authority, name).await;
        assert_eq!(line, format!("HTTP/1.1 {status}"), "{name}");
    }
}
