//! Tests requests waiting for a concurrency slot, with tokio's paused time.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tidegate::Clock;
use tidegate_core::{
    Algorithm, Limit, MemoryBounds, MemoryStore, Rule, RuleSet, SlotWait, Span, Store, Timestamp,
};
use tidegate_tower::RateLimitLayer;
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};

use crate::{
    stores::RemoteStore,
    support::{Answer, Limiter, get, read},
};

type Inner = BoxCloneService<Request<()>, Response<Full<Bytes>>, Infallible>;

fn waiting_rule(limit: u64, longest: Span) -> Rule {
    let lease = Span::from_secs(60);
    let limit = Limit::new(Algorithm::Concurrency { limit, lease }).unwrap();
    let queue = SlotWait::DEFAULT_QUEUE;
    let limit = limit.with_slot_wait(SlotWait { longest, queue }).unwrap();
    Rule::new("at-work", vec![limit]).unwrap()
}

fn limiter_on<S: Store>(store: S, rule: Rule) -> Arc<Limiter<S>> {
    let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
    let start = Timestamp::from_micros(1_700_006_400_000_000);
    Arc::new(Limiter::new(rules, store, Clock::tokio(start)))
}

fn memory() -> MemoryStore {
    MemoryStore::new(MemoryBounds::default())
}

/// A service that records the path of each request and takes 600 ms to respond.
fn slow_service(received: &Arc<Mutex<Vec<String>>>) -> Inner {
    let received = Arc::clone(received);
    BoxCloneService::new(service_fn(move |request: Request<()>| {
        let path = request.uri().path().to_owned();
        received.lock().unwrap().push(path);
        async {
            sleep(Duration::from_millis(600)).await;
            Ok(Response::new(Full::default()))
        }
    }))
}

async fn ask<S: Store + 'static>(
    layer: RateLimitLayer<Limiter<S>>,
    inner: Inner,
    path: &str,
) -> Answer {
    let mut service = layer.layer(inner);
    let service = service.ready().await.unwrap();
    read(service.call(get(path)).await.unwrap()).await
}

#[tokio::test(start_paused = true)]
async fn twenty_at_work_and_two_seconds_of_patience_serve_sixty_arrivals_in_order() {
    let limiter = limiter_on(memory(), waiting_rule(20, Span::from_secs(2)));
    let received = Arc::default();
    let (layer, inner) = (RateLimitLayer::new(limiter), slow_service(&received));
    let start = Instant::now();
    let tasks: Vec<_> = (0..60)
        .map(|number| {
            let (layer, inner) = (layer.clone(), inner.clone());
            tokio::spawn(async move { ask(layer, inner, &format!("/{number}")).await.status })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    let expected: Vec<String> = (0..60).map(|number| format!("/{number}")).collect();
    assert_eq!(*received.lock().unwrap(), expected);
    assert_eq!(start.elapsed(), Duration::from_millis(1_800));
}

/// The status is 503 instead of 429, because the client is not at fault if the service is at
/// capacity.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_in_vain_is_answered_503() {
    let limiter = limiter_on(memory(), waiting_rule(1, Span::from_millis(400)));
    let (layer, inner) = (RateLimitLayer::new(limiter), slow_service(&Arc::default()));
    let first = tokio::spawn(ask(layer.clone(), inner.clone(), "/"));
    tokio::task::yield_now().await;
    let start = Instant::now();
    let denied = ask(layer.clone(), inner.clone(), "/").await;
    assert_eq!(
        (denied.status, start.elapsed()),
        (503, Duration::from_millis(400))
    );
    assert!(
        denied.body.contains("#temporary-reduced-capacity"),
        "{denied:?}"
    );
    assert_eq!(denied.header("retry-after"), Some("1"));
    assert_eq!(first.await.unwrap().status, 200);
    // If the layer's maximum wait is shorter than the rule's maximum wait, the request is denied
    // earlier.
    let first = tokio::spawn(ask(layer.clone(), inner.clone(), "/"));
    tokio::task::yield_now().await;
    let start = Instant::now();
    let hasty = layer.longest_wait(Span::from_millis(100));
    assert_eq!(ask(hasty, inner, "/").await.status, 503);
    assert_eq!(start.elapsed(), Duration::from_millis(100));
    assert_eq!(first.await.unwrap().status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_concurrency_limit_of_a_client_is_answered_429() {
    let rule = waiting_rule(1, Span::from_millis(400));
    let limiter = limiter_on(memory(), rule.keyed_by(&["query.user"]).unwrap());
    let (layer, inner) = (RateLimitLayer::new(limiter), slow_service(&Arc::default()));
    let first = tokio::spawn(ask(layer.clone(), inner.clone(), "/?user=a"));
    tokio::task::yield_now().await;
    let denied = ask(layer, inner, "/?user=a").await;
    assert_eq!(denied.status, 429);
    assert!(denied.body.contains("#quota-exceeded"), "{denied:?}");
    assert_eq!(first.await.unwrap().status, 200);
}

/// Sends three requests to a service with one slot, and cancels the second one while it waits.
async fn cancels_the_second<S: Store + 'static>(store: S, step: Duration) {
    let limiter = limiter_on(store, waiting_rule(1, Span::from_secs(20)));
    let received = Arc::default();
    let (layer, inner) = (
        RateLimitLayer::new(Arc::clone(&limiter)),
        slow_service(&received),
    );
    let mut tasks = Vec::new();
    for number in 0..3 {
        let (layer, inner) = (layer.clone(), inner.clone());
        tasks.push(tokio::spawn(async move {
            ask(layer, inner, &format!("/{number}")).await.status
        }));
        sleep(step).await;
    }
    assert_eq!(limiter.waiters(), 2);
    let cancelled = tasks.remove(1);
    cancelled.abort();
    assert!(cancelled.await.is_err());
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    assert_eq!(*received.lock().unwrap(), ["/0", "/2"]);
    // Nothing holds the slot any more.
    assert_eq!(ask(layer, inner, "/3").await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_gives_its_turn_on() {
    cancels_the_second(memory(), Duration::from_millis(1)).await;
}

/// With a remote store, the second request may be cancelled during a call to the store. If the
/// store admits the request, its slot is then released in the background.
#[tokio::test(start_paused = true)]
async fn a_cancelled_request_to_a_remote_store_gives_its_turn_on() {
    // The first request holds the slot for 1.6 s: 0.6 s for the service and 1 s for the settlement.
    // A call to the store is shorter than 1.6 s, so all other requests wait.
    let store = RemoteStore(memory());
    let limiter = limiter_on(store, waiting_rule(1, Span::from_secs(30)));
    let received = Arc::default();
    let (layer, inner) = (
        RateLimitLayer::new(Arc::clone(&limiter)),
        slow_service(&received),
    );
    let mut tasks = Vec::new();
    for number in 0..4 {
        let (layer, inner) = (layer.clone(), inner.clone());
        tasks.push(tokio::spawn(async move {
            ask(layer, inner, &format!("/{number}")).await.status
        }));
    }
    // The store replies after a second. The first request holds the slot until it is settled, 2.6 s
    // after the start, and the other requests wait.
    sleep(Duration::from_millis(1_500)).await;
    let cancelled = tasks.remove(1);
    cancelled.abort();
    assert!(cancelled.await.is_err());
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    assert_eq!(*received.lock().unwrap(), ["/0", "/2", "/3"]);
    assert_eq!(limiter.waiters(), 0);
}
