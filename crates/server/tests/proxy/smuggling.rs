//! Tests of HTTP/1.1 request smuggling: ambiguous messages are rejected, or forwarded in an
//! unambiguous form.

use crate::{listener::TestListener, upstream::Upstream};

/// Sends these bytes. Returns the bytes that the client receives, and the heads that reach the
/// upstream.
fn smuggled(bytes: &str) -> (String, Vec<String>) {
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            if head.contains("transfer-encoding: chunked") {
                connection.until("0\r\n\r\n");
            }
            connection.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        }
    });
    let listener = TestListener::with(
        upstream.url(),
        "timeouts: {request_head: 300ms, keep_alive: 300ms}",
    );
    let mut client = listener.connect();
    client.send_what_fits(bytes);
    (client.until_closed(), upstream.heads())
}

#[test]
fn an_ambiguous_request_does_not_reach_the_upstream() {
    for bytes in [
        "POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 5, 6\r\n\r\nhello!",
        "POST / HTTP/1.1\r\nhost: h\r\ncontent-length: +5\r\n\r\nhello",
        "POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0x5\r\n\r\nhello",
        "POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\nhello",
        "POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999999999999999\r\n\r\nhello",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip\r\n\r\nhello",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.0\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: h\r\na: b\r\n folded: c\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: h\r\na\0: b\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: h\r\na: b\rc\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: h\r\n: b\r\n\r\n",
        "GET / HTTP/1.1\r\n host: h\r\n\r\n",
        "GET * HTTP/1.1\r\nhost: h\r\n\r\n",
        "GET a HTTP/1.1\r\nhost: h\r\n\r\n",
        "GET /a b HTTP/1.1\r\nhost: h\r\n\r\n",
        "GET / HTTP/9.9\r\nhost: h\r\n\r\n",
        "\0\0\0\0",
    ] {
        let (answer, heads) = smuggled(bytes);
        assert!(
            heads.is_empty(),
            "{bytes:?} reached the upstream: {heads:?}"
        );
        assert!(answer.starts_with("HTTP/1.1 400 "), "{bytes:?}: {answer:?}");
    }
}

#[test]
fn a_request_has_exactly_one_host() {
    for (bytes, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\nhost: \r\n\r\n", "400"),
        ("GET http://u@h/ HTTP/1.1\r\nhost: h\r\n\r\n", "400"),
        ("CONNECT h:443 HTTP/1.1\r\nhost: h:443\r\n\r\n", "501"),
    ] {
        let (answer, heads) = smuggled(bytes);
        assert!(heads.is_empty(), "{bytes:?}");
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{bytes:?}: {answer}"
        );
    }
}

/// `Transfer-Encoding` takes precedence (RFC 9112). The proxy drops a `Content-Length` in the same
/// request, so that the upstream cannot misinterpret where the message ends.
#[test]
fn content_length_beside_transfer_encoding_is_dropped() {
    for lengths in [
        "content-length: 3\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 3",
    ] {
        let bytes = format!("POST / HTTP/1.1\r\nhost: h\r\n{lengths}\r\n\r\n2\r\nhi\r\n0\r\n\r\n");
        let (answer, heads) = smuggled(&bytes);
        assert_eq!(heads.len(), 1, "{heads:?}");
        assert!(!heads[0].contains("content-length"), "{heads:?}");
        assert!(heads[0].contains("transfer-encoding: chunked"), "{heads:?}");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }
}

#[test]
fn an_invalid_chunk_ends_the_connection() {
    for chunks in [
        "zz\r\n\r\n",
        "5\r\nhelloX",
        "-1\r\n\r\n",
        "fffffffffffffffff\r\n",
        // If a line ends in CR CR LF, some parsers end it at the first CR.
        "1\r\r\na\r\n0\r\n\r\n",
        "1;x\r\r\na\r\n0\r\n\r\n",
        "1 \r\r\na\r\n0\r\n\r\n",
        "1\r\na\r\r\n0\r\n\r\n",
        "1\r\na\r\n0\r\r\n\r\n",
        "1\r\na\r\n0;x\r\r\n\r\n",
        "1\r\na\r\n0\r\n\r\r\n",
        "1\r\na\r\n0\r\nx: y\r\r\n\r\n",
    ] {
        let upstream = Upstream::silent();
        let listener = TestListener::with(upstream.url(), "timeouts: {idle: 300ms}");
        let mut client = listener.connect();
        client.send(format!(
            "POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n{chunks}"
        ));
        let answer = client.read_answer(false);
        assert_eq!(answer.status, 400, "{chunks:?}");
    }
}
