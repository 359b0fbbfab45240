//! Tests of upgraded connections.

use std::{
    sync::{Mutex, mpsc::channel},
    time::Duration,
};

use crate::{listener::TestListener, upstream::Upstream};

const UPGRADE_REQUEST: &str = "GET /chat HTTP/1.1\r\nhost: h\r\nconnection: keep-alive, Upgrade\r\nupgrade: echo\r\nsec-key: k\r\n\r\n";

/// Returns an upstream that upgrades the connection, sends a greeting, and echoes data until it
/// receives a command to stop.
fn echo() -> Upstream {
    Upstream::start(|connection| {
        let head = connection.head().unwrap();
        assert!(head.contains("connection: upgrade"), "{head}");
        assert!(head.contains("upgrade: echo"), "{head}");
        assert!(head.contains("sec-key: k"), "{head}");
        connection.send("HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: echo\r\nsec-accept: a\r\n\r\nhello\n");
        while let Some(line) = connection.line() {
            if line == "end\n" {
                return connection.close();
            }
            connection.send(line);
        }
        connection.send("you are gone\n");
        connection.close();
    })
}

#[test]
fn bytes_are_forwarded_both_ways_until_the_upstream_closes() {
    let upstream = echo();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send(UPGRADE_REQUEST);
    let head = client.read_until("\r\n\r\n");
    assert!(
        head.starts_with("HTTP/1.1 101 Switching Protocols\r\n"),
        "{head}"
    );
    for line in [
        "connection: upgrade\r\n",
        "upgrade: echo\r\n",
        "sec-accept: a\r\n",
    ] {
        assert!(head.contains(line), "{head}");
    }
    assert_eq!(client.read_until("\n"), "hello\n");
    let long = format!("{}\n", "x".repeat(1 << 20));
    for line in ["one\n", "two\n", &long] {
        client.send(line);
        assert_eq!(client.read_until("\n"), line);
    }
    client.send("end\n");
    assert_eq!(client.until_closed(), "");
}

#[test]
fn a_slot_is_held_until_both_sides_have_closed() {
    let upstream = echo();
    let rules = "rules: [{name: places, limits: [{algorithm: concurrency, limit: 1}]}]";
    let listener = TestListener::open(&format!(
        "{rules}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: '{}'}}]}}\n",
        upstream.url()
    ));
    for _ in 0..3 {
        // The proxy may need several polls to notice that the previous connection is closed.
        let upgraded = (0..10_000).find_map(|_| {
            let mut client = listener.connect();
            client.send(UPGRADE_REQUEST);
            let head = client.read_until("\r\n\r\n");
            head.starts_with("HTTP/1.1 101 ").then_some(client)
        });
        let mut client = upgraded.expect("a disconnected client must free its slot");
        assert_eq!(client.read_until("\n"), "hello\n");
        assert_eq!(listener.get("/").status, 503);
        client.send("one\n");
        assert_eq!(client.read_until("\n"), "one\n");
        client.send("end\n");
        assert_eq!(client.until_closed(), "");
    }
}

#[test]
fn a_half_closed_client_still_receives() {
    let upstream = echo();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send(UPGRADE_REQUEST);
    client.read_until("hello\n");
    client
        .clone_stream()
        .shutdown(std::net::Shutdown::Write)
        .unwrap();
    assert_eq!(client.until_closed(), "you are gone\n");
}

#[test]
fn an_idle_tunnel_is_closed() {
    let upstream = echo();
    let listener = TestListener::with(
        upstream.url(),
        "timeouts: {upgraded: 2s, keep_alive: 500ms, request_head: 500ms}",
    );
    let mut client = listener.connect();
    client.send(UPGRADE_REQUEST);
    client.read_until("hello\n");
    // The exchange takes longer than the request timeout and the idle timeout.
    for _ in 0..3 {
        std::thread::park_timeout(Duration::from_millis(600));
        client.send("still here\n");
        assert_eq!(client.read_until("\n"), "still here\n");
    }
    assert_eq!(client.until_closed(), "");
}

#[test]
fn an_upstream_may_decline_an_upgrade() {
    let upstream =
        Upstream::responding_with("HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno");
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for _ in 0..2 {
        client.send(UPGRADE_REQUEST);
        let answer = client.read_answer(false);
        assert_eq!((answer.status, &*answer.body), (403, "no"));
    }
    assert_eq!(upstream.connections(), 1, "the connection stays usable");
}

#[test]
fn an_upgrade_to_h2c_is_not_forwarded() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n");
    assert_eq!(client.read_answer(false).status, 200);
    let head = &upstream.heads()[0];
    assert!(
        !head.contains("upgrade") && !head.contains("http2"),
        "{head}"
    );
}

#[test]
fn an_invalid_switch_is_502() {
    for lines in [
        "",
        "upgrade: echo\r\n",
        "connection: upgrade\r\n",
        "connection: close\r\nupgrade: echo\r\n",
        "connection: upgrade\r\nupgrade: h2c\r\n",
        "connection: upgrade\r\nupgrade: echo, H2C\r\n",
        "connection: upgrade\r\nupgrade: websocket\r\n",
    ] {
        let (send, closed) = channel();
        let send = Mutex::new(send);
        let upstream = Upstream::start(move |connection| {
            connection.head().unwrap();
            connection.send(format!(
                "HTTP/1.1 101 Switching Protocols\r\n{lines}\r\nhello\n"
            ));
            connection.until_closed();
            send.lock().unwrap().send(()).unwrap();
        });
        let listener = TestListener::in_front_of(upstream.url());
        let mut client = listener.connect();
        client.send(UPGRADE_REQUEST);
        let answer = client.read_answer(false);
        assert_eq!(answer.status, 502, "{lines}");
        assert_eq!(answer.problem(), "invalid response from upstream");
        // The connection might use another protocol, so the proxy does not reuse it.
        let closed = closed.recv_timeout(Duration::from_secs(20));
        assert!(closed.is_ok(), "the connection stays open: {lines}");
    }
}

#[test]
fn an_http_1_0_client_cannot_upgrade() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send(UPGRADE_REQUEST.replace("HTTP/1.1", "HTTP/1.0"));
    assert_eq!(client.read_answer(false).status, 200);
    let head = &upstream.heads()[0];
    assert!(
        !head.contains("upgrade") && !head.contains("echo"),
        "{head}"
    );
}

#[test]
fn a_tunnel_counts_as_a_connection_until_it_closes() {
    let upstream = echo();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send(UPGRADE_REQUEST);
    client.read_until("hello\n");
    assert_eq!(listener.listener.open(), 1);
    client.send("end\n");
    client.until_closed();
    while listener.listener.open() > 0 {
        std::thread::yield_now();
    }
}
