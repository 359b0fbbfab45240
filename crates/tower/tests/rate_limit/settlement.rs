//! Tests refunds after the end or the cancellation of a request. The clock does not advance, so
//! only refunds make units available again.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future::{self, Ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty, Full};
use tidegate::RateLimiter;
use tidegate_core::{
    Algorithm, AlgorithmName, Condition, Cost, Effect, Limit, MemoryBounds, MemoryStore, Mode,
    Pattern, ResponseCost, Rule, Scratch, Span, Store, When,
};
use tidegate_tower::{LongLivedPermit, RateLimit, RateLimitLayer, ResponseEntries};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{
    stores::RemoteStore,
    support::{Limiter, Notes, fixed, get, limiter, limiter_on, rule, statuses, with_permit},
};

/// A service that calls a function with the path and responds immediately with the result.
struct Answering<B>(fn(&str) -> Response<B>);

impl<B> Clone for Answering<B> {
    fn clone(&self) -> Self {
        Self(self.0)
    }
}

impl<B> Service<Request<()>> for Answering<B> {
    type Response = Response<B>;
    type Error = Infallible;
    type Future = Ready<Result<Response<B>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        future::ready(Ok((self.0)(request.uri().path())))
    }
}

/// A body that consists of these frames. An endless body stays pending after the last frame.
struct Frames {
    frames: VecDeque<Result<Frame<Bytes>, &'static str>>,
    is_endless: bool,
}

