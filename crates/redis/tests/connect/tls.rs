//! TLS with server and client certificates.

use tidegate_core::Decision;
use tidegate_redis::{Settings, Tls, Topology};

use crate::{
    asked::{Asked, address, standalone},
    support::{Certificates, RedisServer, free_port},
};

#[tokio::test]
async fn a_server_that_requires_client_certificates_accepts_only_ours() {
    let made = Certificates::make();
    let port = free_port().to_string();
    let [ca, cert, key] = ["ca.pem", "server.pem", "server.key"]
        .map(|name| made.path(name).to_str().unwrap().to_owned());
    let tls = [
        "--tls-port",
        &port,
        "--tls-ca-cert-file",
        &ca,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
    ];
    let _server = RedisServer::start_with(&tls);
    let url = format!("rediss://127.0.0.1:{port}");
    let with = |tls: Tls| {
        Asked::with(Settings {
            topology: Topology::Standalone(address(&url)),
            tls,
            ..standalone(&url)
        })
    };
    let authority = Some(made.read("ca.pem"));
    let client = Some((made.read("client.pem"), made.read("client.key")));
    let asked = with(Tls {
        authority: authority.clone(),
        client: client.clone(),
    });
    assert_eq!(asked.until_decided("k").await, Decision::Admitted);

    let stranger = with(Tls {
        authority: None,
        client,
    });
    assert!(
        stranger
            .trouble()
            .await
            .contains(&format!("127.0.0.1:{port}"))
    );
    let nobody = with(Tls {
        authority,
        client: None,
    });
    assert!(
        nobody
            .trouble()
            .await
            .contains(&format!("127.0.0.1:{port}"))
    );
    let broken = with(Tls {
        authority: Some(b"no certificate".to_vec()),
        client: None,
    });
    assert!(
        broken
            .trouble()
            .await
            .contains(&format!("127.0.0.1:{port}"))
            || broken.trouble().await.contains("store.tls")
    );
}
