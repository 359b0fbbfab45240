//! Tests of client-side throttling against a server with limits. No request is lost, no request is
//! refused needlessly, and all requests are completed in time.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use tidegate_client::{
    Backoff, Error, Jitter, Pacing, QueueLayer, QueueSettings, RetryLayer, RetryPolicy, Rng, Span,
    ThrottleLayer, spaced,
};
use tidegate_core::{
    AlgorithmName, Charge, Cost, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore, Verdict,
    notation,
};
use tidegate_tower::{HeaderWriter, Legacy};
use tokio::{task::JoinSet, time::Instant};
use tower::{Layer, Service, ServiceBuilder, ServiceExt as _};

use crate::support::{Server, clock, get, reply};

fn store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(MemoryBounds::default()))
}

fn limits(rate: &str, algorithm: AlgorithmName) -> Limits {
    let spec = LimitSpec::shorthand(notation::rate(rate).unwrap(), algorithm);
    Limits::new(vec![spec.build().unwrap()]).unwrap()
}

/// Returns a server that applies one limit to all requests and reports the limit in its headers.
/// Also returns the number of requests that the server has refused.
fn limiting(rate: &str, algorithm: AlgorithmName) -> (Server, Arc<Mutex<u64>>) {
    let (store, limits, refused) = (store(), limits(rate, algorithm), Arc::new(Mutex::new(0)));
    let count = Arc::clone(&refused);
    let server = Server::new(move |_, now| {
        let mut outcomes = Vec::new();
        let charges = [Charge::new(b"all", &limits, Cost::ONE).unwrap()];
        let decision = store.check(&charges, now, Effect::Charge, &mut outcomes);
        let verdict = Verdict::of(&decision, &charges, &outcomes);
        if !verdict.allowed {
            *count.lock().unwrap() += 1;
        }
        let mut reply = reply(if verdict.allowed { 200 } else { 429 }, &[]);
        HeaderWriter::new(true, Legacy::Off).write(&verdict, now, reply.headers_mut());
        reply
    });
    (server, refused)
}

/// From every client, sends `each` requests one after another. Checks that all requests succeed.
/// Returns the total time in milliseconds.
async fn all_pass<S, B>(clients: Vec<S>, each: u32) -> u128
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Error>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for client in clients {
        calls.spawn(async move {
            for _ in 0..each {
                let answer = client.clone().oneshot(get()).await.unwrap();
                assert_eq!(answer.status(), 200);
            }
        });
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap();
    }
    start.elapsed().as_millis()
}

fn within(took: u128, ideal: u128) {
    assert!(
        took * 10 <= ideal * 11,
        "{took} ms, which is more than 1.1 of {ideal} ms"
    );
}

/// Ten clients share a store, like ten processes. No request is refused, and each request is sent
/// as soon as the limit allows.
#[tokio::test(start_paused = true)]
async fn clients_that_share_a_store_are_never_refused() {
    for algorithm in [
        AlgorithmName::Gcra,
        AlgorithmName::TokenBucket,
        AlgorithmName::SlidingWindowLog,
        AlgorithmName::FixedWindow,
    ] {
        let (server, refused) = limiting("100/s", algorithm);
        let shared = store();
        let client = |_| {
            let settings = QueueSettings::default();
            let limits = spaced("100/s").unwrap();
            ThrottleLayer::with_store(Arc::clone(&shared), "api", limits, settings, clock())
                .layer(server.client::<Full<Bytes>>())
        };
        let took = all_pass((0..10).map(client).collect(), 100).await;
        assert_eq!(
            (server.request_count(), *refused.lock().unwrap()),
            (1_000, 0),
            "{algorithm:?}"
        );
        within(took, 9_990);
    }
}

fn patient() -> RetryPolicy {
    RetryPolicy {
        backoff: Backoff::new(Span::from_millis(10), Span::from_millis(200), Jitter::Full),
        max_tries: 100,
        deadline: Span::from_secs(3_600),
        budget_scope: tidegate_client::BudgetScope::AllButScheduled,
        ..RetryPolicy::default()
    }
}

fn retry(seed: u64) -> RetryLayer {
    RetryLayer::new(patient())
        .with_clock(clock())
        .with_rng(Rng::with_seed(seed))
}

