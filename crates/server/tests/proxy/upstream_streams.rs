//! Tests of HTTP/2 upstream connections: their number, their streams, and unresponsive connections.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response, body::Incoming, client::conn::http2, http::request::Builder, server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Barrier, Notify},
    time::timeout,
};

use crate::{listener::TestListener, slow_clients::ZeroWindowClient};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(20);

/// An HTTP/2 upstream that counts its connections.
struct Upstream {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Upstream {
    /// Starts an upstream that allows `streams` concurrent streams per connection. The response
    /// body is the result of `body` for the connection's number and the path. The first connection
    /// is closed when it receives a request for `/last`.
    async fn start<F, B>(streams: u32, body: F) -> Self
    where
        F: Fn(usize, String) -> B + Clone + Send + 'static,
        B: Future<Output = Bytes> + Send + 'static,
    {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let connection = counted.fetch_add(1, Ordering::SeqCst);
                let body = body.clone();
                let ended = Arc::new(Notify::new());
                let end = Arc::clone(&ended);
                let handler = service_fn(move |request: Request<Incoming>| {
                    let path = request.uri().path().to_owned();
                    let answer = body(connection, path.clone());
                    if path == "/last" && connection == 0 {
                        end.notify_one();
                    }
                    async move {
                        let answer = Response::new(Full::new(answer.await));
                        if path == "/neglected" {
                            // The upstream neither reads the body nor resets the stream.
                            tokio::spawn(async move {
                                std::future::pending::<()>().await;
                                drop(request);
                            });
                        }
                        Ok::<_, Infallible>(answer)
                    }
                });
                let mut serving = server::conn::http2::Builder::new(TokioExecutor::new());
                serving.max_concurrent_streams(streams);
                let serving = serving.serve_connection(TokioIo::new(stream), handler);
                tokio::spawn(async move {
                    tokio::select! {
                        biased;
                        () = ended.notified() => {}
                        _ = serving => {}
                    }
                });
            }
        });
        Self {
            address,
            connections,
        }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Opens a proxy in front of this upstream, with additional settings for the upstream and for
    /// the proxy.
    fn listener(&self, upstream: &str, proxy: &str) -> TestListener {
        TestListener::open(&format!(
            "proxy: {{listen: '127.0.0.1:0', {proxy} upstreams: [{{name: app, http2: true, {upstream} urls: 'http://{}'}}]}}\n",
            self.address
        ))
    }
}

#[derive(Clone)]
struct Client(http2::SendRequest<Full<Bytes>>);

