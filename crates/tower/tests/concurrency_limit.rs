//! Tests the concurrency limit layer around a service that responds only when the test tells it to.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tidegate::{Clock, Limiter};
use tidegate_core::{
    Algorithm, Limit, MemoryBounds, MemoryStore, Rule, RuleSet, Span, Timestamp,
    concurrency::{AdaptiveSettings, Aimd, Method},
};
use tidegate_identity::Entries;
use tidegate_tower::{
    ConcurrencyLimitLayer, ConcurrencyLimiter, HeadroomCondition, RateLimitLayer, SlotShare,
};
use tokio::sync::oneshot;
use tower::{Layer, Service, ServiceExt, service_fn};

/// The pending requests of the service, in order of arrival, each with a channel for its response.
type HeldRequests = Arc<Mutex<Vec<(Option<Entries>, oneshot::Sender<Option<StatusCode>>)>>>;

/// Creates a service that holds every request until the test sends its status. If the test sends
/// `None`, the service returns an error.
fn holding(
    held: &HeldRequests,
) -> impl Service<
    Request<()>,
    Response = Response<Full<Bytes>>,
    Error = &'static str,
    Future: Send + 'static,
> + Clone {
    let held = Arc::clone(held);
    service_fn(move |request: Request<()>| {
        let (answer, answered) = oneshot::channel();
        let entries = request.extensions().get::<Entries>().cloned();
        held.lock().unwrap().push((entries, answer));
        async move {
            let status = answered.await.map_err(|_| "gone")?.ok_or("failed")?;
            let mut response = Response::new(Full::default());
            *response.status_mut() = status;
            Ok(response)
        }
    })
}

fn settings(initial: u32) -> AdaptiveSettings {
    AdaptiveSettings {
        method: Method::Aimd(Aimd::default()),
        initial,
        samples: 1,
        ..AdaptiveSettings::default()
    }
}

fn layer(initial: u32, clock: &Clock) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::new(settings(initial), clock.clone()).unwrap()
}

fn clock() -> Clock {
    Clock::manual(Timestamp::from_micros(1_000_000))
}

