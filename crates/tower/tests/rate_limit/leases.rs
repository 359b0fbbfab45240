//! Tests concurrency slots held for longer than their lease.

use std::{
    convert::Infallible,
    future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body_util::{Full, StreamBody, combinators::UnsyncBoxBody};
use tidegate_core::{
    Charge, DecisionAndReceipt, MaybeReady, MemoryBounds, MemoryStore, Outcome, Receipt, Renewal,
    Settlement, Span, Store, StoreDecision, StoreRequest, Timestamp,
};
use tidegate_tower::{LongLivedPermit, RateLimitLayer};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{
    settlement::{left, places},
    stores::RemoteStore,
    support::{Limiter, get, limiter, limiter_on, with_permit},
};

/// Advances the clocks of the limiter and of the runtime by `seconds`.
async fn pass<S: Store>(limiter: &Limiter<S>, seconds: u64) {
    for _ in 0..seconds {
        let clock = limiter.clock();
        clock.set(clock.now().after(Span::from_secs(1)));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Returns a response whose body never ends.
fn endless() -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let body = StreamBody::new(futures_util::stream::pending());
    Response::new(UnsyncBoxBody::new(body))
}

/// Takes the only slot of `limiter` and holds it for ten times its lease duration, with a response
/// that does not end.
async fn outlasts_its_lease<S: Store + 'static>(limiter: Arc<Limiter<S>>) {
    let streaming = |_: Request<()>| future::ready(Ok::<_, Infallible>(endless()));
    let layer = RateLimitLayer::new(Arc::clone(&limiter));
    let mut service = layer.layer(service_fn(streaming));
    let answer = service.ready().await.unwrap().call(get("/")).await.unwrap();
    for minute in 0..10 {
        pass(&limiter, 60).await;
        assert_eq!(left(&limiter).await, 0, "after minute {minute}");
    }
    drop(answer);
    // With a remote store, a separate task settles the charges.
    pass(&limiter, 3).await;
    assert_eq!(left(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_response_longer_than_its_lease_keeps_its_slot() {
    outlasts_its_lease(limiter(vec![places(1)])).await;
}

#[tokio::test(start_paused = true)]
async fn a_remote_response_longer_than_its_lease_keeps_its_slot() {
    let store = RemoteStore(MemoryStore::new(MemoryBounds::default()));
    outlasts_its_lease(limiter_on(store, vec![places(1)])).await;
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_request_keeps_its_slot() {
    let limiter = limiter(vec![places(1)]);
    let silent = |_: Request<()>| future::pending::<Result<Response<Full<Bytes>>, Infallible>>();
    let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(service_fn(silent));
    let mut asked = Box::pin(service.ready().await.unwrap().call(get("/")));
    assert!(asked.as_mut().now_or_never().is_none());
    pass(&limiter, 150).await;
    assert_eq!(left(&limiter).await, 0);
    drop(asked);
    assert_eq!(left(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_outlives_the_body_keeps_its_slot() {
    let limiter = limiter(vec![places(1)]);
    let permit = LongLivedPermit::default();
    let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(with_permit(&permit));
    let answer = service.ready().await.unwrap().call(get("/")).await.unwrap();
    drop((answer, service));
    pass(&limiter, 150).await;
    assert_eq!(left(&limiter).await, 0);
    drop(permit);
    assert_eq!(left(&limiter).await, 1);
}

/// A memory store whose lease renewals fail or hang.
struct FaultyStore(MemoryStore, RenewalFault);

enum RenewalFault {
    /// Every renewal fails.
    AlwaysFails,
    /// The first renewal never completes.
    HangsOnce(AtomicBool),
}

impl Store for FaultyStore {
    type Receipt = Receipt;

    fn decide(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        self.0.decide(request, outcomes)
    }

    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<Receipt>,
        impl Future<Output = DecisionAndReceipt<Receipt>> + Send,
    > {
        Store::reserve(&self.0, request, outcomes)
    }

    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<Receipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        Store::settle(&self.0, charges, receipt, settlements, now)
    }

    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        match &self.1 {
            RenewalFault::AlwaysFails => MaybeReady::Ready(Renewal::Unknown),
            RenewalFault::HangsOnce(has_hung) if !has_hung.swap(true, Ordering::Relaxed) => {
                MaybeReady::Pending(future::pending())
            }
            RenewalFault::HangsOnce(_) => MaybeReady::Ready(self.0.renew(charges, receipt, now)),
        }
    }
}

/// A lease that cannot be renewed expires, but the request continues.
#[tokio::test(start_paused = true)]
async fn a_slot_without_renewal_ends_with_its_lease() {
    let store = FaultyStore(
        MemoryStore::new(MemoryBounds::default()),
        RenewalFault::AlwaysFails,
    );
    let limiter = limiter_on(store, vec![places(1)]);
    let streaming = |_: Request<()>| future::ready(Ok::<_, Infallible>(endless()));
    let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(service_fn(streaming));
    let answer = service.ready().await.unwrap().call(get("/")).await.unwrap();
    pass(&limiter, 59).await;
    assert_eq!(left(&limiter).await, 0);
    pass(&limiter, 1).await;
    assert_eq!(left(&limiter).await, 1);
    let second = service.ready().await.unwrap().call(get("/")).await.unwrap();
    assert_eq!(
        (answer.status(), second.status()),
        (StatusCode::OK, StatusCode::OK)
    );
    drop(answer);
    assert_eq!(left(&limiter).await, 0, "it releases no other slot");
}

/// The leases of completed requests are not renewed.
#[tokio::test(start_paused = true)]
async fn finished_requests_are_not_renewed() {
    let limiter = limiter(vec![places(2)]);
    let streaming = |_: Request<()>| future::ready(Ok::<_, Infallible>(endless()));
    let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(service_fn(streaming));
    for _ in 0..3 {
        let first = service.ready().await.unwrap().call(get("/")).await.unwrap();
        pass(&limiter, 30).await;
        let second = service.ready().await.unwrap().call(get("/")).await.unwrap();
        drop(first);
        pass(&limiter, 90).await;
        assert_eq!(left(&limiter).await, 1);
        drop(second);
        assert_eq!(left(&limiter).await, 2);
        pass(&limiter, 90).await;
        assert_eq!(left(&limiter).await, 2);
    }
    drop(service);
    assert_eq!(Arc::strong_count(&limiter), 1, "no task keeps it");
}

/// A hanging renewal times out before the next renewal. The hanging renewal does not delay the
/// renewals of other requests.
#[tokio::test(start_paused = true)]
async fn a_hanging_renewal_loses_no_other_slot() {
    let hangs = RenewalFault::HangsOnce(AtomicBool::new(false));
    let store = FaultyStore(MemoryStore::new(MemoryBounds::default()), hangs);
    let limiter = limiter_on(store, vec![places(2)]);
    let streaming = |_: Request<()>| future::ready(Ok::<_, Infallible>(endless()));
    let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(service_fn(streaming));
    let first = service.ready().await.unwrap().call(get("/")).await.unwrap();
    let second = service.ready().await.unwrap().call(get("/")).await.unwrap();
    for second in (10..=300).step_by(10) {
        pass(&limiter, 10).await;
        assert_eq!(left(&limiter).await, 0, "after {second} s");
    }
    drop((first, second));
    // Separate tasks settle the charges.
    pass(&limiter, 1).await;
    assert_eq!(left(&limiter).await, 2);
}

/// Sends the first request on a runtime that shuts down before any renewal, and the second request
/// on another runtime. Tests that the second runtime renews the leases of both requests.
fn outlives_a_runtime(ask_on: impl FnOnce(Runtime, &mut dyn FnMut())) {
    let limiter = limiter(vec![places(2)]);
    let streaming = |_: Request<()>| future::ready(Ok::<_, Infallible>(endless()));
    let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(service_fn(streaming));
    let mut ask = || {
        let asked = async { service.ready().await.unwrap().call(get("/")).await.unwrap() };
        asked.now_or_never().expect("memory answers at once")
    };
    let mut answers = Vec::new();
    let short_lived = Builder::new_current_thread().build().unwrap();
    ask_on(short_lived, &mut || answers.push(ask()));
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        answers.push(ask());
        pass(&limiter, 150).await;
        assert_eq!(left(&limiter).await, 0);
    });
    assert_eq!(answers.len(), 2);
}

#[test]
fn a_short_lived_runtime_does_not_stop_renewals() {
    outlives_a_runtime(|runtime, ask| runtime.block_on(async { ask() }));
}

#[test]
fn an_ended_runtime_does_not_stop_renewals() {
    outlives_a_runtime(|runtime, ask| {
        let handle = runtime.handle().clone();
        drop(runtime);
        let _entered = handle.enter();
        ask();
    });
}
