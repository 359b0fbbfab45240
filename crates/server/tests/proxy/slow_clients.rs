//! Tests that slow clients do not occupy upstream connections that other clients need.

use std::{
    sync::{Arc, Mutex, mpsc::channel},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use crate::{listener::TestListener, upstream::Upstream};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(20);

/// An HTTP/2 client that never reads a response body.
#[derive(Clone)]
pub(crate) struct ZeroWindowClient(http2::SendRequest<Full<Bytes>>);

impl ZeroWindowClient {
    pub(crate) async fn connect(listener: &TestListener) -> Self {
        let stream = TcpStream::connect(listener.listener.local_addr()).await;
        let (client, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(0)
            .handshake(TokioIo::new(stream.unwrap()))
            .await
            .unwrap();
        tokio::spawn(connection);
        Self(client)
    }

    pub(crate) async fn ask(&self, path: &str) -> Response<Incoming> {
        let request = Request::get(format!("http://h.example{path}"));
        let answer = self
            .0
            .clone()
            .send_request(request.body(Full::default()).unwrap());
        tokio::time::timeout(TIMEOUT, answer)
            .await
            .unwrap()
            .unwrap()
    }
}

/// Opens a proxy whose upstream allows only a single connection.
fn single_connection(upstream: &Upstream, settings: &str) -> TestListener {
    TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', {settings} upstreams: [{{name: app, max_connections: 1, urls: '{}'}}]}}\n",
        upstream.url()
    ))
}

/// Starts an upstream that answers `/small` with an empty body. For every other path, the response
/// consists of `count` pieces of `piece` bytes each.
fn sized(piece: usize, count: usize) -> Upstream {
    Upstream::start(move |connection| {
        while let Some(head) = connection.head() {
            if head.starts_with("GET /small") {
                connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
                continue;
            }
            let length = count * piece;
            connection.send(format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n"
            ));
            for _ in 0..count {
                connection.send(vec![b'x'; piece]);
                std::thread::yield_now();
            }
        }
    })
}

/// Waits until the single upstream connection is free.
async fn until_free(listener: &TestListener) {
    let address = listener.listener.local_addr();
    let asking = tokio::task::spawn_blocking(move || {
        let mut client = crate::client::Client::connect(address);
        while client.ask("GET", "/small", &[], b"").status == 503 {
            std::thread::yield_now();
        }
    });
    tokio::time::timeout(TIMEOUT, asking)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_small_unread_response_frees_its_upstream_connection_at_once() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
    ] {
        let upstream = Upstream::responding_with(answer);
        let listener = single_connection(&upstream, "");
        let greedy = ZeroWindowClient::connect(&listener).await;
        let mut held = Vec::new();
        for _ in 0..20 {
            let answer = greedy.ask("/").await;
            assert_eq!(answer.status(), 200);
            held.push(answer);
        }
        assert_eq!(upstream.connections(), 1);
        until_free(&listener).await;
    }
}

/// The upstream sends the response in several pieces. The proxy reads all pieces, although the
/// client reads none.
#[tokio::test]
async fn a_response_is_read_ahead_of_its_client() {
    let upstream = sized(8 << 10, 7);
    let listener = single_connection(&upstream, "");
    let greedy = ZeroWindowClient::connect(&listener).await;
    let held = greedy.ask("/large").await;
    assert_eq!(held.status(), 200);
    until_free(&listener).await;
}

#[test]
fn a_body_is_complete_for_every_read_ahead_size() {
    const LENGTH: usize = 300_000;
    let body: String = (0..LENGTH)
        .map(|at| char::from(b'a' + u8::try_from(at % 23).unwrap()))
        .collect();
    let expected = body.clone();
    let upstream = Upstream::start(move |connection| {
        while let Some(head) = connection.head() {
            let path = head.split(' ').nth(1).unwrap();
            let answer = match path {
                "/none" => "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
                "/small" => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_owned(),
                _ => format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n{body}"),
            };
            connection.send(answer);
        }
    });
    for buffer in ["0", "1", "64KiB", "16MiB"] {
        let listener = TestListener::with(upstream.url(), &format!("response_buffer: {buffer}"));
        let before = upstream.connections();
        let mut client = listener.connect();
        for _ in 0..3 {
            assert_eq!(client.ask("GET", "/none", &[], b"").status, 204);
            assert_eq!(client.ask("GET", "/small", &[], b"").body, "ok");
            assert!(
                client.ask("GET", "/large", &[], b"").body == expected,
                "{buffer}"
            );
        }
        assert_eq!(upstream.connections() - before, 1, "{buffer}");
    }
}

