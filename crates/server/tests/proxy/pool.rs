//! Tests of upstream connection pools: keep-alive, reuse, limits, and stale connections.

use std::{sync::mpsc::channel, time::Duration};

use crate::{listener::TestListener, upstream::Upstream};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[test]
fn a_connection_serves_one_request_after_the_other() {
    let upstream = Upstream::responding_with(OK);
    let listener = TestListener::in_front_of(upstream.url());
    for _ in 0..5 {
        assert_eq!(listener.get("/").body, "ok");
    }
    assert_eq!(upstream.connections(), 1);
    assert_eq!(upstream.heads().len(), 5);
}

/// The header cache of a connection must not leak headers from one response into the next.
#[test]
fn response_heads_on_one_connection_do_not_mix() {
    const ANSWERS: [(&str, Option<&str>, Option<&str>); 4] = [
        (
            "Set-Cookie: a=1\r\nX-Kind: one\r\n",
            Some("a=1"),
            Some("one"),
        ),
        (
            "Set-Cookie: a=2\r\nX-Kind: one\r\n",
            Some("a=2"),
            Some("one"),
        ),
        ("X-Kind: one\r\n", None, Some("one")),
        ("Set-Cookie: a=1\r\n", Some("a=1"), None),
    ];
    let upstream = Upstream::start(|connection| {
        for (lines, ..) in ANSWERS.iter().cycle() {
            if connection.head().is_none() {
                break;
            }
            connection.send(format!(
                "HTTP/1.1 200 OK\r\n{lines}content-length: 0\r\n\r\n"
            ));
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for (lines, cookie, kind) in ANSWERS.iter().cycle().take(9) {
        let answer = client.ask("GET", "/", &[], b"");
        let headers = (answer.header("set-cookie"), answer.header("x-kind"));
        assert_eq!(headers, (*cookie, *kind), "{lines}");
    }
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_connection_closed_by_the_upstream_is_not_reused() {
    let upstream = Upstream::responding_with(
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
    );
    let listener = TestListener::in_front_of(upstream.url());
    for _ in 0..3 {
        assert_eq!(listener.get("/").body, "ok");
    }
    assert_eq!(upstream.connections(), 3);
}

#[test]
fn the_proxy_closes_a_connection_that_does_not_persist() {
    for head in [
        "HTTP/1.1 200 OK\r\nconnection: close\r\n",
        "HTTP/1.1 200 OK\r\nconnection: keep-alive\r\nconnection: Close\r\n",
        "HTTP/1.0 200 OK\r\n",
        "HTTP/1.0 200 OK\r\nconnection: keep-alive, close\r\n",
    ] {
        let (send, closed) = channel();
        let send = std::sync::Mutex::new(send);
        let upstream = Upstream::start(move |connection| {
            connection.head().unwrap();
            connection.send(format!("{head}content-length: 2\r\n\r\nok"));
            connection.until_closed();
            send.lock().unwrap().send(()).unwrap();
        });
        let listener = TestListener::in_front_of(upstream.url());
        assert_eq!(listener.get("/").body, "ok", "{head}");
        let closed = closed.recv_timeout(Duration::from_secs(20));
        assert!(closed.is_ok(), "the connection stays open: {head}");
    }
}

#[test]
fn an_http_1_0_connection_with_keep_alive_is_reused() {
    let upstream = Upstream::responding_with(
        "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok",
    );
    let listener = TestListener::in_front_of(upstream.url());
    for _ in 0..3 {
        assert_eq!(listener.get("/").body, "ok");
    }
    assert_eq!(upstream.connections(), 1);
}

/// A non-idempotent request must not be retried, so it would be lost if it were sent on a closed
/// idle connection.
#[test]
fn an_idle_connection_closed_by_the_upstream_is_not_reused() {
    let (send, closed) = channel();
    let closing = Upstream::start(move |connection| {
        connection.head().unwrap();
        connection.read_bytes(b"once".len());
        connection.send(OK);
        connection.close();
        let _ = send.send(());
    });
    let other = Upstream::responding_with(OK);
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: other, when: {{path: /other}}, urls: '{}'}}, {{name: app, urls: '{}'}}]}}\n",
        other.url(),
        closing.url(),
    ));
    let mut client = listener.connect();
    for _ in 0..3 {
        assert_eq!(client.ask("POST", "/", &[], b"once").status, 200);
        closed.recv().unwrap();
        // When the response arrives, the proxy's worker has already noticed that the upstream
        // closed the other connection.
        assert_eq!(client.ask("GET", "/other", &[], b"").status, 200);
    }
    assert_eq!(closing.connections(), 3);
}

