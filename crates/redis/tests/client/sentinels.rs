//! Tests a primary that the Sentinels report, and its replacement.

use std::time::Duration;

use tidegate_core::Decision;
use tidegate_redis::{RedisSettings, Topology};

use crate::{
    store_fixture::{StoreFixture, address, standalone},
    support::{Proxy, RedisServer, Sentinels, eventually, sentinels::PRIMARY},
};

fn settings(sentinels: &Sentinels, primary: &str) -> RedisSettings {
    let urls = sentinels.urls();
    RedisSettings {
        topology: Topology::Sentinel {
            sentinels: urls.iter().map(|url| address(url)).collect(),
            primary: primary.to_owned(),
        },
        ..standalone(&urls[0])
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_followed() {
    let mut sentinels = Sentinels::start();
    let unknown = StoreFixture::with(settings(&sentinels, "nobody"));
    assert!(
        unknown
            .error()
            .await
            .contains("no Sentinel knows a primary named `nobody`")
    );

    let fixture = StoreFixture::with(settings(&sentinels, PRIMARY));
    assert_eq!(fixture.until_decided("k").await, Decision::Admitted);
    sentinels.primary.kill();
    let successor = sentinels.replica.port();
    tokio::task::block_in_place(|| {
        eventually("the Sentinels name the replica", || {
            (sentinels.named()? == successor).then_some(())
        });
    });
    fixture.until_decided("k").await;
    fixture.until("up again", |health| health.up == 1).await;
    assert!(sentinels.replica.ask(&["DBSIZE"]).as_str() >= ":1");
}

/// Sentinels whose replies take longer than the decision timeout are still used to find the
/// primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_sentinel_is_waited_for() {
    let sentinels = tokio::task::block_in_place(Sentinels::start);
    let proxies: Vec<Proxy> = sentinels
        .ports()
        .iter()
        .map(|port| Proxy::before(*port))
        .collect();
    for proxy in &proxies {
        proxy.delay(Duration::from_millis(150));
    }
    let urls = proxies.iter().map(Proxy::url);
    let settings = RedisSettings {
        topology: Topology::Sentinel {
            sentinels: urls.map(|url| address(&url)).collect(),
            primary: PRIMARY.to_owned(),
        },
        timeout: Duration::from_millis(100),
        ..standalone(&sentinels.urls()[0])
    };
    let fixture = StoreFixture::with(settings);
    assert_eq!(fixture.until_decided("k").await, Decision::Admitted);
}

/// Two of three Sentinels are paused. The third Sentinel names another server, which accepts
/// writes. The store keeps its primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_minority_does_not_replace_a_working_primary() {
    let (sentinels, stale) =
        tokio::task::block_in_place(|| (Sentinels::start(), RedisServer::start()));
    let fixture = StoreFixture::with(settings(&sentinels, PRIMARY));
    fixture.until_decided("other").await;
    assert_eq!(fixture.admitted("k", 12).await, 10);
    sentinels.pause(0);
    sentinels.pause(1);
    assert_eq!(sentinels.ask(2, &["SENTINEL", "REMOVE", PRIMARY]), "+OK");
    let port = stale.port().to_string();
    let monitor = ["SENTINEL", "MONITOR", PRIMARY, "127.0.0.1", &port, "2"];
    assert_eq!(sentinels.ask(2, &monitor), "+OK");
    // Every query to a Sentinel opens a connection, so the test's own queries are also counted.
    let (before, mut own) = (sentinels.connections(2), 0);
    tokio::task::block_in_place(|| {
        eventually("the third Sentinel has been asked five times", || {
            own += 1;
            (sentinels.connections(2) >= before + own + 5).then_some(())
        });
    });
    assert_eq!(
        fixture.admitted("k", 12).await,
        0,
        "they were spent on the primary"
    );
    assert_eq!(fixture.redis.health().up, 1);
    assert_eq!(fixture.redis.health().circuit_opens, 0);
}
