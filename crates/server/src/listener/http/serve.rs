//! The HTTP/1.1 server for one connection, with limits on sizes and times.

use std::convert::Infallible;

use futures_util::FutureExt as _;
use http_body_util::Full;
use hyper::{
    Request, Response, Version,
    body::{Body, Bytes, Incoming},
    header::HOST,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tidegate_net::{
    Connection, Http1End, Http1State, MaybeMovable, PeerClosed, Phase, Problem, StateFormat,
    StreamTimeouts, TimedStream, WriteTimeout,
};
use tokio::io::{AsyncRead, AsyncWrite};

use super::close_watch::{CloseWatch, WatchedStream};

/// The body of a response.
pub(crate) trait ResponseBody: Body<Data = Bytes, Error = Infallible> {
    /// Marks the beginning of the connection phase in which this body is sent.
    fn begin(&mut self, phase: &Phase);
}

/// A complete body is sent in one piece, so the connection immediately enters the phase in which it
/// waits for the next request.
impl ResponseBody for Full<Bytes> {
    fn begin(&mut self, phase: &Phase) {
        phase.await_request();
    }
}

/// The maximum size of a request head in bytes. The actual size may exceed this maximum slightly,
/// because of the last read.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// The format of the state of a connection that moves to another process: the bytes that were read
/// and not used.
const MOVED: StateFormat = StateFormat {
    protocol: b'H',
    version: 1,
};

/// Serves one connection. Returns when the client has closed the connection and all responses are
/// sent. During a shutdown, returns when the response to the current request is sent. During an
/// upgrade, hands over the connection between two requests.
pub(crate) async fn serve<S, F, B>(
    stream: S,
    connection: &Connection,
    answer: impl Fn(Request<Incoming>) -> F,
) where
    S: AsyncRead + AsyncWrite + PeerClosed + MaybeMovable + Unpin,
    F: Future<Output = Response<B>>,
    B: ResponseBody + 'static,
{
    serve_watched(stream, connection, &CloseWatch::default(), answer).await;
}

/// Works like [`serve`]. Requests use `watch` to detect that the client has disconnected.
pub(super) async fn serve_watched<S, F, B>(
    stream: S,
    connection: &Connection,
    watch: &CloseWatch,
    answer: impl Fn(Request<Incoming>) -> F,
) where
    S: AsyncRead + AsyncWrite + PeerClosed + MaybeMovable + Unpin,
    F: Future<Output = Response<B>>,
    B: ResponseBody + 'static,
{
    let bounds = connection.bounds;
    let timeouts = StreamTimeouts {
        idle: bounds.idle,
        request: bounds.request,
        write: WriteTimeout::Drain(bounds.write),
    };
    let stream = match &connection.handover.resumed {
        None => TimedStream::new(stream, timeouts),
        Some(state) => {
            let Some(unread) = MOVED.strip(state) else {
                return connection.log_unknown_state();
            };
            TimedStream::resumed(stream, timeouts, unread.to_vec())
        }
    };
    let movable = connection.handover.movable::<S>(&connection.shutdown);
    let phase = stream.phase().clone();
    let stream = WatchedStream::new(stream, watch);
    let service = service_fn(|request| {
        let in_flight = connection.activity.begin();
        // The request phase also covers the body, which `answer` reads.
        answer(request).map(|mut answer| {
            drop(in_flight);
            answer.body_mut().begin(&phase);
            Ok::<_, Infallible>(answer)
        })
    });
    let mut serving = http1::Builder::new()
        // A relayed connection ends after its next response.
        .keep_alive(connection.handover.relayed.is_none())
        // hyper's own timeout is off, because `TimedStream` enforces the timeouts.
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD_BYTES)
        // A client that half-closes its connection after its request still gets a response. The
        // server cannot distinguish such a client from one that has disconnected entirely.
        // Therefore a disconnected client is still charged, and occupies its connection until the
        // decision is made. In return, hyper does not watch for the end of the stream during each
        // decision, which would need a new 8 KiB buffer.
        .half_close(true)
        // The maximum number of header lines is hyper's default, which equals `net::MAX_HEADERS`.
        // Setting this number explicitly would be slower.
        //
        // Head and body are small, so hyper copies both into one buffer and sends them with a
        // single write.
        .writev(false)
        .serve_connection(TokioIo::new(stream), service);
    let state = Http1State {
        phase: &phase,
        activity: &connection.activity,
        movable: movable.as_ref(),
    };
    let ended = connection.shutdown.serve_http1(&mut serving, state).await;
    match (ended, movable) {
        (Ok(Http1End::Paused), Some(movable)) => {
            let parts = serving.into_parts();
            let (stream, rest) = parts.io.into_inner().into_stream().into_parts();
            let state = [&MOVED.header()[..], &parts.read_buf, &rest].concat();
            movable.hand_over(stream, state);
        }
        (Ok(_), _) => {}
        // Log at debug level only: clients may abort connections at any time, and operators need
        // not act.
        (Err(error), _) => tracing::debug!(peer = %connection.peer, "connection ended: {error}"),
    }
}

