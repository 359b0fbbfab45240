//! Reads the protobuf fields of a message without copying.
//!
//! The requests of `ShouldRateLimit`, `Check` and Kuadrant's service are decoded by hand, because
//! proxies make these calls for each request. A whole call of `ShouldRateLimit` takes 0.64 times
//! the CPU time of a call to a tonic service that decodes the same request with `prost` and makes
//! no decision (`bench/results/grpc.md`, c763ed6). The decoders were not compared on their own.

use std::fmt;

use tonic::Status;

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldValue<'m> {
    Number(u64),
    LengthDelimited(&'m [u8]),
    /// A value with a wire type that is not used by any supported message.
    Other,
}

/// An iterator over the fields of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageFields<'m>(&'m [u8]);

/// The error for bytes that are not a valid protobuf message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedMessage(&'static str);

impl fmt::Display for MalformedMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the message is malformed: {}", self.0)
    }
}

impl From<MalformedMessage> for Status {
    fn from(malformed: MalformedMessage) -> Self {
        Self::invalid_argument(malformed.to_string())
    }
}

impl<'m> MessageFields<'m> {
    pub(super) const fn of(message: &'m [u8]) -> Self {
        Self(message)
    }

    /// Returns the number and value of the next field; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u32, FieldValue<'m>)>, MalformedMessage> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let tag =
            u32::try_from(self.varint()?).map_err(|_| MalformedMessage("a tag is too large"))?;
        let (number, kind) = (tag >> 3, tag & 7);
        if number == 0 {
            return Err(MalformedMessage("a field has the number 0"));
        }
        let value = match kind {
            0 => FieldValue::Number(self.varint()?),
            1 => self.take(8).map(|_| FieldValue::Other)?,
            2 => {
                let length = self.varint()?;
                FieldValue::LengthDelimited(
                    self.take(usize::try_from(length).unwrap_or(usize::MAX))?,
                )
            }
            5 => self.take(4).map(|_| FieldValue::Other)?,
            _ => return Err(MalformedMessage("a field has an unknown wire type")),
        };
        Ok(Some((number, value)))
    }

    fn take(&mut self, count: usize) -> Result<&'m [u8], MalformedMessage> {
        let (bytes, rest) = self
            .0
            .split_at_checked(count)
            .ok_or(MalformedMessage("a field is longer than its message"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn varint(&mut self) -> Result<u64, MalformedMessage> {
        let mut number = 0_u64;
        for (at, byte) in self.0.iter().enumerate().take(10) {
            let bits = u64::from(byte & 0x7f);
            // The tenth byte of a varint has room for only one bit.
            if at == 9 && bits > 1 {
                break;
            }
            number |= bits << (7 * at);
            if byte & 0x80 == 0 {
                self.0 = &self.0[at + 1..];
                return Ok(number);
            }
        }
        Err(MalformedMessage("a varint is not terminated"))
    }
}

impl<'m> FieldValue<'m> {
    /// Returns the bytes of a field; empty if the field has another type.
    pub(super) const fn bytes(self) -> &'m [u8] {
        match self {
            Self::LengthDelimited(bytes) => bytes,
            Self::Number(_) | Self::Other => &[],
        }
    }

    pub(super) fn text(self) -> Result<&'m str, MalformedMessage> {
        std::str::from_utf8(self.bytes()).map_err(|_| MalformedMessage("a string is not UTF-8"))
    }

    pub(super) const fn number(self) -> u64 {
        match self {
            Self::Number(number) => number,
            Self::LengthDelimited(_) | Self::Other => 0,
        }
    }

    /// Returns the low 32 bits of a number. All protobuf parsers truncate numbers to 32 bits in
    /// this way.
    pub(super) fn number_32(self) -> u32 {
        let [a, b, c, d, ..] = self.number().to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut fields: MessageFields<'_>) -> Result<Vec<(u32, FieldValue<'_>)>, MalformedMessage> {
        let mut all = Vec::new();
        while let Some(field) = fields.next()? {
            all.push(field);
        }
        Ok(all)
    }

    #[test]
    fn every_wire_type_is_read_or_skipped() {
        let message = b"\x08\x96\x01\x12\x02hi\x1d\0\0\0\0\x21\0\0\0\0\0\0\0\0\x28\x01";
        let read = all(MessageFields::of(message)).unwrap();
        assert_eq!(
            read,
            [
                (1, FieldValue::Number(150)),
                (2, FieldValue::LengthDelimited(b"hi")),
                (3, FieldValue::Other),
                (4, FieldValue::Other),
                (5, FieldValue::Number(1)),
            ]
        );
        let largest = b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01";
        assert_eq!(
            all(MessageFields::of(largest)).unwrap()[0].1.number(),
            u64::MAX
        );
        assert_eq!(
            all(MessageFields::of(largest)).unwrap()[0].1.number_32(),
            u32::MAX
        );
    }

    #[test]
    fn malformed_messages_are_rejected() {
        for message in [
            b"\x08".as_slice(),
            b"\x00\x01",
            b"\x12\x05hi",
            b"\x0b",
            b"\x0f",
            b"\x1d\0\0",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        ] {
            assert!(all(MessageFields::of(message)).is_err(), "{message:?}");
        }
        assert!(FieldValue::LengthDelimited(b"\xff").text().is_err());
    }
}
