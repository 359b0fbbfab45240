//! Tests of the guards around hyper's client: which requests are admitted, delayed and rejected.

use std::{sync::Mutex, time::Duration};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tidegate_client::{
    AdaptiveLayer, AdaptiveThrottle, BreakerLayer, BreakerSettings, Error, Pacing, QueueLayer,
    QueueSettings, RetryLayer, RetryPolicy, Rng, Span, TimeoutLayer,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower::{Layer as _, ServiceBuilder, ServiceExt as _};

use crate::support::{Server, clock, get, reply, request};

fn queue(max_waiting: u32, pacing: Pacing) -> QueueLayer {
    let settings = QueueSettings {
        max_waiting,
        max_wait: Span::from_secs(10),
    };
    QueueLayer::with_clock(settings, pacing, clock())
}

fn numbered(number: usize) -> Request<Full<Bytes>> {
    let mut request = get();
    request.headers_mut().insert("x-number", number.into());
    request
}

/// Returns a server that responds with these headers, and a list in which the server records the
/// number of each request.
fn recording(headers: &'static [(&str, &str)]) -> (Server, std::sync::Arc<Mutex<Vec<usize>>>) {
    let seen = std::sync::Arc::new(Mutex::new(Vec::new()));
    let noted = std::sync::Arc::clone(&seen);
    let server = Server::new(move |request, _| {
        let number = request.headers()["x-number"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        noted.lock().unwrap().push(number);
        reply(200, headers)
    });
    (server, seen)
}

#[tokio::test(start_paused = true)]
async fn a_queue_delays_requests_in_order() {
    let (server, seen) = recording(&[("ratelimit", "\"s\";r=2;t=1")]);
    let client = queue(100, Pacing::Spread).layer(server.client());
    client.clone().oneshot(numbered(0)).await.unwrap();
    let mut calls = JoinSet::new();
    for number in 1..=10 {
        calls.spawn(client.clone().oneshot(numbered(number)));
        tokio::task::yield_now().await;
    }
    while let Some(answer) = calls.join_next().await {
        answer.unwrap().unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), Vec::from_iter(0..=10));
    let gaps = server.gaps_ms();
    assert!(
        gaps.iter().all(|gap| (500..510).contains(gap)),
        "two a second: {gaps:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_wait_leaves_no_gap() {
    let (server, seen) = recording(&[("ratelimit", "\"s\";r=1;t=1")]);
    let client = queue(100, Pacing::Spread).layer(server.client());
    client.clone().oneshot(numbered(0)).await.unwrap();
    let mut calls = Vec::new();
    for number in 1..=6 {
        calls.push(tokio::spawn(client.clone().oneshot(numbered(number))));
        tokio::task::yield_now().await;
    }
    // Cancel the first request in the queue, a request in the middle, and the last request.
    for cancelled in [0, 2, 5] {
        calls[cancelled].abort();
    }
    for call in calls {
        let _ = call.await;
    }
    assert_eq!(*seen.lock().unwrap(), [0, 2, 4, 5]);
    let gaps = server.gaps_ms();
    assert!(
        gaps.iter().all(|gap| (1_000..1_010).contains(gap)),
        "{gaps:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_queue_is_bounded_in_number_and_in_time() {
    let server = Server::scripted(vec![reply(200, &[("retry-after", "8")])]);
    let client = queue(2, Pacing::Off).layer(server.client());
    client.clone().oneshot(get()).await.unwrap();
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..3 {
        calls.spawn(client.clone().oneshot(get()));
        tokio::task::yield_now().await;
    }
    let first = calls.join_next().await.unwrap().unwrap();
    assert!(
        matches!(first, Err(Error::QueueFull { most: 2 })),
        "{first:?}"
    );
    assert!(start.elapsed() < Duration::from_millis(1));
    let passed = calls.join_next().await.unwrap().unwrap();
    assert_eq!(
        (passed.unwrap().status().as_u16(), start.elapsed().as_secs()),
        (200, 8)
    );
    // The response asks for another 8 s, so the last request would exceed its longest wait.
    let last = calls.join_next().await.unwrap().unwrap();
    assert!(matches!(last, Err(Error::WaitTooLong { .. })), "{last:?}");
    assert_eq!(start.elapsed().as_secs(), 10);

    let hour = Server::scripted(vec![reply(503, &[("retry-after", "3600")])]);
    let client = queue(2, Pacing::Off).layer(hour.client());
    client.clone().oneshot(get()).await.unwrap();
    let start = Instant::now();
    let refused = client.oneshot(get()).await;
    assert!(
        matches!(refused, Err(Error::WaitTooLong { wait, .. }) if wait > Span::from_secs(3_590))
    );
    assert!(
        start.elapsed() < Duration::from_millis(1),
        "no request waits in vain"
    );
}

#[tokio::test(start_paused = true)]
async fn hosts_do_not_wait_for_each_other() {
    let server = Server::scripted(vec![reply(429, &[("retry-after", "5")]), reply(200, &[])]);
    let client = queue(2, Pacing::Spread).layer(server.client());
    let start = Instant::now();
    client.clone().oneshot(get()).await.unwrap();
    let mut other = get();
    *other.uri_mut() = "http://other.test/".parse().unwrap();
    client.clone().oneshot(other).await.unwrap();
    assert!(start.elapsed() < Duration::from_millis(10));
    client.oneshot(get()).await.unwrap();
    assert_eq!(start.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_breaker_opens_for_a_failing_server_and_closes_on_recovery() {
    let failing = std::sync::Arc::new(Mutex::new(true));
    let well = std::sync::Arc::clone(&failing);
    let server =
        Server::new(move |_, _| reply(if *failing.lock().unwrap() { 500 } else { 200 }, &[]));
    let breaker = BreakerLayer::with_clock(BreakerSettings::default(), clock());
    let retry = RetryLayer::new(RetryPolicy::default()).with_clock(clock());
    let client = ServiceBuilder::new()
        .layer(retry)
        .layer(breaker)
        .service(server.client());
    for _ in 0..20 {
        let _ = client.clone().oneshot(request("POST", "")).await;
    }
    for _ in 0..100 {
        let rejected = client.clone().oneshot(get()).await;
        assert!(
            matches!(rejected, Err(Error::CircuitOpen { .. })),
            "{rejected:?}"
        );
    }
    assert_eq!(server.request_count(), 20, "nothing was retried");
    *well.lock().unwrap() = false;
    sleep(Duration::from_secs(5)).await;
    for _ in 0..10 {
        assert_eq!(client.clone().oneshot(get()).await.unwrap().status(), 200);
    }
}

/// If an inner timeout expires, an outer circuit breaker counts a failure.
#[tokio::test(start_paused = true)]
async fn a_breaker_opens_for_a_server_that_hangs() {
    let hanging = tower::service_fn(|_: Request<Full<Bytes>>| {
        std::future::pending::<Result<http::Response<Full<Bytes>>, std::io::Error>>()
    });
    let client = ServiceBuilder::new()
        .layer(BreakerLayer::with_clock(
            BreakerSettings::default(),
            clock(),
        ))
        .layer(TimeoutLayer::new(Span::from_secs(1)))
        .service(hanging);
    for _ in 0..20 {
        let error = client.clone().oneshot(get()).await.unwrap_err();
        assert!(matches!(error, Error::Inner(_)), "{error:?}");
    }
    let error = client.oneshot(get()).await.unwrap_err();
    assert!(matches!(error, Error::CircuitOpen { .. }), "{error:?}");
}

/// Adaptive throttling must not reject requests only because many requests to a healthy server are
/// in flight or were cancelled.
#[tokio::test(start_paused = true)]
async fn requests_in_flight_or_cancelled_are_not_failures() {
    let slow = tower::service_fn(|_: Request<Full<Bytes>>| async {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, std::io::Error>(reply(200, &[]))
    });
    let layer =
        AdaptiveLayer::with_clock_and_rng(AdaptiveThrottle::default(), clock(), Rng::with_seed(5));
    let client = layer.layer(slow);
    let mut calls = JoinSet::new();
    for number in 0..200_u64 {
        let call = client.clone().oneshot(get());
        // Three of four requests are cancelled before the response.
        let limit = Duration::from_millis(if number % 4 == 0 { 2_000 } else { 10 });
        calls.spawn(tokio::time::timeout(limit, call));
    }
    while let Some(done) = calls.join_next().await {
        assert!(!matches!(done.unwrap(), Ok(Err(_))), "rejected");
    }
    assert!(client.oneshot(get()).await.is_ok());
}

/// If a probe is cancelled, another probe is admitted.
#[tokio::test(start_paused = true)]
async fn a_cancelled_probe_is_not_a_result() {
    let silent = std::sync::Arc::new(Mutex::new(false));
    let hang = std::sync::Arc::clone(&silent);
    let service = tower::service_fn(move |_: Request<Full<Bytes>>| {
        let hangs = *hang.lock().unwrap();
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok::<_, std::convert::Infallible>(reply(503, &[]))
        }
    });
    let settings = BreakerSettings {
        probes: 1,
        min_requests: 1,
        ..BreakerSettings::default()
    };
    let client = BreakerLayer::with_clock(settings, clock()).layer(service);
    client.clone().oneshot(get()).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    *silent.lock().unwrap() = true;
    for _ in 0..3 {
        let probe = tokio::time::timeout(Duration::from_secs(1), client.clone().oneshot(get()));
        assert!(probe.await.is_err(), "it was sent, and hangs");
    }
}

#[tokio::test(start_paused = true)]
async fn adaptive_throttling_reduces_load_on_a_refusing_server() {
    let server = Server::scripted(vec![reply(503, &[])]);
    let layer =
        AdaptiveLayer::with_clock_and_rng(AdaptiveThrottle::default(), clock(), Rng::with_seed(5));
    let client = layer.layer(server.client());
    let mut rejected = 0;
    for _ in 0..1_000 {
        if let Err(error) = client.clone().oneshot(get()).await {
            assert!(matches!(error, Error::Overloaded), "{error:?}");
            rejected += 1;
        }
    }
    assert_eq!(server.request_count() + rejected, 1_000);
    assert!(server.request_count() < 20, "{}", server.request_count());
}
