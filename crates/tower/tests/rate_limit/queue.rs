//! Tests limits that delay requests instead of denying them. The tests use tokio's paused time,
//! which advances when all tasks wait.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt, future::join_all};
use http::{Request, Response};
use http_body::Body;
use tidegate::RateLimiter;
use tidegate_core::{
    Algorithm, Cost, Effect, Limit, MemoryBounds, MemoryStore, Rate, Rule, Scratch, Span,
};
use tidegate_tower::RateLimitLayer;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceExt};

use crate::{
    stores::RemoteStore,
    support::{Notes, get, limited, limiter, limiter_on, read, send},
};

/// Returns a rule with a queue of this capacity that serves one request per second.
fn queue(capacity: u64) -> Vec<Rule> {
    let leak = Rate {
        count: 1,
        period: Span::from_secs(1),
    };
    let queue = Algorithm::LeakyBucket {
        capacity,
        leak,
        queue: true,
    };
    vec![Rule::new("queue", vec![Limit::new(queue).unwrap()]).unwrap()]
}

#[tokio::test(start_paused = true)]
async fn requests_queue_in_order_and_are_denied_when_the_queue_is_full() {
    let (notes, mut service) = limited(queue(3));
    let start = Instant::now();
    let mut asked = Vec::new();
    for path in ["/1", "/2", "/3", "/4", "/5"] {
        let answer = service.ready().await.unwrap().call(get(path));
        asked.push(answer.map(|answer| (answer.unwrap(), start.elapsed().as_secs())));
    }
    let mut statuses = Vec::new();
    for (answer, after) in join_all(asked).await {
        statuses.push((read(answer).await.status, after));
    }
    let denied = statuses.pop().unwrap();
    assert_eq!(statuses, [(200, 0), (200, 1), (200, 2), (200, 3)]);
    assert_eq!(denied, (429, 0));
    assert_eq!(notes.paths(), ["/1", "/2", "/3", "/4"]);
    assert_eq!(notes.last().delay, Span::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_never_reaches_the_service() {
    let (notes, mut service) = limited(queue(5));
    assert_eq!(send(&mut service, get("/1")).await.status, 200);
    let waiting = service.ready().await.unwrap().call(get("/given-up"));
    let gave_up = timeout(Duration::from_millis(500), waiting).await;
    assert!(gave_up.is_err());
    assert_eq!(send(&mut service, get("/3")).await.status, 200);
    assert_eq!(notes.paths(), ["/1", "/3"]);
}

/// The queue has two slots behind the request in progress. A cancelled request frees its slot for
/// the next request.
#[tokio::test(start_paused = true)]
async fn the_last_queued_request_frees_its_turn_when_cancelled() {
    let (notes, mut service) = limited(queue(2));
    let remote = RemoteStore(MemoryStore::new(MemoryBounds::default()));
    let mut elsewhere = RateLimitLayer::new(limiter_on(remote, queue(2))).layer(notes.clone());
    give_up(&mut service, Duration::from_millis(500)).await;
    // The store needs one second to decide. The request would be served a second after the
    // decision.
    give_up(&mut elsewhere, Duration::from_millis(1_500)).await;
    assert_eq!(notes.paths(), ["/1", "/3", "/1", "/3"]);
}

async fn give_up<S, R>(service: &mut S, patience: Duration)
where
    S: Service<Request<()>, Response = Response<R>, Error = Infallible>,
    R: Body<Data = Bytes, Error = Infallible>,
{
    assert_eq!(send(service, get("/1")).await.status, 200);
    for _ in 0..5 {
        let mut one = Box::pin(service.ready().await.unwrap().call(get("/one")));
        assert!(timeout(patience, &mut one).await.is_err());
        let mut other = Box::pin(service.ready().await.unwrap().call(get("/other")));
        assert!(timeout(patience, &mut other).await.is_err());
        // Cancel the last request first. A request can release its slot only if no other request is
        // behind it, because a later request already has a fixed start time.
        drop(other);
        sleep(Duration::from_secs(2)).await;
        drop(one);
        sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(send(service, get("/3")).await.status, 200);
}

/// A denied request must not enter the queue. Only the last request in a queue can leave it, so the
/// queue would fill with denied requests.
#[tokio::test(start_paused = true)]
async fn a_wait_over_the_maximum_leaves_the_queue_unchanged() {
    let remote = RemoteStore(MemoryStore::new(MemoryBounds::default()));
    let limiter = limiter_on(remote, queue(100));
    let notes = Notes::default();
    let mut service = RateLimitLayer::new(Arc::clone(&limiter))
        .longest_wait(Span::from_secs(2))
        .layer(notes.clone());
    for expected in [[200; 3].as_slice(), &[429; 8]] {
        let mut asked = Vec::new();
        for _ in expected {
            asked.push(service.ready().await.unwrap().call(get("/")));
        }
        let answers = join_all(asked).await;
        let statuses: Vec<u16> = answers
            .iter()
            .map(|answer| answer.as_ref().unwrap().status().as_u16())
            .collect();
        assert_eq!(statuses, expected);
    }
    // A refund to the remote store takes a second.
    sleep(Duration::from_secs(2)).await;
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let request = tidegate_core::Request::new(&[], Cost::ONE).unwrap();
    let verdict = limiter.check(&rules, &mut scratch, &request, Effect::Look);
    let line = verdict.await.unwrap().lines[0].outcome.reset_after;
    assert_eq!(line, Span::from_secs(3));
    assert_eq!(notes.paths().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_longer_than_the_maximum() {
    let notes = Notes::default();
    let mut service = RateLimitLayer::new(limiter(queue(9)))
        .longest_wait(Span::from_millis(1_500))
        .layer(notes.clone());
    let first = service.ready().await.unwrap().call(get("/1"));
    let second = service.ready().await.unwrap().call(get("/2"));
    let third = service.ready().await.unwrap().call(get("/3"));
    let denied = read(third.now_or_never().unwrap().unwrap()).await;
    assert_eq!(
        (denied.status, denied.header("retry-after")),
        (429, Some("1"))
    );
    let detail = "\"1/s capacity 9 exceeded; retry in 500ms\"";
    assert!(denied.body.contains(detail), "{}", denied.body);
    let header = denied.header("ratelimit").unwrap();
    assert!(header.starts_with("\"1/s capacity 9\";r=0"), "{header}");
    assert!(first.await.is_ok() && second.await.is_ok());
    assert_eq!(notes.paths(), ["/1", "/2"]);
}
