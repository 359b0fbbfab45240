//! Tests of HTTP/2 upstreams. Some tests use Tidegate's own gRPC listener as the upstream.

use std::{
    convert::Infallible,
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream::unfold;
use http::{HeaderMap, HeaderName, HeaderValue, header::TRAILER};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::{
    Request, Response,
    body::{Body, Frame, Incoming},
    client::conn::http2,
    server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate_config::Grpc;
use tidegate_envoy::grpc::{self, GrpcContext, Http2};
use tidegate_net::Bounds;
use tokio::{net::TcpStream, sync::mpsc::unbounded_channel};

use crate::{
    http2_smuggling::{DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, block, frame},
    listener::TestListener,
    upstream::Upstream,
};

/// Opens a proxy whose upstream is the gRPC listener of `behind`.
pub(crate) fn in_front_of_grpc(behind: &TestListener, rules: &str) -> TestListener {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let served = GrpcContext {
        limiter: Arc::clone(&behind.limiter),
        quotas: Arc::default(),
        rate_limits: None,
        authorization: None,
    };
    let http2 = Http2::new(Grpc::default(), None);
    let grpc = grpc::listen(&behind.server, socket, Bounds::default(), served, http2).unwrap();
    TestListener::open(&format!(
        "{rules}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: grpc, http2: true, urls: 'http://{}'}}]}}\n",
        grpc.local_addr()
    ))
}

#[tokio::test]
async fn http1_reaches_an_upstream_as_http2() {
    let behind = TestListener::in_front_of("http://127.0.0.1:1");
    let listener = in_front_of_grpc(&behind, "");
    let answer = tokio::task::spawn_blocking(move || {
        let headers = [
            ("content-type", "application/grpc"),
            ("connection", "te"),
            ("te", "trailers"),
        ];
        listener
            .connect()
            .ask("POST", "/no.such.Service/Call", &headers, &[0; 5])
    });
    let answer = answer.await.unwrap();
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("grpc-status"), Some("12"), "UNIMPLEMENTED");
}

#[test]
fn an_upstream_without_http2_is_502() {
    let upstream = Upstream::start(|connection| {
        connection.send("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        connection.close();
    });
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, http2: true, urls: '{}'}}]}}\n",
        upstream.url()
    ));
    assert_eq!(listener.get("/").status, 502);
}

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Connects to `listener` over HTTP/2.
async fn connect<B>(listener: &TestListener) -> http2::SendRequest<B>
where
    B: Body<Data: Send, Error: std::error::Error + Send + Sync> + Send + Unpin + 'static,
{
    let stream = TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (client, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    client
}

/// Starts an upstream that echoes the request body as it arrives, followed by trailers as in gRPC.
/// The response contains the `X-Forwarded-For` and `Trailer` headers of the received request.
async fn echo() -> SocketAddr {
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = socket.accept().await {
            let handler = service_fn(|request: Request<Incoming>| async {
                let asked = request.headers().get_all(X_FORWARDED_FOR);
                let asked: Vec<_> = asked.iter().cloned().collect();
                let announced = request.headers().get(TRAILER).cloned();
                let trailers =
                    HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())]);
                let body = request
                    .into_body()
                    .with_trailers(async { Some(Ok(trailers)) });
                let mut answer = Response::new(body);
                for client in asked {
                    answer.headers_mut().append(X_FORWARDED_FOR, client);
                }
                if let Some(announced) = announced {
                    answer.headers_mut().append(TRAILER, announced);
                }
                Ok::<_, Infallible>(answer)
            });
            let serving = server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(serving.serve_connection(TokioIo::new(stream), handler));
        }
    });
    address
}

