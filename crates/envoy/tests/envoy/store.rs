//! Tests with an unavailable store. The service responds according to its failure policy, or
//! returns an error so that Envoy applies its own failure mode.

use std::{sync::Arc, time::Duration};

use tidegate_config::envoy::{DomainFiles, RlsSettings, StoreFailure};
use tidegate_envoy::{Code, Descriptor, HitCounterKind, RateLimitRequest, RlsError};
use tidegate_limiter::metrics::ListenerKind;
use tidegate_redis::{Address, Redis, RedisSettings, Topology};
use tokio::{runtime::Handle, time::Instant};

use crate::{
    format::ConfigFile,
    subject::{Started, StoreKind},
    support::{RedisServer, TIMEOUT, reserve_port},
};

const SHOP: &str = "
domain: shop
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 4}}
  - {key: few, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 4}}
  - {key: more, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 8}}";

/// Returns a client for an unreachable Redis. The client has already failed to connect. The client
/// runs on the caller's async runtime.
pub(crate) async fn gone() -> Arc<Redis> {
    let redis = at(&format!("redis://127.0.0.1:{}", reserve_port()));
    redis.wait_for_first_attempt().await.unwrap_err();
    Arc::new(redis)
}

/// Returns a client for the Redis at `url`.
pub(crate) fn at(url: &str) -> Redis {
    waiting(url, Duration::from_secs(5))
}

/// Returns a client for the Redis at `url` with this request timeout.
fn waiting(url: &str, timeout: Duration) -> Redis {
    let (address, ..) = Address::parse(url).unwrap();
    let settings = RedisSettings {
        timeout,
        ..RedisSettings::new(Topology::Standalone(address))
    };
    Redis::start(settings, &Handle::current())
}

fn started(redis: &Arc<Redis>, store_failure: StoreFailure, with: fn(&mut RlsSettings)) -> Started {
    let mut settings = RlsSettings::default();
    settings.store_failure = store_failure;
    with(&mut settings);
    let store_kind = StoreKind::Redis(redis, "t");
    let started = Started::with(store_kind, settings, DomainFiles::One, 1_700_000_040);
    let file = ConfigFile {
        name: "shop.yaml".into(),
        yaml: SHOP.into(),
    };
    started.load(&[file]).unwrap();
    started
}

/// Returns a request with a charge, a query and a refund, each for its own key.
fn request() -> RateLimitRequest {
    let descriptor = |value: &str, hits, is_negative_hits| Descriptor {
        entries: vec![("k".into(), value.into())],
        hits_addend: Some(hits),
        is_negative_hits,
        ..Descriptor::default()
    };
    RateLimitRequest {
        domain: "shop".into(),
        descriptors: vec![
            descriptor("a", 1, false),
            descriptor("b", 0, false),
            descriptor("c", 1, true),
        ],
        hits_addend: 0,
    }
}

fn counted(started: &Started, wanted: HitCounterKind) -> u64 {
    let mut found = 0;
    started.service.for_each_counter(|_, _, counter, hits| {
        if counter == wanted {
            found += hits;
        }
    });
    found
}

#[tokio::test]
async fn a_store_failure_is_an_error_if_configured() {
    for with in [
        |_: &mut RlsSettings| {},
        |settings: &mut RlsSettings| {
            settings.stop_increment = true;
            settings.local_cache_bytes = 1 << 20;
        },
    ] {
        let redis = gone().await;
        let started = started(&redis, StoreFailure::Error, with);
        for _ in 0..3 {
            let answered = started.service.should_rate_limit(&request()).await;
            assert_eq!(answered, Err(RlsError::Store));
        }
        assert_eq!(started.service.errors(), 3);
        assert_eq!(
            counted(&started, HitCounterKind::TotalHits),
            3,
            "as in envoyproxy/ratelimit"
        );
        assert_eq!(counted(&started, HitCounterKind::WithinLimit), 0);
        assert_eq!(counted(&started, HitCounterKind::TotalNegativeHits), 0);
        let local = started.limiter.local_store().stats();
        assert_eq!(local.keys, 0, "no fallback policy decided");
    }
}

