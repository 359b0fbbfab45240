//! Tests of TLS and client certificates.

use std::{fs, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tidegate_config::Config;
use tidegate_net::{Tls, TlsListener};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::{
    client::Client,
    listener::TestListener,
    proto::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse},
};

/// A certificate authority, which issues certificates in PEM format.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self {
            issuer: CertifiedIssuer::self_signed(params, key).unwrap(),
        }
    }

    fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues a certificate for `localhost`. Returns the certificate and its key.
    fn sign(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

/// Writes the certificate files to `folder`, and returns settings with the paths of these files.
fn settings(folder: &Path, authority: &Authority, with_clients: bool) -> String {
    renew(folder, authority);
    fs::write(folder.join("clients.pem"), authority.pem()).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    let client_ca = if with_clients {
        format!(", client_ca: '{}'", path("clients.pem"))
    } else {
        String::new()
    };
    format!(
        "grpc: {{tls: {{certificate: '{}', key: '{}'{client_ca}}}}}\n",
        path("server.pem"),
        path("server.key")
    )
}

/// Replaces the certificate and key in `folder` with new ones from `authority`.
fn renew(folder: &Path, authority: &Authority) {
    let (certificate, key) = authority.sign();
    fs::write(folder.join("server.pem"), certificate).unwrap();
    fs::write(folder.join("server.key"), key).unwrap();
}

async fn is_served(listener: &TestListener, tls: ClientTlsConfig) -> bool {
    let port = listener.listener.local_addr().port();
    let endpoint = Endpoint::from_shared(format!("https://localhost:{port}")).unwrap();
    let endpoint = endpoint.tls_config(tls).unwrap();
    let Ok(mut client) = Client::over(endpoint).await else {
        return false;
    };
    let request = HealthCheckRequest::default();
    client
        .call::<_, HealthCheckResponse>("/grpc.health.v1.Health/Check", request)
        .await
        .is_ok()
}

fn trusting(authority: &Authority) -> ClientTlsConfig {
    ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority.pem()))
}

#[tokio::test]
async fn the_listener_presents_its_certificate() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let listener = TestListener::open(&settings(folder.path(), &authority, false));
    assert!(is_served(&listener, trusting(&authority)).await);
    assert!(!is_served(&listener, trusting(&Authority::new())).await);
}

#[tokio::test]
async fn only_clients_with_a_trusted_certificate_are_accepted() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let listener = TestListener::open(&settings(folder.path(), &authority, true));
    let shows = |(certificate, key): (String, String)| {
        trusting(&authority).identity(Identity::from_pem(certificate, key))
    };
    assert!(is_served(&listener, shows(authority.sign())).await);
    assert!(!is_served(&listener, shows(Authority::new().sign())).await);
    assert!(!is_served(&listener, trusting(&authority)).await);
}

#[tokio::test]
async fn a_tls_listener_rejects_cleartext() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let listener = TestListener::open(&settings(folder.path(), &authority, false));
    let endpoint =
        Endpoint::from_shared(format!("http://{}", listener.listener.local_addr())).unwrap();
    let request = HealthCheckRequest::default();
    let answered = match Client::over(endpoint).await {
        Ok(mut client) => client
            .call::<_, HealthCheckResponse>("/grpc.health.v1.Health/Check", request)
            .await
            .is_ok(),
        Err(_) => false,
    };
    assert!(!answered);
}

#[tokio::test]
async fn a_renewed_certificate_is_used_and_open_connections_continue() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let listener = TestListener::open(&settings(folder.path(), &authority, false));
    let tls = listener.tls.as_deref().unwrap();
    let port = listener.listener.local_addr().port();
    let endpoint = Endpoint::from_shared(format!("https://localhost:{port}")).unwrap();
    let endpoint = endpoint.tls_config(trusting(&authority)).unwrap();
    let mut before = Client::over(endpoint).await.unwrap();
    assert!(!tls.has_changed());

    let successor = Authority::new();
    renew(folder.path(), &successor);
    assert!(!tls.has_changed(), "the two files are not replaced at once");
    assert!(tls.has_changed());
    assert!(
        is_served(&listener, trusting(&authority)).await,
        "not loaded yet"
    );
    tls.reload().unwrap();
    assert!(!tls.has_changed());
    assert!(is_served(&listener, trusting(&successor)).await);
    assert!(!is_served(&listener, trusting(&authority)).await);
    let request = HealthCheckRequest::default();
    before
        .call::<_, HealthCheckResponse>("/grpc.health.v1.Health/Check", request)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_invalid_certificate_pair_changes_nothing_and_is_reported() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let listener = TestListener::open(&settings(folder.path(), &authority, false));
    let tls = listener.tls.as_deref().unwrap();
    let (certificate, _) = Authority::new().sign();
    fs::write(folder.path().join("server.pem"), certificate).unwrap();
    let refused = tls.reload().unwrap_err().to_string();
    assert!(refused.starts_with("grpc.tls: "), "{refused}");
    assert_eq!(tls.problem(), Some(refused));
    assert!(is_served(&listener, trusting(&authority)).await);

    fs::remove_file(folder.path().join("server.key")).unwrap();
    for _ in 0..2 {
        assert!(!tls.has_changed(), "the file is being replaced");
    }
    renew(folder.path(), &authority);
    tls.reload().unwrap();
    assert_eq!(tls.problem(), None);
    assert!(is_served(&listener, trusting(&authority)).await);
}

#[tokio::test]
async fn clients_of_a_new_ca_are_accepted_and_those_of_the_old_are_not() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let listener = TestListener::open(&settings(folder.path(), &authority, true));
    let clients = Authority::new();
    fs::write(folder.path().join("clients.pem"), clients.pem()).unwrap();
    listener.tls.as_deref().unwrap().reload().unwrap();
    let shows = |(certificate, key): (String, String)| {
        trusting(&authority).identity(Identity::from_pem(certificate, key))
    };
    assert!(is_served(&listener, shows(clients.sign())).await);
    assert!(!is_served(&listener, shows(authority.sign())).await);
}

#[test]
fn invalid_files_are_named() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let config = Config::parse(&settings(folder.path(), &authority, true)).unwrap();
    let files = config.grpc.tls.unwrap();
    let refused = || {
        Tls::load(TlsListener::Grpc, &files)
            .unwrap_err()
            .to_string()
    };

    let (_, other_key) = authority.sign();
    fs::write(folder.path().join("server.key"), other_key).unwrap();
    assert!(refused().starts_with("grpc.tls: "), "{}", refused());
    fs::write(folder.path().join("clients.pem"), "nothing").unwrap();
    assert!(
        refused().starts_with("grpc.tls.client_ca: cannot use "),
        "{}",
        refused()
    );
    fs::remove_file(folder.path().join("server.key")).unwrap();
    assert!(
        refused().starts_with("grpc.tls.key: cannot use "),
        "{}",
        refused()
    );
    fs::write(folder.path().join("server.pem"), "").unwrap();
    assert!(
        refused().starts_with("grpc.tls.certificate: cannot use "),
        "{}",
        refused()
    );
}
