//! Tests of forwarding headers and hop-by-hop headers.

use std::sync::{Arc, OnceLock};

use crate::{client::Client, listener::TestListener, upstream::Upstream};

/// Returns the header lines that reach the upstream, sorted and without the request line.
fn forwarded_headers(settings: &str, identity: &str, headers: &[(&str, &str)]) -> Vec<String> {
    let upstream = Upstream::ok();
    let text = format!(
        "{identity}\nproxy:\n  listen: 127.0.0.1:0\n  {settings}\n  upstreams: [{{name: app, urls: [\"{}\"]}}]\n",
        upstream.url()
    );
    let listener = TestListener::open(&text);
    assert_eq!(listener.connect().ask("GET", "/", headers, b"").status, 200);
    let head = &upstream.heads()[0];
    let mut lines: Vec<String> = head.lines().skip(1).map(str::to_owned).collect();
    lines.retain(|line| line != "content-length: 0");
    lines.sort();
    lines
}

#[test]
fn an_untrusted_client_cannot_set_its_address() {
    let claims = [
        ("host", "h.example"),
        ("x-forwarded-for", "6.6.6.6"),
        ("x-forwarded-proto", "https"),
        ("x-real-ip", "6.6.6.6"),
        ("forwarded", "for=6.6.6.6"),
        ("connection", "x-forwarded-for"),
    ];
    let expected = [
        "host: h.example",
        "via: 1.1 tidegate",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-host: h.example",
        "x-forwarded-proto: http",
    ];
    assert_eq!(forwarded_headers("", "", &claims), expected);
}

#[test]
fn host_is_the_first_header_line() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    let headers = [("a", "1"), ("host", "h.example"), ("b", "2")];
    assert_eq!(
        listener.connect().ask("GET", "/", &headers, b"").status,
        200
    );
    let heads = upstream.heads();
    assert_eq!(heads[0].lines().nth(1), Some("host: h.example"));
    assert_eq!(heads[0].matches("host: ").count(), 2, "{}", heads[0]);
}

#[test]
fn forwarding_headers_of_a_trusted_proxy_are_extended() {
    let claims = [
        ("host", "h.example"),
        ("x-forwarded-for", "203.0.113.9"),
        ("x-forwarded-proto", "https"),
    ];
    let expected = [
        "forwarded: for=127.0.0.1;proto=http;host=\"h.example\"",
        "host: h.example",
        "via: 1.1 tidegate",
        "x-forwarded-for: 203.0.113.9, 127.0.0.1",
        "x-forwarded-host: h.example",
        "x-forwarded-proto: https",
    ];
    let believed = "clients: {proxies: [127.0.0.0/8]}";
    assert_eq!(
        forwarded_headers("forwarded: both", believed, &claims),
        expected
    );
}

#[test]
fn hop_by_hop_request_headers_are_not_forwarded() {
    let asked = [
        ("host", "h"),
        ("connection", "keep-alive, x-secret"),
        ("x-secret", "1"),
        ("keep-alive", "timeout=5"),
        ("te", "gzip"),
        ("proxy-authorization", "Basic x"),
        ("upgrade", "h2c"),
        ("authorization", "Bearer x"),
    ];
    let forwarded_headers = forwarded_headers("", "", &asked);
    let names: Vec<&str> = forwarded_headers
        .iter()
        .map(|line| line.split(':').next().unwrap())
        .collect();
    let kept = [
        "authorization",
        "host",
        "via",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
    ];
    assert_eq!(names, kept);
}

#[test]
fn hop_by_hop_response_headers_are_not_forwarded() {
    let upstream = Upstream::responding_with(
        "HTTP/1.1 200 OK\r\nconnection: x-hop, keep-alive\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nupgrade: h2c\r\nproxy-authenticate: Basic\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ncontent-length: 0\r\n\r\n",
    );
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    let head = client.read_until("\r\n\r\n");
    for gone in [
        "connection",
        "x-hop",
        "keep-alive",
        "upgrade",
        "proxy-authenticate",
    ] {
        assert!(!head.contains(&format!("\r\n{gone}:")), "{head}");
    }
    assert!(
        head.contains("set-cookie: a=1\r\nset-cookie: b=2\r\n"),
        "{head}"
    );
}

#[test]
fn the_host_of_an_absolute_target_wins_over_the_host_header() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("GET http://other.example/p?q HTTP/1.1\r\nhost: h.example\r\n\r\n");
    client.read_until("\r\n\r\n");
    let head = &upstream.heads()[0];
    assert!(head.starts_with("GET /p?q HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("\r\nhost: other.example"), "{head}");
    assert_eq!(head.matches("\r\nhost:").count(), 1, "{head}");
}

#[test]
fn via_lists_the_proxies_of_a_message() {
    let upstream = Upstream::responding_with(
        "HTTP/1.0 200 OK\r\nvia: 1.1 inner\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n",
    );
    for (setting, forwarded_headers, answered) in [
        ("", Some("1.0 other, 1.1 tidegate"), Some("1.0 tidegate")),
        (
            "via: edge-1",
            Some("1.0 other, 1.1 edge-1"),
            Some("1.0 edge-1"),
        ),
        ("via: off", Some("1.0 other"), None),
    ] {
        let listener = TestListener::with(upstream.url(), setting);
        let mut client = listener.connect();
        client.send("GET / HTTP/1.1\r\nhost: h\r\nvia: 1.0 other\r\n\r\n");
        let head = client.read_until("\r\n\r\n");
        let via: Vec<_> = head
            .lines()
            .filter_map(|line| line.strip_prefix("via: "))
            .collect();
        let expected: Vec<_> = ["1.1 inner"].into_iter().chain(answered).collect();
        assert_eq!(via, expected, "{setting}");
        let heads = upstream.heads();
        let lines = heads.last().unwrap().lines();
        let via = lines
            .filter_map(|line| line.strip_prefix("via: "))
            .next_back();
        assert_eq!(via, forwarded_headers, "{setting}");
    }
}

/// Tests a proxy that forwards requests to itself through a relay.
#[test]
fn a_request_in_a_proxy_loop_is_rejected() {
    let ring = Arc::new(OnceLock::new());
    let entrance = Arc::clone(&ring);
    let upstream = Upstream::start(move |connection| {
        while let Some(head) = connection.head() {
            let mut client = Client::connect(*entrance.get().unwrap());
            client.send(format!("{head}\r\n\r\n"));
            let status = client.read_answer(false).status;
            connection.send(format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n"));
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    ring.set(listener.listener.local_addr()).unwrap();
    assert_eq!(listener.get("/").status, 508);
    assert_eq!(upstream.heads().len(), 4);
}
