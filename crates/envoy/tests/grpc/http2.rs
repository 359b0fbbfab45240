//! Tests of HTTP/2 connections: limits, connection age, and non-gRPC requests.

use std::time::Duration;

use tidegate_net::Bounds;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::Code;

use crate::{
    listener::TestListener,
    proto::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse},
};

const CHECK: &str = "/grpc.health.v1.Health/Check";

/// Reads until the server closes the connection. Returns the received bytes.
async fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut sent = Vec::new();
    // A reset connection counts as closed.
    let _ = stream.read_to_end(&mut sent).await;
    sent
}

#[tokio::test]
async fn a_silent_client_is_disconnected() {
    let bounds = Bounds {
        request: Duration::from_millis(1),
        ..Bounds::default()
    };
    let listener = TestListener::open_with_bounds("", bounds);
    let stream = TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    until_closed(stream).await;
}

#[tokio::test]
async fn a_slow_or_incomplete_preface_times_out() {
    let bounds = Bounds {
        request: Duration::from_millis(50),
        idle: Duration::from_secs(3_600),
        ..Bounds::default()
    };
    let listener = TestListener::open_with_bounds("", bounds);
    let beginning = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0";
    for cut in [1, 12, 24, beginning.len()] {
        let mut stream = TcpStream::connect(listener.listener.local_addr())
            .await
            .unwrap();
        for byte in &beginning[..cut] {
            stream.write_all(&[*byte]).await.unwrap();
        }
        until_closed(stream).await;
    }
}

