//! Message framing: determines the end of a body (RFC 9112, section 6). Ambiguous framing is an
//! error.

use std::io::{self, Write as _};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderValue, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING},
};
use hyper::body::{Body, Frame};

use super::InvalidResponse;
use crate::headers::{hop_by_hop, lookup};

/// The framing of a body, which determines where the body ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// No body.
    Nothing,
    /// A body with a `Content-Length`. The variant contains the number of remaining bytes.
    Length(u64),
    Chunked,
    /// A body that ends when the connection closes. Only responses can have such bodies.
    Close,
}

impl Framing {
    /// Returns the framing of a request body. The `headers` of the request must not contain
    /// `Transfer-Encoding`.
    pub(super) fn of_request(headers: &HeaderMap, body: &impl Body) -> Self {
        if body.is_end_stream() {
            return Self::Nothing;
        }
        // Normalisation has rejected any `Content-Length` that is not a single number.
        lookup::first(headers, &CONTENT_LENGTH)
            .and_then(number)
            .map_or(Self::Chunked, Self::Length)
    }

    /// Returns the framing of a response body, and removes `Content-Length` from a 204 response. A
    /// repeated `Content-Length` is treated as malformed even if its values are equal. RFC 9110,
    /// section 8.6, allows a recipient to accept or reject equal values.
    pub(super) fn of_response(
        response: &mut Response<()>,
        has_no_body: bool,
    ) -> Result<Self, InvalidResponse> {
        let status = response.status();
        let is_framed = lookup::has(response.headers(), &TRANSFER_ENCODING);
        let length = length(response.headers())?;
        let is_bodiless = status.is_informational()
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        if status == StatusCode::NO_CONTENT {
            // A 204 response must not have a `Content-Length` (RFC 9110, section 8.6). If the
            // response had one, an HTTP/2 client would wait for a body.
            lookup::remove(response.headers_mut(), &CONTENT_LENGTH);
        }
        if has_no_body || is_bodiless {
            return Ok(Self::Nothing);
        }
        if !is_framed {
            return Ok(length.map_or(Self::Close, Self::Length));
        }
        let mut codings = response.headers().get_all(TRANSFER_ENCODING).iter();
        match (codings.next(), codings.next()) {
            // Accept only `chunked`. The proxy removes `Transfer-Encoding` from the response, so
            // the client could not decode any other transfer coding.
            (Some(coding), None)
                if coding.as_bytes().eq_ignore_ascii_case(b"chunked")
                    && response.version() == Version::HTTP_11 =>
            {
                Ok(Self::Chunked)
            }
            _ => Err(InvalidResponse::Framing),
        }
    }

    /// Writes a `frame` of a request body to the buffer `to`.
    pub(super) fn write(&mut self, frame: Frame<Bytes>, to: &mut BytesMut) -> io::Result<()> {
        let data = match (frame.into_data(), &mut *self) {
            (Ok(data), Self::Length(left)) => {
                let rest = left.checked_sub(length_of(&data));
                *left = rest
                    .ok_or_else(|| invalid_data("the body is longer than its declared length"))?;
                data
            }
            (Ok(data), Self::Chunked) if !data.is_empty() => {
                write!(to.writer(), "{:x}\r\n", data.len())?;
                to.put_slice(&data);
                to.put_slice(b"\r\n");
                return Ok(());
            }
            _ => return Ok(()),
        };
        to.put_slice(&data);
        Ok(())
    }

    /// Writes the end of a request body to the buffer `to`.
    pub(super) fn finish(&self, to: &mut BytesMut) -> io::Result<()> {
        match self {
            Self::Length(left) if *left > 0 => {
                return Err(invalid_data("the body is shorter than its declared length"));
            }
            Self::Chunked => to.put_slice(b"0\r\n\r\n"),
            Self::Nothing | Self::Length(_) | Self::Close => {}
        }
        Ok(())
    }
}

/// Returns whether the connection persists after this response (RFC 9112, section 9.3).
pub(super) fn is_keep_alive(response: &Response<()>) -> bool {
    let says = |word| hop_by_hop::has_token(response.headers(), &CONNECTION, word);
    if says("close") {
        return false;
    }
    match response.version() {
        Version::HTTP_11 => true,
        // `Transfer-Encoding` over HTTP/1.0 is faulty framing even if the response has no body, so
        // the connection must be closed (section 6.1).
        _ => says("keep-alive") && !lookup::has(response.headers(), &TRANSFER_ENCODING),
    }
}

/// Returns the length of `data` as `u64`; a length in memory always fits in 64 bits.
pub(super) fn length_of(data: &[u8]) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

/// Returns the `Content-Length` of a response. More than one `Content-Length`, or a value that is
/// not a number, is an error.
fn length(headers: &HeaderMap) -> Result<Option<u64>, InvalidResponse> {
    let mut lines = headers.get_all(CONTENT_LENGTH).iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    match (number(line), lines.next()) {
        (Some(length), None) => Ok(Some(length)),
        _ => Err(InvalidResponse::Framing),
    }
}

fn number(value: &HeaderValue) -> Option<u64> {
    digits(value.as_bytes())
}

/// Parses a decimal number. Unlike `str::parse`, this function does not accept a sign.
fn digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| byte - b'0')?;
        number.checked_mul(10)?.checked_add(digit.into())
    })
}

