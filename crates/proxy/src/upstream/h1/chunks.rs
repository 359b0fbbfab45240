//! An incremental decoder for chunked bodies (RFC 9112, section 7.1).

use bytes::{Buf as _, Bytes, BytesMut};
use http::HeaderMap;
use httparse::{EMPTY_HEADER, Status};

use super::{InvalidResponse, framing::length_of, head::read_line};

/// The maximum length of a chunk-size line in bytes, including extensions.
const MAX_LINE_BYTES: usize = 4_096;

/// The maximum number of trailers.
const MAX_TRAILERS: usize = 100;

/// The decoder's position in a chunked body.
#[derive(Debug, Default)]
pub(super) enum ChunkDecoder {
    /// Before a chunk-size line.
    #[default]
    Size,
    /// Within a chunk. The variant contains the number of remaining bytes in the chunk.
    Data(u64),
    /// After a chunk's data, before its CR LF.
    DataEnd,
    /// After the last chunk.
    Trailers,
}

/// The next part of a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Data(Bytes),
    /// The end, with trailers.
    Trailers(HeaderMap),
    /// The end, without trailers.
    End,
    /// More bytes are needed.
    Incomplete,
}

impl ChunkDecoder {
    /// Decodes the next part of the body from `received`. A trailer section of more than `max`
    /// bytes is an error. The empty line at the end counts towards these bytes.
    pub(super) fn next(
        &mut self,
        received: &mut BytesMut,
        max: usize,
    ) -> Result<Piece, InvalidResponse> {
        loop {
            *self = match self {
                Self::Size => match size(received)? {
                    None => return Ok(Piece::Incomplete),
                    Some(0) => Self::Trailers,
                    Some(size) => Self::Data(size),
                },
                Self::Data(_) if received.is_empty() => return Ok(Piece::Incomplete),
                Self::Data(left) => {
                    let max = usize::try_from(*left).unwrap_or(usize::MAX);
                    let data = received.split_to(received.len().min(max)).freeze();
                    *left = left.saturating_sub(length_of(&data));
                    if *left == 0 {
                        *self = Self::DataEnd;
                    }
                    return Ok(Piece::Data(data));
                }
                Self::DataEnd => match &received[..] {
                    [b'\r', b'\n', ..] => {
                        received.advance(2);
                        Self::Size
                    }
                    [] | [b'\r'] => return Ok(Piece::Incomplete),
                    _ => return Err(InvalidResponse::Chunk),
                },
                Self::Trailers => return trailers(received, max),
            };
        }
    }
}

/// Takes a chunk-size line and returns the size; `None` if the line is not complete.
fn size(received: &mut BytesMut) -> Result<Option<u64>, InvalidResponse> {
    let line = &received[..received.len().min(MAX_LINE_BYTES)];
    let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
        let is_too_long = received.len() > MAX_LINE_BYTES;
        return if is_too_long {
            Err(InvalidResponse::Chunk)
        } else {
            Ok(None)
        };
    };
    let line = line[..end]
        .strip_suffix(b"\r")
        .ok_or(InvalidResponse::Chunk)?;
    // Refuse a bare CR, because some parsers accept it as a line end (RFC 9112, section 2.2).
    if line.contains(&b'\r') {
        return Err(InvalidResponse::Chunk);
    }
    // Ignore chunk extensions: a recipient must ignore extensions that it does not know.
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
    let digits = digits.trim_ascii_end();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(InvalidResponse::Chunk);
    }
    let digits = std::str::from_utf8(digits).map_err(|_| InvalidResponse::Chunk)?;
    let size = u64::from_str_radix(digits, 16).map_err(|_| InvalidResponse::Chunk)?;
    received.advance(end + 1);
    Ok(Some(size))
}

