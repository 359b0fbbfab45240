//! HTTP/1.1 on a connection, bounded in bytes and in time.

use std::{
    convert::Infallible,
    task::{Context, Poll, Waker},
};

use futures_util::FutureExt as _;
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode, Version,
    body::{Body, Bytes, Incoming},
    header::{CONTENT_TYPE, HOST, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Problem, stream::TimedStream};
use crate::net::Connection;

/// What a door answers.
pub(crate) type Answer = Response<Full<Bytes>>;

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The most bytes of a request's line and headers together, give or take what one read brings.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Serves one connection until the client has closed it and has his answers, or a shutdown begins and its request is answered.
pub(crate) async fn serve<S, F>(
    stream: S,
    connection: &Connection,
    answer: impl Fn(Request<Incoming>) -> F,
) where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Answer>,
{
    let service = service_fn(|request| {
        let in_flight = connection.activity.begin();
        answer(request).map(|answer| {
            drop(in_flight);
            Ok::<_, Infallible>(answer)
        })
    });
    let serving = http1::Builder::new()
        // The stream keeps the time.
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD_BYTES)
        // Who has sent all that he has to say is answered all the same; so it is decided to the end for who has left, too, who is charged
        // and holds his connection until then, for as long as the store may take. And hyper need not look out for the end, with a new
        // buffer of 8 KiB, while each request is decided.
        .half_close(true)
        // Of header lines hyper takes `net::MAX_HEADERS` without being told.
        // Head and body are small: copied together they leave in one write.
        .writev(false)
        .serve_connection(
            TokioIo::new(TimedStream::new(stream, connection.bounds)),
            service,
        );
    let serving = std::pin::pin!(serving);
    let ended = connection
        .shutdown
        .serve(serving, |serving| serving.graceful_shutdown())
        .await;
    if let Err(error) = ended {
        // Whoever broke the connection off knows; for the operator it is no news.
        tracing::debug!(peer = %connection.peer, "connection ended: {error}");
    }
}

/// Refuses a request of HTTP/1.1 that has no `Host`, or several: RFC 9112, section 3.2.
pub(super) fn check_host(request: &Request<Incoming>) -> Result<(), Problem> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let problem = match (hosts.next(), hosts.next()) {
        (Some(_), None) => return Ok(()),
        (None, _) if request.version() != Version::HTTP_11 => return Ok(()),
        (None, _) => "is missing; HTTP/1.1 wants one",
        (Some(_), Some(_)) => "stands there several times; HTTP/1.1 wants one",
    };
    Err(Problem::bad("Host", problem))
}

/// A JSON document as an answer.
pub(crate) fn json(status: StatusCode, value: &impl serde::Serialize) -> Answer {
    // Serialising to memory fails only for maps with keys that are no strings, and no answer has those.
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, JSON);
    answer
}

/// The octets of an answer's body, which is whole from the start.
pub(super) fn body(answer: Answer) -> Vec<u8> {
    let body = std::pin::pin!(answer.into_body());
    match body.poll_frame(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default().to_vec(),
        _ => Vec::new(),
    }
}