#[tokio::test]
async fn the_server_decides_locally_while_the_store_fails() {
    let redis = gone().await;
    let started = started(&redis, StoreFailure::Answer, |_| {});
    let mut passed = 0;
    for _ in 0..5 {
        let answer = started.service.should_rate_limit(&request()).await;
        passed += usize::from(answer.unwrap().overall_code == Code::Ok);
    }
    assert_eq!(passed, 2, "half of four, as the share is half by default");
}

/// If Redis hangs, it does not reply within Envoy's timeout. The service must still respond in
/// time, with the fallback policy.
#[tokio::test]
async fn a_slow_store_does_not_exceed_the_deadline() {
    let server = RedisServer::start();
    for (store_failure, expected) in [
        (StoreFailure::Answer, Ok(1)),
        (StoreFailure::Error, Err(RlsError::Store)),
    ] {
        let redis = Arc::new(waiting(&server.url(), 10 * TIMEOUT));
        redis.wait_for_first_attempt().await.unwrap();
        let started = started(&redis, store_failure, |_| {});
        server.pause();
        let (request, within) = (request(), Some(Duration::from_millis(20)));
        let asked = started
            .service
            .should_rate_limit_on(ListenerKind::Grpc, &request, within);
        let answered = tokio::time::timeout(TIMEOUT, asked).await;
        server.resume();
        let left =
            answered.map(|answered| answered.map(|answer| answer.statuses[0].limit_remaining));
        assert_eq!(left.unwrap(), expected);
    }
}

/// Quotas decided together need several store queries, which share one deadline.
#[tokio::test]
async fn many_store_requests_do_not_exceed_the_deadline() {
    let server = RedisServer::start();
    let redis = Arc::new(waiting(&server.url(), 10 * TIMEOUT));
    redis.wait_for_first_attempt().await.unwrap();
    let started = started(&redis, StoreFailure::Answer, |settings| {
        settings.stop_increment = true;
    });
    let descriptors = ["few", "more"].map(|key| Descriptor {
        entries: vec![(key.into(), "a".into())],
        ..Descriptor::default()
    });
    let request = RateLimitRequest {
        descriptors: descriptors.into(),
        ..request()
    };
    server.pause();
    // After this line, the clock is paused and advances only when all tasks are waiting.
    tokio::time::pause();
    let (began, within) = (Instant::now(), Duration::from_millis(20));
    let asked = started
        .service
        .should_rate_limit_on(ListenerKind::Grpc, &request, Some(within));
    let answered = asked.await;
    let took = began.elapsed();
    tokio::time::resume();
    server.resume();
    let left = answered.unwrap().statuses[0].limit_remaining;
    assert_eq!(left, 1, "one is left of this server's share");
    assert!(took < within + within / 2, "{took:?}");
}

/// After the deadline, no query is sent. A later query would charge hits in Redis that the local
/// fallback has already charged.
#[tokio::test]
async fn the_store_is_not_asked_after_the_deadline() {
    let server = RedisServer::start();
    let redis = Arc::new(at(&server.url()));
    redis.wait_for_first_attempt().await.unwrap();
    let started = started(&redis, StoreFailure::Answer, |_| {});
    let request = request();
    let asked =
        started
            .service
            .should_rate_limit_on(ListenerKind::Grpc, &request, Some(Duration::ZERO));
    assert_eq!(asked.await.unwrap().statuses[0].limit_remaining, 1);
    let answer = started.service.should_rate_limit(&request).await.unwrap();
    assert_eq!(answer.statuses[0].limit_remaining, 3, "of the whole limit");
}

#[tokio::test]
async fn decisions_are_exact_again_after_the_store_recovers() {
    let mut server = RedisServer::start();
    let redis = Arc::new(at(&server.url()));
    redis.wait_for_first_attempt().await.unwrap();
    let started = started(&redis, StoreFailure::Error, |_| {});
    let ask = || async { started.service.should_rate_limit(&request()).await };
    assert_eq!(ask().await.unwrap().statuses[0].limit_remaining, 3);
    server.kill();
    assert_eq!(ask().await, Err(RlsError::Store));
    server.restart();
    let back = async {
        loop {
            match ask().await {
                Err(RlsError::Store) => tokio::time::sleep(Duration::from_millis(10)).await,
                answered => return answered.unwrap(),
            }
        }
    };
    let answered = tokio::time::timeout(TIMEOUT, back).await.unwrap();
    // The counters were lost with the Redis server.
    assert_eq!(answered.statuses[0].limit_remaining, 3);
}
