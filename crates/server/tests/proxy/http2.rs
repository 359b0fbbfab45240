//! Tests of HTTP/2 clients, in plaintext and over TLS.

use std::{convert::Infallible, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::{Request, body::Frame, client::conn::http2, header::HeaderMap, http::request::Builder};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{ClientConfig, RootCertStore, crypto::ring::default_provider, pki_types::ServerName},
};

use crate::{listener::TestListener, upstream::Upstream};

type Client = http2::SendRequest<Full<Bytes>>;

async fn connect<T>(stream: T) -> Client
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (client, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    client
}

async fn in_the_clear(listener: &TestListener) -> Client {
    let stream = TcpStream::connect(listener.listener.local_addr()).await;
    connect(stream.unwrap()).await
}

/// Sends `request`, and returns the status, headers and body of the response.
async fn ask(client: &mut Client, request: Request<Full<Bytes>>) -> (u16, HeaderMap, String) {
    let answer = client.send_request(request).await.unwrap();
    let (head, body) = answer.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.to_vec()).unwrap();
    (head.status.as_u16(), head.headers, body)
}

fn get(path: &str) -> Builder {
    Request::builder().uri(format!("http://h.example{path}"))
}

#[tokio::test]
async fn cleartext_http2_reaches_an_http1_upstream() {
    let upstream = Upstream::responding_with(
        "HTTP/1.1 200 OK\r\nconnection: x-hop\r\nx-hop: 1\r\nx-kept: 2\r\ncontent-length: 2\r\n\r\nok",
    );
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = in_the_clear(&listener).await;
    let request = get("/p?q")
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .header("te", "trailers");
    let (status, headers, body) = ask(&mut client, request.body(Full::default()).unwrap()).await;
    assert_eq!((status, &*body), (200, "ok"));
    assert_eq!(headers["x-kept"], "2");
    assert!(!headers.contains_key("x-hop"), "{headers:?}");
    let head = &upstream.heads()[0];
    assert!(head.starts_with("GET /p?q HTTP/1.1\r\n"), "{head}");
    for line in [
        "host: h.example",
        "cookie: a=1; b=2",
        "te: trailers",
        "x-forwarded-proto: http",
        "x-forwarded-host: h.example",
    ] {
        assert!(head.lines().any(|sent| sent == line), "{line}: {head}");
    }
}

#[tokio::test]
async fn many_requests_share_a_connection() {
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            let path = head.split(' ').nth(1).unwrap();
            let (length, path) = (path.len(), path.to_owned());
            connection.send(format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{path}"
            ));
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let client = in_the_clear(&listener).await;
    let asked = (0..100).map(|number| {
        let mut client = client.clone();
        tokio::spawn(async move {
            let path = format!("/{number}");
            let request = get(&path).body(Full::default()).unwrap();
            let (status, _, body) = ask(&mut client, request).await;
            assert_eq!((status, body), (200, path));
        })
    });
    for asked in asked.collect::<Vec<_>>() {
        asked.await.unwrap();
    }
    assert_eq!(listener.listener.accepted(), 1);
}

#[tokio::test]
async fn bodies_and_response_trailers_are_forwarded() {
    let upstream = Upstream::start(|connection| {
        let head = connection.head().unwrap();
        assert!(head.contains("transfer-encoding: chunked"), "{head}");
        assert!(!head.contains("trailer:"), "{head}");
        let body = connection.until("0\r\n");
        assert_eq!(body, "2\r\nhi\r\n0\r\n");
        assert_eq!(connection.line().as_deref(), Some("\r\n"));
        connection.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-total\r\n\r\n2\r\nho\r\n0\r\nx-total: 9\r\ncontent-length: 9\r\n\r\n");
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let stream = TcpStream::connect(listener.listener.local_addr()).await;
    let (mut client, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream.unwrap()))
            .await
            .unwrap();
    tokio::spawn(connection);
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "7".parse().unwrap());
    let frames = [
        Frame::data(Bytes::from_static(b"hi")),
        Frame::trailers(trailers),
    ];
    let body = StreamBody::new(futures_util::stream::iter(frames.map(Ok::<_, Infallible>)));
    let request = get("/").method("POST").header("trailer", "x-sum");
    let answer = client.send_request(request.body(body).unwrap()).await;
    let collected = answer.unwrap().into_body().collect().await.unwrap();
    let trailers = collected.trailers().unwrap();
    assert_eq!(
        (trailers.len(), &trailers["x-total"]),
        (1, &"9".parse().unwrap())
    );
    assert_eq!(collected.to_bytes(), "ho");
}