#[tokio::test]
async fn forwarding_headers_are_sent_over_http2_and_request_trailers_are_not() {
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: echo, http2: true, urls: 'http://{}'}}]}}\n",
        echo().await
    ));
    let mut client = connect(&listener).await;
    let claim = || "6.6.6.6".parse::<HeaderValue>().unwrap();
    let trailers = HeaderMap::from_iter([
        (X_FORWARDED_FOR, claim()),
        ("x-sum".parse().unwrap(), "7".parse().unwrap()),
    ]);
    let trailers = Box::pin(async { Some(Ok(trailers)) });
    let body = Full::<Bytes>::from("hi").with_trailers(trailers);
    let mut request = Request::post("http://localhost/").body(body).unwrap();
    request.headers_mut().insert(X_FORWARDED_FOR, claim());
    request
        .headers_mut()
        .insert(TRAILER, "x-sum".parse().unwrap());
    let answer = client.send_request(request).await.unwrap();
    let forwarded: Vec<_> = answer.headers().get_all(X_FORWARDED_FOR).iter().collect();
    assert_eq!(forwarded, ["127.0.0.1"]);
    assert!(!answer.headers().contains_key(TRAILER));
    // If the upstream had received request trailers, it would have returned them in addition to its
    // own trailers.
    let collected = answer.into_body().collect().await.unwrap();
    let trailers = collected.trailers().unwrap();
    let names: Vec<_> = trailers.keys().collect();
    assert_eq!(names, ["grpc-status"]);
    assert_eq!(collected.to_bytes(), "hi");
}

/// In bidirectional streaming, the upstream answers each message before the client sends the next
/// message.
#[tokio::test]
async fn a_bidirectional_stream_is_forwarded_message_by_message() {
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: echo, http2: true, urls: 'http://{}'}}]}}\n",
        echo().await
    ));
    let mut client = connect(&listener).await;
    let (messages, sent) = unbounded_channel::<Bytes>();
    let sending = unfold(sent, |mut sent| async {
        let message = sent.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(message)), sent))
    });
    let request = Request::post("http://localhost/echo.Echo/Both")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(StreamBody::new(Box::pin(sending)))
        .unwrap();
    let mut answer = client.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    for number in 0..100_u8 {
        let message = Bytes::from(vec![0, 0, 0, 0, 1, number]);
        messages.send(message.clone()).unwrap();
        let frame = answer.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), message);
    }
    drop(messages);
    let trailers = answer.frame().await.unwrap().unwrap();
    assert_eq!(trailers.into_trailers().unwrap()["grpc-status"], "0");
    assert!(answer.frame().await.is_none());
}

/// Starts an HTTP/2 upstream. For each request on a connection, `counts` contains the number of
/// interim responses that the upstream sends before the 200.
fn hinting(
    counts: impl IntoIterator<Item = usize, IntoIter: Send> + Clone + Send + Sync + 'static,
) -> Upstream {
    Upstream::start(move |connection| {
        connection.read_bytes(24);
        connection.send(b"\0\0\0\x04\0\0\0\0\0");
        let mut counts = counts.clone().into_iter();
        while let Some((kind, stream)) = connection.frame() {
            if kind == 1 {
                let [a, b, c, d] = stream.to_be_bytes();
                // The bytes encode `:status: 103` as a literal without indexing.
                let interim = [0, 0, 5, 1, 4, a, b, c, d, 8, 3, b'1', b'0', b'3'];
                connection.send(interim.repeat(counts.next().unwrap()));
                // The frames of a head, and of an empty body that ends the stream.
                connection.send([0, 0, 1, 1, 4, a, b, c, d, 0x88]);
                connection.send([0, 0, 0, 0, 1, a, b, c, d]);
            }
        }
    })
}

fn in_front_of_http2(upstream: &Upstream) -> TestListener {
    TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, http2: true, urls: '{}'}}]}}\n",
        upstream.url()
    ))
}

/// As for HTTP/1.1 upstreams, the maximum is 100 interim responses per response.
#[test]
fn too_many_interim_responses_are_502() {
    let upstream = hinting([0, 100, 100, 100, 101]);
    let listener = in_front_of_http2(&upstream);
    let statuses = [0; 5].map(|_| listener.get("/").status);
    assert_eq!(statuses, [200, 200, 200, 200, 502]);
    assert_eq!(upstream.connections(), 1);
}

