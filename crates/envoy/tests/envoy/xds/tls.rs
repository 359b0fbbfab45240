//! Tests of mutual TLS to the control plane.

use std::{fs, path::Path, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tidegate_config::envoy::{XdsConfig, XdsTls};
use tidegate_net::ClientTlsFiles;
use tokio_rustls::TlsAcceptor;

use super::{
    control_plane::{ControlPlane, RunningClient, packed},
    plane::Plane as _,
    protocol::{limiting, started},
};

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// Issues a certificate for `name`. Returns the certificate and its key.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// Writes the authority's certificate, and a client certificate with its key.
    fn write(&self, folder: &Path) {
        let (certificate, key) = self.sign("client");
        fs::write(folder.join("ca.crt"), self.0.pem()).unwrap();
        fs::write(folder.join("tls.crt"), certificate).unwrap();
        fs::write(folder.join("tls.key"), key).unwrap();
    }

    /// Returns a server named `envoy-gateway` that requires a client certificate.
    fn acceptor(&self) -> TlsAcceptor {
        let (certificate, key) = self.sign("envoy-gateway");
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(self.0.pem().as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let provider = Arc::new(default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(vec![certificate], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }
}

fn settings(plane: &ControlPlane, folder: &Path, name: &str) -> XdsConfig {
    let mut config = plane.config();
    config.tls = Some(XdsTls {
        files: ClientTlsFiles {
            ca: Some(folder.join("ca.crt")),
            certificate: Some((folder.join("tls.crt"), folder.join("tls.key"))),
        },
        name: Some(name.to_owned()),
    });
    config
}

#[tokio::test]
async fn mutual_tls_reads_renewed_files_at_the_next_connection() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let mut plane = ControlPlane::with_tls(Some(authority.acceptor())).await;
    // The control plane does not accept the first certificate.
    Authority::new().write(folder.path());
    fs::write(folder.path().join("ca.crt"), authority.0.pem()).unwrap();
    let started = started();
    let config = settings(&plane, folder.path(), "envoy-gateway");
    let client = RunningClient::start(config, &started.service);
    while client.client.problem().is_none() {
        tokio::task::yield_now().await;
    }
    authority.write(folder.path());
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let resources = vec![packed(&limiting("shop", 3))];
    stream.send(("1", "a", ""), resources).await.unwrap();
    assert_eq!(started.service.domains(), 1);
    // Invalid files do not affect the open connection, because files are read only when a
    // connection is opened.
    fs::write(folder.path().join("tls.key"), "nonsense").unwrap();
    let resources = vec![packed(&limiting("shop", 4))];
    stream.send(("2", "b", "1"), resources).await.unwrap();
    drop(stream);
    let mut problem = String::new();
    while !problem.contains("tls.key") {
        tokio::task::yield_now().await;
        problem = client.client.problem().unwrap_or_default();
    }
    assert_eq!(
        started.service.domains(),
        1,
        "the last good set stays active"
    );
    authority.write(folder.path());
    plane.accept().await.subscription("2").await;
}

#[tokio::test]
async fn the_name_of_the_control_plane_is_verified() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    authority.write(folder.path());
    let plane = ControlPlane::with_tls(Some(authority.acceptor())).await;
    let started = started();
    let config = settings(&plane, folder.path(), "other");
    let client = RunningClient::start(config, &started.service);
    let mut problem = String::new();
    while !problem.contains("TLS handshake failed") {
        tokio::task::yield_now().await;
        problem = client.client.problem().unwrap_or_default();
    }
    assert!(
        problem.contains("not valid for name \"other\""),
        "{problem}"
    );
}