/// The proxy buffers a response only up to a maximum size. Beyond the maximum size, the upstream
/// has to wait for the client, so a client that is too slow is disconnected.
#[tokio::test]
async fn a_response_that_is_read_too_slowly_is_aborted() {
    let upstream = sized(16 << 20, 1);
    // Because of the minimum rate, the response is aborted long before the idle timeout.
    let settings = "timeouts: {idle: 1h}, min_rate: {bytes_per_second: 1000, grace: 100ms},";
    let listener = single_connection(&upstream, settings);
    let greedy = ZeroWindowClient::connect(&listener).await;
    let held = greedy.ask("/large").await;
    assert_eq!(held.status(), 200);
    until_free(&listener).await;
}

#[test]
fn a_request_body_below_the_minimum_rate_is_408() {
    let upstream = Upstream::silent();
    let settings = "timeouts: {idle: 1h}\nmin_rate: {bytes_per_second: 1000, grace: 100ms}";
    let listener = TestListener::with(upstream.url(), settings);
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000\r\n\r\n");
    let mut drip = client.clone_stream();
    std::thread::spawn(move || {
        use std::io::Write as _;
        while drip.write_all(b"x").is_ok() {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    });
    assert_eq!(client.read_answer(false).status, 408);
}

#[tokio::test]
async fn a_client_cannot_exceed_its_in_flight_limit() {
    let (send, wait) = channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    let upstream = Upstream::start(move |connection| {
        while connection.head().is_some() {
            let _ = wait.lock().unwrap().recv();
            connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let rule = "rules: [{name: all, key: [ip], limits: [2/d]}]\n";
    let proxy = |more: &str| {
        TestListener::open(&format!(
            "{rule}{more}proxy: {{listen: '127.0.0.1:0', max_requests_per_client: 2, upstreams: [{{name: app, urls: '{}'}}]}}\n",
            upstream.url()
        ))
    };
    let listener = proxy("");
    let greedy = ZeroWindowClient::connect(&listener).await;
    let asking: Vec<_> = (0..2)
        .map(|_| {
            let greedy = greedy.clone();
            tokio::spawn(async move { greedy.ask("/").await.status() })
        })
        .collect();
    while upstream.heads().len() < 2 {
        tokio::task::yield_now().await;
    }
    // The limit applies to all concurrent requests from an address, over all connections and
    // protocol versions. Rejected requests are not charged.
    let answer = listener.get("/");
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (429, Some("1"))
    );
    assert!(answer.problem().starts_with("2 requests from this address"));
    assert_eq!(greedy.ask("/").await.status(), 429);
    for _ in 0..2 {
        send.send(()).unwrap();
    }
    for asking in asking {
        assert_eq!(asking.await.unwrap(), 200);
    }
    let metrics = listener.limiter.exposition();
    assert!(
        !metrics.contains("listener=\"proxy\",outcome=\"limit\"} 1"),
        "{metrics}"
    );
    // The limit does not apply to a trusted proxy, because it forwards requests from many clients.
    let listener = proxy("clients: {proxies: [127.0.0.0/8]}\n");
    let greedy = ZeroWindowClient::connect(&listener).await;
    let before = upstream.heads().len();
    let claims = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];
    let asking: Vec<_> = claims
        .map(|client| {
            let mut sender = greedy.0.clone();
            let request = Request::get("http://h.example/").header("x-forwarded-for", client);
            let request = request.body(Full::default()).unwrap();
            tokio::spawn(async move { sender.send_request(request).await.unwrap().status() })
        })
        .into_iter()
        .collect();
    while upstream.heads().len() < before + 3 {
        tokio::task::yield_now().await;
    }
    for _ in 0..3 {
        send.send(()).unwrap();
    }
    for asking in asking {
        assert_eq!(asking.await.unwrap(), 200);
    }
}
