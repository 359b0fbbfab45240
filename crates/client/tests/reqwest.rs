//! Tests of the layers as middleware of reqwest, against a real server on a TCP socket.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use reqwest::redirect::Policy;
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use tidegate_client::{
    BreakerLayer, BreakerSettings, Error, GiveUpReason, Pacing, QueueLayer, QueueSettings,
    RetryLayer, RetryPolicy, RetryReport,
};
use tokio::net::TcpListener;

#[path = "../../redis/tests/support/ports.rs"]
#[allow(unreachable_pub, reason = "other crates re-export it")]
mod ports;

use ports::reserve_port;

/// Starts a server that responds to the first `refusals` requests with `refusal`. The server
/// answers each later request with the body of that request. Returns the address of the server and
/// the number of requests so far.
async fn server(refusals: usize, refusal: Response<Full<Bytes>>) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (count, refusal) = (Arc::clone(&count), refusal.clone());
            let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let (number, refusal) = (count.fetch_add(1, Ordering::Relaxed), refusal.clone());
                async move {
                    let body = request.into_body().collect().await;
                    let echo = Full::new(body.map(|body| body.to_bytes()).unwrap_or_default());
                    let answer = if number < refusals {
                        refusal
                    } else {
                        Response::new(echo)
                    };
                    Ok::<_, Infallible>(answer)
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(socket), service));
        }
    });
    (address, requests)
}

fn refusal(status: u16, header: (&str, &str), body: &'static str) -> Response<Full<Bytes>> {
    let refusal = Response::builder()
        .status(status)
        .header(header.0, header.1);
    refusal
        .body(Full::new(Bytes::from_static(body.as_bytes())))
        .unwrap()
}

fn retrying() -> ClientBuilder {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    ClientBuilder::new(client).with(RetryLayer::new(RetryPolicy::default()))
}

fn report(response: &reqwest::Response) -> Option<RetryReport> {
    response.extensions().get::<RetryReport>().copied()
}

fn client_error(error: &reqwest_middleware::Error) -> &Error {
    match error {
        reqwest_middleware::Error::Middleware(error) => error.downcast_ref().unwrap(),
        reqwest_middleware::Error::Reqwest(error) => panic!("{error:?}"),
    }
}

async fn put(client: &ClientWithMiddleware, address: SocketAddr) -> reqwest::Response {
    client
        .put(format!("http://{address}/x"))
        .body("a thing")
        .send()
        .await
        .unwrap()
}

#[tokio::test]
async fn a_refused_request_is_retried_with_its_body() {
    let (address, requests) = server(2, refusal(429, ("retry-after-ms", "3"), "")).await;
    let queue = QueueLayer::new(QueueSettings::default(), Pacing::Spread);
    let answer = put(&retrying().with(queue).build(), address).await;
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 3,
            gave_up: None
        })
    );
    assert_eq!(requests.load(Ordering::Relaxed), 3);
    assert_eq!(answer.text().await.unwrap(), "a thing");
}

#[tokio::test]
async fn a_permanent_refusal_is_returned_unchanged() {
    let body = r#"{"status":429,"retry_after_ms":null}"#;
    let (address, _) = server(
        9,
        refusal(429, ("content-type", "application/problem+json"), body),
    )
    .await;
    let answer = put(&retrying().build(), address).await;
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 1,
            gave_up: Some(GiveUpReason::Permanent)
        })
    );
    assert_eq!(
        (answer.status(), answer.url().path()),
        (StatusCode::TOO_MANY_REQUESTS, "/x")
    );
    assert_eq!(answer.headers()["content-type"], "application/problem+json");
    assert_eq!(answer.text().await.unwrap(), body);
}

/// The first server has processed the request and responded with a redirect. Only the redirect's
/// target is unreachable.
#[tokio::test]
async fn a_processed_request_is_not_retried_after_a_broken_redirect() {
    let location = format!("http://127.0.0.1:{}/receipt", reserve_port());
    let (address, requests) = server(9, refusal(303, ("location", &location), "")).await;
    let sent = retrying().build().post(format!("http://{address}/orders"));
    let error = sent.body("an order").send().await.unwrap_err();
    assert!(
        matches!(
            client_error(&error),
            Error::Failed {
                tries: 1,
                gave_up: GiveUpReason::NotIdempotent,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(requests.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_refused_connection_is_retried_for_any_method_without_redirects() {
    let direct = reqwest::Client::builder().redirect(Policy::none());
    let direct = direct.no_proxy().build().unwrap();
    let retry = RetryLayer::new(RetryPolicy::default()).never_sent_if(|error| {
        let error = error.downcast_ref::<reqwest::Error>();
        error.is_some_and(reqwest::Error::is_connect)
    });
    let client = ClientBuilder::new(direct).with(retry).build();
    let error = client
        .post(format!("http://127.0.0.1:{}/", reserve_port()))
        .send()
        .await
        .unwrap_err();
    match client_error(&error) {
        Error::Failed {
            tries: 4,
            gave_up: GiveUpReason::Tries,
            source,
        } => {
            assert!(
                source
                    .downcast_ref::<reqwest::Error>()
                    .unwrap()
                    .is_connect()
            );
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_request_rejected_by_a_guard_is_not_retried() {
    let (address, requests) = server(9, refusal(500, ("x-nothing", "0"), "")).await;
    let breaker = BreakerLayer::new(BreakerSettings {
        min_requests: 4,
        ..BreakerSettings::default()
    });
    let client = retrying().with(breaker).build();
    assert_eq!(put(&client, address).await.status(), 500);
    let rejected = client
        .get(format!("http://{address}/"))
        .send()
        .await
        .unwrap_err();
    assert!(
        matches!(client_error(&rejected), Error::CircuitOpen { .. }),
        "{rejected:?}"
    );
    assert_eq!(requests.load(Ordering::Relaxed), 4);
}
