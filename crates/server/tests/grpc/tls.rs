//! TLS, and clients that must show a certificate.

use std::{fs, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tidegate_server::{config::Config, door::grpc::Tls};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::{
    client::Client,
    door::Door,
    proto::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse},
};

/// An authority, and what it signed: PEM texts.
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

    /// A certificate for `localhost` and its key.
    fn sign(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

/// Files in `folder`, and the settings that name them.
fn settings(folder: &Path, authority: &Authority, with_clients: bool) -> String {
    let (certificate, key) = authority.sign();
    fs::write(folder.join("server.pem"), certificate).unwrap();
    fs::write(folder.join("server.key"), key).unwrap();
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

async fn is_served(door: &Door, tls: ClientTlsConfig) -> bool {
    let port = door.listener.local_addr().port();
    let endpoint = Endpoint::from_shared(format!("https://localhost:{port}")).unwrap();
    let endpoint = endpoint.tls_config(tls).unwrap();
    let Ok(mut client) = Client::over(endpoint).await else {
        return false;
    };
    let asked = HealthCheckRequest::default();
    client
        .call::<_, HealthCheckResponse>("/grpc.health.v1.Health/Check", asked)
        .await
        .is_ok()
}

fn trusting(authority: &Authority) -> ClientTlsConfig {
    ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority.pem()))
}

#[tokio::test]
async fn the_door_shows_its_certificate() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let door = Door::open(&settings(folder.path(), &authority, false));
    assert!(is_served(&door, trusting(&authority)).await);
    assert!(!is_served(&door, trusting(&Authority::new())).await);
}

#[tokio::test]
async fn only_clients_with_a_certificate_of_the_authority_are_let_in() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let door = Door::open(&settings(folder.path(), &authority, true));
    let shows = |(certificate, key): (String, String)| {
        trusting(&authority).identity(Identity::from_pem(certificate, key))
    };
    assert!(is_served(&door, shows(authority.sign())).await);
    assert!(!is_served(&door, shows(Authority::new().sign())).await);
    assert!(!is_served(&door, trusting(&authority)).await);
}

#[tokio::test]
async fn a_door_with_tls_does_not_speak_in_the_clear() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let door = Door::open(&settings(folder.path(), &authority, false));
    let endpoint = Endpoint::from_shared(format!("http://{}", door.listener.local_addr())).unwrap();
    let asked = HealthCheckRequest::default();
    let answered = match Client::over(endpoint).await {
        Ok(mut client) => client
            .call::<_, HealthCheckResponse>("/grpc.health.v1.Health/Check", asked)
            .await
            .is_ok(),
        Err(_) => false,
    };
    assert!(!answered);
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let config = Config::parse(&settings(folder.path(), &authority, true)).unwrap();
    let files = config.grpc.tls.unwrap();
    let refused = || Tls::load(&files).unwrap_err().to_string();

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
