//! Tests stores that have to wait, and stores that cannot decide.

use std::time::Duration;

use futures_util::FutureExt;
use tidegate_core::{
    Charge, Decision, DecisionAndReceipt, Exactness, MaybeReady, MemoryBounds, MemoryStore, Never,
    Outcome, Receipt, Renewal, RetryAfter, Settlement, Source, Span, Store, StoreDecision,
    StoreRequest, Timestamp,
};
use tidegate_tower::RateLimitLayer;
use tower::{Layer, Service, ServiceExt};

use crate::support::{Notes, fixed, get, limiter_on, send, statuses};

/// A memory store with a latency of one second.
pub(crate) struct RemoteStore(pub(crate) MemoryStore);

impl Store for RemoteStore {
    type Receipt = Receipt;

    fn decide(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        MaybeReady::Pending(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.0.decide(request, outcomes).into_inner()
        })
    }

    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<Receipt>,
        impl Future<Output = DecisionAndReceipt<Receipt>> + Send,
    > {
        MaybeReady::Pending(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Store::reserve(&self.0, request, outcomes).into_inner()
        })
    }

    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<Receipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        if receipt.is_none() {
            return MaybeReady::Ready(());
        }
        MaybeReady::Pending(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Store::settle(&self.0, charges, receipt, settlements, now).into_inner();
        })
    }

    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        MaybeReady::Pending(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.0.renew(charges, receipt, now)
        })
    }
}

/// A store that is unreachable, with a fallback policy that denies all requests.
pub(crate) struct Closed;

impl Store for Closed {
    type Receipt = ();

    fn decide(
        &self,
        _: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        outcomes.clear();
        MaybeReady::<_, Never<_>>::Ready(StoreDecision {
            decision: Decision::Full {
                retry_after: RetryAfter::After(Span::from_millis(1_200)),
            },
            exactness: Exactness::None,
            source: Source::Policy,
        })
    }

    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<DecisionAndReceipt<()>, impl Future<Output = DecisionAndReceipt<()>> + Send>
    {
        self.decide(request, outcomes)
            .map(DecisionAndReceipt::without_receipt)
    }

    fn settle(
        &self,
        _: &[Charge<'_>],
        _: &mut Option<()>,
        _: &[Settlement],
        _: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        MaybeReady::<_, Never<_>>::Ready(())
    }

    fn renew(
        &self,
        _: &[Charge<'_>],
        (): &mut (),
        _: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        MaybeReady::Pending(async { unreachable!("nothing was charged") })
    }
}

#[tokio::test(start_paused = true)]
async fn a_remote_store_is_awaited_and_called_once() {
    let store = RemoteStore(MemoryStore::new(MemoryBounds::default()));
    let notes = Notes::default();
    let limiter = limiter_on(
        store,
        vec![fixed("all", "2/h").keyed_by(&["query.q"]).unwrap()],
    );
    let mut service = RateLimitLayer::new(limiter).layer(notes.clone());
    let asked = service.ready().await.unwrap().call(get("/?q=1"));
    assert!(asked.now_or_never().is_none(), "it must wait");
    assert!(
        notes.paths().is_empty(),
        "a request that is given up does not arrive"
    );
    assert_eq!(statuses(&mut service, "/?q=1", 3).await, [200, 200, 429]);
    assert_eq!(notes.paths().len(), 2);
}

#[tokio::test]
async fn a_store_failure_is_a_503() {
    let notes = Notes::default();
    let limiter = limiter_on(Closed, vec![fixed("all", "2/h")]);
    let mut service = RateLimitLayer::new(limiter).layer(notes.clone());
    let denied = send(&mut service, get("/")).await;
    assert_eq!(
        (denied.status, denied.header("retry-after")),
        (503, Some("2"))
    );
    assert_eq!(
        denied.body,
        r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Service Unavailable","status":503,"detail":"the limiter could not decide; retry in 2s","retry_after_ms":1200}"#
    );
    assert!(notes.paths().is_empty());
}
