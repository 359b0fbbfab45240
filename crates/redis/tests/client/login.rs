//! Tests a Redis user with only the permissions that a store needs.

use tidegate_core::Decision;
use tidegate_redis::{Login, RedisSettings};

use crate::{
    store_fixture::{StoreFixture, standalone},
    support::RedisServer,
};

#[tokio::test]
async fn the_documented_acl_suffices_and_missing_permissions_are_reported() {
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
        StoreFixture::with(RedisSettings {
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
