//! Tests servers that fail while they are in use.

use std::time::Duration;

use tidegate_core::Decision;
use tidegate_redis::StoreError;
use tokio::time::Instant;

use crate::{
    store_fixture::{StoreFixture, standalone, without_timeout},
    support::{Proxy, RedisServer},
};

#[tokio::test]
async fn a_server_that_starts_late_is_used_once_it_is_up() {
    let port = crate::support::reserve_port();
    let fixture = StoreFixture::with(standalone(&format!("redis://127.0.0.1:{port}")));
    fixture.error().await;
    let _server = RedisServer::start_on(port, &[]);
    assert_eq!(fixture.until_decided("k").await, Decision::Admitted);
    assert_eq!(
        fixture.until("up", |health| health.up == 1).await.error,
        None
    );
}

#[tokio::test]
async fn a_killed_server_delays_nothing_and_is_used_again_after_its_restart() {
    let mut server = RedisServer::start();
    let fixture = StoreFixture::with(standalone(&server.url()));
    assert_eq!(fixture.admitted("k", 12).await, 10);
    server.kill();
    fixture.until("down", |health| health.up == 0).await;
    let began = Instant::now();
    for _ in 0..100 {
        assert!(matches!(
            fixture.spend("k").await,
            Err(StoreError::NotExecuted(_))
        ));
    }
    assert!(
        began.elapsed() < Duration::from_millis(500),
        "{:?}",
        began.elapsed()
    );
    server.restart();
    // The counts are lost, because the server stores nothing on disk.
    assert_eq!(fixture.until_decided("k").await, Decision::Admitted);
    assert_eq!(fixture.admitted("k", 12).await, 9);
}

#[tokio::test]
async fn a_request_to_a_paused_server_is_not_sent_again() {
    let server = RedisServer::start();
    let mut settings = standalone(&server.url());
    settings.timeout = Duration::from_millis(50);
    let fixture = StoreFixture::with(settings);
    fixture.until_decided("k").await;
    server.pause();
    let mut unknown = 0;
    while fixture.redis.health().up == 1 {
        match fixture.spend("k").await {
            Err(StoreError::Unknown(_)) => unknown += 1,
            Err(StoreError::NotExecuted(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(
        (1..=16).contains(&unknown),
        "{unknown} questions before it was given up"
    );
    server.resume();
    fixture.until_decided("other").await;
    // Each request with an unknown outcome was executed at most once. The server executes the
    // requests from the pause when the pause ends.
    let left = fixture.admitted("k", 12).await;
    assert!(
        left >= 9_usize.saturating_sub(unknown) && left <= 9,
        "{left} left after {unknown}"
    );
}

#[tokio::test]
async fn a_slow_server_is_dropped_and_used_again_once_it_is_fast() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let mut settings = standalone(&proxy.url());
    settings.timeout = Duration::from_millis(100);
    let fixture = StoreFixture::with(settings);
    fixture.until_decided("k").await;
    proxy.delay(Duration::from_millis(300));
    while fixture.redis.health().up == 1 {
        assert!(fixture.spend("k").await.is_err());
    }
    // The lost connection is noticed immediately. The reason is known only after the next
    // connection attempt fails.
    fixture
        .until("too slow", |health| {
            let error = health.error.as_ref().map(ToString::to_string);
            error.is_some_and(|error| error.contains(" timed out ("))
        })
        .await;
    proxy.delay(Duration::ZERO);
    fixture.until_decided("k").await;
}

#[tokio::test]
async fn broken_connections_are_reopened() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let fixture = StoreFixture::with(standalone(&proxy.url()));
    for _ in 0..5 {
        fixture.until_decided("k").await;
        proxy.reset();
    }
    fixture.until_decided("k").await;
    assert!(fixture.redis.health().circuit_opens >= 1);
}

#[tokio::test]
async fn a_flushed_script_is_sent_again_and_charges_once() {
    let server = RedisServer::start();
    let fixture = StoreFixture::with(without_timeout(&server.url()));
    for _ in 0..10 {
        assert_eq!(fixture.spend("k").await, Ok(Decision::Admitted));
        server.ask(&["SCRIPT", "FLUSH"]);
    }
    assert_eq!(fixture.spend("k").await, Ok(Decision::Limited));
}

#[tokio::test]
async fn a_full_server_error_names_the_cause() {
    let server = RedisServer::start();
    let fixture = StoreFixture::with(without_timeout(&server.url()));
    fixture.until_decided("k").await;
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    match fixture.spend("new").await {
        Err(StoreError::Refused(problem)) => assert!(problem.contains("OOM"), "{problem}"),
        other => panic!("{other:?}"),
    }
    server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(fixture.spend("new").await, Ok(Decision::Admitted));
}

#[tokio::test]
async fn waiting_requests_are_pipelined() {
    let server = RedisServer::start();
    let mut settings = without_timeout(&server.url());
    settings.connections = 1;
    let fixture = StoreFixture::with(settings);
    fixture.until_decided("first").await;
    let before = fixture.redis.health().batches;
    let keys: Vec<String> = (0..500).map(|key| key.to_string()).collect();
    let together = keys.iter().map(|key| fixture.spend(key));
    let decided = futures_util::future::join_all(together).await;
    assert!(
        decided
            .iter()
            .all(|decision| *decision == Ok(Decision::Admitted))
    );
    let batches = fixture.redis.health().batches - before;
    assert!(batches <= 20, "500 questions in {batches} batches");
}
