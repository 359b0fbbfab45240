//! Heads: a request's written, an answer's read.

use std::{mem::MaybeUninit, ops::Range};

use bytes::{BufMut, BytesMut};
use http::{
    HeaderName, HeaderValue, Response, StatusCode, Version,
    header::{CONTENT_LENGTH, HOST},
    request::Parts,
};
use httparse::{Header, ParserConfig, Status};

use super::{
    super::{forwarded::Forwarding, lines},
    Malformed,
    framing::Framing,
    header_map,
};
use crate::config::Proxy;

/// How large a head may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) bytes: usize,
    pub(super) headers: usize,
}

impl Bounds {
    pub(super) const fn of(settings: &Proxy) -> Self {
        Self {
            bytes: settings.max_head,
            headers: settings.max_headers,
        }
    }
}

/// Header lines that were found: a name, and where its value is. Empty between heads; kept for its room.
pub(super) type Fields = Vec<(HeaderName, Range<usize>)>;

/// As many header lines as need no memory of their own while they are found.
const FEW_HEADERS: usize = 100;

/// Writes the head of a request whose body is framed like this, and of whose client `client` is to be told.
pub(super) fn write(
    head: &mut Parts,
    client: Option<&Forwarding>,
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
    // That it is the first line is asked for by RFC 9110, section 7.2.
    if let Some(host) = lines::first(&head.headers, &HOST) {
        write_line(&HOST, host, to);
    }
    if let Some(client) = client {
        client.tell(&mut head.headers, |name, value| write_line(name, value, to));
    }
    let mut has_length = false;
    for (name, value) in &head.headers {
        if name == CONTENT_LENGTH {
            has_length = true;
        } else if name != HOST {
            write_line(name, value, to);
        }
    }
    // What is said of the body is what is sent.
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

/// Takes the head of an answer from what was `received`; `None` if it is not whole yet.
pub(super) fn parse(
    received: &mut BytesMut,
    bounds: Bounds,
    fields: &mut Fields,
) -> Result<Option<Response<()>>, Malformed> {
    if received.is_empty() {
        return Ok(None);
    }
    let found = if bounds.headers <= FEW_HEADERS {
        let mut room = [const { MaybeUninit::uninit() }; FEW_HEADERS];
        find(received, &mut room[..bounds.headers], fields)
    } else {
        let mut room = vec![MaybeUninit::uninit(); bounds.headers];
        find(received, &mut room, fields)
    };
    let Some((length, status, version)) = found? else {
        // One that is too large whole is too large before.
        return if received.len() > bounds.bytes {
            Err(Malformed::HeadTooLarge)
        } else {
            Ok(None)
        };
    };
    if length > bounds.bytes {
        return Err(Malformed::HeadTooLarge);
    }
    let octets = received.split_to(length).freeze();
    let mut answer = Response::new(());
    *answer.status_mut() = status;
    *answer.version_mut() = version;
    *answer.headers_mut() = header_map(&octets, fields)?;
    Ok(Some(answer))
}

/// How long the head is, and what it says; its header lines are left in `fields`.
fn find<'b>(
    received: &'b [u8],
    room: &mut [MaybeUninit<Header<'b>>],
    fields: &mut Fields,
) -> Result<Option<(usize, StatusCode, Version)>, Malformed> {
    let mut answer = httparse::Response::new(&mut []);
    let parsed =
        ParserConfig::default().parse_response_with_uninit_headers(&mut answer, received, room);
    let length = match parsed {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Malformed::HeadTooLarge),
        Err(error) => return Err(Malformed::Head(error)),
    };
    fields.clear();
    let is_new = answer.version == Some(1);
    for header in answer.headers.iter() {
        if !(is_new && says_it_keeps(header)) {
            fields.push(field(received, header)?);
        }
    }
    let status = answer.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(Malformed::Head(httparse::Error::Status))?;
    let version = if answer.version == Some(0) {
        Version::HTTP_10
    } else {
        Version::HTTP_11
    };
    Ok(Some((length, status, version)))
}

/// Whether it says what goes without saying in HTTP/1.1, as nearly every upstream does. It would only be removed again.
fn says_it_keeps(header: &Header<'_>) -> bool {
    header.name.eq_ignore_ascii_case("connection") && header.value == b"keep-alive"
}

/// A header line by its name and the place of its value in `octets`, of which it is a part.
pub(super) fn field(
    octets: &[u8],
    header: &Header<'_>,
) -> Result<(HeaderName, Range<usize>), Malformed> {
    let name = HeaderName::from_bytes(header.name.as_bytes());
    let name = name.map_err(|_| Malformed::Head(httparse::Error::HeaderName))?;
    let start = header.value.as_ptr().addr() - octets.as_ptr().addr();
    Ok((name, start..start + header.value.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        bytes: 64,
        headers: 2,
    };

    fn parsed(octets: &str) -> Result<Option<Response<()>>, Malformed> {
        parse(&mut BytesMut::from(octets), BOUNDS, &mut Fields::new())
    }

    #[test]
    fn a_head_is_taken_and_what_follows_stays() {
        let mut received = BytesMut::from("HTTP/1.1 404 Not Found\r\na: 1\r\nA:  x y \r\n\r\nbody");
        let answer = parse(&mut received, BOUNDS, &mut Fields::new())
            .unwrap()
            .unwrap();
        assert_eq!(
            (answer.status(), answer.version()),
            (StatusCode::NOT_FOUND, Version::HTTP_11)
        );
        let values: Vec<_> = answer.headers().get_all("a").iter().collect();
        assert_eq!(values, ["1", "x y"]);
        assert_eq!(received, "body");
    }

    #[test]
    fn that_a_connection_is_kept_is_heard_where_it_says_anything() {
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
            let answer = parsed(&format!("HTTP/{version} 200 OK\r\n{lines}\r\n"));
            let answer = answer.unwrap().unwrap();
            let said: Vec<_> = answer.headers().get_all("connection").iter().collect();
            assert_eq!(said, expected, "{version} {lines}");
        }
    }

    #[test]
    fn half_a_head_is_waited_for() {
        let whole = "HTTP/1.0 200 OK\r\na: 1\r\n\r\n";
        for end in 0..whole.len() {
            assert!(parsed(&whole[..end]).unwrap().is_none(), "{end}");
        }
        assert_eq!(parsed(whole).unwrap().unwrap().version(), Version::HTTP_10);
    }

    #[test]
    fn what_is_no_head_is_refused() {
        for octets in [
            "HTTP/2.0 200 OK\r\n\r\n",
            "HTTP/1.1 99 X\r\n\r\n",
            "SSH-2.0",
            "HTTP/1.1 200 OK\r\na\r\n\r\n",
        ] {
            assert!(
                matches!(parsed(octets), Err(Malformed::Head(_))),
                "{octets:?}"
            );
        }
        let long = format!("HTTP/1.1 200 OK\r\na: {}", "x".repeat(64));
        let many = "HTTP/1.1 200 OK\r\na: 1\r\nb: 2\r\nc: 3\r\n\r\n";
        for octets in [&long, &format!("{long}\r\n\r\n"), many] {
            assert_eq!(
                parsed(octets).unwrap_err(),
                Malformed::HeadTooLarge,
                "{octets:?}"
            );
        }
    }
}
