//! Tests of slow and silent clients, oversized requests, and the bounds on sizes and times.

use std::time::Duration;

use crate::{listener::TestListener, upstream::Upstream};

#[test]
fn a_slow_request_head_times_out() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "timeouts: {request_head: 200ms}");
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n");
    let drip = client.clone_stream();
    std::thread::spawn(move || {
        use std::io::Write as _;
        let mut drip = drip;
        // The client keeps sending header lines, which must not extend the timeout for the request
        // head.
        while drip.write_all(b"a: b\r\n").is_ok() {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    });
    assert_eq!(client.until_closed(), "");
    assert_eq!(upstream.connections(), 0);
}

#[test]
fn an_idle_client_connection_is_closed() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "timeouts: {keep_alive: 100ms}");
    let mut client = listener.connect();
    assert_eq!(client.ask("GET", "/", &[], b"").status, 200);
    assert_eq!(client.until_closed(), "");
}

#[test]
fn a_stalled_request_body_is_408() {
    let upstream = Upstream::silent();
    let listener = TestListener::with(upstream.url(), "timeouts: {idle: 100ms}");
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\nhalf");
    let answer = client.read_answer(false);
    assert_eq!(
        (answer.status, answer.header("connection")),
        (408, Some("close"))
    );
}

#[test]
fn a_slow_request_body_is_accepted() {
    let upstream = Upstream::start(|connection| {
        connection.head();
        connection.read_bytes(6);
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        connection.until_closed();
    });
    // The upload takes longer than `timeouts.head`. `timeouts.head` starts only when the upload is
    // complete.
    let listener = TestListener::with(upstream.url(), "timeouts: {idle: 10s, head: 1s}");
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 6\r\n\r\n");
    for _ in 0..6 {
        std::thread::park_timeout(Duration::from_millis(200));
        client.send("x");
    }
    assert_eq!(client.read_answer(false).status, 200);
}

#[test]
fn a_too_large_body_is_413() {
    let upstream = Upstream::silent();
    let listener = TestListener::with(upstream.url(), "max_body: 10");
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 11\r\n\r\n");
    let answer = client.read_answer(false);
    assert_eq!(
        (answer.status, answer.header("connection")),
        (413, Some("close"))
    );
    assert_eq!(answer.problem(), "the body exceeds the maximum of 10 bytes");
    assert_eq!(upstream.connections(), 0, "rejected by its declared length");
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n8\r\n12345678\r\n3\r\n123\r\n");
    assert_eq!(client.read_answer(false).status, 413);
}

#[test]
fn the_default_number_of_header_lines_is_accepted_and_one_more_is_431() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "");
    for (lines, status) in [(99, 200), (100, 431)] {
        let mut client = listener.connect();
        let headers = "a: b\r\n".repeat(lines);
        client.send_what_fits(format!("GET / HTTP/1.1\r\nhost: h\r\n{headers}\r\n"));
        assert_eq!(client.read_answer(false).status, status, "{lines}");
    }
}

#[test]
fn a_head_that_is_too_large_is_431() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "max_head: 8KiB\nmax_headers: 10");
    for headers in [
        format!("a: {}\r\n", "x".repeat(20_000)),
        "a: b\r\n".repeat(11),
    ] {
        let mut client = listener.connect();
        client.send_what_fits(format!("GET / HTTP/1.1\r\nhost: h\r\n{headers}\r\n"));
        let answer = client.read_answer(false);
        assert_eq!(answer.status, 431);
        assert_eq!(
            answer.problem(),
            "the request head is too large, or has too many lines"
        );
    }
    assert_eq!(upstream.connections(), 0);
    let metrics = listener.runtime.exposition();
    let counted = "tidegate_proxy_rejected_total{status=\"431\"} 2\n";
    assert!(metrics.contains(counted), "{metrics}");
}

/// Requests that precede the invalid head are answered as usual.
#[test]
fn an_invalid_head_is_400() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    assert_eq!(client.ask("GET", "/", &[], b"").status, 200);
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\nGET /a b HTTP/1.1\r\n\r\n");
    assert_eq!(client.read_answer(false).status, 200);
    let answer = client.read_answer(false);
    assert_eq!(answer.status, 400);
    assert_eq!(
        answer.problem(),
        "the request head is not valid HTTP/1.1, or is ambiguous"
    );
    assert_eq!(client.until_closed(), "");
    let metrics = listener.runtime.exposition();
    let counted = "tidegate_proxy_rejected_total{status=\"400\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn a_response_that_the_client_does_not_read_times_out() {
    let (send, gone) = std::sync::mpsc::channel();
    let send = std::sync::Mutex::new(send);
    let upstream = Upstream::start(move |connection| {
        connection.head();
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n");
        // The upstream sends until the proxy stops reading. The proxy stops because the client does
        // not read.
        let mut sent = 0;
        while std::io::Write::write_all(&mut connection.stream, &[0; 1 << 16]).is_ok() {
            sent += 1 << 16;
        }
        send.lock().unwrap().send(sent).unwrap();
    });
    let listener = TestListener::with(upstream.url(), "timeouts: {idle: 300ms}");
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    let sent: usize = gone.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(sent < 50_000_000, "{sent} bytes are buffered");
}

#[test]
fn at_the_limit_the_longest_idle_connection_is_closed() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "max_connections: 1");
    let mut idle = listener.connect();
    assert_eq!(idle.ask("GET", "/", &[], b"").status, 200);
    let mut at_work = listener.connect();
    assert_eq!(at_work.ask("GET", "/", &[], b"").status, 200);
    assert_eq!(idle.until_closed(), "");
    assert_eq!(
        (listener.listener.evicted(), listener.listener.refused()),
        (1, 0)
    );
}

#[test]
fn at_the_limit_an_active_connection_is_not_closed() {
    let upstream = Upstream::silent();
    let listener = TestListener::with(upstream.url(), "max_connections: 1");
    let mut at_work = listener.connect();
    at_work.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n");
    while upstream.connections() < 1 {
        std::thread::yield_now();
    }
    assert_eq!(listener.connect().until_closed(), "");
    assert_eq!(
        (listener.listener.evicted(), listener.listener.refused()),
        (0, 1)
    );
}

#[test]
fn a_client_cannot_exceed_its_connection_limit() {
    let upstream = Upstream::ok();
    let listener = TestListener::with(upstream.url(), "max_connections_per_client: 1");
    let mut first = listener.connect();
    assert_eq!(first.ask("GET", "/", &[], b"").status, 200);
    assert_eq!(listener.connect().until_closed(), "");
    assert_eq!(listener.listener.refused_to_client(), 1);
    assert_eq!(first.ask("GET", "/", &[], b"").status, 200);
}