fn invalid_data(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framing(
        status: u16,
        lines: &[(&'static str, &'static str)],
    ) -> Result<Framing, InvalidResponse> {
        let mut response = Response::builder().status(status);
        for (name, value) in lines {
            response = response.header(*name, *value);
        }
        Framing::of_response(&mut response.body(()).unwrap(), false)
    }

    #[test]
    fn a_body_ends_where_its_head_says() {
        const LENGTH: (&str, &str) = ("content-length", "5");
        const CHUNKED: (&str, &str) = ("transfer-encoding", "Chunked");
        assert_eq!(framing(200, &[LENGTH]), Ok(Framing::Length(5)));
        assert_eq!(framing(200, &[CHUNKED]), Ok(Framing::Chunked));
        assert_eq!(framing(200, &[CHUNKED, LENGTH]), Ok(Framing::Chunked));
        assert_eq!(framing(200, &[]), Ok(Framing::Close));
        assert_eq!(framing(204, &[]), Ok(Framing::Nothing));
        assert_eq!(framing(304, &[LENGTH]), Ok(Framing::Nothing));
        assert_eq!(framing(204, &[LENGTH]), Ok(Framing::Nothing));
    }

    #[test]
    fn no_content_has_no_length() {
        for (status, expected) in [(204, None), (304, Some("5"))] {
            let response = Response::builder().status(status);
            let mut response = response.header(CONTENT_LENGTH, "5").body(()).unwrap();
            Framing::of_response(&mut response, false).unwrap();
            let length = response.headers().get(CONTENT_LENGTH);
            assert_eq!(length.map(|length| length.to_str().unwrap()), expected);
        }
    }

    #[test]
    fn ambiguous_framing_is_rejected() {
        for lines in [
            &[("content-length", "5"), ("content-length", "6")][..],
            &[("content-length", "5"), ("content-length", "5")],
            &[("content-length", "5, 5")],
            &[("content-length", "+5")],
            &[("content-length", "")],
            &[("content-length", "18446744073709551616")],
            &[("transfer-encoding", "gzip, chunked")],
            &[
                ("transfer-encoding", "chunked"),
                ("transfer-encoding", "chunked"),
            ],
            &[("transfer-encoding", "identity")],
        ] {
            assert_eq!(
                framing(200, lines),
                Err(InvalidResponse::Framing),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn transfer_encoding_over_http_1_0_is_rejected() {
        for length in [None, Some("5")] {
            let response = Response::builder().version(Version::HTTP_10);
            let response = response.header(TRANSFER_ENCODING, "chunked");
            let mut response = response.body(()).unwrap();
            if let Some(length) = length {
                let length = HeaderValue::from_static(length);
                response.headers_mut().insert(CONTENT_LENGTH, length);
            }
            assert_eq!(
                Framing::of_response(&mut response, false),
                Err(InvalidResponse::Framing),
                "{length:?}"
            );
        }
    }

    #[test]
    fn version_and_headers_determine_whether_a_connection_persists() {
        for (version, lines, expected) in [
            (Version::HTTP_11, &[][..], true),
            (Version::HTTP_11, &[(CONNECTION, "a")], true),
            (Version::HTTP_11, &[(CONNECTION, "close")], false),
            (Version::HTTP_11, &[(CONNECTION, "a, Close")], false),
            (
                Version::HTTP_11,
                &[(CONNECTION, "keep-alive"), (CONNECTION, "close")],
                false,
            ),
            (Version::HTTP_10, &[], false),
            (Version::HTTP_10, &[(CONNECTION, "close")], false),
            (Version::HTTP_10, &[(CONNECTION, "Keep-Alive")], true),
            (Version::HTTP_10, &[(CONNECTION, "a, keep-alive")], true),
            (
                Version::HTTP_10,
                &[(CONNECTION, "keep-alive, close")],
                false,
            ),
            (
                Version::HTTP_10,
                &[(CONNECTION, "keep-alive"), (TRANSFER_ENCODING, "chunked")],
                false,
            ),
        ] {
            let mut response = Response::builder().version(version);
            for (name, value) in lines {
                response = response.header(name, *value);
            }
            let response = response.body(()).unwrap();
            assert_eq!(is_keep_alive(&response), expected, "{version:?} {lines:?}");
        }
    }

    #[test]
    fn a_request_body_has_its_declared_length() {
        let mut bytes = BytesMut::new();
        let mut framing = Framing::Length(3);
        framing
            .write(Frame::data(Bytes::from("ab")), &mut bytes)
            .unwrap();
        assert!(framing.finish(&mut bytes).is_err());
        assert!(
            framing
                .write(Frame::data(Bytes::from("cd")), &mut bytes)
                .is_err()
        );
        framing
            .write(Frame::data(Bytes::from("c")), &mut bytes)
            .unwrap();
        framing.finish(&mut bytes).unwrap();
        assert_eq!(bytes, "abc");
    }

    #[test]
    fn a_chunked_request_body_ends_without_trailers() {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("1"));
        let mut bytes = BytesMut::new();
        let mut framing = Framing::Chunked;
        framing
            .write(Frame::data(Bytes::from("sixteen octets !")), &mut bytes)
            .unwrap();
        framing
            .write(Frame::data(Bytes::new()), &mut bytes)
            .unwrap();
        framing
            .write(Frame::trailers(trailers), &mut bytes)
            .unwrap();
        framing.finish(&mut bytes).unwrap();
        assert_eq!(bytes, "10\r\nsixteen octets !\r\n0\r\n\r\n");
    }
}