/// Returns an upstream that serves one request per connection, and closes the connection when a
/// second request arrives. To the proxy, the closed connection looks like a stale connection.
fn fickle() -> Upstream {
    Upstream::start(|connection| {
        connection.head().unwrap();
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        connection.head();
        connection.close();
    })
}

#[test]
fn a_retryable_request_survives_a_lost_connection() {
    let upstream = fickle();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    let claims = [("x-forwarded-for", "6.6.6.6")];
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"] {
        assert_eq!(
            client.ask(method, "/", &claims, b"").status,
            200,
            "{method}"
        );
    }
    // Each connection except the last one received a second request. This request was then retried
    // on the next connection.
    assert_eq!(upstream.connections(), 5);
    let heads = upstream.heads();
    assert_eq!(heads.len(), 9);
    for head in heads {
        let lines = head.lines().filter(|line| line.contains("forwarded-for"));
        assert_eq!(lines.collect::<Vec<_>>(), ["x-forwarded-for: 127.0.0.1"]);
    }
    let metrics = listener.runtime.exposition();
    let retries = "tidegate_proxy_retries_total{upstream=\"app\"} 4\n";
    assert!(metrics.contains(retries), "{metrics}");
}

#[test]
fn a_request_that_may_have_been_processed_is_not_retried() {
    for (method, body) in [
        ("POST", ""),
        ("PATCH", ""),
        ("PUT", "body"),
        ("POST", "body"),
    ] {
        let upstreams = [fickle(), fickle()];
        let urls = format!("urls: ['{}', '{}']", upstreams[0].url(), upstreams[1].url());
        let listener = TestListener::open(&format!(
            "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, eject: {{failures: 1, duration: 1h}}, {urls}}}]}}\n"
        ));
        let mut client = listener.connect();
        // The requests alternate between the two endpoints.
        for _ in 0..2 {
            assert_eq!(client.ask("GET", "/", &[], b"").status, 200);
        }
        assert_eq!(
            client.ask(method, "/", &[], body.as_bytes()).status,
            502,
            "{method}"
        );
        let heads: usize = upstreams
            .iter()
            .map(|upstream| upstream.heads().len())
            .sum();
        assert_eq!(heads, 3, "{method}");
        // A stale connection does not count as a failure of its endpoint.
        let metrics = listener.runtime.exposition();
        let up = metrics
            .lines()
            .filter(|line| line.starts_with("tidegate_proxy_endpoint_up"));
        assert_eq!(
            up.filter(|line| line.ends_with(" 1")).count(),
            2,
            "{metrics}"
        );
    }
}

#[test]
fn an_idle_pooled_connection_is_closed_after_its_timeout() {
    let (send, closed) = channel();
    let send = std::sync::Mutex::new(send);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        connection.send(OK);
        connection.until_closed();
        send.lock().unwrap().send(()).unwrap();
    });
    let listener = TestListener::with(upstream.url(), "timeouts: {pool: 100ms}");
    assert_eq!(listener.get("/").body, "ok");
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn a_disconnected_client_cancels_its_request() {
    let (send, closed) = channel();
    let send = std::sync::Mutex::new(send);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        connection.until_closed();
        send.lock().unwrap().send(()).unwrap();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        std::thread::yield_now();
    }
    drop(client);
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn an_upstream_without_a_free_connection_is_503() {
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            if !head.starts_with("GET /slow") {
                connection.send(OK);
            }
        }
    });
    let text = format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: \"{}\", max_connections: 1}}]\n",
        upstream.url()
    );
    let listener = TestListener::open(&text);
    let mut slow = listener.connect();
    slow.send("GET /slow HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        std::thread::yield_now();
    }
    let answer = listener.get("/");
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (503, Some("1"))
    );
    drop(slow);
    let mut client = listener.connect();
    while client.ask("GET", "/", &[], b"").status == 503 {}
    assert_eq!(client.ask("GET", "/", &[], b"").body, "ok");
}
