//! Certificates on both sides, and a user that may do no more than it has to.

use tidegate_core::Decision;
use tidegate_redis::{Login, Settings, Tls, Topology};

use crate::{
    asked::{Asked, address, standalone},
    support::{Certificates, RedisServer, free_port},
};

#[tokio::test]
async fn a_server_that_asks_for_certificates_is_asked_with_ours_and_with_no_others() {
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

#[tokio::test]
async fn a_user_with_the_documented_rights_decides_and_one_with_fewer_is_told() {
    let server = RedisServer::start();
    server.ask(&[
        "ACL",
        "SETUSER",
        "tidegate",
        "on",
        ">secret",
        "~test*",
        "resetchannels",
        "-@all",
        "+evalsha",
        "+eval",
        "+@read",
        "+@write",
        "+time",
        "+client|setname",
        "+ping",
    ]);
    server.ask(&[
        "ACL", "SETUSER", "nobody", "on", ">secret", "~test*", "-@all", "+ping",
    ]);
    let with = |username: &str| {
        Asked::with(Settings {
            login: Login {
                username: Some(username.into()),
                password: Some("secret".into()),
            },
            ..standalone(&server.url())
        })
    };
    assert_eq!(
        with("tidegate").until_decided("k").await,
        Decision::Admitted
    );
    let nobody = with("nobody");
    nobody.until("up", |health| health.up == 1).await;
    let refused = nobody.spend("k").await.unwrap_err().to_string();
    assert!(refused.contains("no permissions"), "{refused}");
}