fn request(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

#[tokio::test]
async fn excess_requests_are_shed_before_the_inner_service() {
    let (held, clock) = (HeldRequests::default(), clock());
    let layer = layer(2, &clock);
    let service = layer.layer(holding(&held));
    let mut waiting: Vec<_> = (0..2)
        .map(|_| Box::pin(service.clone().oneshot(request("/"))))
        .collect();
    assert!(waiting.iter_mut().all(|one| one.now_or_never().is_none()));

    let shed = service.clone().oneshot(request("/")).await.unwrap();
    assert_eq!(shed.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(shed.headers()["retry-after"], "1");
    assert_eq!(shed.headers()["content-type"], "application/problem+json");
    let body = shed.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert!(text.contains("the service is overloaded"), "{text}");
    assert_eq!(held.lock().unwrap().len(), 2);
    let load = layer.load();
    assert_eq!((load.limit, load.in_flight, load.shed), (2, 2, 1));

    // Respond to one request and cancel another request, so that both slots are free.
    let (_, answer) = held.lock().unwrap().remove(0);
    answer.send(Some(StatusCode::OK)).unwrap();
    assert_eq!(waiting.remove(0).await.unwrap().status(), StatusCode::OK);
    drop(waiting);
    assert_eq!(layer.load().in_flight, 0);
}

#[tokio::test]
async fn a_shed_grpc_call_gets_a_grpc_status() {
    let (held, clock) = (HeldRequests::default(), clock());
    let service = layer(1, &clock).layer(holding(&held));
    let mut first = Box::pin(service.clone().oneshot(request("/")));
    assert!((&mut first).now_or_never().is_none());
    let mut call = request("/pkg.Service/Method");
    *call.method_mut() = http::Method::POST;
    let headers = call.headers_mut();
    headers.insert("content-type", "application/grpc".parse().unwrap());
    let shed = service.clone().oneshot(call).await.unwrap();
    assert_eq!(shed.status(), StatusCode::OK);
    assert_eq!(shed.headers()["grpc-status"], "14");
}

#[tokio::test]
async fn lower_priority_classes_are_shed_first() {
    let (held, clock) = (HeldRequests::default(), clock());
    let layer = layer(4, &clock)
        .classes(&[100, 50], |request| {
            usize::from(request.uri.path() == "/batch")
        })
        .unwrap();
    let service = layer.layer(holding(&held));
    let mut waiting = Vec::new();
    let mut joins = |path: &str| {
        let mut one = Box::pin(service.clone().oneshot(request(path)));
        let joined = (&mut one).now_or_never().is_none();
        waiting.push(one);
        joined
    };
    assert!(joins("/batch") && joins("/batch"));
    assert!(!joins("/batch"), "half of the permits are taken");
    assert!(joins("/") && joins("/"));
    assert!(!joins("/"), "all of them are");
}

#[tokio::test]
async fn failures_and_slowness_shrink_the_limit_and_neutral_outcomes_do_not() {
    let (held, clock) = (HeldRequests::default(), clock());
    let layer = layer(20, &clock);
    let service = layer.layer(holding(&held));
    let ends = async |with: Option<StatusCode>, after: Span| {
        let mut one = Box::pin(service.clone().oneshot(request("/")));
        assert!((&mut one).now_or_never().is_none());
        clock.set(clock.now().after(after));
        let (_, answer) = held.lock().unwrap().remove(0);
        answer.send(with).unwrap();
        let _ = one.await;
        layer.load().limit
    };
    let window = Span::from_millis(200);
    // A measurement window begins when the first request in it ends.
    assert_eq!(ends(Some(StatusCode::OK), window).await, 20);
    assert_eq!(
        ends(Some(StatusCode::OK), window).await,
        20,
        "one of twenty is in use"
    );
    assert_eq!(ends(None, window).await, 20);
    assert_eq!(ends(Some(StatusCode::OK), window).await, 18, "it failed");
    assert_eq!(ends(Some(StatusCode::GATEWAY_TIMEOUT), window).await, 18);
    assert_eq!(ends(Some(StatusCode::OK), window).await, 16);
    let long = Span::from_secs(6);
    assert_eq!(ends(Some(StatusCode::TOO_MANY_REQUESTS), long).await, 16);
    assert_eq!(ends(Some(StatusCode::OK), long).await, 16);
    assert_eq!(
        ends(Some(StatusCode::OK), window).await,
        14,
        "it was too slow"
    );
}

#[tokio::test]
async fn inner_services_see_whether_there_is_room() {
    let (held, clock) = (HeldRequests::default(), clock());
    let layer = layer(4, &clock).export_headroom("headroom.app", HeadroomCondition::InFlight(75));
    let service = layer.layer(holding(&held));
    let mut waiting = Vec::new();
    for expected in ["yes", "yes", "no", "no"] {
        let mut asked = request("/");
        let known = Entries::new().with("customer", "acme");
        asked
            .extensions_mut()
            .insert(known.with("headroom.app", "maybe"));
        let mut one = Box::pin(service.clone().oneshot(asked));
        assert!((&mut one).now_or_never().is_none());
        waiting.push(one);
        let held = held.lock().unwrap();
        let entries = held.last().unwrap().0.as_ref().unwrap();
        assert_eq!(entries.get("headroom.app"), Some(expected));
        assert_eq!(entries.get("customer"), Some("acme"));
    }
}

#[tokio::test]
async fn there_is_room_while_latency_is_normal() {
    let (held, clock) = (HeldRequests::default(), clock());
    let settings = AdaptiveSettings {
        samples: 1,
        ..AdaptiveSettings::default()
    };
    let layer = ConcurrencyLimitLayer::new(settings, clock.clone()).unwrap();
    let layer = layer.export_headroom("headroom.app", HeadroomCondition::Latency(120));
    let service = layer.layer(holding(&held));
    let saw_headroom = async |takes: Span| {
        let mut one = Box::pin(service.clone().oneshot(request("/")));
        assert!((&mut one).now_or_never().is_none());
        clock.set(clock.now().after(takes));
        let (entries, answer) = held.lock().unwrap().remove(0);
        answer.send(Some(StatusCode::OK)).unwrap();
        one.await.unwrap();
        entries.unwrap().get("headroom.app") == Some("yes")
    };
    let (usual, slow) = (Span::from_millis(100), Span::from_millis(130));
    assert!(!saw_headroom(usual).await, "nothing is known yet");
    saw_headroom(usual).await;
    assert!(saw_headroom(usual).await);
    for _ in 0..4 {
        saw_headroom(slow).await;
    }
    assert!(!saw_headroom(slow).await, "they wait for something");
    for _ in 0..4 {
        saw_headroom(usual).await;
    }
    assert!(saw_headroom(usual).await);
}

#[tokio::test]
async fn grpc_statuses_of_the_service_are_understood() {
    let clock = clock();
    let code = Arc::new(Mutex::new("0"));
    let inner = {
        let code = Arc::clone(&code);
        service_fn(move |_: Request<()>| {
            let mut response = Response::new(Full::<Bytes>::default());
            let code = code.lock().unwrap().parse().unwrap();
            response.headers_mut().insert("grpc-status", code);
            async { Ok::<_, Infallible>(response) }
        })
    };
    let layer = layer(20, &clock);
    let service = layer.layer(inner);
    let answers = async |with: &'static str| {
        *code.lock().unwrap() = with;
        for _ in 0..4 {
            clock.set(clock.now().after(Span::from_millis(60)));
            service.clone().oneshot(request("/")).await.unwrap();
        }
        layer.load().limit
    };
    assert_eq!(answers("8").await, 20, "the request itself was invalid");
    assert_eq!(answers("14").await, 18);
    assert!(answers("4").await < 18);
}

#[tokio::test]
async fn the_last_slot_is_reserved_for_the_first_class_unless_it_is_the_only_slot() {
    for (initial, joins) in [(1, 1), (2, 1), (3, 2), (9, 8), (10, 9)] {
        let (held, clock) = (HeldRequests::default(), clock());
        let layer = layer(initial, &clock);
        let layer = layer.classes(&[100, 90], |_| 1).unwrap();
        let service = layer.layer(holding(&held));
        let mut waiting = Vec::new();
        for _ in 0..initial {
            let mut one = Box::pin(service.clone().oneshot(request("/")));
            let _ = (&mut one).now_or_never();
            waiting.push(one);
        }
        assert_eq!(layer.load().in_flight, joins, "of {initial}");
    }
}

#[tokio::test]
async fn a_panic_releases_the_permit() {
    let clock = clock();
    let layer = layer(1, &clock);
    let inner = service_fn(|_: Request<()>| async {
        let mut answers: Vec<Response<Full<Bytes>>> = Vec::new();
        Ok::<_, Infallible>(answers.remove(0))
    });
    let service = layer.layer(inner);
    let asked = tokio::spawn(async move { service.oneshot(request("/")).await.is_ok() });
    assert!(asked.await.unwrap_err().is_panic());
    assert_eq!(layer.load().in_flight, 0);
}

#[test]
fn invalid_shares_are_refused() {
    for shares in [&[][..], &[0], &[101], &[100; 17]] {
        let refused = layer(1, &clock()).classes(shares, |_| 0).unwrap_err();
        assert_eq!(refused.field, "shares", "{shares:?}");
    }
}

#[tokio::test]
async fn poll_ready_takes_no_permit() {
    let clock = clock();
    let layer = layer(1, &clock);
    let inner = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let mut service = layer.layer(inner);
    for _ in 0..3 {
        ServiceExt::<Request<()>>::ready(&mut service)
            .await
            .unwrap();
        assert_eq!(layer.load().in_flight, 0);
    }
}

#[test]
fn a_paused_request_holds_no_permit_and_is_not_timed() {
    let later = |clock: &Clock, span| clock.set(clock.now().after(span));
    let hour = Span::from_secs(3_600);
    for (pauses, is_slow) in [(true, false), (false, true)] {
        let clock = clock();
        let limiter = Arc::new(ConcurrencyLimiter::new(settings(20), clock.clone()).unwrap());
        let mut held = limiter.try_acquire(SlotShare::ALL).unwrap();
        if pauses {
            held.pause();
            held.pause();
            assert_eq!(limiter.load().in_flight, 0);
        }
        later(&clock, hour);
        held.resume();
        assert_eq!(limiter.load().in_flight, 1);
        later(&clock, Span::from_secs(1));
        held.finish(&Response::new(()));
        // A measurement takes effect when the next request ends.
        later(&clock, Span::from_secs(1));
        let next = limiter.try_acquire(SlotShare::ALL).unwrap();
        next.finish(&Response::new(()));
        assert_eq!(limiter.load().limit < 20, is_slow);
        assert_eq!(limiter.load().in_flight, 0);
    }
    let limiter = Arc::new(ConcurrencyLimiter::new(settings(1), clock()).unwrap());
    let mut first = limiter.try_acquire(SlotShare::ALL).unwrap();
    first.pause();
    let _second = limiter.try_acquire(SlotShare::ALL).unwrap();
    first.resume();
    assert_eq!(limiter.load().in_flight, 2, "one too many");
    first.pause();
    drop(first);
    assert_eq!(limiter.load().in_flight, 1);
    assert!(limiter.try_acquire(SlotShare::ALL).is_none());
}

/// A denial by a rule does not show how many requests the service can handle.
#[tokio::test]
async fn a_denial_by_the_capacity_of_a_rule_does_not_shrink_the_limit() {
    let clock = clock();
    let lease = Span::from_secs(60);
    let slots = Limit::new(Algorithm::Concurrency { limit: 0, lease }).unwrap();
    let one = Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
    for (limit, status) in [(slots, 429), (one, 503)] {
        let rule = Rule::new("at-work", vec![limit]).unwrap();
        let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Arc::new(Limiter::new(rules, store, clock.clone()));
        let held = HeldRequests::default();
        let limited = RateLimitLayer::new(limiter).layer(holding(&held));
        let layer = layer(20, &clock);
        let service = layer.layer(limited);
        let mut first = Box::pin(service.clone().oneshot(request("/")));
        let _ = (&mut first).now_or_never();
        for _ in 0..3 {
            clock.set(clock.now().after(Span::from_millis(200)));
            let denied = service.clone().oneshot(request("/")).await.unwrap();
            assert_eq!(denied.status().as_u16(), status);
            assert_eq!(layer.load().limit, 20);
        }
    }
}
