//! Tests of TLS and client certificates.

use std::{fs, path::Path, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use crate::listener::TestListener;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Issues a certificate for `localhost`. Returns the certificate and its private key in PEM.
fn sign(authority: &Authority) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    (certificate.pem(), key.serialize_pem())
}

fn rules(folder: &Path, authority: &Authority) -> String {
    let (certificate, key) = sign(authority);
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (certificate, key) = (write("a.pem", certificate), write("a.key", key));
    let clients = write("clients.pem", authority.pem());
    format!(
        "listen: {{http: {{address: '127.0.0.1:0', tls: {{certificate: '{certificate}', key: '{key}', client_ca: '{clients}'}}}}}}"
    )
}

/// Returns the response to a client with this certificate. The response is empty if the handshake
/// is rejected.
async fn answer(
    listener: &TestListener,
    authority: &Authority,
    shown: Option<(String, String)>,
) -> String {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap();
    roots.add(root).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match shown {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder
                .with_client_auth_cert(vec![certificate], key)
                .unwrap()
        }
    };
    let stream = tokio::net::TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream);
    let Ok(mut stream) = connected.await else {
        return String::new();
    };
    let request = b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut received = Vec::new();
    // With TLS 1.3, the client notices a rejected handshake only when it reads.
    if stream.write_all(request).await.is_ok() {
        let _ = stream.read_to_end(&mut received).await;
    }
    String::from_utf8(received).unwrap()
}

#[tokio::test]
async fn only_clients_with_a_trusted_certificate_are_answered() {
    let (folder, ours) = (tempfile::tempdir().unwrap(), authority());
    let listener = TestListener::open(&rules(folder.path(), &ours));
    let answered = answer(&listener, &ours, Some(sign(&ours))).await;
    assert!(answered.starts_with("HTTP/1.1 404"), "{answered}");
    let strangers = sign(&authority());
    for shown in [None, Some(strangers)] {
        assert_eq!(answer(&listener, &ours, shown).await, "");
    }
    let mut in_the_clear = listener.connect();
    in_the_clear.send("GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n");
    assert!(!in_the_clear.until_closed().contains("HTTP/1.1"));
}
