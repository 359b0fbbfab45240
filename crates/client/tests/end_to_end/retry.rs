//! Tests of [`RetryLayer`] around hyper's client.

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, StreamBody};
use tidegate_client::{
    Backoff, Error, GiveUpReason, Jitter, NonIdempotentPolicy, PeekedBody, RetryBudget, RetryLayer,
    RetryPolicy, RetryReport, Rng, Span, TimeoutLayer, TryTimeout,
};
use tower::{Layer as _, ServiceExt as _};

use crate::support::{Server, clock, get, reply, request};

const OK: u16 = 200;

fn retry(policy: RetryPolicy) -> RetryLayer {
    RetryLayer::new(policy)
        .with_clock(clock())
        .with_rng(Rng::with_seed(7))
}

async fn send<B>(
    server: &Server,
    retry: &RetryLayer,
    request: Request<B>,
) -> Result<Response<PeekedBody<hyper::body::Incoming>>, Error>
where
    B: http_body::Body<Data = Bytes> + Unpin + Send + 'static,
    B::Error: Into<tidegate_client::BoxError>,
{
    retry.layer(server.client()).oneshot(request).await
}

fn report<B>(response: &Response<B>) -> Option<RetryReport> {
    response.extensions().get::<RetryReport>().copied()
}

#[tokio::test(start_paused = true)]
async fn a_retry_waits_as_long_as_the_server_asks() {
    let server = Server::scripted(vec![
        reply(429, &[("retry-after", "3")]),
        reply(503, &[("retry-after-ms", "1500")]),
        reply(OK, &[]),
    ]);
    let answer = send(&server, &retry(RetryPolicy::default()), get())
        .await
        .unwrap();
    assert_eq!(answer.status(), OK);
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 3,
            gave_up: None
        })
    );
    let gaps = server.gaps_ms();
    assert!(
        (3_000..=4_502).contains(&gaps[0]) && (1_500..=2_252).contains(&gaps[1]),
        "{gaps:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn without_advice_a_retry_backs_off() {
    let server = Server::scripted(vec![reply(502, &[])]);
    let backoff = Backoff::new(Span::from_millis(100), Span::from_millis(250), Jitter::None);
    let policy = RetryPolicy {
        backoff,
        ..RetryPolicy::default()
    };
    let answer = send(&server, &retry(policy), get()).await.unwrap();
    assert_eq!(answer.status(), 502, "the last response is passed on");
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 4,
            gave_up: Some(GiveUpReason::Tries)
        })
    );
    let expected = [100, 200, 250];
    let gaps = server.gaps_ms();
    assert!(
        gaps.iter()
            .zip(expected)
            .all(|(gap, wait)| (wait..wait + 3).contains(gap)),
        "{gaps:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_non_idempotent_request_is_sent_once() {
    let policy = RetryPolicy::default();
    let server = Server::scripted(vec![reply(500, &[]), reply(OK, &[])]);
    let answer = send(&server, &retry(policy), request("POST", "pay"))
        .await
        .unwrap();
    assert_eq!((answer.status().as_u16(), server.request_count()), (500, 1));
    let gave_up = Some(GiveUpReason::NotIdempotent);
    assert_eq!(report(&answer), Some(RetryReport { tries: 1, gave_up }));

    let refusing = Server::scripted(vec![reply(429, &[("retry-after", "1")]), reply(OK, &[])]);
    let refused_too = RetryPolicy {
        non_idempotent: NonIdempotentPolicy::Refused,
        ..policy
    };
    let answer = send(&refusing, &retry(refused_too), request("POST", "pay"))
        .await
        .unwrap();
    assert_eq!(
        (answer.status().as_u16(), refusing.request_count()),
        (OK, 2)
    );
}

