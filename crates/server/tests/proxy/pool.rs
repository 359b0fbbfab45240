//! Connections to upstreams: kept, used again, counted, and given up.

use std::{sync::mpsc::channel, time::Duration};

use crate::{door::Door, upstream::Upstream};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[test]
fn a_connection_serves_one_request_after_the_other() {
    let upstream = Upstream::answering(OK);
    let door = Door::before(upstream.url());
    for _ in 0..5 {
        assert_eq!(door.get("/").body, "ok");
    }
    assert_eq!(upstream.connections(), 1);
    assert_eq!(upstream.heads().len(), 5);
}

#[test]
fn a_connection_that_the_upstream_ends_is_not_used_again() {
    let upstream =
        Upstream::answering("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok");
    let door = Door::before(upstream.url());
    for _ in 0..3 {
        assert_eq!(door.get("/").body, "ok");
    }
    assert_eq!(upstream.connections(), 3);
}

/// The upstream closes while the proxy sends: sometimes the proxy knows before, sometimes not. Either way nothing that
/// was sent is sent again, and what was not sent is.
#[test]
fn a_stale_connection_costs_no_request() {
    let upstream = Upstream::start(|talk| {
        talk.head().unwrap();
        talk.send(OK);
        talk.close();
    });
    let door = Door::before(upstream.url());
    let mut client = door.connect();
    assert_eq!(client.ask("GET", "/", &[], b"").body, "ok");
    // The news of the end is with the proxy when it reads again.
    std::thread::park_timeout(Duration::from_millis(100));
    assert_eq!(client.ask("POST", "/", &[], b"body").body, "ok");
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn a_connection_that_waits_too_long_is_closed() {
    let (send, closed) = channel();
    let send = std::sync::Mutex::new(send);
    let upstream = Upstream::start(move |talk| {
        talk.head().unwrap();
        talk.send(OK);
        talk.until_closed();
        send.lock().unwrap().send(()).unwrap();
    });
    let door = Door::with(upstream.url(), "timeouts: {pool: 100ms}");
    assert_eq!(door.get("/").body, "ok");
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn a_client_that_leaves_takes_its_request_along() {
    let (send, closed) = channel();
    let send = std::sync::Mutex::new(send);
    let upstream = Upstream::start(move |talk| {
        talk.head().unwrap();
        talk.until_closed();
        send.lock().unwrap().send(()).unwrap();
    });
    let door = Door::before(upstream.url());
    let mut client = door.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        std::thread::yield_now();
    }
    drop(client);
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn an_upstream_with_all_its_connections_in_use_is_503() {
    let upstream = Upstream::start(|talk| {
        while let Some(head) = talk.head() {
            if !head.starts_with("GET /slow") {
                talk.send(OK);
            }
        }
    });
    let text = format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: \"{}\", max_connections: 1}}]\n",
        upstream.url()
    );
    let door = Door::open(&text);
    let mut slow = door.connect();
    slow.send("GET /slow HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        std::thread::yield_now();
    }
    let answer = door.get("/");
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (503, Some("1"))
    );
    drop(slow);
    let mut client = door.connect();
    while client.ask("GET", "/", &[], b"").status == 503 {}
    assert_eq!(client.ask("GET", "/", &[], b"").body, "ok");
}