/// One client sends many concurrent requests, and learns the limit only from the responses. The
/// queue adapts to the server's pace.
#[tokio::test(start_paused = true)]
async fn a_queue_follows_the_advice_of_the_server() {
    // The client sends 300 requests. The first two limits need 15 windows, the last of which begins
    // after 140 s. The third limit admits 60 requests immediately, and then one request per second.
    for (rate, algorithm, ideal, resets) in [
        ("20/10s", AlgorithmName::FixedWindow, 140_000, 15_u32),
        ("20/10s", AlgorithmName::SlidingWindowLog, 140_000, 15),
        ("60/min", AlgorithmName::TokenBucket, 240_000, 240),
    ] {
        let (server, refused) = limiting(rate, algorithm);
        let settings = QueueSettings {
            max_waiting: 1_000,
            max_wait: Span::from_secs(3_600),
        };
        let queue = QueueLayer::with_clock(settings, Pacing::Burst, clock());
        let client = ServiceBuilder::new()
            .layer(retry(3))
            .layer(queue)
            .service(server.client());
        let took = all_pass(vec![client; 20], 15).await;
        let refused = *refused.lock().unwrap();
        assert_eq!(
            server.request_count() as u64,
            300 + refused,
            "nothing is lost"
        );
        within(took, ideal);
        // Each time the limit is exhausted, only requests that are already in flight can be
        // refused.
        assert!(refused <= 20 * u64::from(resets), "{refused}");
    }
}

/// Fifty clients share one limit without coordination.
#[tokio::test(start_paused = true)]
async fn uncoordinated_clients_lose_nothing_and_finish_in_time() {
    for algorithm in [AlgorithmName::TokenBucket, AlgorithmName::FixedWindow] {
        let (server, refused) = limiting("50/s", algorithm);
        let client =
            |seed| retry(seed).layer(server.client::<tidegate_client::ReplayBody<Full<Bytes>>>());
        let took = all_pass((0..50).map(client).collect(), 20).await;
        let refused = *refused.lock().unwrap();
        assert_eq!(
            server.request_count() as u64,
            1_000 + refused,
            "nothing is lost"
        );
        // The limit admits 50 requests immediately, and then 50 per second.
        within(took, 19_000);
        // A refused client waits for the time in the response, which is one second, so each client
        // is refused at most once per second.
        assert!(refused <= 50 * 20, "{refused}");
    }
}

/// The server allows fewer requests than the client's limit. A refusal then closes the queue of
/// this client, and slows down other clients that share the store.
#[tokio::test(start_paused = true)]
async fn a_refusal_closes_the_queue_and_slows_the_others() {
    let server = Server::scripted(vec![reply(429, &[("retry-after", "3")]), reply(200, &[])]);
    let shared = store();
    let client = |_| {
        let limits = limits("10/s", AlgorithmName::TokenBucket);
        let settings = QueueSettings::default();
        ThrottleLayer::with_store(Arc::clone(&shared), "api", limits, settings, clock())
            .layer(server.client::<Full<Bytes>>())
    };
    let [first, other] = [0, 1].map(client);
    first.clone().oneshot(get()).await.unwrap();
    first.oneshot(get()).await.unwrap();
    assert!(
        (3_000..3_010).contains(&server.gaps_ms()[0]),
        "{:?}",
        server.gaps_ms()
    );

    let refusing = Server::scripted(vec![reply(429, &[("retry-after", "3")]), reply(200, &[])]);
    let stranger = ThrottleLayer::with_store(
        Arc::clone(&shared),
        "api",
        limits("10/s", AlgorithmName::TokenBucket),
        QueueSettings::default(),
        clock(),
    );
    stranger
        .layer(refusing.client::<Full<Bytes>>())
        .oneshot(get())
        .await
        .unwrap();
    let start = Instant::now();
    other.oneshot(get()).await.unwrap();
    assert!(
        (90..=110).contains(&start.elapsed().as_millis()),
        "the bucket was emptied: {start:?}"
    );
}

/// The first of two requests is refused while the second waits for the client's own limit. The
/// second request then waits for the server too.
#[tokio::test(start_paused = true)]
async fn a_refusal_delays_waiting_requests() {
    let server = Server::scripted(vec![reply(429, &[("retry-after", "3")]), reply(200, &[])]);
    let limits = limits("1/s", AlgorithmName::Gcra);
    let layer =
        ThrottleLayer::with_store(store(), "api", limits, QueueSettings::default(), clock());
    let client = layer.layer(server.client::<Full<Bytes>>());
    let (first, second) = tokio::join!(client.clone().oneshot(get()), client.oneshot(get()));
    assert_eq!(
        (
            first.unwrap().status().as_u16(),
            second.unwrap().status().as_u16()
        ),
        (429, 200)
    );
    let gaps = server.gaps_ms();
    assert!((3_000..3_010).contains(&gaps[0]), "{gaps:?}");
}

