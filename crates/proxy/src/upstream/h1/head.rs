//! Writes request heads and parses response heads.

use std::mem::MaybeUninit;

use bytes::{Buf as _, BufMut, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Version,
    header::{CONTENT_LENGTH, HOST},
    request::Parts,
};
use httparse::{Header, ParserConfig, Status};
use tidegate_config::Proxy;

use super::{InvalidResponse, framing::Framing};
use crate::headers::{forwarded::ForwardingHeaders, lookup};

/// The maximum size of a response head in bytes, and its maximum number of header lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadLimits {
    pub(super) bytes: usize,
    pub(super) headers: usize,
}

impl HeadLimits {
    pub(super) const fn of(settings: &Proxy) -> Self {
        Self {
            bytes: settings.max_head,
            headers: settings.max_headers,
        }
    }
}

/// Caches the header lines of the last response, except long lines. Responses from one upstream
/// have many lines in common. If a line equals the line at the same position in the last response,
/// the cached name and value are used.
#[derive(Default)]
pub(super) struct HeaderLineCache(Vec<Option<CachedHeaderLine>>);

/// The maximum length of a cached line in bytes. The maximum bounds the memory that an idle
/// connection uses.
const MAX_CACHED_LINE_BYTES: usize = 256;

struct CachedHeaderLine {
    /// The line as received, without its CR LF.
    bytes: Bytes,
    name: HeaderName,
    /// The header's value, which shares the memory of `bytes`.
    value: HeaderValue,
}

impl HeaderLineCache {
    /// Returns the name and value of `header`, the line at index `at` in `head`. The caller must
    /// read the lines of a head in order.
    fn read(
        &mut self,
        at: usize,
        header: &Header<'_>,
        head: &[u8],
    ) -> Result<(HeaderName, HeaderValue), InvalidResponse> {
        let start = header.name.as_ptr().addr() - head.as_ptr().addr();
        let value = header.value.as_ptr().addr() - head.as_ptr().addr();
        // `bytes` contains the line from the first byte of the name to the last byte of the value.
        let bytes = &head[start..value + header.value.len()];
        if let Some(Some(line)) = self.0.get(at)
            && line.bytes == bytes
        {
            return Ok((line.name.clone(), line.value.clone()));
        }
        let bytes = Bytes::copy_from_slice(bytes);
        let name = name_of(header)?;
        let value = HeaderValue::from_maybe_shared(bytes.slice(value - start..));
        let value = value.map_err(|_| InvalidResponse::Head(httparse::Error::HeaderValue))?;
        let line = (bytes.len() <= MAX_CACHED_LINE_BYTES).then(|| CachedHeaderLine {
            bytes,
            name: name.clone(),
            value: value.clone(),
        });
        match self.0.get_mut(at) {
            Some(cache) => *cache = line,
            None => self.0.push(line),
        }
        Ok((name, value))
    }
}

/// The number of headers that the proxy adds to most responses.
const ADDED_HEADERS: usize = 4;

/// The number of header lines that can be parsed without a heap allocation.
const FEW_HEADERS: usize = 100;

/// Writes the head of a request with this body `framing`, and with the forwarding headers of
/// `client`.
pub(super) fn write(
    head: &mut Parts,
    client: Option<&ForwardingHeaders>,
    framing: &Framing,
    to: &mut BytesMut,
) {
    let target = head
        .uri
        .path_and_query()
        .map_or("/", |target| target.as_str());
    to.reserve(512);
    to.put_slice(head.method.as_str().as_bytes());
    to.put_u8(b' ');
    to.put_slice(target.as_bytes());
    to.put_slice(b" HTTP/1.1\r\n");
    // `Host` should be the first header (RFC 9110, section 7.2).
    if let Some(host) = lookup::first(&head.headers, &HOST) {
        write_line(&HOST, host, to);
    }
    if let Some(client) = client {
        client.emit(head.version, &mut head.headers, |name, value| {
            write_line(name, value, to);
        });
    }
    let mut has_length = false;
    for (name, value) in &head.headers {
        if name == CONTENT_LENGTH {
            has_length = true;
        } else if name != HOST {
            write_line(name, value, to);
        }
    }
    // Derive the framing headers from the actual framing, not from the client's headers.
    match framing {
        Framing::Chunked => to.put_slice(b"transfer-encoding: chunked\r\n"),
        Framing::Length(length) => {
            to.put_slice(b"content-length: ");
            to.put_slice(itoa::Buffer::new().format(*length).as_bytes());
            to.put_slice(b"\r\n");
        }
        Framing::Nothing if has_length => to.put_slice(b"content-length: 0\r\n"),
        Framing::Nothing | Framing::Close => {}
    }
    to.put_slice(b"\r\n");
}

