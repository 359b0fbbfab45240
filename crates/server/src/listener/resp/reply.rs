//! Encodes replies in RESP2 or RESP3.

use std::{fmt, io::Write};

/// The protocol version that a client has negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RespVersion {
    #[default]
    Resp2,
    Resp3,
}

impl RespVersion {
    pub(super) fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Writes replies. In RESP2, a type that exists only in RESP3 is written as the closest RESP2 type.
#[derive(Debug)]
pub(super) struct Reply<'o> {
    pub(super) out: &'o mut Vec<u8>,
    pub(super) protocol: RespVersion,
}

impl Reply<'_> {
    pub(super) fn simple(&mut self, text: &str) {
        self.out.push(b'+');
        self.out.extend_from_slice(text.as_bytes());
        self.end_line();
    }

    pub(super) fn ok(&mut self) {
        self.simple("OK");
    }

    /// Writes an error. Line breaks in quoted input are replaced, so that the error stays on one
    /// line.
    pub(super) fn error(&mut self, text: fmt::Arguments<'_>) {
        self.out.push(b'-');
        let start = self.out.len();
        // Writing to a vector does not fail.
        let _ = self.out.write_fmt(text);
        for byte in &mut self.out[start..] {
            if matches!(byte, b'\r' | b'\n') {
                *byte = b' ';
            }
        }
        self.end_line();
    }

    pub(super) fn integer(&mut self, value: i64) {
        self.header(b':', value);
    }

    /// Writes a count, capped at `i64::MAX`.
    pub(super) fn count(&mut self, value: u64) {
        self.integer(i64::try_from(value).unwrap_or(i64::MAX));
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.length(b'$', bytes.len());
        self.out.extend_from_slice(bytes);
        self.end_line();
    }

    /// Writes human-readable text, as a verbatim string in RESP3 and as a bulk string in RESP2.
    pub(super) fn verbatim(&mut self, text: &str) {
        match self.protocol {
            RespVersion::Resp2 => self.bulk(text.as_bytes()),
            RespVersion::Resp3 => {
                self.length(b'=', text.len() + 4);
                self.out.extend_from_slice(b"txt:");
                self.out.extend_from_slice(text.as_bytes());
                self.end_line();
            }
        }
    }

    pub(super) fn null(&mut self) {
        self.out.extend_from_slice(match self.protocol {
            RespVersion::Resp2 => b"$-1\r\n",
            RespVersion::Resp3 => b"_\r\n",
        });
    }

    /// Writes the header of an array. The caller must then write `length` elements.
    pub(super) fn array(&mut self, length: usize) {
        self.length(b'*', length);
    }

    /// Writes a null array.
    pub(super) fn null_array(&mut self) {
        self.out.extend_from_slice(match self.protocol {
            RespVersion::Resp2 => b"*-1\r\n",
            RespVersion::Resp3 => b"_\r\n",
        });
    }

    /// Writes the header of a map. The caller must then write `pairs` keys and values.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.protocol {
            RespVersion::Resp2 => self.length(b'*', pairs * 2),
            RespVersion::Resp3 => self.length(b'%', pairs),
        }
    }

    /// Writes `words` as a set of simple strings.
    pub(super) fn words(&mut self, words: &[&str]) {
        match self.protocol {
            RespVersion::Resp2 => self.length(b'*', words.len()),
            RespVersion::Resp3 => self.length(b'~', words.len()),
        }
        for word in words {
            self.simple(word);
        }
    }

    fn length(&mut self, kind: u8, length: usize) {
        self.header(kind, i64::try_from(length).unwrap_or(i64::MAX));
    }

    fn header(&mut self, kind: u8, value: i64) {
        // Most lengths and flags have one digit. One append is cheaper than three.
        if let Ok(digit @ 0..=9) = u8::try_from(value) {
            return self
                .out
                .extend_from_slice(&[kind, b'0' + digit, b'\r', b'\n']);
        }
        self.out.push(kind);
        self.out
            .extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
        self.end_line();
    }

    fn end_line(&mut self) {
        self.out.extend_from_slice(b"\r\n");
    }
}
