//! The HTTP/1.1 server for one connection, with limits on size and time.

use std::convert::Infallible;

use futures_util::FutureExt as _;
use hyper::{
    Request, Version, body::Incoming, header::HOST, server::conn::http1, service::service_fn,
};
use hyper_util::rt::TokioIo;
use tidegate_net::{Connection, Problem, response::Answer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::stream::TimedStream;

/// The maximum size of a request's head in bytes. One read may exceed it slightly.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Serves one connection until the client has closed it and all responses are sent, or until the
/// shutdown begins and the current request is answered.
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
        // `TimedStream` enforces the timeouts instead.
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD_BYTES)
        // A client that half-closes after its request still gets a response. A client that has
        // disconnected entirely is still charged and occupies its connection until the decision is
        // made; the two cases cannot be distinguished. This also means that hyper need not watch
        // for the end of the stream, with a new buffer of 8 KiB, during each decision.
        .half_close(true)
        // The maximum number of header lines is hyper's default, `net::MAX_HEADERS`; an explicit
        // setting would be slower.
        //
        // Head and body are small: copied together, they need only one write.
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
        // A connection that the client aborts does not concern the operator.
        tracing::debug!(peer = %connection.peer, "connection ended: {error}");
    }
}

/// Rejects an HTTP/1.1 request without `Host` or with several (RFC 9112 §3.2).
pub(super) fn check_host(request: &Request<Incoming>) -> Result<(), Problem> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let problem = match (hosts.next(), hosts.next()) {
        (Some(_), None) => return Ok(()),
        (None, _) if request.version() != Version::HTTP_11 => return Ok(()),
        (None, _) => "is missing; HTTP/1.1 requires exactly one",
        (Some(_), Some(_)) => "is repeated; HTTP/1.1 requires exactly one",
    };
    Err(Problem::bad("Host", problem))
}