fn write_line(name: &HeaderName, value: &HeaderValue, to: &mut BytesMut) {
    to.put_slice(name.as_str().as_bytes());
    to.put_slice(b": ");
    to.put_slice(value.as_bytes());
    to.put_slice(b"\r\n");
}

/// Parses a response head and removes it from `received`. Returns `None` if the head is incomplete.
pub(super) fn parse(
    received: &mut BytesMut,
    limits: HeadLimits,
    cache: &mut HeaderLineCache,
) -> Result<Option<Response<()>>, InvalidResponse> {
    if received.is_empty() {
        return Ok(None);
    }
    let head = if limits.headers <= FEW_HEADERS {
        let mut room = [const { MaybeUninit::uninit() }; FEW_HEADERS];
        read(received, limits.bytes, &mut room[..limits.headers], cache)
    } else {
        let mut room = vec![MaybeUninit::uninit(); limits.headers];
        read(received, limits.bytes, &mut room, cache)
    };
    let Some((length, response)) = head? else {
        // Reject an incomplete head as soon as it exceeds the maximum.
        return if received.len() > limits.bytes {
            Err(InvalidResponse::HeadTooLarge)
        } else {
            Ok(None)
        };
    };
    received.advance(length);
    Ok(Some(response))
}

/// Parses a response head of at most `bytes` bytes. Returns the response and the length of the
/// head.
fn read<'b>(
    received: &'b [u8],
    bytes: usize,
    room: &mut [MaybeUninit<Header<'b>>],
    cache: &mut HeaderLineCache,
) -> Result<Option<(usize, Response<()>)>, InvalidResponse> {
    let mut parsed = httparse::Response::new(&mut []);
    let status =
        ParserConfig::default().parse_response_with_uninit_headers(&mut parsed, received, room);
    let length = match status {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(InvalidResponse::HeadTooLarge),
        Err(error) => return Err(InvalidResponse::Head(error)),
    };
    if length > bytes {
        return Err(InvalidResponse::HeadTooLarge);
    }
    let mut response = Response::new(());
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    *response.status_mut() = status.ok_or(InvalidResponse::Head(httparse::Error::Status))?;
    let is_new = parsed.version == Some(1);
    *response.version_mut() = if is_new {
        Version::HTTP_11
    } else {
        Version::HTTP_10
    };
    // Reserve room for the headers that are added later: the rate limit headers and `Via`.
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + ADDED_HEADERS);
    let mut count = 0;
    for header in parsed.headers.iter() {
        if !(is_new && is_keep_alive(header)) {
            let (name, value) = cache.read(count, header, received)?;
            headers.append(name, value);
            count += 1;
        }
    }
    cache.0.truncate(count);
    *response.headers_mut() = headers;
    Ok(Some((length, response)))
}

/// Returns whether the line is `Connection: keep-alive`. Most upstreams send `Connection:
/// keep-alive`, although it is redundant in HTTP/1.1. The parser skips the line, so it need not be
/// removed later.
fn is_keep_alive(header: &Header<'_>) -> bool {
    header.name.eq_ignore_ascii_case("connection") && header.value == b"keep-alive"
}

/// Converts a header line without using the cache.
pub(super) fn read_line(header: &Header<'_>) -> Result<(HeaderName, HeaderValue), InvalidResponse> {
    let value = HeaderValue::from_bytes(header.value);
    let value = value.map_err(|_| InvalidResponse::Head(httparse::Error::HeaderValue))?;
    Ok((name_of(header)?, value))
}