fn trailers(received: &mut BytesMut, max: usize) -> Result<Piece, InvalidResponse> {
    if received.starts_with(b"\r\n") {
        received.advance(2);
        return Ok(Piece::End);
    }
    let mut slots = [EMPTY_HEADER; MAX_TRAILERS];
    let mut trailers = HeaderMap::new();
    let length = match httparse::parse_headers(received, &mut slots) {
        Ok(Status::Complete((length, found))) if length <= max => {
            for header in found {
                let (name, value) = read_line(header)?;
                trailers.append(name, value);
            }
            length
        }
        Ok(Status::Partial) if received.len() < max => return Ok(Piece::Incomplete),
        _ => return Err(InvalidResponse::Trailers),
    };
    received.advance(length);
    Ok(Piece::Trailers(trailers))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes `bytes` twice, once all at once and once byte by byte, and checks that the results
    /// are equal.
    fn read(bytes: &str) -> Result<(String, Piece), InvalidResponse> {
        let whole = read_by(bytes, bytes.len());
        let byte_by_byte = read_by(bytes, 1);
        assert_eq!(whole, byte_by_byte, "{bytes:?}");
        whole
    }

    fn read_by(bytes: &str, step: usize) -> Result<(String, Piece), InvalidResponse> {
        let (mut chunks, mut received, mut text) =
            (ChunkDecoder::default(), BytesMut::new(), String::new());
        for part in bytes.as_bytes().chunks(step) {
            received.extend_from_slice(part);
            loop {
                match chunks.next(&mut received, 64)? {
                    Piece::Data(data) => text.push_str(std::str::from_utf8(&data).unwrap()),
                    Piece::Incomplete => break,
                    end => return Ok((text, end)),
                }
            }
        }
        Ok((text, Piece::Incomplete))
    }

    #[test]
    fn chunks_are_joined() {
        let read = read("5\r\nhello\r\n00A ;ext=\"x\"\r\n, you all!\r\n0\r\n\r\n");
        assert_eq!(read, Ok(("hello, you all!".to_owned(), Piece::End)));
    }

    #[test]
    fn trailers_end_a_body() {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", http::HeaderValue::from_static("7"));
        let read = read("1\r\na\r\n0\r\nX-Sum: 7\r\n\r\n");
        assert_eq!(read, Ok(("a".to_owned(), Piece::Trailers(trailers))));
    }

    #[test]
    fn too_many_trailers_are_rejected() {
        for (count, is_accepted) in [(MAX_TRAILERS, true), (MAX_TRAILERS + 1, false)] {
            let bytes = format!("0\r\n{}\r\n", "a: 1\r\n".repeat(count));
            let mut received = BytesMut::from(bytes.as_str());
            let read = ChunkDecoder::default().next(&mut received, 64 << 10);
            match read {
                Ok(Piece::Trailers(trailers)) if is_accepted => assert_eq!(trailers.len(), count),
                Err(InvalidResponse::Trailers) if !is_accepted => {}
                other => panic!("{count}: {other:?}"),
            }
        }
    }

    #[test]
    fn invalid_chunks_are_rejected() {
        for bytes in [
            "5\nhello\r\n",
            "\r\n",
            "-5\r\n",
            "+5\r\n",
            "0x5\r\nhello",
            "g\r\n",
            "5 5\r\n",
            "10000000000000000\r\n",
            "1\r\nab",
            "1\r\na\n",
            "1\r\r\na\r\n",
            "1;\r\r\na\r\n",
            "1;a\rb\r\na\r\n",
        ] {
            assert_eq!(read(bytes), Err(InvalidResponse::Chunk), "{bytes:?}");
        }
        let long = format!("5;{}", "x".repeat(MAX_LINE_BYTES));
        assert_eq!(read(&long), Err(InvalidResponse::Chunk));
        let many = format!("0\r\na: {}", "x".repeat(64));
        assert_eq!(read(&many), Err(InvalidResponse::Trailers));
        // A trailer section may have 64 bytes, including the final empty line, even if all bytes
        // arrive together.
        let section = |length: usize| format!("0\r\na: {}\r\n\r\n", "x".repeat(length - 7));
        assert!(matches!(read(&section(64)), Ok((_, Piece::Trailers(_)))));
        assert_eq!(read(&section(65)), Err(InvalidResponse::Trailers));
        assert_eq!(
            read("0\r\nno colon\r\n\r\n"),
            Err(InvalidResponse::Trailers)
        );
    }
}
