//! Tests of pipelining, fragmented requests, and slow, idle or oversized clients.

use std::{io::Write as _, time::Duration};

use tidegate_core::MemoryBounds;
use tidegate_net::Bounds;

use crate::listener::TestListener;

const BODY: &str = r#"{"key": "k", "algorithm": "fixed_window", "limit": 100, "window": "1h"}"#;

fn request(body: &str) -> String {
    format!(
        "POST /v1/throttle HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Opens a listener with very short timeouts.
fn impatient() -> TestListener {
    let bounds = Bounds {
        idle: Duration::from_millis(300),
        request: Duration::from_millis(100),
        write: Duration::from_millis(100),
        ..Bounds::default()
    };
    TestListener::with("", MemoryBounds::default(), bounds)
}

#[test]
fn a_pipeline_is_answered_in_order() {
    let listener = TestListener::open("");
    let mut client = listener.connect();
    client.send(request(BODY).repeat(50));
    for number in 1..=50 {
        assert_eq!(client.read_answer(false).json()["remaining"], 100 - number);
    }
}

#[test]
fn a_request_in_pieces_and_chunks_is_one_request() {
    let listener = TestListener::open("");
    let mut client = listener.connect();
    for byte in request(BODY).bytes() {
        client.send([byte]);
    }
    assert_eq!(client.read_answer(false).json()["remaining"], 99);
    let mut chunked =
        b"POST /v1/throttle HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for piece in BODY.as_bytes().chunks(7) {
        write!(chunked, "{:x}\r\n", piece.len()).unwrap();
        chunked.extend_from_slice(piece);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    client.send(chunked);
    assert_eq!(client.read_answer(false).json()["remaining"], 98);
}

#[test]
fn a_too_large_body_is_rejected_before_or_while_it_is_read() {
    let listener = TestListener::open("");
    let mut announced = listener.connect();
    announced.send("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 262145\r\n\r\n");
    let answer = announced.read_answer(false);
    assert_eq!(answer.status, 413);
    assert_eq!(
        answer.problem(),
        "the body exceeds the maximum of 262144 bytes"
    );
    let mut creeping = listener.connect();
    creeping.send("POST /v1/check HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    creeping.send_what_fits(chunk.repeat(5));
    assert_eq!(creeping.read_answer(false).status, 413);
    let spaces = " ".repeat(262_144 - BODY.len());
    assert_eq!(
        listener
            .post("/v1/throttle", &format!("{BODY}{spaces}"))
            .status,
        200
    );
}

#[test]
fn a_too_large_head_is_rejected() {
    let listener = TestListener::open("");
    let mut long = listener.connect();
    long.send_what_fits(format!(
        "POST /v1/check HTTP/1.1\r\nx-long: {}\r\n\r\n",
        "x".repeat(300_000)
    ));
    assert!(long.until_closed().starts_with("HTTP/1.1 431 "));
    let mut many = listener.connect();
    many.send(format!(
        "POST /v1/check HTTP/1.1\r\n{}\r\n",
        "x: y\r\n".repeat(101)
    ));
    assert!(many.until_closed().starts_with("HTTP/1.1 431 "));
    let mut as_many_as_may_be = listener.connect();
    as_many_as_may_be.send(format!(
        "POST /v1/check HTTP/1.1\r\nhost: x\r\n{}connection: close\r\n\r\n",
        "x: y\r\n".repeat(98)
    ));
    let answer = as_many_as_may_be.until_closed();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("body: "), "{answer}");
}

#[test]
fn a_request_has_one_host() {
    let listener = TestListener::open("");
    let body = r#"{"key": "k", "algorithm": "gcra", "rate": "1/s"}"#;
    for (version, hosts, expected) in [
        ("1.1", "host: a\r\n", ""),
        ("1.1", "", "Host: is missing"),
        ("1.1", "host: a\r\nHost: b\r\n", "Host: is repeated"),
        ("1.0", "", ""),
        ("1.0", "host: a\r\nhost: a\r\n", "Host: is repeated"),
    ] {
        let mut client = listener.connect();
        client.send(format!(
            "POST /v1/throttle HTTP/{version}\r\n{hosts}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        let answer = client.until_closed();
        let is_refused = answer.starts_with(&format!("HTTP/{version} 400 "));
        assert_eq!(is_refused, !expected.is_empty(), "{hosts}: {answer}");
        assert!(answer.contains(expected), "{hosts}: {answer}");
    }
}

#[test]
fn invalid_http_closes_the_connection() {
    let listener = TestListener::open("");
    for bytes in [
        "*1\r\n$4\r\nPING\r\n",
        "\x16\x03\x01\x02\x00\x01",
        "GET / HTTP/9.9\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut client = listener.connect();
        client.send(bytes);
        let response = client.until_closed();
        assert!(
            response.is_empty() || response.starts_with("HTTP/1.1 400 "),
            "{bytes:?}: {response}"
        );
    }
    // A request with two lengths, or with both a length and chunking, would be ambiguous and would
    // allow request smuggling.
    let mut client = listener.connect();
    client.send(
        "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\n{}   ",
    );
    assert!(client.until_closed().starts_with("HTTP/1.1 400 "));
}

#[test]
fn a_half_closed_client_is_answered() {
    let listener = TestListener::open("");
    for number in 1..=50 {
        let mut client = listener.connect();
        client.send(request(BODY));
        client.half_close();
        assert_eq!(client.read_answer(false).json()["remaining"], 100 - number);
        assert_eq!(client.until_closed(), "");
    }
}

#[test]
fn a_silent_client_is_disconnected() {
    let listener = impatient();
    assert_eq!(listener.connect().until_closed(), "");
    let mut idle = listener.connect();
    idle.send(request(BODY));
    assert_eq!(idle.read_answer(false).status, 200);
    assert_eq!(idle.until_closed(), "");
}

#[test]
fn a_stalled_request_is_disconnected() {
    let listener = impatient();
    let request = request(BODY);
    for cut in [1, 20, request.len() - BODY.len() - 2, request.len() - 1] {
        let mut client = listener.connect();
        client.send(&request[..cut]);
        let response = client.until_closed();
        assert!(!response.contains("200 OK"), "{cut}: {response}");
    }
    assert!(
        listener.limiter.local_store().stats().keys == 0,
        "an incomplete request is not decided"
    );
}

#[test]
fn a_client_that_never_reads_is_disconnected() {
    let listener = impatient();
    let mut client = listener.connect();
    // The responses to the requests do not fit in the socket buffers. The client reads no response
    // until the server has closed the connection.
    let requests = request(BODY).repeat(1_000);
    for _ in 0..200 {
        client.send_what_fits(&requests);
    }
    let response = client.until_closed();
    assert!(response.len() < 200 * 1_000 * 300, "{}", response.len());
    assert_eq!(
        listener.post("/v1/throttle", BODY).header("content-type"),
        Some("application/json")
    );
}

#[test]
fn a_shutdown_lets_the_request_finish() {
    let listener = TestListener::open("");
    let mut busy = listener.connect();
    let request = request(BODY);
    let (begin, rest) = request.split_at(request.len() - 5);
    busy.send(request.repeat(2));
    busy.read_answer(false);
    busy.read_answer(false);
    busy.send(begin);
    let idle = listener.connect();
    // When the listener has counted both connections, it serves both.
    while listener.listener.open() < 2 {
        std::thread::yield_now();
    }
    let TestListener { server, .. } = listener;
    let stopping = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(server.shutdown(Duration::from_secs(20)))
    });
    assert_eq!(idle.until_closed(), "");
    busy.send(rest);
    assert_eq!(busy.read_answer(false).json()["remaining"], 97);
    assert_eq!(busy.until_closed(), "");
    assert_eq!(stopping.join().unwrap(), 0, "no connection was dropped");
}