/// Rejects an HTTP/1.1 request that does not have exactly one `Host` header (RFC 9112 §3.2).
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

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, SocketAddr},
        sync::Arc,
        time::Duration,
    };

    use tidegate_net::{Bounds, MovedConnection, Server, Shutdown, response::Answer};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        sync::{Notify, mpsc},
        time::Instant,
    };

    use super::*;
    use crate::listener::http::read_body;

    fn connection() -> Connection {
        Connection {
            peer: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
            worker: 0,
            bounds: Bounds {
                idle: Duration::from_secs(300),
                request: Duration::from_secs(10),
                ..Bounds::default()
            },
            activity: Default::default(),
            shutdown: Shutdown::default(),
            handover: Default::default(),
        }
    }

    async fn echo(request: Request<Incoming>) -> Answer {
        match read_body(request.into_body()).await {
            Ok(body) => Response::new(body.into()),
            Err(problem) => problem.answer(),
        }
    }

    /// Sends `request`. While the response is being prepared, the server begins to hand over its
    /// connections. The handler does not read the body. Returns the received bytes until the server
    /// closes the connection or hands it over, and the states of the handed over connections.
    async fn handed_over(request: &str) -> (String, Vec<Vec<u8>>) {
        let server = Server::start(1).unwrap();
        let (begun, has_begun) = mpsc::unbounded_channel();
        let may_answer = Arc::new(Notify::new());
        let handler = {
            let may_answer = Arc::clone(&may_answer);
            move |stream: TcpStream, connection: Connection| {
                let (begun, may_answer) = (begun.clone(), Arc::clone(&may_answer));
                async move {
                    let answer = |request: Request<Incoming>| {
                        let (begun, may_answer) = (begun.clone(), Arc::clone(&may_answer));
                        async move {
                            begun.send(()).unwrap();
                            may_answer.notified().await;
                            drop(request);
                            Answer::default()
                        }
                    };
                    serve(stream, &connection, answer).await;
                }
            }
        };
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = server.listen(socket, Bounds::default(), handler).unwrap();
        let mut client = TcpStream::connect(listener.local_addr()).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let mut has_begun = has_begun;
        has_begun.recv().await.unwrap();
        server.stop_accepting().await;
        let (moved, states) = std::sync::mpsc::channel();
        let take = move |connection: MovedConnection| moved.send(connection.state).unwrap();
        server.hand_over(Box::new(take)).await;
        may_answer.notify_one();
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        drop(server);
        (
            String::from_utf8(received).unwrap(),
            states.iter().collect(),
        )
    }

    #[tokio::test]
    async fn a_connection_is_handed_over_after_a_complete_request() {
        let (received, states) = handed_over("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /next").await;
        assert!(received.starts_with("HTTP/1.1 200 OK\r\n"), "{received}");
        assert_eq!(states, [b"H\x01GET /next"]);
    }

    /// If the connection were handed over, the other process would take the rest of the body for a
    /// request.
    #[tokio::test]
    async fn a_connection_with_an_unread_body_is_closed_instead_of_handed_over() {
        let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n";
        let (received, states) = handed_over(&format!("{head}GET / HTTP/1.1\r\n")).await;
        assert!(received.starts_with("HTTP/1.1 200 OK\r\n"), "{received}");
        assert_eq!(states, Vec::<Vec<u8>>::new());
    }

    /// The request is not complete when the interim response is written, so the interim response
    /// must not end the request timeout.
    #[tokio::test(start_paused = true)]
    async fn the_timeout_of_a_request_includes_a_body_after_100_continue() {
        let connection = connection();
        let (ours, mut client) = tokio::io::duplex(1 << 16);
        let start = Instant::now();
        let asking = async {
            let head =
                "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
            client.write_all(head.as_bytes()).await.unwrap();
            let mut received = Vec::new();
            client.read_to_end(&mut received).await.unwrap();
            String::from_utf8(received).unwrap()
        };
        let ((), received) = tokio::join!(serve(ours, &connection, echo), asking);
        assert!(
            received.starts_with("HTTP/1.1 100 Continue\r\n\r\n"),
            "{received}"
        );
        assert_eq!(start.elapsed().as_secs(), 10, "{received}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_idle_timeout_begins_with_the_end_of_a_response() {
        let connection = connection();
        let (ours, mut client) = tokio::io::duplex(1 << 16);
        let start = Instant::now();
        let asking = async {
            let request = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody";
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                client.write_all(request.as_bytes()).await.unwrap();
            }
            let mut received = Vec::new();
            client.read_to_end(&mut received).await.unwrap();
            received
        };
        let ((), received) = tokio::join!(serve(ours, &connection, echo), asking);
        let received = String::from_utf8(received).unwrap();
        assert_eq!(received.matches("200 OK").count(), 3, "{received}");
        assert_eq!(start.elapsed().as_secs(), 3 * 9 + 300);
    }
}