/// If a 204 response had a `Content-Length`, a client could wait for a body of that length.
#[tokio::test]
async fn no_content_has_no_length() {
    let upstream =
        Upstream::responding_with("HTTP/1.1 204 No Content\r\ncontent-length: 6\r\n\r\n");
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = in_the_clear(&listener).await;
    let request = get("/").body(Full::default()).unwrap();
    let (status, headers, body) = ask(&mut client, request).await;
    assert_eq!((status, &*body), (204, ""));
    assert!(!headers.contains_key("content-length"));
}

#[tokio::test]
async fn failures_are_responses_over_http2() {
    let listener = TestListener::with(
        format!("http://{}", Upstream::closed_address()),
        "max_body: 4",
    );
    let mut client = in_the_clear(&listener).await;
    let request = get("/").body(Full::default()).unwrap();
    assert_eq!(ask(&mut client, request).await.0, 502);
    let request = get("/").method("POST").body(Full::from("hello"));
    assert_eq!(ask(&mut client, request.unwrap()).await.0, 413);
}

#[tokio::test]
async fn an_idle_connection_is_closed() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(
        upstream.url(),
        "timeouts: {keep_alive: 100ms, request_head: 100ms}",
    );
    let mut client = in_the_clear(&listener).await;
    let request = get("/").body(Full::default()).unwrap();
    assert_eq!(ask(&mut client, request).await.0, 200);
    let patience = Duration::from_secs(20);
    let ended = async {
        while client.ready().await.is_ok() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(patience, ended).await.unwrap();
}

#[tokio::test]
async fn a_client_that_stalls_in_the_preface_is_disconnected() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "timeouts: {request_head: 100ms}");
    for bytes in ["", "P", "PRI * HTTP/2.0\r\n\r\nSM"] {
        let stream = TcpStream::connect(listener.listener.local_addr()).await;
        let mut stream = stream.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        assert!(is_ended(&mut stream).await, "left open after {bytes:?}");
    }
}

/// A connection without requests has nothing to finish, so the shutdown closes it immediately.
#[test]
fn a_shutdown_does_not_wait_for_silent_clients() {
    let folder = tempfile::tempdir().unwrap();
    issue(folder.path());
    let upstream = Upstream::ok();
    let patient = "timeouts: {request_head: 1h}";
    for settings in [
        patient.to_owned(),
        format!("{patient}\n{}", settings(folder.path())),
    ] {
        let listener = TestListener::with(upstream.url(), &settings);
        let silent = listener.connect();
        while listener.listener.open() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(
            listener.shut_down(),
            0,
            "the connection was cut off instead of closed"
        );
        assert_eq!(silent.until_closed(), "");
    }
}

/// A client can keep its flow-control window closed and still answer pings. Therefore only a stream
/// timeout can detect a client that does not read.
#[tokio::test]
async fn a_response_that_its_client_does_not_read_is_aborted() {
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', timeouts: {{idle: 200ms}}, upstreams: [{{name: app, max_connections: 1, urls: '{}'}}]}}\n",
        upstream.url()
    ));
    let stream = TcpStream::connect(listener.listener.local_addr()).await;
    let (mut client, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(0)
        .handshake(TokioIo::new(stream.unwrap()))
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = get("/").body(Full::<Bytes>::default()).unwrap();
    let answer = client.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    let body = answer.into_body().collect();
    let body = tokio::time::timeout(Duration::from_secs(20), body).await;
    assert!(body.unwrap().is_err(), "the body could not arrive");
    // The only upstream connection is free again, and the client's connection can still be used.
    let mut other = in_the_clear(&listener).await;
    let request = get("/").body(Full::default()).unwrap();
    assert_eq!(ask(&mut other, request).await.2, "ok");
    let request = get("/").body(Full::default()).unwrap();
    assert_eq!(client.send_request(request).await.unwrap().status(), 200);
}

