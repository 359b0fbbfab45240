//! Tests that requests and responses are forwarded unchanged.

use std::{
    io::{Read as _, Write as _},
    sync::{Mutex, mpsc::channel},
    time::Duration,
};

use crate::{client::Client, listener::TestListener, upstream::Upstream};

#[test]
fn a_request_and_its_response_are_forwarded() {
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            assert!(
                head.starts_with("POST /a/%2e%2e/b?q=1&q=%20 HTTP/1.1\r\n"),
                "{head}"
            );
            assert_eq!(connection.read_bytes(5), b"hello");
            connection
                .send("HTTP/1.1 418 Whatever\r\ncontent-length: 5\r\nx-answer: 1\r\n\r\nworld");
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for _ in 0..3 {
        let answer = client.ask(
            "POST",
            "/a/%2e%2e/b?q=1&q=%20",
            &[("x-asked", "1")],
            b"hello",
        );
        assert_eq!((answer.status, &*answer.body), (418, "world"));
        assert_eq!(answer.header("x-answer"), Some("1"));
    }
    assert!(upstream.heads()[0].contains("\r\nx-asked: 1"));
}

#[test]
fn chunks_are_streamed_in_both_directions() {
    let upstream = Upstream::start(|connection| {
        let head = connection.head().unwrap();
        assert!(head.contains("transfer-encoding: chunked"), "{head}");
        // The proxy streams the body: each chunk arrives at the upstream before the client sends
        // the next chunk.
        assert_eq!(connection.until("one\r\n"), "3\r\none\r\n");
        connection.send(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\neins\r\n"
                .replace("3\r\neins", "4\r\neins"),
        );
        assert_eq!(connection.until("two\r\n"), "3\r\ntwo\r\n");
        connection.send("4\r\nzwei\r\n");
        assert_eq!(connection.until("\r\n\r\n"), "0\r\n\r\n");
        connection.send("0\r\n\r\n");
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n");
    assert!(
        client
            .read_until("4\r\neins\r\n")
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
    client.send("3\r\ntwo\r\n");
    assert_eq!(client.read_until("zwei\r\n"), "4\r\nzwei\r\n");
    client.send("0\r\n\r\n");
    assert_eq!(client.read_until("0\r\n\r\n"), "0\r\n\r\n");
}

/// Rules do not see trailers. Some upstreams merge trailers into the headers, so request trailers
/// must not be forwarded.
#[test]
fn request_trailers_are_dropped_and_response_trailers_are_forwarded() {
    let upstream = Upstream::start(|connection| {
        let head = connection.head().unwrap();
        assert!(head.contains("te: trailers"), "{head}");
        let body = connection.until("0\r\n");
        assert_eq!(body, "2\r\nhi\r\n0\r\n");
        assert_eq!(connection.line().as_deref(), Some("\r\n"));
        connection.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-total\r\n\r\n2\r\nho\r\n0\r\nx-total: 9\r\n\r\n");
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\nte: trailers\r\nconnection: te\r\ntrailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx-sum: 7\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n");
    let answer = client.read_until("x-total: 9\r\n\r\n");
    assert!(
        answer.ends_with("2\r\nho\r\n0\r\nx-total: 9\r\n\r\n"),
        "{answer}"
    );
    let head = &upstream.heads()[0];
    assert!(!head.contains("trailer:"), "{head}");
}

#[test]
fn a_head_response_keeps_its_content_length() {
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n");
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for _ in 0..2 {
        let answer = client.ask("HEAD", "/", &[], b"");
        assert_eq!(
            (answer.status, answer.header("content-length")),
            (200, Some("1234"))
        );
    }
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn responses_without_a_body_are_forwarded() {
    for answer in [
        "HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n",
    ] {
        let upstream = Upstream::responding_with(answer);
        let listener = TestListener::in_front_of(upstream.url());
        let mut client = listener.connect();
        for _ in 0..2 {
            let passed = client.ask("GET", "/", &[], b"");
            assert!(answer.contains(&passed.status.to_string()));
            assert_eq!(passed.header("content-length"), None);
        }
        assert_eq!(upstream.connections(), 1);
    }
}

#[test]
fn a_body_that_ends_with_its_connection_is_forwarded() {
    let upstream = Upstream::start(|connection| {
        connection.head().unwrap();
        connection.send("HTTP/1.0 200 OK\r\n\r\nall of it");
        connection.close();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    let answer = client.read_until("0\r\n\r\n");
    assert!(
        answer.contains("transfer-encoding: chunked\r\n"),
        "{answer}"
    );
    assert!(answer.ends_with("9\r\nall of it\r\n0\r\n\r\n"), "{answer}");
}

#[test]
fn expect_100_continue_is_answered_before_the_body_arrives() {
    let upstream = Upstream::start(|connection| {
        let head = connection.head().unwrap();
        assert!(!head.contains("expect"), "{head}");
        assert_eq!(connection.read_bytes(2), b"hi");
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n");
    assert_eq!(
        client.read_until("\r\n\r\n"),
        "HTTP/1.1 100 Continue\r\n\r\n"
    );
    client.send("hi");
    assert!(
        client
            .read_until("\r\n\r\n")
            .starts_with("HTTP/1.1 200 OK\r\n")
    );
}

#[test]
fn an_interim_response_is_not_the_final_response() {
    let upstream = Upstream::start(|connection| {
        connection.head().unwrap();
        connection.send("HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    assert_eq!(listener.get("/").body, "ok");
}

#[test]
fn an_http_1_0_client_is_served() {
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let listener = TestListener::in_front_of(upstream.url());
    let mut client: Client = listener.connect();
    client.send("GET / HTTP/1.0\r\nhost: h\r\n\r\n");
    let answer = client.until_closed();
    assert!(
        answer.starts_with("HTTP/1.0 200 OK\r\n") && answer.ends_with("\r\n\r\nok"),
        "{answer}"
    );
}

#[test]
fn a_shutdown_waits_for_a_response_in_progress() {
    let (send, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        wait.lock().unwrap().recv().unwrap();
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate");
        connection.until_closed();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        std::thread::yield_now();
    }
    let ended = std::thread::spawn(move || listener.shut_down());
    send.send(()).unwrap();
    assert!(client.until_closed().ends_with("\r\n\r\nlate"));
    assert_eq!(ended.join().unwrap(), 0, "nothing was dropped");
}

/// The proxy forwards the response before the request body is complete, and drops the rest of the
/// body. If the proxy waited for the body, the client could occupy the upstream connection for as
/// long as it wants.
#[test]
fn an_early_response_ends_the_request_body() {
    let (send, closed) = channel();
    let send = Mutex::new(send);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nearly");
        connection.until_closed();
        send.lock().unwrap().send(()).unwrap();
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    client.send("PUT / HTTP/1.1\r\nhost: h\r\ncontent-length: 6\r\n\r\nabc");
    let answer = client.read_answer(false);
    assert_eq!((answer.status, &*answer.body), (200, "early"));
    // The client sends nothing more, and keeps its connection open.
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
    drop(client);
}

/// The proxy forwards a response that arrives after it has given up sending the request, and closes
/// the connection.
#[test]
fn an_upstream_that_stops_reading_can_still_respond() {
    const LENGTH: usize = 64 << 20;
    let (send, closed) = channel();
    let send = Mutex::new(send);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        // The response is sent after the proxy's write timeout.
        std::thread::park_timeout(Duration::from_secs(1));
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate");
        let mut rest = Vec::new();
        let _ = connection.stream.read_to_end(&mut rest);
        send.lock().unwrap().send(rest.len()).unwrap();
    });
    let listener = TestListener::with(upstream.url(), "timeouts: {idle: 200ms}");
    let mut client = listener.connect();
    client.send(format!(
        "PUT / HTTP/1.1\r\nhost: h\r\ncontent-length: {LENGTH}\r\n\r\n"
    ));
    let mut stream = client.clone_stream();
    let sending = std::thread::spawn(move || {
        let body = vec![b'x'; LENGTH];
        // The proxy closes the connection before it has read the whole body.
        assert!(stream.write_all(&body).is_err());
    });
    let answer = client.read_answer(false);
    assert_eq!((answer.status, &*answer.body), (200, "late"));
    let received = closed.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(received < LENGTH, "the whole request was sent");
    sending.join().unwrap();
}

/// hyper 1.12 reads a request that follows trailers as additional trailers, and would silently drop
/// it.
#[test]
fn a_request_after_trailers_is_not_silently_dropped() {
    const TRAILERS: &str = "transfer-encoding: chunked\r\n\r\n0\r\nx: y\n\n";
    const NEXT: &str = "GET /second HTTP/1.1\r\nhost: h\r\n\r\n";
    let denying = "rules: [{name: all, when: {path: /denied}, key: [ip], limits: [1/d]}]";
    for path in ["/", "/denied"] {
        let upstream = Upstream::start(|connection| {
            while let Some(head) = connection.head() {
                if head.contains("chunked") {
                    connection.until("\r\n\r\n");
                }
                connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
            }
        });
        let listener = TestListener::open(&format!(
            "{denying}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: '{}'}}]}}\n",
            upstream.url()
        ));
        listener.get("/denied");
        let mut client = listener.connect();
        client.send(format!(
            "POST {path} HTTP/1.1\r\nhost: h\r\n{TRAILERS}{NEXT}"
        ));
        let head = client.read_until("\r\n\r\n");
        assert!(head.contains("\r\nconnection: close\r\n"), "{head}");
        client.until_closed();
        assert!(!upstream.heads().iter().any(|head| head.contains("second")));
    }
}

#[test]
fn a_chunked_request_without_trailers_keeps_its_connection() {
    let upstream = Upstream::start(|connection| {
        while connection.head().is_some() {
            connection.until("0\r\n\r\n");
            connection.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        }
    });
    let listener = TestListener::in_front_of(upstream.url());
    let mut client = listener.connect();
    for _ in 0..3 {
        client.send(
            "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        );
        let answer = client.read_answer(false);
        assert_eq!((answer.status, answer.header("connection")), (200, None));
    }
    assert_eq!(
        (listener.listener.accepted(), upstream.connections()),
        (1, 1)
    );
}