fn name_of(header: &Header<'_>) -> Result<HeaderName, InvalidResponse> {
    HeaderName::from_bytes(header.name.as_bytes())
        .map_err(|_| InvalidResponse::Head(httparse::Error::HeaderName))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: HeadLimits = HeadLimits {
        bytes: 64,
        headers: 2,
    };

    fn parsed(bytes: impl AsRef<[u8]>) -> Result<Option<Response<()>>, InvalidResponse> {
        parse(
            &mut BytesMut::from(bytes.as_ref()),
            LIMITS,
            &mut HeaderLineCache::default(),
        )
    }

    #[test]
    fn a_head_is_consumed_and_the_rest_stays() {
        let mut received = BytesMut::from("HTTP/1.1 404 Not Found\r\na: 1\r\nA:  x y \r\n\r\nbody");
        let response = parse(&mut received, LIMITS, &mut HeaderLineCache::default())
            .unwrap()
            .unwrap();
        assert_eq!(
            (response.status(), response.version()),
            (StatusCode::NOT_FOUND, Version::HTTP_11)
        );
        let values: Vec<_> = response.headers().get_all("a").iter().collect();
        assert_eq!(values, ["1", "x y"]);
        assert_eq!(received, "body");
    }

    #[test]
    fn status_lines_may_differ_from_the_usual_form() {
        for (line, expected) in [
            ("HTTP/1.1 200 OK\r\n".as_bytes(), 200),
            (b"HTTP/1.1 404 not\there\r\n", 404),
            (b"HTTP/1.1 404 \x80\xff\r\n", 404),
            (b"HTTP/1.1 200 \r\n", 200),
            (b"HTTP/1.1 200\r\n", 200),
            (b"HTTP/1.1 100 Continue\r\n", 100),
            (b"HTTP/1.1 999 X\r\n", 999),
            (b"\r\n\n\r\nHTTP/1.1 200 OK\r\n", 200),
            (b"HTTP/1.1 200 OK\n", 200),
            (b"HTTP/1.1 200\n", 200),
        ] {
            let head = [line, b"a: 1\r\n\r\n"].concat();
            let text = head.escape_ascii();
            let response = parsed(&head).unwrap();
            let response = response.unwrap_or_else(|| panic!("incomplete: {text}"));
            assert_eq!(response.status().as_u16(), expected, "{text}");
            assert_eq!(response.headers().get("a").unwrap(), "1", "{text}");
        }
    }

    #[test]
    fn header_lines_may_differ_from_the_usual_form() {
        for (lines, expected) in [
            ("a: 1\r\n\r\n".as_bytes(), &b"1"[..]),
            (b"a:\r\n\r\n", b""),
            (b"a: \t\r\n\r\n", b""),
            (b"a: 1\t2\r\n\r\n", b"1\t2"),
            (b"a: caf\xe9\r\n\r\n", b"caf\xe9"),
            (b"a: \x80\xff\r\n\r\n", b"\x80\xff"),
            (b"a: 1\n\r\n", b"1"),
            (b"a: 1\r\n\n", b"1"),
            (b"a: 1\n\n", b"1"),
        ] {
            let head = [b"HTTP/1.1 200 OK\r\n", lines].concat();
            let text = head.escape_ascii();
            let response = parsed(&head).unwrap();
            let response = response.unwrap_or_else(|| panic!("incomplete: {text}"));
            assert_eq!(response.headers().get("a").unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn a_redundant_keep_alive_is_dropped() {
        for (version, lines, expected) in [
            ("1.1", "Connection: keep-alive\r\n", vec![]),
            (
                "1.1",
                "connection: keep-alive\r\nConnection: close\r\n",
                vec!["close"],
            ),
            (
                "1.1",
                "connection: keep-alive, a\r\n",
                vec!["keep-alive, a"],
            ),
            ("1.0", "connection: keep-alive\r\n", vec!["keep-alive"]),
        ] {
            let response = parsed(format!("HTTP/{version} 200 OK\r\n{lines}\r\n"));
            let response = response.unwrap().unwrap();
            let values: Vec<_> = response.headers().get_all("connection").iter().collect();
            assert_eq!(values, expected, "{version} {lines}");
        }
    }

    fn line() -> impl Strategy<Value = String> {
        let name = prop::sample::select(vec!["A", "a", "Set-Cookie", "Server", "Connection"]);
        let long = "x".repeat(MAX_CACHED_LINE_BYTES);
        let values = ["", " ", "1", " 1 ", "2", " keep-alive", " a, b", &long];
        let value = prop::sample::select(values.map(str::to_owned).to_vec());
        (name, value).prop_map(|(name, value)| format!("{name}:{value}\r\n"))
    }

    proptest! {
        #[test]
        fn a_cached_head_does_not_affect_the_next_one(
            heads in prop::collection::vec(prop::collection::vec(line(), 0..5), 1..6),
        ) {
            let limits = HeadLimits { bytes: 64 << 10, headers: 100 };
            let mut cache = HeaderLineCache::default();
            for lines in heads {
                let head = format!("HTTP/1.1 200 OK\r\n{}\r\n", lines.concat());
                let read = |cache: &mut HeaderLineCache| {
                    parse(&mut BytesMut::from(head.as_str()), limits, cache).unwrap().unwrap()
                };
                let (after, alone) = (read(&mut cache), read(&mut HeaderLineCache::default()));
                let lines = |response: &Response<()>| format!("{:?}", response.headers());
                prop_assert_eq!(lines(&after), lines(&alone));
                prop_assert_eq!(cache.0.len(), alone.headers().len());
                let mut cached = cache.0.iter().flatten();
                prop_assert!(cached.all(|line| line.bytes.len() <= MAX_CACHED_LINE_BYTES));
            }
        }
    }

    #[test]
    fn an_incomplete_head_waits_for_more() {
        let whole = "HTTP/1.0 200 OK\r\na: 1\r\n\r\n";
        for end in 0..whole.len() {
            assert!(parsed(&whole[..end]).unwrap().is_none(), "{end}");
        }
        assert_eq!(parsed(whole).unwrap().unwrap().version(), Version::HTTP_10);
    }

    #[test]
    fn invalid_heads_are_rejected() {
        for bytes in [
            "HTTP/2.0 200 OK\r\n\r\n",
            "HTTP/1.1 99 X\r\n\r\n",
            "HTTP/1.1 099 X\r\n\r\n",
            "HTTP/1.1 1000 X\r\n\r\n",
            "HTTP/1.1 -20 X\r\n\r\n",
            "SSH-2.0",
            "HTTP/1.1  200 OK\r\n\r\n",
            "HTTP/1.1\t200 OK\r\n\r\n",
            "HTTP/1.1 200 O\0K\r\n\r\n",
            "HTTP/1.1 200 O\x1bK\r\n\r\n",
            "HTTP/1.1 200 O\x7fK\r\n\r\n",
            "HTTP/1.1 200 O\rK\r\n\r\n",
            "HTTP/1.1 200 OK\r\r\n\r\n",
            "HTTP/1.1 200 OK\r\na\r\n\r\n",
            "HTTP/1.1 200 OK\r\na : 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\na\t: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\n: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\na b: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\na\0: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\n\u{e9}: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\n a: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: 1\r\n 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: 1\rb: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: 1\r\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: \x1b\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: \x7f\r\n\r\n",
            "HTTP/1.1 200 OK\r\na: 1\r\n\r\r\n",
        ] {
            assert!(
                matches!(parsed(bytes), Err(InvalidResponse::Head(_))),
                "{bytes:?}"
            );
        }
        let long = format!("HTTP/1.1 200 OK\r\na: {}", "x".repeat(64));
        let many = "HTTP/1.1 200 OK\r\na: 1\r\nb: 2\r\nc: 3\r\n\r\n";
        for bytes in [&long, &format!("{long}\r\n\r\n"), many] {
            assert_eq!(
                parsed(bytes).unwrap_err(),
                InvalidResponse::HeadTooLarge,
                "{bytes:?}"
            );
        }
    }
}