/// If a limit bounds the requests in flight, the response to a request releases its slot. The next
/// request in the queue gets the slot immediately.
#[tokio::test(start_paused = true)]
async fn in_flight_requests_are_limited() {
    let in_flight = Arc::new(Mutex::new((0, 0)));
    let seen = Arc::clone(&in_flight);
    let slow = tower::service_fn(move |_: Request<Full<Bytes>>| {
        let seen = Arc::clone(&seen);
        async move {
            {
                let (now, most) = &mut *seen.lock().unwrap();
                *now += 1;
                *most = (*most).max(*now);
            }
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            seen.lock().unwrap().0 -= 1;
            Ok::<Response<Full<Bytes>>, std::io::Error>(reply(200, &[]))
        }
    });
    let limits = limits("3/min", AlgorithmName::Concurrency);
    let layer =
        ThrottleLayer::with_store(store(), "api", limits, QueueSettings::default(), clock());
    let took = all_pass(vec![layer.layer(slow); 9], 1).await;
    assert_eq!(in_flight.lock().unwrap().1, 3);
    assert!((3_000..3_010).contains(&took), "{took}");
}

/// A slot is released even if its request is cancelled or rejected by an inner layer.
#[tokio::test(start_paused = true)]
async fn a_cancelled_request_releases_its_permit() {
    let requests = Arc::new(Mutex::new(0));
    let count = Arc::clone(&requests);
    let inner = tower::service_fn(move |_: Request<Full<Bytes>>| {
        let mut count = count.lock().unwrap();
        *count += 1;
        let number = *count;
        async move {
            match number {
                1..=3 => std::future::pending().await,
                4..=6 => Err(Error::CircuitOpen {
                    retry_after: Span::from_secs(1),
                }),
                _ => Ok::<Response<Full<Bytes>>, Error>(reply(200, &[])),
            }
        }
    });
    let limits = limits("1/min", AlgorithmName::Concurrency);
    let layer =
        ThrottleLayer::with_store(store(), "api", limits, QueueSettings::default(), clock());
    let client = layer.layer(inner);
    let start = Instant::now();
    for _ in 0..3 {
        let limit = std::time::Duration::from_millis(10);
        let given_up = tokio::time::timeout(limit, client.clone().oneshot(get())).await;
        assert!(given_up.is_err());
    }
    for _ in 0..3 {
        let rejected = client.clone().oneshot(get()).await;
        assert!(matches!(rejected, Err(Error::CircuitOpen { .. })));
    }
    assert_eq!(client.oneshot(get()).await.unwrap().status(), 200);
    assert_eq!(*requests.lock().unwrap(), 7);
    assert!(
        start.elapsed().as_millis() < 100,
        "no request waited for a lease"
    );
}

/// The longest wait of the layer also bounds the wait in the queue of a leaky bucket. Cancelled
/// requests leave the queue of the leaky bucket.
#[tokio::test(start_paused = true)]
async fn a_queue_wait_is_bounded_and_ends_on_cancellation() {
    let server = Server::scripted(vec![reply(200, &[])]);
    let spec = LimitSpec {
        queue: Some(true),
        ..LimitSpec::shorthand(notation::rate("1/s").unwrap(), AlgorithmName::LeakyBucket)
    };
    let spec = LimitSpec {
        capacity: Some(100),
        ..spec
    };
    let limits = Limits::new(vec![spec.build().unwrap()]).unwrap();
    let settings = QueueSettings {
        max_wait: Span::from_secs(5),
        ..QueueSettings::default()
    };
    let layer = ThrottleLayer::with_store(store(), "api", limits, settings, clock());
    let client = layer.layer(server.client::<Full<Bytes>>());
    let start = Instant::now();
    client.clone().oneshot(get()).await.unwrap();
    // Cancel three requests. If the cancelled requests stayed in the queue, each of them would add
    // one second to the wait of later requests.
    for _ in 0..3 {
        let limit = std::time::Duration::from_millis(1);
        let given_up = tokio::time::timeout(limit, client.clone().oneshot(get())).await;
        assert!(given_up.is_err());
    }
    client.clone().oneshot(get()).await.unwrap();
    let took = start.elapsed().as_millis();
    assert!((1_000..1_050).contains(&took), "{took} ms");
    let mut dear = get();
    dear.extensions_mut().insert(Cost::new(50).unwrap());
    client.clone().oneshot(dear).await.unwrap();
    let error = client.oneshot(get()).await.unwrap_err();
    assert!(matches!(error, Error::WaitTooLong { .. }), "{error:?}");
    let waited = start.elapsed().as_millis();
    assert!(
        (2_000..2_100).contains(&waited),
        "refused at once: {waited} ms"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cost_that_never_fits_is_not_queued() {
    let server = Server::scripted(vec![reply(200, &[])]);
    let client =
        ThrottleLayer::new(limits("5/s", AlgorithmName::TokenBucket)).layer(server.client());
    let mut dear = get();
    dear.extensions_mut().insert(Cost::new(6).unwrap());
    let error = client.clone().oneshot(dear).await;
    assert!(
        matches!(error, Err(Error::NeverFits { cost: 6 })),
        "{error:?}"
    );
    let answer: Response<Incoming> = client.oneshot(get()).await.unwrap();
    assert_eq!(answer.status(), 200);
}
