//! Tests servers that cannot be used. For each kind of problem, the error message says how to fix
//! it.

use std::{
    io::{Read, Write},
    net::TcpListener,
    thread,
};

use tidegate_redis::{Login, RedisSettings, StoreError, Topology};

use crate::{
    store_fixture::{StoreFixture, address, standalone},
    support::{RedisServer, reserve_port},
};

async fn reports_error(settings: RedisSettings, advice: &str) {
    let fixture = StoreFixture::with(settings);
    let error = fixture.error().await;
    assert!(error.contains(advice), "{error}");
    // A request to this server fails immediately, and the error states the reason.
    match fixture.spend("k").await {
        Err(StoreError::NotExecuted(problem)) => assert!(problem.contains(advice), "{problem}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_unreachable_server_is_reported() {
    let port = reserve_port();
    let settings = standalone(&format!("redis://127.0.0.1:{port}"));
    reports_error(settings, &format!("cannot reach Redis at 127.0.0.1:{port}")).await;
}

#[tokio::test]
async fn a_wrong_and_a_missing_password_are_reported() {
    let server = RedisServer::start_with(&["--requirepass", "secret"]);
    let advice = "set `store.username` and `store.password_env`";
    reports_error(standalone(&server.url()), advice).await;
    let wrong = Login {
        username: None,
        password: Some("wrong".into()),
    };
    let settings = RedisSettings {
        login: wrong,
        ..standalone(&server.url())
    };
    reports_error(settings, advice).await;
}

#[tokio::test]
async fn a_read_only_replica_is_reported() {
    let primary = RedisServer::start();
    let of = primary.port().to_string();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &of]);
    reports_error(
        standalone(&replica.url()),
        "is a read-only replica; configure the primary",
    )
    .await;
}

#[tokio::test]
async fn a_standalone_server_and_a_cluster_node_are_not_confused() {
    let server = RedisServer::start();
    let cluster = |url: &str| RedisSettings {
        topology: Topology::Cluster {
            seeds: vec![address(url)],
        },
        ..standalone(url)
    };
    reports_error(
        cluster(&server.url()),
        &format!("write `redis: {}`", server.url()),
    )
    .await;
    let node = RedisServer::start_with(&[
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &reserve_port().to_string(),
    ]);
    let advice = format!("write `redis: {{cluster: [{}]}}`", node.url());
    reports_error(standalone(&node.url()), &advice).await;
    reports_error(cluster(&node.url()), "create the cluster first").await;
}

#[tokio::test]
async fn a_missing_database_is_reported() {
    let server = RedisServer::start();
    let url = format!("{}/99", server.url());
    reports_error(standalone(&url), "check the database number in the URL").await;
}

#[tokio::test]
async fn an_old_server_is_reported() {
    let url =
        pretender(b"%3\r\n+version\r\n+6.2.14\r\n+mode\r\n+standalone\r\n+role\r\n+master\r\n");
    reports_error(
        standalone(&url),
        "is version 6.2.14; upgrade to Redis 7.0 or later, or to Valkey",
    )
    .await;
}

#[tokio::test]
async fn a_server_that_is_not_redis_is_reported() {
    let url = pretender(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    reports_error(standalone(&url), "is this a Redis server?").await;
}

/// Starts a server that replies to every command with `answer`.
fn pretender(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut room = [0; 4_096];
                while let Ok(length) = client.read(&mut room) {
                    // A command is an array. Only the first line of the array begins with an
                    // asterisk.
                    let commands = room[..length]
                        .split(|byte| *byte == b'\n')
                        .filter(|line| line.starts_with(b"*"));
                    let answers = commands.flat_map(|_| answer).copied().collect::<Vec<u8>>();
                    if length == 0 || client.write_all(&answers).is_err() {
                        return;
                    }
                }
            });
        }
    });
    format!("redis://127.0.0.1:{port}")
}
