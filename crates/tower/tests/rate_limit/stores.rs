//! Tests stores that require waiting, and stores that cannot decide.

use std::time::Duration;

use futures_util::FutureExt;
use tidegate_core::{
    Charge, Decided, Decision, Exactness, MemoryBounds, MemoryStore, Outcome, Question, Receipt,
    Renewal, Retry, Settlement, Source, Span, Store, Timestamp,
};
use tidegate_tower::RateLimitLayer;
use tower::{Layer, Service, ServiceExt};

use crate::support::{Notes, fixed, get, limiter_on, send, statuses};

/// A memory store with a latency of one second.
pub(crate) struct Far(pub(crate) MemoryStore);

impl Store for Far {
    type Receipt = Receipt;

    fn decide_now(&self, _: &mut Question<'_, '_>, _: &mut Vec<Outcome>) -> Option<Decided> {
        None
    }

    async fn decide_later(
        &self,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.decide(question, outcomes).await
    }

    async fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<Receipt>) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Store::reserve(&self.0, question, outcomes).await
    }

    async fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Receipt,
        now: Timestamp,
    ) -> Renewal {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.renew(charges, receipt, now)
    }

    async fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: Receipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.settle(charges, receipt, settlements, now);
    }
}

/// A store that is unreachable, with a fallback policy that denies.
pub(crate) struct Closed;

impl Store for Closed {
    type Receipt = ();

    fn decide_now(&self, _: &mut Question<'_, '_>, outcomes: &mut Vec<Outcome>) -> Option<Decided> {
        outcomes.clear();
        Some(Decided {
            decision: Decision::Full {
                retry_after: Retry::After(Span::from_millis(1_200)),
            },
            exactness: Exactness::None,
            source: Source::Policy,
        })
    }

    async fn decide_later(&self, _: Question<'_, '_>, _: &mut Vec<Outcome>) -> Decided {
        unreachable!("it has already replied")
    }

    async fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<()>) {
        (self.decide_now(question, outcomes).unwrap(), None)
    }

    async fn renew(&self, _: &[Charge<'_>], (): &mut (), _: Timestamp) -> Renewal {
        unreachable!("nothing was charged")
    }

    async fn settle(&self, _: &[Charge<'_>], (): (), _: &[Settlement], _: Timestamp) {
        unreachable!("nothing was charged")
    }
}

#[tokio::test(start_paused = true)]
async fn a_remote_store_is_awaited_and_called_once() {
    let store = Far(MemoryStore::new(MemoryBounds::default()));
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
        r#"{"title":"Service Unavailable","status":503,"detail":"the limiter could not decide; retry in 2s","retry_after_ms":1200}"#
    );
    assert!(notes.paths().is_empty());
}