impl Frames {
    fn of(texts: &[&'static str]) -> Self {
        let frames = texts.iter().map(|text| Ok(Frame::data((*text).into())));
        Self {
            frames: frames.collect(),
            is_endless: false,
        }
    }

    fn endless(texts: &[&'static str]) -> Self {
        Self {
            is_endless: true,
            ..Self::of(texts)
        }
    }

    fn then(mut self, frame: Result<Frame<Bytes>, &'static str>) -> Self {
        self.frames.push_back(frame);
        self
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        match self.frames.pop_front() {
            None if self.is_endless => Poll::Pending,
            frame => Poll::Ready(frame),
        }
    }
}

/// Returns a rule that admits at most `limit` concurrent requests.
pub(crate) fn places(limit: u64) -> Rule {
    let lease = Span::from_secs(60);
    let places = Limit::new(Algorithm::Concurrency { limit, lease }).unwrap();
    Rule::new("places", vec![places]).unwrap()
}

pub(crate) fn counting(rule: Rule, entry: &str, pattern: &str) -> Rule {
    let condition = Condition::new(entry, Pattern::text(pattern).unwrap()).unwrap();
    let response_cost = ResponseCost::default().counting(When::all(vec![condition]));
    rule.with_response_cost(response_cost).unwrap()
}

fn costing(rule: Rule, entry: &str) -> Rule {
    rule.with_response_cost(ResponseCost::default().costing(entry).unwrap())
        .unwrap()
}

/// Returns the remaining units of the only rule.
pub(crate) async fn left<S: Store>(limiter: &Limiter<S>) -> u64 {
    let request = tidegate_core::Request::new(&[], Cost::ONE).unwrap();
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let verdict = limiter.check(&rules, &mut scratch, &request, Effect::Look);
    let verdict = verdict.await.unwrap();
    verdict.lines[0].outcome.remaining
}

/// Sends a request for `path` and returns the response with its body unread.
async fn ask<S, B>(service: &mut S, path: &str) -> Response<B>
where
    S: Service<Request<()>, Response = Response<B>>,
    S::Error: std::fmt::Debug,
{
    service
        .ready()
        .await
        .unwrap()
        .call(get(path))
        .await
        .unwrap()
}

fn layered<S: Store + 'static, I>(limiter: &Arc<Limiter<S>>, inner: I) -> RateLimit<I, Limiter<S>> {
    RateLimitLayer::new(Arc::clone(limiter)).layer(inner)
}

fn limiter_on_remote_store(rules: Vec<Rule>) -> Arc<Limiter<RemoteStore>> {
    limiter_on(
        RemoteStore(MemoryStore::new(MemoryBounds::default())),
        rules,
    )
}

#[tokio::test]
async fn a_slot_is_held_until_the_response_ends() {
    let limiter = limiter(vec![places(2)]);
    let endings: [fn(&str) -> Response<Frames>; 3] = [
        |_| Response::new(Frames::of(&["one"])),
        |_| Response::new(Frames::of(&["one"]).then(Err("broken off"))),
        |_| Response::new(Frames::endless(&["one"])),
    ];
    for ending in endings {
        let mut service = layered(&limiter, Answering(ending));
        let mut first = ask(&mut service, "/").await.into_body();
        let mut second = ask(&mut service, "/").await.into_body();
        assert_eq!(ask(&mut service, "/").await.status(), 503);
        assert!(first.frame().await.unwrap().is_ok());
        assert_eq!(left(&limiter).await, 0, "more is to come");
        let ended = first.frame().now_or_never();
        // An endless response has not ended yet. Dropping the response cancels it.
        let is_held = ended.is_none();
        assert_eq!(left(&limiter).await, u64::from(!is_held));
        drop(first);
        assert_eq!(left(&limiter).await, 1);
        assert!(second.frame().await.unwrap().is_ok());
        drop(second);
        assert_eq!(left(&limiter).await, 2);
    }
}

#[tokio::test]
async fn a_slot_is_released_when_the_service_fails_or_the_caller_leaves() {
    let limiter = limiter(vec![places(1)]);
    let failing = service_fn(|_: Request<()>| async { Err::<Response<Empty<Bytes>>, _>("down") });
    let mut service = layered(&limiter, failing);
    for _ in 0..3 {
        let answer = service.ready().await.unwrap().call(get("/")).await;
        assert_eq!(answer.err(), Some("down"));
    }
    let idle = service_fn(|_: Request<()>| {
        future::pending::<Result<Response<Empty<Bytes>>, Infallible>>()
    });
    let mut service = layered(&limiter, idle);
    for _ in 0..3 {
        let mut waiting = Box::pin(service.ready().await.unwrap().call(get("/")));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert_eq!(left(&limiter).await, 0);
        drop(waiting);
        assert_eq!(left(&limiter).await, 1);
    }
}

#[tokio::test]
async fn a_slot_is_released_from_a_thread_without_a_runtime() {
    let limiter = limiter(vec![places(1)]);
    let mut service = layered(&limiter, Answering(|_| Response::new(Frames::endless(&[]))));
    let answer = ask(&mut service, "/").await;
    assert_eq!(left(&limiter).await, 0);
    std::thread::spawn(move || drop(answer)).join().unwrap();
    assert_eq!(left(&limiter).await, 1);
}

#[tokio::test]
async fn a_handle_that_outlives_the_body_holds_the_slot() {
    let limiter = limiter(vec![places(2)]);
    let permit = LongLivedPermit::default();
    let mut service = layered(&limiter, with_permit(&permit));
    assert_eq!(statuses(&mut service, "/", 3).await, [200, 200, 503]);
    drop(service);
    assert_eq!(left(&limiter).await, 0);
    drop(permit);
    assert_eq!(left(&limiter).await, 2);
}

#[tokio::test]
async fn an_empty_response_ends_at_once() {
    let limiter = limiter(vec![places(1)]);
    let mut service = layered(&limiter, Answering(|_| Response::new(Empty::new())));
    assert_eq!(statuses(&mut service, "/", 3).await, [200, 200, 200]);
}

#[tokio::test]
async fn only_matching_responses_are_counted() {
    let rule = counting(fixed("failed", "3/h"), "status", "401");
    let limiter = limiter(vec![rule]);
    let status = |path: &str| {
        Response::builder()
            .status(&path[1..])
            .body(Full::from(""))
            .unwrap()
    };
    let mut service = layered(&limiter, Answering(status));
    assert_eq!(statuses(&mut service, "/200", 9).await, [200; 9]);
    assert_eq!(statuses(&mut service, "/401", 2).await, [401, 401]);
    assert_eq!(statuses(&mut service, "/500", 4).await, [500; 4]);
    assert_eq!(statuses(&mut service, "/401", 1).await, [401]);
    assert_eq!(statuses(&mut service, "/200", 2).await, [429, 429]);
}

/// The charge is reserved, so a client cannot make more concurrent attempts than the limit allows.
/// If the client disconnects before the response, the request stays charged, so that aborted
/// attempts are not free.
#[tokio::test]
async fn attempts_are_reserved_and_stay_charged_without_a_response() {
    let rule = counting(fixed("failed", "3/h"), "status", "401");
    let limiter = limiter(vec![rule]);
    let idle = service_fn(|_: Request<()>| {
        future::pending::<Result<Response<Empty<Bytes>>, Infallible>>()
    });
    let mut service = layered(&limiter, idle);
    for _ in 0..3 {
        let trying = service.ready().await.unwrap().call(get("/login"));
        assert!(trying.now_or_never().is_none());
    }
    assert_eq!(ask(&mut service, "/login").await.status(), 429);
}

#[tokio::test]
async fn a_response_is_charged_by_the_bytes_sent() {
    let rule = costing(fixed("bytes", "100/h"), "bytes");
    let limiter = limiter(vec![rule]);
    let ten = |_: &str| Response::new(Frames::endless(&["12345", "67890"]));
    let mut service = RateLimitLayer::new(Arc::clone(&limiter))
        .cost(Cost::new(50).unwrap())
        .layer(Answering(ten));
    let mut body = ask(&mut service, "/").await.into_body();
    assert_eq!(left(&limiter).await, 50);
    body.frame().await.unwrap().unwrap();
    body.frame().await.unwrap().unwrap();
    drop(body);
    assert_eq!(left(&limiter).await, 90);
    drop(ask(&mut service, "/").await);
    assert_eq!(left(&limiter).await, 90, "a head costs nothing");
}

#[tokio::test]
async fn an_excess_over_the_estimate_is_charged_if_there_is_room() {
    let limiter = limiter(vec![costing(fixed("bytes", "20/h"), "bytes")]);
    let mut service = layered(
        &limiter,
        Answering(|path: &str| Response::new(Full::from(path.to_owned()))),
    );
    assert_eq!(statuses(&mut service, "/23456789", 1).await, [200]);
    assert_eq!(left(&limiter).await, 11);
    assert_eq!(
        statuses(&mut service, "/2345678901234567890", 1).await,
        [200]
    );
    assert_eq!(left(&limiter).await, 0);
    assert_eq!(statuses(&mut service, "/", 1).await, [429]);
}

#[tokio::test]
async fn the_application_sets_the_cost_during_the_response() {
    let limiter = limiter(vec![costing(fixed("tokens", "1000/h"), "tokens")]);
    let service = service_fn(|request: Request<()>| {
        let report = ResponseEntries::default();
        let mut response = Response::new(Frames::endless(&["once"]));
        if request.uri().path() != "/unset" {
            report.set("tokens", 1);
            response.extensions_mut().insert(report.clone());
        }
        future::ready(Ok::<_, Infallible>((response, report)))
    });
    let reports = std::sync::Mutex::new(Vec::new());
    let reports = Arc::new(reports);
    let kept = Arc::clone(&reports);
    let service = service.map_response(move |(response, report)| {
        kept.lock().unwrap().push(report);
        response
    });
    let mut service = RateLimitLayer::new(Arc::clone(&limiter))
        .cost(Cost::new(300).unwrap())
        .layer(service);
    drop(ask(&mut service, "/").await);
    assert_eq!(left(&limiter).await, 999);
    let answer = ask(&mut service, "/").await;
    reports.lock().unwrap()[1].set("tokens", 200);
    drop(answer);
    assert_eq!(left(&limiter).await, 799);
    drop(ask(&mut service, "/unset").await);
    assert_eq!(left(&limiter).await, 499);
}

#[tokio::test]
async fn an_upstream_sets_the_cost_in_a_header() {
    let limiter = limiter(vec![costing(fixed("tokens", "1000/h"), "header.x-tokens")]);
    let answer = |path: &str| {
        Response::builder()
            .header("X-Tokens", &path[1..])
            .body(Full::from(""))
            .unwrap()
    };
    let mut service = layered(&limiter, Answering(answer));
    for (tokens, expected) in [
        ("17", 983),
        ("0", 983),
        ("many", 982),
        ("-5", 981),
        ("1e3", 980),
    ] {
        assert_eq!(
            statuses(&mut service, &format!("/{tokens}"), 1).await,
            [200]
        );
        assert_eq!(left(&limiter).await, expected, "{tokens}");
    }
}

#[tokio::test]
async fn the_grpc_status_is_read_from_headers_or_trailers() {
    let limiter = limiter(vec![counting(fixed("failed", "9/h"), "grpc-status", "16")]);
    let answer = |path: &str| {
        let trailers =
            HeaderMap::from_iter([("grpc-status".parse().unwrap(), path[1..].parse().unwrap())]);
        Response::new(Frames::of(&["message"]).then(Ok(Frame::trailers(trailers))))
    };
    let mut service = layered(&limiter, Answering(answer));
    for (status, expected) in [("0", 9), ("16", 8), ("7", 8)] {
        let answer = ask(&mut service, &format!("/{status}")).await;
        answer.into_body().collect().await.unwrap();
        assert_eq!(left(&limiter).await, expected, "{status}");
    }
    let answer = |_: &str| {
        Response::builder()
            .header("grpc-status", "16")
            .body(Frames::of(&[]))
            .unwrap()
    };
    let mut service = layered(&limiter, Answering(answer));
    drop(ask(&mut service, "/").await);
    assert_eq!(left(&limiter).await, 7);
}

/// A client that reads the whole body and resets the stream before the trailers is charged like any
/// other client.
#[tokio::test]
async fn a_disconnect_before_the_trailers_is_still_counted() {
    let limiter = limiter(vec![counting(fixed("served", "9/h"), "grpc-status", "0")]);
    let answer = |_: &str| Response::new(Frames::endless(&["all", "of it"]));
    let mut service = layered(&limiter, Answering(answer));
    let mut body = ask(&mut service, "/").await.into_body();
    for _ in 0..2 {
        body.frame().await.unwrap().unwrap();
    }
    drop(body);
    assert_eq!(left(&limiter).await, 8);
    // A response that ends without a gRPC status does not match the condition.
    let mut service = layered(&limiter, Answering(|_| Response::new(Frames::of(&["all"]))));
    let answer = ask(&mut service, "/").await;
    answer.into_body().collect().await.unwrap();
    assert_eq!(left(&limiter).await, 8);
    let mut service = layered(
        &limiter,
        Answering(|_| Response::new(Empty::<Bytes>::new())),
    );
    drop(ask(&mut service, "/").await);
    assert_eq!(left(&limiter).await, 8);
}

#[tokio::test]
async fn each_layer_settles_its_own_charges() {
    let outer = limiter(vec![counting(fixed("outer", "5/h"), "status", "2*")]);
    let inner = limiter(vec![fixed("inner", "2/h")]);
    let service = layered(&inner, Notes::default());
    let mut service = layered(&outer, service);
    assert_eq!(statuses(&mut service, "/", 4).await, [200, 200, 429, 429]);
    // The outer rule does not count a denial by the inner layer.
    assert_eq!((left(&outer).await, left(&inner).await), (3, 0));
}

#[tokio::test]
async fn shadow_charges_are_settled() {
    let limiter = limiter(vec![places(1).in_mode(Mode::Shadow)]);
    let mut service = layered(&limiter, Answering(|_| Response::new(Frames::endless(&[]))));
    let one = ask(&mut service, "/").await;
    let other = ask(&mut service, "/").await;
    assert_eq!(
        (one.status(), other.status()),
        (200.try_into().unwrap(), 200.try_into().unwrap())
    );
    assert_eq!(left(&limiter).await, 0);
    drop((one, other));
    assert_eq!(left(&limiter).await, 1);
}

/// With a remote store, charges and refunds are completed in the background after the request is
/// dropped.
#[tokio::test(start_paused = true)]
async fn a_remote_store_is_settled_in_the_background() {
    let limiter = limiter_on_remote_store(vec![places(1)]);
    let mut service = layered(&limiter, Answering(|_| Response::new(Frames::endless(&[]))));
    let answer = ask(&mut service, "/").await;
    assert_eq!(answer.status(), 200);
    assert_eq!(ask(&mut service, "/").await.status(), 503);
    drop(answer);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert_eq!(left(&limiter).await, 1);
    // Cancel the request while the store makes its decision.
    let mut asked = Box::pin(service.ready().await.unwrap().call(get("/")));
    assert!(asked.as_mut().now_or_never().is_none());
    drop(asked);
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(left(&limiter).await, 1);
}

/// When a runtime shuts down, its pending refunds are lost. The charges stay, and the slots become
/// free when their leases expire.
#[test]
fn a_runtime_shutdown_drops_pending_refunds() {
    let runtime = || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap()
    };
    let limiter = limiter_on_remote_store(vec![places(2)]);
    let endless = Answering(|_| Response::new(Frames::endless(&[])));
    let mut service = layered(&limiter, endless);
    let first = runtime();
    let answer = first.block_on(ask(&mut service, "/"));
    assert_eq!(answer.status(), 200);
    let mut asked = Box::pin(service.call(get("/")));
    assert!(
        first
            .block_on(async { asked.as_mut().now_or_never() })
            .is_none()
    );
    drop(first);
    drop((answer, asked));
    assert_eq!(runtime().block_on(left(&limiter)), 1);
}

#[tokio::test(start_paused = true)]
async fn a_remote_store_is_charged_the_excess() {
    let limiter = limiter_on_remote_store(vec![costing(
        rule("bytes", AlgorithmName::SlidingWindowLog, "20/h"),
        "bytes",
    )]);
    let mut service = layered(
        &limiter,
        Answering(|path: &str| Response::new(Full::from(path.to_owned()))),
    );
    for (path, expected) in [("/234", 16), ("/2345678901234567890", 0)] {
        assert_eq!(statuses(&mut service, path, 1).await, [200]);
        tokio::time::sleep(std::time::Duration::from_secs(9)).await;
        assert_eq!(left(&limiter).await, expected);
    }
}