#[tokio::test]
async fn a_control_frame_flood_is_disconnected_and_counted() {
    let listener = TestListener::open("");
    let floods: [(&str, &[u8]); 5] = [
        ("PING", b"\0\0\x08\x06\0\0\0\0\0sentinel"),
        ("PING ACK", b"\0\0\x08\x06\x01\0\0\0\0sentinel"),
        ("SETTINGS", b"\0\0\0\x04\0\0\0\0\0"),
        ("PRIORITY", b"\0\0\x05\x02\0\0\0\0\x01\0\0\0\0\x01"),
        ("unknown", b"\0\0\0\x63\0\0\0\0\0"),
    ];
    for (at, (name, frame)) in (1..).zip(floods) {
        let stream = TcpStream::connect(listener.listener.local_addr())
            .await
            .unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        bytes.extend(frame.repeat(20_000));
        let flood = tokio::spawn(async move {
            // The server closes the connection during the write, so the write may fail.
            let _ = writer.write_all(&bytes).await;
            writer
        });
        let mut sent = Vec::new();
        let _ = reader.read_to_end(&mut sent).await;
        drop(flood.await.unwrap());
        assert_eq!(listener.listener.floods(), at, "{name}");
    }
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_an_idle_client_that_ignores_it() {
    let listener = TestListener::open("");
    let mut streams = Vec::new();
    for beginning in [
        &b""[..],
        b"PRI * HT",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    ] {
        let mut stream = TcpStream::connect(listener.listener.local_addr())
            .await
            .unwrap();
        stream.write_all(beginning).await.unwrap();
        streams.push(stream);
    }
    while listener.listener.open() < streams.len() {
        tokio::task::yield_now().await;
    }
    // If the connection were still open, the shutdown would wait until the deadline and report the
    // connection as dropped.
    assert_eq!(listener.server.shutdown(Duration::from_secs(60)).await, 0);
}

#[tokio::test]
async fn a_client_that_does_not_answer_pings_is_disconnected() {
    let listener = TestListener::open("grpc: {keep_alive: 1ms, keep_alive_timeout: 1ms}");
    let mut stream = TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    let sent = until_closed(stream).await;
    let ping = b"\0\0\x08\x06\0\0\0\0\0";
    assert!(
        sent.windows(ping.len()).any(|frame| frame == ping),
        "{sent:?}"
    );
}

#[tokio::test]
async fn http_1_is_not_supported() {
    let listener = TestListener::open("");
    let mut stream = TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .unwrap();
    let sent = until_closed(stream).await;
    assert!(!sent.starts_with(b"HTTP/1.1 200"), "{sent:?}");
}

#[tokio::test]
async fn a_connection_at_its_maximum_age_is_closed_and_reopened() {
    let listener = TestListener::open("grpc: {max_connection_age: 1ms}");
    let mut client = listener.connect().await;
    while listener.listener.accepted() < 3 {
        // A call may fail because the connection is closed, but a response must never be incorrect.
        let called = client
            .call::<_, HealthCheckResponse>(CHECK, HealthCheckRequest::default())
            .await;
        assert!(called.is_ok_and(|health| health.status == 1) || listener.listener.accepted() > 0);
    }
}

#[tokio::test]
async fn an_unknown_method_is_unimplemented() {
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    for path in [
        "/weather.Forecast/Today",
        "/grpc.health.v1.Health/Guess",
        "/",
    ] {
        let called = client.call::<_, HealthCheckResponse>(path, HealthCheckRequest::default());
        assert_eq!(
            called.await.unwrap_err().code(),
            Code::Unimplemented,
            "{path}"
        );
    }
}

#[tokio::test]
async fn a_slow_call_ends_at_the_server_deadline() {
    let bounds = Bounds {
        request: Duration::from_millis(50),
        ..Bounds::default()
    };
    let listener = TestListener::open_with_bounds("", bounds);
    let mut client = listener.connect().await;
    // The request never completes, because its only message is never sent.
    let never = futures_util::stream::pending::<HealthCheckRequest>();
    let called = client.stream::<_, HealthCheckResponse>(CHECK, never).await;
    assert_eq!(
        called.err().map(|status| status.code()),
        Some(Code::DeadlineExceeded)
    );
}

/// Encodes a header in HPACK as a literal without indexing.
fn literal(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| {
        let length = u8::try_from(text.len()).unwrap();
        [&[length], text.as_bytes()].concat()
    };
    [vec![0], text(name), text(value)].concat()
}

/// Uses raw HTTP/2 frames, because tonic's client cancels a call when the timeout expires, and
/// would never see the server's response.
#[tokio::test]
async fn a_call_ends_at_the_deadline_of_its_caller() {
    let listener = TestListener::open("");
    let mut stream = TcpStream::connect(listener.listener.local_addr())
        .await
        .unwrap();
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", CHECK),
        (":authority", "a"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("grpc-timeout", "1m"),
    ]
    .map(|(name, value)| literal(name, value))
    .concat();
    let length = u8::try_from(headers.len()).unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    // Send the headers of stream 1. The stream never receives a message.
    stream
        .write_all(&[0, 0, length, 1, 4, 0, 0, 0, 1])
        .await
        .unwrap();
    stream.write_all(&headers).await.unwrap();

    let mut sent = Vec::new();
    // The response is a HEADERS frame that ends stream 1.
    let answer = [1, 5, 0, 0, 0, 1];
    let answered = async {
        while !sent.windows(answer.len()).any(|bytes| bytes == answer) {
            assert_ne!(stream.read_buf(&mut sent).await.unwrap(), 0, "{sent:?}");
        }
    };
    let soon = tokio::time::timeout(Duration::from_secs(8), answered).await;
    assert!(
        soon.is_ok(),
        "without a caller deadline a call may take 10 s"
    );
}

#[tokio::test]
async fn a_too_large_message_is_rejected() {
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    let asked = HealthCheckRequest {
        service: "x".repeat(2 << 20),
    };
    let refused = client
        .call::<_, HealthCheckResponse>(CHECK, asked)
        .await
        .unwrap_err();
    assert!(
        matches!(refused.code(), Code::OutOfRange | Code::ResourceExhausted),
        "{refused:?}"
    );
    let health = client.call::<_, HealthCheckResponse>(CHECK, HealthCheckRequest::default());
    assert!(health.await.is_ok(), "the connection stays open");
}