/// If the client's window is one byte, hyper buffers the whole response, and no timeout applies to
/// the buffered data. However, the connection then counts as idle, so it is closed after the idle
/// timeout.
#[tokio::test]
async fn a_connection_whose_client_does_not_read_the_end_of_a_response_is_closed() {
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let listener = TestListener::with(
        upstream.url(),
        "timeouts: {idle: 200ms, keep_alive: 100ms, request_head: 100ms}",
    );
    let stream = TcpStream::connect(listener.listener.local_addr()).await;
    let (mut client, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(1)
        .handshake(TokioIo::new(stream.unwrap()))
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let request = get("/").body(Full::<Bytes>::default()).unwrap();
    let unread = client.send_request(request).await.unwrap();
    assert_eq!(unread.status(), 200);
    let ended = tokio::time::timeout(Duration::from_secs(20), connection).await;
    assert!(ended.is_ok(), "the connection is still open");
    drop(unread);
}

#[tokio::test]
async fn header_lines_are_limited_and_content_length_is_one_number() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "max_headers: 20");
    let mut client = in_the_clear(&listener).await;
    let with_lines = |count: usize| {
        let request = (0..count).fold(get("/"), |request, at| {
            request.header(format!("a{at}"), "b")
        });
        request.body(Full::default()).unwrap()
    };
    assert_eq!(ask(&mut client, with_lines(20)).await.0, 200);
    let (status, headers, body) = ask(&mut client, with_lines(21)).await;
    assert_eq!(
        (status, &headers["content-type"]),
        (431, &"application/problem+json".parse().unwrap())
    );
    assert!(
        body.contains("the number of header lines exceeds the maximum of 20"),
        "{body}"
    );
    let twice = get("/")
        .method("POST")
        .header("content-length", "2")
        .header("content-length", "2");
    let (status, _, body) = ask(&mut client, twice.body(Full::from("hi")).unwrap()).await;
    assert_eq!(status, 400, "{body}");
    assert_eq!(upstream.heads().len(), 1);
}

/// Returns whether the server ends `stream`, with a close or a reset.
///
/// The maximum wait is a number of short reads, and not a total time. If the machine suspends the
/// whole process, including the server, only one of these reads times out.
async fn is_ended(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    for _turn in 0..200 {
        let read = stream.read_to_end(&mut rest);
        if tokio::time::timeout(Duration::from_millis(100), read)
            .await
            .is_ok()
        {
            return true;
        }
    }
    false
}

/// Issues a certificate for `localhost` in `folder`, and returns trust anchors that accept it.
fn issue(folder: &Path) -> RootCertStore {
    let issued = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("server.pem"), issued.cert.pem()).unwrap();
    std::fs::write(
        folder.join("server.key"),
        issued.signing_key.serialize_pem(),
    )
    .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(issued.cert.der().clone()).unwrap();
    roots
}

fn settings(folder: &Path) -> String {
    let path = |name: &str| folder.join(name).display().to_string();
    let (certificate, key) = (path("server.pem"), path("server.key"));
    format!("tls: {{certificate: '{certificate}', key: '{key}'}}")
}

async fn tls(
    listener: &TestListener,
    roots: &RootCertStore,
    protocol: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let mut config = config
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let stream = TcpStream::connect(listener.listener.local_addr()).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

#[tokio::test]
async fn alpn_selects_the_http_version() {
    let folder = tempfile::tempdir().unwrap();
    let roots = issue(folder.path());
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let listener = TestListener::with(upstream.url(), &settings(folder.path()));
    let mut client = connect(tls(&listener, &roots, "h2").await.unwrap()).await;
    let request = get("/").body(Full::default()).unwrap();
    assert_eq!(ask(&mut client, request).await.2, "ok");

    let mut stream = tls(&listener, &roots, "http/1.1").await.unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for head in upstream.heads() {
        assert!(head.contains("x-forwarded-proto: https"), "{head}");
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_used_for_new_connections() {
    let folder = tempfile::tempdir().unwrap();
    let old = issue(folder.path());
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), &settings(folder.path()));
    let mut client = connect(tls(&listener, &old, "h2").await.unwrap()).await;
    let new = issue(folder.path());
    listener.tls.as_ref().unwrap().reload().unwrap();
    assert!(tls(&listener, &old, "h2").await.is_err());
    assert!(tls(&listener, &new, "h2").await.is_ok());
    let request = get("/").body(Full::default()).unwrap();
    assert_eq!(
        ask(&mut client, request).await.0,
        200,
        "the open connection still works"
    );
}