#[tokio::test(start_paused = true)]
async fn an_unsent_request_is_retried_for_any_method() {
    let server = Server::scripted(vec![reply(OK, &[])]);
    *server.refusals.lock().unwrap() = 2;
    let answer = send(
        &server,
        &retry(RetryPolicy::default()),
        request("POST", "pay"),
    )
    .await;
    assert_eq!(report(&answer.unwrap()).map(|report| report.tries), Some(3));

    *server.refusals.lock().unwrap() = 9;
    let error = send(
        &server,
        &retry(RetryPolicy::default()),
        request("POST", "pay"),
    )
    .await;
    match error.unwrap_err() {
        Error::Failed {
            tries: 4,
            gave_up: GiveUpReason::Tries,
            ..
        } => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_is_sent_again_from_its_beginning() {
    let server = Server::new(|request, _| {
        let whole = request.body() == "a thing to keep";
        reply(if whole { 503 } else { 400 }, &[])
    });
    let retry_whole = retry(RetryPolicy::default());
    let answer = send(&server, &retry_whole, request("PUT", "a thing to keep"));
    assert_eq!(answer.await.unwrap().status(), 503);
    assert_eq!(server.request_count(), 4);

    let policy = RetryPolicy {
        max_replay_bytes: 5,
        ..RetryPolicy::default()
    };
    let parts = ["a thing", " to keep"].map(|part| {
        Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from_static(part.as_bytes())))
    });
    let streamed = request("PUT", "").map(|_| StreamBody::new(futures_util::stream::iter(parts)));
    let answer = send(&server, &retry(policy), streamed).await.unwrap();
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 1,
            gave_up: Some(GiveUpReason::Body)
        })
    );
}

#[tokio::test(start_paused = true)]
async fn a_wait_over_the_maximum_is_not_honoured() {
    let server = Server::scripted(vec![reply(429, &[("retry-after", "3600")])]);
    let start = tokio::time::Instant::now();
    let answer = send(&server, &retry(RetryPolicy::default()), get())
        .await
        .unwrap();
    let server_wait = Span::from_secs(3_600);
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 1,
            gave_up: Some(GiveUpReason::MaxWait { server_wait })
        })
    );
    assert!(start.elapsed().as_secs() < 1);
}

#[tokio::test(start_paused = true)]
async fn a_permanent_refusal_is_passed_on_unchanged() {
    let body = r#"{"title":"Too Many Requests","status":429,"retry_after_ms":null}"#;
    let problem = || {
        let head = reply(429, &[("content-type", "application/problem+json")]);
        head.map(|_| Full::new(Bytes::from_static(body.as_bytes())))
    };
    let server = Server::scripted(vec![problem()]);
    let answer = send(&server, &retry(RetryPolicy::default()), get())
        .await
        .unwrap();
    assert_eq!(
        report(&answer),
        Some(RetryReport {
            tries: 1,
            gave_up: Some(GiveUpReason::Permanent)
        })
    );
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), body);
}

/// If a server never responds, every try times out, and the whole call reaches its deadline.
#[tokio::test(start_paused = true)]
async fn a_deadline_covers_the_whole_call() {
    let silent = tower::service_fn(|_: Request<_>| {
        std::future::pending::<Result<Response<Full<Bytes>>, std::io::Error>>()
    });
    let timeout = Span::from_secs(10);
    let policy = RetryPolicy {
        deadline: Span::from_secs(25),
        ..RetryPolicy::default()
    };
    let start = tokio::time::Instant::now();
    let silent = TimeoutLayer::new(timeout).layer(silent);
    let error = retry(policy)
        .layer(silent.clone())
        .oneshot(get())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded { .. }), "{error:?}");
    assert_eq!(start.elapsed().as_secs(), 25);

    let twice = RetryPolicy {
        max_tries: 2,
        ..policy
    };
    match retry(twice).layer(silent).oneshot(get()).await.unwrap_err() {
        Error::Failed {
            tries: 2, source, ..
        } => {
            assert_eq!(source.downcast::<TryTimeout>().unwrap().timeout, timeout);
        }
        other => panic!("{other:?}"),
    }
}

/// Tests the documented bound. If a server fails each of 1,000 requests over 100 s, it gets at most
/// `percent` more requests, plus the free retries.
#[tokio::test(start_paused = true)]
async fn a_failing_server_gets_no_more_than_the_budget() {
    for (min_per_sec, percent) in [(0, 20), (1, 20), (0, 100), (0, 0)] {
        let server = Server::scripted(vec![reply(500, &[])]);
        let budget = RetryBudget::new(Span::from_secs(10), min_per_sec, percent);
        let retry = retry(RetryPolicy::default()).with_budget(budget);
        let client = retry.layer(server.client());
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..1_000 {
            calls.spawn(client.clone().oneshot(get()));
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        while let Some(answer) = calls.join_next().await {
            assert_eq!(answer.unwrap().unwrap().status(), 500);
        }
        let extra = server.request_count() - 1_000;
        // The 100 s, plus the backoffs of the last retries, are at most twelve windows of nine
        // slots each.
        let most = 10 * percent as usize + 10 * min_per_sec as usize * 12;
        assert!(extra <= most, "{extra} retries over {most}");
        assert!(
            extra * 10 >= most * 6,
            "{extra} retries: the budget of {most} is there to be used"
        );
    }
}