impl Client {
    async fn connect(listener: &TestListener) -> Self {
        let stream = TcpStream::connect(listener.listener.local_addr())
            .await
            .unwrap();
        let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (client, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        Self(client)
    }

    async fn ask(&self, request: Builder, body: Bytes) -> Response<Incoming> {
        let answer = self
            .0
            .clone()
            .send_request(request.body(body.into()).unwrap());
        timeout(TIMEOUT, answer).await.unwrap().unwrap()
    }

    async fn head(&self, path: &str) -> Response<Incoming> {
        let request = Request::get(format!("http://h.example{path}"));
        self.ask(request, Bytes::new()).await
    }

    async fn get(&self, path: &str) -> (u16, Bytes) {
        let answer = self.head(path).await;
        (answer.status().as_u16(), read(answer).await)
    }

    /// Sends a body that is larger than the upstream's flow-control windows, to an upstream that
    /// does not read it.
    async fn post(&self, path: &str) -> u16 {
        let request = Request::post(format!("http://h.example{path}"));
        let answer = self.ask(request, vec![0; 4 << 20].into()).await;
        answer.status().as_u16()
    }
}

async fn read(answer: Response<Incoming>) -> Bytes {
    let body = timeout(TIMEOUT, answer.into_body().collect()).await;
    body.unwrap().unwrap().to_bytes()
}

async fn ok() -> Bytes {
    Bytes::from_static(b"ok")
}

#[tokio::test]
async fn a_first_burst_opens_one_connection() {
    let upstream = Upstream::start(200, |_, _| ok()).await;
    let listener = upstream.listener("", "");
    let client = Client::connect(&listener).await;
    let answers = join_all((0..100).map(|_| client.get("/"))).await;
    assert!(
        answers.iter().all(|(status, _)| *status == 200),
        "{answers:?}"
    );
    assert_eq!(upstream.connections(), 1);
}

/// The upstream responds only when all requests have arrived. Therefore, if the first connection
/// has no free stream, a request must use another connection.
#[tokio::test]
async fn streams_over_the_limit_use_another_connection() {
    let all = Arc::new(Barrier::new(5));
    let upstream = Upstream::start(2, move |_, _| {
        let all = Arc::clone(&all);
        async move {
            all.wait().await;
            ok().await
        }
    })
    .await;
    let listener = upstream.listener("", "");
    let client = Client::connect(&listener).await;
    for _round in 0..2 {
        let answers = join_all((0..5).map(|_| client.get("/"))).await;
        assert!(
            answers.iter().all(|(status, _)| *status == 200),
            "{answers:?}"
        );
        assert_eq!(upstream.connections(), 3);
    }
}

#[tokio::test]
async fn a_connection_without_free_streams_is_not_closed() {
    let begun = Arc::new(Barrier::new(2));
    let go_on = Arc::new(Barrier::new(2));
    let barriers = (Arc::clone(&begun), Arc::clone(&go_on));
    let upstream = Upstream::start(1, move |_, path| {
        let (begun, go_on) = barriers.clone();
        async move {
            if path == "/slow" {
                begun.wait().await;
                go_on.wait().await;
            }
            ok().await
        }
    })
    .await;
    let listener = upstream.listener("max_connections: 1,", "");
    let client = Client::connect(&listener).await;
    let slow = tokio::spawn({
        let client = client.clone();
        async move { client.get("/slow").await }
    });
    begun.wait().await;
    assert_eq!(client.get("/").await.0, 503);
    go_on.wait().await;
    assert_eq!(slow.await.unwrap().0, 200);
    assert_eq!(client.get("/").await.0, 200);
    assert_eq!(upstream.connections(), 1);
}

/// The proxy could find out only with a ping whether the connection is dead. Opening a new
/// connection is faster.
#[tokio::test]
async fn an_unresponsive_connection_gets_no_new_requests() {
    let upstream = Upstream::start(200, |connection, _| async move {
        if connection == 0 {
            std::future::pending::<()>().await;
        }
        ok().await
    })
    .await;
    let listener = upstream.listener("", "timeouts: {head: 200ms},");
    let client = Client::connect(&listener).await;
    assert_eq!(client.get("/").await.0, 504);
    assert_eq!(client.get("/").await.0, 200);
    assert_eq!(upstream.connections(), 2);
}

/// The connection is alive and answers pings, so only a request body timeout can detect the
/// problem.
#[tokio::test]
async fn a_request_body_that_the_upstream_does_not_read_times_out() {
    let upstream = Upstream::start(200, |_, _| std::future::pending()).await;
    let listener = upstream.listener("", "timeouts: {idle: 200ms, head: 200ms},");
    assert_eq!(Client::connect(&listener).await.post("/").await, 504);
}

#[tokio::test]
async fn a_request_body_is_not_sent_after_its_response() {
    let upstream = Upstream::start(1, |_, _| ok()).await;
    let listener = upstream.listener("max_connections: 1,", "timeouts: {idle: 1h},");
    let client = Client::connect(&listener).await;
    assert_eq!(client.post("/neglected").await, 200);
    let is_free = async { while client.get("/").await.0 != 200 {} };
    timeout(TIMEOUT, is_free).await.unwrap();
    assert_eq!(upstream.connections(), 1);
}

/// The upstream uses hyper's server, which sends a body even in response to `HEAD`.
#[tokio::test]
async fn a_response_to_head_has_no_body() {
    let upstream = Upstream::start(1, |_, _| ok()).await;
    let listener = upstream.listener("max_connections: 1,", "");
    let client = Client::connect(&listener).await;
    let request = Request::head("http://h.example/");
    let answer = client.ask(request, Bytes::new()).await;
    assert_eq!(read(answer).await, "");
    assert_eq!(client.get("/").await.1, "ok");
}

/// A connection with long responses must not be treated as dead after a single timeout.
#[tokio::test]
async fn a_connection_that_recovers_gets_requests_again() {
    const LARGE: usize = 16 << 20;
    let upstream = Upstream::start(200, |connection, path| async move {
        match (&*path, connection) {
            ("/large", _) => vec![0; LARGE].into(),
            ("/late", _) => std::future::pending().await,
            _ => connection.to_string().into(),
        }
    })
    .await;
    let listener = upstream.listener("", "timeouts: {head: 200ms},");
    let client = Client::connect(&listener).await;
    // The response is larger than all buffers between the upstream and the client, so it cannot
    // complete before the client reads it.
    let large = Client::connect(&listener).await.head("/large").await;
    assert_eq!(client.get("/late").await.0, 504);
    assert_eq!(client.get("/").await.0, 200);
    assert_eq!(read(large).await.len(), LARGE);
    assert_eq!(client.get("/").await, (200, Bytes::from_static(b"0")));
}

/// When an endpoint restarts, its pooled connections are lost. Idempotent requests are then retried
/// on a new connection, and the lost connections do not count as endpoint failures.
#[tokio::test]
async fn requests_on_a_lost_pooled_connection_are_retried_on_a_new_one() {
    for (method, status) in [("GET", 200), ("POST", 502)] {
        let upstream = Upstream::start(200, |connection, path| async move {
            if path == "/last" && connection == 0 {
                std::future::pending::<()>().await;
            }
            ok().await
        })
        .await;
        let listener = upstream.listener("", "");
        let client = Client::connect(&listener).await;
        assert_eq!(client.get("/").await.0, 200);
        let last = Request::builder()
            .method(method)
            .uri("http://h.example/last");
        let answer = client.ask(last, Bytes::new()).await;
        assert_eq!(answer.status().as_u16(), status, "{method}");
        let page = listener.runtime.exposition();
        let failures = format!(
            "tidegate_proxy_endpoint_failures_total{{upstream=\"app\",endpoint=\"http://{}\",failure=\"bad_answer\"}} 0\n",
            upstream.address
        );
        assert!(page.contains(&failures), "{page}");
    }
}

#[tokio::test]
async fn stalled_streams_do_not_block_others_on_the_connection() {
    const LARGE: usize = 1 << 20;
    let upstream = Upstream::start(200, |_, path| async move {
        if path == "/large" {
            return vec![0; LARGE].into();
        }
        ok().await
    })
    .await;
    let listener = upstream.listener("", "");
    let client = Client::connect(&listener).await;
    let mut unread = Vec::new();
    // The test uses all but one of the streams that the proxy allows per connection.
    for _ in 0..99 {
        // Each request uses its own client connection, so that no connection's flow-control window
        // blocks other requests.
        unread.push(Client::connect(&listener).await.head("/large").await);
    }
    let (status, body) = client.get("/large").await;
    assert_eq!((status, body.len()), (200, LARGE));
    assert_eq!(upstream.connections(), 1);
    drop(unread);
}

#[tokio::test]
async fn a_response_with_too_many_header_lines_is_rejected() {
    let upstream = Upstream::start(200, |_, _| ok()).await;
    // hyper's server adds at least two headers, such as the length and the date, to every response.
    let listener = upstream.listener("", "max_headers: 1,");
    let (status, _) = Client::connect(&listener).await.get("/").await;
    assert_eq!(status, 502);
}

/// The upstream allows only one connection and one stream on it. The proxy reads each response
/// completely, although the client reads nothing.
#[tokio::test]
async fn an_unread_response_frees_its_upstream_stream() {
    let upstream = Upstream::start(1, |_, path| async move {
        if path == "/small" {
            return ok().await;
        }
        vec![0; 56 << 10].into()
    })
    .await;
    for path in ["/small", "/several-frames"] {
        let listener = upstream.listener("max_connections: 1,", "");
        let greedy = ZeroWindowClient::connect(&listener).await;
        let mut held = Vec::new();
        let holding = async {
            while held.len() < 20 {
                let answer = greedy.ask(path).await;
                // The status is 503 while the proxy is still reading the previous response.
                if answer.status() == 200 {
                    held.push(answer);
                }
            }
        };
        timeout(TIMEOUT, holding).await.expect(path);
        let client = Client::connect(&listener).await;
        let is_free = async { while client.get("/small").await.0 != 200 {} };
        timeout(TIMEOUT, is_free).await.expect(path);
    }
    assert_eq!(upstream.connections(), 2, "one for each listener");
}
