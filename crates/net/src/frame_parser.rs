//! The parser of the frames in one direction of an HTTP/2 connection, which reads the frame
//! headers.

/// The length in bytes of the client's connection preface (RFC 9113 §3.4).
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = FrameHeader::BYTES;

/// A parser for one direction of a connection. A frame may be split across calls.
#[derive(Debug)]
pub struct FrameParser {
    header: [u8; HEADER_BYTES],
    header_read: usize,
    payload_left: usize,
}

/// The header of a frame (RFC 9113 §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The length of the payload in bytes.
    pub length: usize,
    /// The frame type, such as [`Self::DATA`].
    pub kind: u8,
    /// The flags, whose meaning depends on the type.
    pub flags: u8,
    /// The stream identifier; 0 for the whole connection.
    pub stream: u32,
}

impl FrameHeader {
    /// The length of a frame header in bytes.
    pub const BYTES: usize = 9;
    /// The type `DATA`.
    pub const DATA: u8 = 0;
    /// The type `HEADERS`.
    pub const HEADERS: u8 = 1;
    /// The type `RST_STREAM`.
    pub const RST_STREAM: u8 = 3;
    /// The type `SETTINGS`.
    pub const SETTINGS: u8 = 4;
    /// The type `WINDOW_UPDATE`.
    pub const WINDOW_UPDATE: u8 = 8;
    /// The type `CONTINUATION`.
    pub const CONTINUATION: u8 = 9;

    /// Returns whether the flag `END_STREAM` is set.
    #[must_use]
    pub const fn is_end_stream(self) -> bool {
        self.flags & 1 != 0
    }
}

impl FrameParser {
    /// Creates a parser for the bytes sent by a client, which begin with the connection preface.
    #[must_use]
    pub const fn of_client() -> Self {
        Self {
            payload_left: PREFACE_BYTES,
            ..Self::of_server()
        }
    }

    /// Creates a parser for the bytes sent by a server.
    #[must_use]
    pub const fn of_server() -> Self {
        Self {
            header: [0; HEADER_BYTES],
            header_read: 0,
            payload_left: 0,
        }
    }

    /// Consumes `bytes` up to the end of the next frame header. Returns the header, or `None` if
    /// `bytes` ends before the header does.
    pub fn next_header(&mut self, bytes: &mut &[u8]) -> Option<FrameHeader> {
        let payload = self.payload_left.min(bytes.len());
        self.payload_left -= payload;
        *bytes = &bytes[payload..];
        // If `bytes` ends within the payload, `bytes` is now empty.
        let part = (HEADER_BYTES - self.header_read).min(bytes.len());
        self.header[self.header_read..self.header_read + part].copy_from_slice(&bytes[..part]);
        self.header_read += part;
        *bytes = &bytes[part..];
        if self.header_read < HEADER_BYTES {
            return None;
        }
        self.header_read = 0;
        let [high, middle, low, kind, flags, stream @ ..] = self.header;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        self.payload_left = length;
        Some(FrameHeader {
            length,
            kind,
            flags,
            // The highest bit is reserved.
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_however_the_bytes_are_split() {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        bytes.extend(b"\0\x01\x02\0\x01\x80\0\x01\x05");
        bytes.extend([7; 0x102]);
        bytes.extend(b"\0\0\x04\x08\0\0\0\0\0four");
        let header = |length, kind, flags, stream| FrameHeader {
            length,
            kind,
            flags,
            stream,
        };
        let expected = [
            header(0, 4, 0, 0),
            header(0x102, FrameHeader::DATA, 1, 0x105),
            header(4, FrameHeader::WINDOW_UPDATE, 0, 0),
        ];
        for size in [1, 7, 9, 10, 4_096] {
            let mut parser = FrameParser::of_client();
            let mut found = Vec::new();
            for mut part in bytes.chunks(size) {
                while let Some(header) = parser.next_header(&mut part) {
                    found.push(header);
                }
                assert!(part.is_empty());
            }
            assert_eq!(found, expected, "{size}");
        }
    }
}
