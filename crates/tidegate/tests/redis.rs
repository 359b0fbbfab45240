//! Limits with counts in a real Redis.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../redis/tests/support/mod.rs"]
mod support;

use std::{sync::Arc, thread, time::Duration};

use tidegate::{
    Clock, Cost, IntoPolicy, IteratorRateLimit as _, Key as _, Limit, Limiter, MemoryBounds,
    MemoryStore, Request, Rule, RuleSet, Verdict,
    redis::{Address, FallbackSettings, FallbackStore, Redis, RedisSettings, Topology},
};
use tokio::{runtime::Handle, time::sleep};

use support::{RedisServer, TIMEOUT};

fn limit(text: &str) -> Limit {
    text.parse().expect("a limit")
}

/// A limiter whose Redis timeout is long enough for a slow machine, so that it never uses its
/// fallback policy.
async fn limiter<P>(
    server: &RedisServer,
    limits: impl IntoPolicy<Policy = P>,
) -> Limiter<FallbackStore, P> {
    let (address, _) = Address::parse(&server.url()).unwrap();
    let settings = RedisSettings {
        timeout: TIMEOUT,
        ..RedisSettings::new(Topology::Standalone(address))
    };
    let redis = Redis::start(settings, &Handle::current());
    redis.wait_for_first_attempt().await.unwrap();
    let local = MemoryStore::new(MemoryBounds::default());
    let store = FallbackStore::new(Arc::new(redis), "test", local, FallbackSettings::default());
    Limiter::new(limits, store, Clock::real())
}

fn allowed(verdict: &Verdict<'_>) -> bool {
    assert_eq!(verdict.source, tidegate::Source::Redis);
    verdict.allowed
}

#[tokio::test(flavor = "multi_thread")]
async fn limiters_on_one_redis_share_their_counts() {
    let server = RedisServer::start();
    let first = limiter(&server, limit("1/d burst 3")).await;
    let second = limiter(&server, limit("1/d burst 3")).await;
    assert!(allowed(&first.check_async("alice".costing(2)).await));
    assert_eq!(second.peek_async("alice").await.remaining(), Some(1));
    assert!(allowed(&second.acquire("alice").await.unwrap()));
    thread::scope(|scope| {
        let last = scope.spawn(|| first.check_blocking("alice"));
        let last = tokio::task::block_in_place(|| last.join().unwrap());
        assert_eq!((allowed(&last), last.remaining()), (true, Some(0)));
    });
    assert!(!first.check_async("alice").await.allowed);
    assert!(
        second
            .acquire_within("alice", Duration::ZERO)
            .await
            .is_err()
    );
    let items: Vec<_> = tokio::task::block_in_place(|| {
        ["a", "b"].into_iter().rate_limited(&first, "bob").collect()
    });
    assert_eq!(items, [Ok("a"), Ok("b")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_counted_in_redis() {
    let server = RedisServer::start();
    let rule = Rule::new("each", vec![limit("2/d")]).unwrap();
    let rule = rule.keyed_by(&["customer"]).unwrap();
    let limiter = limiter(&server, RuleSet::build(vec![rule], Vec::new()).unwrap()).await;
    let entries = [("customer", "alice")];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let current = limiter.current();
    assert!(allowed(&current.check_async(&request).await.unwrap()));
    assert_eq!(
        current.peek_async(&request).await.unwrap().remaining(),
        Some(0)
    );
    assert!(allowed(&current.acquire(&request).await.unwrap()));
    let verdict = tokio::task::block_in_place(|| current.check_blocking(&request)).unwrap();
    assert_eq!((verdict.allowed, verdict.rule), (false, Some("each")));
}

/// Redis replies after the request has stopped waiting. The charge is refunded.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_cancelled_during_a_call_costs_nothing() {
    let server = RedisServer::start();
    let limiter = Arc::new(limiter(&server, limit("1/d burst 3")).await);
    assert!(allowed(&limiter.check_async("alice").await));
    server.pause();
    let waiting = Arc::clone(&limiter);
    let task = tokio::spawn(async move { waiting.acquire("alice").await.map(|_| ()) });
    // The pause is usually long enough for the call to be sent. If the call has not been sent,
    // there is nothing to refund.
    sleep(Duration::from_millis(200)).await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    server.resume();
    for _ in 0..TIMEOUT.as_millis() / 10 {
        let peek = limiter.peek_async("alice").await;
        if peek.remaining() == Some(2) {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the charge was never refunded");
}

#[tokio::test]
async fn a_url_is_all_that_a_limiter_in_redis_needs() {
    let server = RedisServer::start();
    let limiter = Limiter::in_redis(limit("1/d burst 3"), &server.url(), "test").unwrap();
    // The connection is opened in the background.
    for _ in 0..TIMEOUT.as_millis() / 10 {
        if limiter.peek_async("alice").await.source == tidegate::Source::Redis {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("Redis was never asked");
}

#[tokio::test]
async fn an_invalid_url_is_refused() {
    let refused = Limiter::in_redis(limit("1/d"), "http://127.0.0.1", "test").unwrap_err();
    assert!(refused.to_string().contains("redis://"), "{refused}");
}
