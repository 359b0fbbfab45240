//! Arbitrary bytes as upstream responses on a keep-alive connection. They must be parsed or
//! rejected without a panic. The result must be the same whether a response arrives in one piece or
//! in several, and whether it arrives on this connection or on a new connection. If a parsed
//! response is written in canonical form and parsed again, the result must be the same.
//!
//! Each frame is a response. The frame's sender selects the request method, and its seconds select
//! the size of the pieces.

#![no_main]

mod frames;

use std::fmt::Write as _;

use http::{HeaderMap, Method, StatusCode, header::CONTENT_LENGTH};
use libfuzzer_sys::fuzz_target;
use tidegate_config::{Config, Proxy};
use tidegate_proxy::{ParsedResponse, ScriptedConnection};

use frames::frames;

const PROXY: &str = "
proxy: {listen: '127.0.0.1:0', max_head: 8KiB, max_headers: 16, upstreams: [{name: app, urls: 'http://127.0.0.1:1'}]}
";

/// Larger bounds, because the canonical form can be longer than the original response.
const WIDE: &str = "
proxy: {listen: '127.0.0.1:0', max_head: 64KiB, max_headers: 32, upstreams: [{name: app, urls: 'http://127.0.0.1:1'}]}
";

const METHODS: [Method; 3] = [Method::GET, Method::HEAD, Method::POST];

fuzz_target!(|input: &[u8]| {
    let (settings, wide) = (settings(PROXY), settings(WIDE));
    let mut whole = ScriptedConnection::open(&settings);
    let mut cut = ScriptedConnection::open(&settings);
    for frame in frames(input).take(16) {
        let method = &METHODS[frame.sender % METHODS.len()];
        let length = usize::try_from(frame.seconds).unwrap_or_default().max(1);
        let parsed = whole.send(method.clone(), [frame.message.to_vec()]);
        let pieces = frame.message.chunks(length).map(<[u8]>::to_vec);
        assert_alike(
            &parsed,
            &cut.send(method.clone(), pieces),
            "when it arrives in pieces",
        );
        let mut first = ScriptedConnection::open(&settings);
        let alone = first.send(method.clone(), [frame.message.to_vec()]);
        assert_alike(&parsed, &alone, "on a new connection");
        assert_eq!(whole.is_ready(), cut.is_ready());
        assert_eq!(whole.is_ready(), first.is_ready());
        assert_sound(&parsed, method, &wide);
        if !whole.is_ready() {
            return;
        }
        assert_eq!(
            parsed.problem, None,
            "a connection whose response failed is not reused"
        );
    }
});

fn settings(text: &str) -> Proxy {
    let config = Config::parse(text).expect("the settings above are valid");
    config.proxy.expect("they are those of a proxy")
}

fn assert_alike(parsed: &ParsedResponse, other: &ParsedResponse, when: &str) {
    let head = |parsed: &ParsedResponse| {
        let head = parsed.head.as_ref();
        head.map(|head| (head.status(), head.version(), head.headers().clone()))
    };
    assert_eq!(head(parsed), head(other), "{when}");
    assert_eq!(parsed.body, other.body, "{when}");
    assert_eq!(parsed.trailers, other.trailers, "{when}");
    assert_eq!(parsed.problem, other.problem, "{when}");
}

/// Checks that it is safe to forward the response, and that its canonical form has the same
/// meaning.
fn assert_sound(parsed: &ParsedResponse, method: &Method, wide: &Proxy) {
    let Some(head) = &parsed.head else {
        assert!(parsed.problem.is_some(), "neither a response nor a problem");
        return;
    };
    let headers = head.headers();
    for name in [
        "connection",
        "transfer-encoding",
        "keep-alive",
        "te",
        "upgrade",
    ] {
        assert!(!headers.contains_key(name), "{name}");
    }
    let length = headers.get(CONTENT_LENGTH);
    let length = length.map(|length| {
        length
            .to_str()
            .expect("a number")
            .parse::<u64>()
            .expect("a number")
    });
    let has_body = *method != Method::HEAD
        && !head.status().is_informational()
        && head.status() != StatusCode::NOT_MODIFIED;
    let came = u64::try_from(parsed.body.len()).expect("a length");
    match (length, &parsed.problem) {
        (Some(length), None) if has_body => {
            assert_eq!(came, length, "exactly Content-Length bytes")
        }
        (Some(length), Some(_)) if has_body => {
            assert!(came < length, "fewer than Content-Length bytes")
        }
        _ => assert!(
            has_body || came == 0,
            "a body on a response that cannot have one"
        ),
    }
    if parsed.problem.is_none() && head.status() != StatusCode::SWITCHING_PROTOCOLS {
        let mut again = ScriptedConnection::open(wide);
        let parsed_again = again.send(method.clone(), [plainly(parsed, has_body)]);
        assert_alike(&plain(parsed), &plain(&parsed_again), "in canonical form");
        assert!(again.is_ready(), "the canonical form has the same end");
    }
}

/// Writes the response in canonical form. If it can have a body, the body is a single chunk.
fn plainly(parsed: &ParsedResponse, has_body: bool) -> Vec<u8> {
    let head = parsed
        .head
        .as_ref()
        .expect("a complete response has a head");
    let mut octets = format!("HTTP/1.1 {}\r\n", head.status().as_u16()).into_bytes();
    let write = |octets: &mut Vec<u8>, headers: &HeaderMap| {
        for (name, value) in headers {
            octets.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
        }
    };
    let mut headers = head.headers().clone();
    headers.remove(CONTENT_LENGTH);
    write(&mut octets, &headers);
    if !has_body || head.status() == StatusCode::NO_CONTENT {
        octets.extend(b"\r\n");
        return octets;
    }
    octets.extend(b"transfer-encoding: chunked\r\n\r\n");
    if !parsed.body.is_empty() {
        let mut size = String::new();
        let _ = write!(size, "{:x}\r\n", parsed.body.len());
        octets.extend(size.into_bytes());
        octets.extend(&parsed.body);
        octets.extend(b"\r\n");
    }
    octets.extend(b"0\r\n");
    write(
        &mut octets,
        parsed.trailers.as_ref().unwrap_or(&HeaderMap::new()),
    );
    octets.extend(b"\r\n");
    octets
}

/// Removes the content length and the HTTP version, because equivalent responses may differ in
/// them.
fn plain(parsed: &ParsedResponse) -> ParsedResponse {
    let head = parsed.head.as_ref().map(|head| {
        let mut plain = http::Response::new(());
        *plain.status_mut() = head.status();
        *plain.headers_mut() = head.headers().clone();
        plain.headers_mut().remove(CONTENT_LENGTH);
        plain
    });
    ParsedResponse {
        head,
        body: parsed.body.clone(),
        trailers: parsed
            .trailers
            .clone()
            .filter(|trailers| !trailers.is_empty()),
        problem: parsed.problem.clone(),
    }
}
