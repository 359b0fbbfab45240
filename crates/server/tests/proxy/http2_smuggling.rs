//! Tests of HTTP/2 requests that would be ambiguous in HTTP/1.1. The tests write individual frames,
//! because no client library sends such requests.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use http_body_util::Full;
use hyper::Response;

use crate::{listener::TestListener, upstream::Upstream};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// The result of the first request on a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestResult {
    /// A response. The value is the first byte of the header block: the status, as an index into
    /// HPACK's static table.
    Response(u8),
    /// The stream was reset, or the connection closed.
    Reset,
}

pub(crate) const OK: RequestResult = RequestResult::Response(0x88);
const BAD_REQUEST: RequestResult = RequestResult::Response(0x8c);

pub(crate) fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![0, high, low, kind, flags, 0, 0, 0, stream];
    frame.extend_from_slice(payload);
    frame
}

/// Encodes header lines in HPACK as literals, without the dynamic table.
pub(crate) fn block(lines: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in lines {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// Sends a request with this head and body, and returns its result.
pub(crate) fn send_request(
    listener: &TestListener,
    lines: &[(&str, &str)],
    body: &[u8],
) -> RequestResult {
    let head = frame(HEADERS, END_HEADERS, 1, &block(lines));
    send_frames(listener, &[head, frame(DATA, END_STREAM, 1, body)].concat())
}

/// Sends the frames of the first request on a connection, and returns the request's result.
fn send_frames(listener: &TestListener, frames: &[u8]) -> RequestResult {
    let mut stream = TcpStream::connect(listener.listener.local_addr()).unwrap();
    let patience = Some(Duration::from_secs(30));
    stream.set_read_timeout(patience).unwrap();
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes.extend(frames);
    stream.write_all(&bytes).unwrap();
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            return RequestResult::Reset;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).unwrap();
        match head[3] {
            HEADERS => return RequestResult::Response(payload[0]),
            RST_STREAM | GOAWAY => return RequestResult::Reset,
            _ => {}
        }
    }
}

pub(crate) fn post<'l>(lines: &[(&'l str, &'l str)]) -> Vec<(&'l str, &'l str)> {
    const PSEUDO: [(&str, &str); 4] = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/p"),
        (":authority", "h"),
    ];
    [&PSEUDO, lines].concat()
}

#[test]
fn an_ambiguous_request_does_not_reach_the_upstream() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    let with = |name, value| {
        [
            (":method", "GET"),
            (":scheme", "http"),
            (":authority", "h"),
            (name, value),
        ]
        .to_vec()
    };
    let table = [
        (post(&[("content-length", "")]), "", BAD_REQUEST),
        (
            post(&[("content-length", "5"), ("content-length", "5")]),
            "hello",
            BAD_REQUEST,
        ),
        (
            post(&[("content-length", "5, 5")]),
            "hello",
            RequestResult::Reset,
        ),
        (
            post(&[("content-length", "5"), ("content-length", "6")]),
            "hello",
            RequestResult::Reset,
        ),
        (
            post(&[("content-length", "+5")]),
            "hello",
            RequestResult::Reset,
        ),
        (
            post(&[("content-length", "99999999999999999999")]),
            "hello",
            RequestResult::Reset,
        ),
        (
            post(&[("transfer-encoding", "chunked")]),
            "0\r\n\r\n",
            RequestResult::Reset,
        ),
        (post(&[("connection", "close")]), "", RequestResult::Reset),
        (post(&[("upgrade", "echo")]), "", RequestResult::Reset),
        (post(&[("te", "gzip")]), "", RequestResult::Reset),
        (post(&[("Upper", "x")]), "", RequestResult::Reset),
        (post(&[("a", "b\r\nc: d")]), "", RequestResult::Reset),
        (post(&[("a b", "c")]), "", RequestResult::Reset),
        (post(&[("", "c")]), "", RequestResult::Reset),
        (post(&[(":path", "/q")]), "", RequestResult::Reset),
        (with(":path", ""), "", RequestResult::Reset),
        (with(":path", "/a b"), "", RequestResult::Reset),
        (with(":path", "*"), "", BAD_REQUEST),
        (with(":path", "a"), "", RequestResult::Reset),
        (with("a", "no path"), "", RequestResult::Reset),
        (post(&[("host", "h"), ("host", "i")]), "", BAD_REQUEST),
        (post(&[("a", "b ")]), "", BAD_REQUEST),
        (post(&[("a", " b")]), "", BAD_REQUEST),
        (post(&[("a", "b\t")]), "", BAD_REQUEST),
        (post(&[("a", "\t")]), "", BAD_REQUEST),
        (post(&[("a\"", "b")]), "", BAD_REQUEST),
    ];
    let wrong: Vec<_> = table
        .iter()
        .map(|(lines, body, status)| {
            (
                lines,
                send_request(&listener, lines, body.as_bytes()),
                status,
            )
        })
        .filter(|(_, status, expected)| status != *expected)
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(upstream.heads(), [""; 0]);
}

/// The host in the target takes precedence over `Host`. Leading zeros in a length are removed.
#[test]
fn a_valid_request_is_forwarded_in_one_form() {
    let upstream = Upstream::ok();
    let listener = TestListener::in_front_of(upstream.url());
    for lines in [
        post(&[("content-length", "5"), ("host", "other")]),
        post(&[("content-length", "0005")]),
    ] {
        assert_eq!(send_request(&listener, &lines, b"hello"), OK, "{lines:?}");
    }
    assert_eq!(send_request(&listener, &post(&[]), b""), OK);
    let heads = upstream.heads();
    for head in &heads[..2] {
        assert_eq!(head.matches("\r\nhost: h\r\n").count(), 1, "{head}");
        assert_eq!(head.matches("\r\nhost:").count(), 1, "{head}");
        assert_eq!(head.matches("content-length: 5").count(), 1, "{head}");
        assert_eq!(head.matches("content-length").count(), 1, "{head}");
        assert!(!head.contains("transfer-encoding"), "{head}");
    }
    assert!(heads[2].contains("transfer-encoding: chunked"), "{heads:?}");
}

/// Request trailers are dropped, so pseudo-headers in trailers cannot change the request.
#[test]
fn pseudo_headers_in_request_trailers_are_not_forwarded() {
    let over_http2 = |_| async { Response::new(Full::default()) };
    let upstreams = [
        (Upstream::over_http2(over_http2), "http2: true,"),
        (Upstream::ok_after_chunks(), ""),
    ];
    for (upstream, settings) in upstreams {
        let listener = TestListener::open(&format!(
            "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, {settings} urls: '{}'}}]}}\n",
            upstream.url()
        ));
        let forwarded: &[&[(&str, &str)]] = &[
            &[],
            &[("x-sum", "7")],
            &[(":path", "/q")],
            &[
                (":method", "PUT"),
                (":scheme", "https"),
                (":path", "/q"),
                (":authority", "i"),
            ],
            &[(":status", "500"), ("x-sum", "7")],
        ];
        for trailers in forwarded {
            let trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(trailers));
            let request = [
                frame(HEADERS, END_HEADERS, 1, &block(&post(&[]))),
                frame(DATA, 0, 1, b"hello"),
                trailers,
            ];
            assert_eq!(send_frames(&listener, &request.concat()), OK);
        }
        let heads = upstream.heads();
        assert_eq!(heads.len(), forwarded.len());
        assert!(heads[0].starts_with("POST /p HTTP/"), "{heads:?}");
        assert!(heads.iter().all(|head| *head == heads[0]), "{heads:#?}");
    }
}
