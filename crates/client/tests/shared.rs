//! Tests two clients with separate connections to one Redis. The clients share one limit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{convert::Infallible, sync::Arc, time::Duration};

use http::{Request, Response};
use tidegate_client::{QueueSettings, ThrottleLayer, TokioClock, spaced};
use tidegate_core::{MemoryBounds, MemoryStore};
use tidegate_redis::{Address, FallbackSettings, FallbackStore, Redis, RedisSettings, Topology};
use tokio::{runtime::Handle, time::Instant};
use tower::{Layer as _, ServiceExt as _};

#[path = "../../redis/tests/support/mod.rs"]
mod support;

async fn process(url: &str) -> ThrottleLayer<FallbackStore> {
    let topology = Topology::Standalone(Address::parse(url).unwrap().0);
    let settings = RedisSettings {
        timeout: Duration::from_secs(5),
        ..RedisSettings::new(topology)
    };
    let redis = Redis::start(settings, &Handle::current());
    redis.wait_for_first_attempt().await.unwrap();
    let local = MemoryStore::new(MemoryBounds::default());
    let fallback = FallbackStore::new(Arc::new(redis), "tg", local, FallbackSettings::default());
    let limits = spaced("50/s").unwrap();
    ThrottleLayer::with_store(
        Arc::new(fallback),
        "api",
        limits,
        QueueSettings::default(),
        TokioClock::system(),
    )
}

/// Both clients together send thirty requests. With a shared limit of fifty requests per second,
/// thirty requests take at least 29/50 s. With separate limits, thirty requests would take only
/// 14/50 s.
#[tokio::test]
async fn two_processes_share_one_limit() {
    let redis = support::RedisServer::start();
    let processes = [process(&redis.url()).await, process(&redis.url()).await];
    let service = tower::service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(())));
    let start = Instant::now();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..15 {
        for process in &processes {
            calls.spawn(process.layer(service).oneshot(Request::new(())));
        }
    }
    while let Some(answer) = calls.join_next().await {
        answer.unwrap().unwrap();
    }
    let least = Duration::from_millis(29 * 20);
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
}
