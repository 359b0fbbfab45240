//! Tests TLS with server and client certificates.

use tidegate_core::Decision;
use tidegate_redis::{RedisSettings, RedisTls, Topology};

use crate::{
    store_fixture::{StoreFixture, address, standalone},
    support::{Certificates, RedisServer, reserve_port},
};

#[tokio::test]
async fn a_server_that_requires_client_certificates_accepts_only_ours() {
    let made = Certificates::make();
    let port = reserve_port().to_string();
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
    let with = |tls: RedisTls| {
        StoreFixture::with(RedisSettings {
            topology: Topology::Standalone(address(&url)),
            tls,
            ..standalone(&url)
        })
    };
    let ca = Some(made.read("ca.pem"));
    let client = Some((made.read("client.pem"), made.read("client.key")));
    let fixture = with(RedisTls {
        ca: ca.clone(),
        client: client.clone(),
    });
    assert_eq!(fixture.until_decided("k").await, Decision::Admitted);

    let stranger = with(RedisTls { ca: None, client });
    assert!(
        stranger
            .error()
            .await
            .contains(&format!("127.0.0.1:{port}"))
    );
    let nobody = with(RedisTls { ca, client: None });
    assert!(nobody.error().await.contains(&format!("127.0.0.1:{port}")));
    let broken = with(RedisTls {
        ca: Some(b"no certificate".to_vec()),
        client: None,
    });
    assert!(
        broken.error().await.contains(&format!("127.0.0.1:{port}"))
            || broken.error().await.contains("store.tls")
    );
}