/// All other requests on the connection continue, and do not count as endpoint failures.
#[test]
fn too_many_interim_responses_fail_only_their_own_request() {
    let upstream = Upstream::start(|connection| {
        connection.read_bytes(24);
        connection.send(b"\0\0\0\x04\0\0\0\0\0");
        let mut waiting = Vec::new();
        let mut answered = 0;
        while let Some((kind, stream)) = connection.frame() {
            if kind != 1 {
                continue;
            }
            waiting.push(stream.to_be_bytes());
            // The upstream answers the first request alone, and the next four requests together.
            if answered > 0 && waiting.len() < 4 {
                continue;
            }
            if answered > 0 {
                let [a, b, c, d] = waiting.remove(1);
                let interim = [0, 0, 5, 1, 4, a, b, c, d, 8, 3, b'1', b'0', b'3'];
                connection.send(interim.repeat(400));
            }
            for [a, b, c, d] in waiting.drain(..) {
                connection.send([0, 0, 1, 1, 5, a, b, c, d, 0x88]);
                answered += 1;
            }
        }
    });
    let listener = in_front_of_http2(&upstream);
    assert_eq!(listener.get("/").status, 200);
    let mut statuses = std::thread::scope(|scope| {
        [0; 4]
            .map(|_| scope.spawn(|| listener.get("/").status))
            .map(|request| request.join().unwrap())
    });
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 502]);
    assert_eq!(upstream.connections(), 1);
    let text = listener.runtime.exposition();
    let counted = r#"tidegate_proxy_failures_total{upstream="app",failure="bad_answer"} 1"#;
    assert!(text.contains(counted), "{text}");
}

/// Returns the responses from an upstream that sends these trailers. The first result, over HTTP/2,
/// is the payload of the last HEADERS frame. The second result, over HTTP/1.1, consists of the
/// chunks and trailers.
fn forwarded_trailers(lines: &[(&str, &str)]) -> (Vec<u8>, String) {
    let trailers = block(lines);
    let upstream = Upstream::start(move |connection| {
        connection.read_bytes(24);
        connection.send(frame(SETTINGS, 0, 0, &[]));
        while let Some((kind, stream)) = connection.frame() {
            if kind == HEADERS {
                let stream = u8::try_from(stream).unwrap();
                let head = block(&[(":status", "200"), ("trailer", "x-sum")]);
                connection.send(frame(HEADERS, END_HEADERS, stream, &head));
                connection.send(frame(DATA, 0, stream, b"ok"));
                let last = END_HEADERS | END_STREAM;
                connection.send(frame(HEADERS, last, stream, &trailers));
            }
        }
    });
    let listener = in_front_of_http2(&upstream);
    let get = [
        (":method", "GET"),
        (":scheme", "http"),
        (":path", "/"),
        (":authority", "h"),
        ("te", "trailers"),
    ];
    let request = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(&get));
    let over_http2 = last_block(&listener, &request);
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\nte: trailers\r\nconnection: te, close\r\n\r\n");
    let answer = client.until_closed();
    let (_, chunks) = answer.split_once("\r\n\r\n").unwrap();
    (over_http2, chunks.to_owned())
}

/// Sends the frames of the first request on a connection. Returns the header block that ends the
/// response stream.
fn last_block(listener: &TestListener, frames: &[u8]) -> Vec<u8> {
    let mut stream = std::net::TcpStream::connect(listener.listener.local_addr()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let beginning = [PREFACE, &frame(SETTINGS, 0, 0, &[]), frames];
    stream.write_all(&beginning.concat()).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).unwrap();
        if head[3] == HEADERS && head[4] & END_STREAM != 0 {
            return payload;
        }
    }
}

#[test]
fn pseudo_headers_in_response_trailers_are_not_forwarded() {
    let expected = forwarded_trailers(&[("x-sum", "7")]);
    assert_eq!(expected.1, "2\r\nok\r\n0\r\nx-sum: 7\r\n\r\n");
    for pseudo in [(":status", "500"), (":path", "/q"), (":method", "PUT")] {
        let forwarded = forwarded_trailers(&[pseudo, ("x-sum", "7")]);
        assert_eq!(forwarded, expected, "{pseudo:?}");
    }
}
