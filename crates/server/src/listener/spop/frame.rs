//! SPOP 2.0 frames: decodes the frames from HAProxy, and encodes the frames from the agent.
//!
//! ```text
//! | length, 4 bytes | type, 1 byte | flags, 4 bytes | stream id | frame id | payload |
//! ```
//!
//! The IDs are variable-length integers of 1 to 10 bytes, and so are most numbers in a payload.
//! Decoding borrows from the input and allocates nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The frame types.
pub(super) const HAPROXY_HELLO: u8 = 1;
pub(super) const HAPROXY_DISCONNECT: u8 = 2;
pub(super) const NOTIFY: u8 = 3;
const AGENT_HELLO: u8 = 101;
const AGENT_DISCONNECT: u8 = 102;
const ACK: u8 = 103;
/// The type of a fragment that continues the payload of an earlier frame.
pub(super) const UNSET: u8 = 0;

/// The flag that marks the last fragment of a payload.
const FIN: u32 = 1;

/// The length of the length prefix, in bytes.
pub(super) const PREFIX_BYTES: usize = 4;

/// The reason why the agent closes a connection, with the SPOP status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Disconnect {
    pub(super) status: u32,
    pub(super) message: &'static str,
}

const fn disconnect(status: u32, message: &'static str) -> Disconnect {
    Disconnect { status, message }
}

pub(super) const NORMAL: Disconnect = disconnect(0, "normal");
pub(super) const TOO_BIG: Disconnect = disconnect(
    3,
    "the frame exceeds the maximum; lower max-frame-size of the spoe-agent",
);
pub(super) const NOT_SPOP: Disconnect = disconnect(
    3,
    "the first bytes are not a HAPROXY-HELLO; this listener accepts SPOP without TLS, or with TLS if \
     `listen.spop.tls` is set",
);
pub(super) const MALFORMED: Disconnect = disconnect(4, "the frame is malformed");
pub(super) const UNEXPECTED: Disconnect = disconnect(
    4,
    "the frame is not expected now: a connection begins with one HAPROXY-HELLO",
);
pub(super) const NO_VERSION: Disconnect = disconnect(5, "supported-versions is missing");
pub(super) const NO_FRAME_SIZE: Disconnect = disconnect(6, "max-frame-size is missing");
pub(super) const NO_CAPABILITIES: Disconnect = disconnect(7, "capabilities is missing");
pub(super) const OTHER_VERSION: Disconnect = disconnect(8, "only version 2.0 is supported");
pub(super) const SMALL_FRAMES: Disconnect = disconnect(9, "max-frame-size must be at least 256");
pub(super) const FRAGMENTED: Disconnect = disconnect(
    10,
    "fragmentation is not supported; send fewer or shorter arguments",
);

/// A frame without its length prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame<'b> {
    pub(super) kind: u8,
    pub(super) id: FrameId,
    pub(super) payload: &'b [u8],
    is_last: bool,
}

/// The IDs of a frame. An ACK repeats the IDs of the NOTIFY that it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FrameId {
    pub(super) stream: u64,
    pub(super) frame: u64,
}

impl<'b> Frame<'b> {
    /// Decodes the first frame of `input`. Returns the frame and its length including the prefix,
    /// or `None` if the frame is incomplete.
    pub(super) fn first(
        input: &'b [u8],
        max_bytes: usize,
    ) -> Result<Option<(Self, usize)>, Disconnect> {
        let Some((prefix, rest)) = input.split_first_chunk() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes(*prefix)).unwrap_or(usize::MAX);
        // The length is checked before the whole frame has arrived, so that the listener never
        // buffers more than the maximum.
        if length > max_bytes {
            return Err(TOO_BIG);
        }
        let Some(bytes) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = Self::read(bytes).ok_or(MALFORMED)?;
        Ok(Some((frame, PREFIX_BYTES + length)))
    }

    fn read(bytes: &'b [u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let kind = reader.byte()?;
        let flags = u32::from_be_bytes(*reader.chunk()?);
        let id = FrameId {
            stream: reader.number()?,
            frame: reader.number()?,
        };
        Some(Self {
            kind,
            id,
            payload: reader.0,
            is_last: flags & FIN != 0,
        })
    }

    /// Returns whether the frame contains only a fragment of a payload.
    pub(super) const fn is_fragment(&self) -> bool {
        !self.is_last || self.kind == UNSET
    }
}

/// A typed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpopValue<'b> {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    Ip(IpAddr),
    Bytes(&'b [u8]),
}

/// Reads the values of a payload. A read method returns `None` if the bytes are malformed or
/// incomplete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'b>(pub(super) &'b [u8]);

impl<'b> Reader<'b> {
    pub(super) const fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn chunk<const N: usize>(&mut self) -> Option<&'b [u8; N]> {
        let (chunk, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(chunk)
    }

    /// Reads a variable-length integer. The first byte contributes 8 bits. If the four highest bits
    /// of the first byte are set, more bytes follow. Each further byte contributes 7 bits; its
    /// highest bit is set if another byte follows.
    fn number(&mut self) -> Option<u64> {
        let first = self.byte()?;
        let mut number = u64::from(first);
        if first < 0xf0 {
            return Some(number);
        }
        for shift in (4..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte);
            let shifted = part << shift;
            if shifted >> shift != part {
                return None;
            }
            number = number.checked_add(shifted)?;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    /// Reads a length-prefixed byte string.
    pub(super) fn bytes(&mut self) -> Option<&'b [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn value(&mut self) -> Option<SpopValue<'b>> {
        let kind = self.byte()?;
        Some(match kind & 0x0f {
            0 => SpopValue::Null,
            // A boolean is stored in the flag bits of its type byte.
            1 => SpopValue::Bool(kind & 0x10 != 0),
            2 | 4 => SpopValue::Signed(self.number()?.cast_signed()),
            3 | 5 => SpopValue::Unsigned(self.number()?),
            6 => SpopValue::Ip(Ipv4Addr::from(*self.chunk::<4>()?).into()),
            7 => SpopValue::Ip(Ipv6Addr::from(*self.chunk::<16>()?).into()),
            8 | 9 => SpopValue::Bytes(self.bytes()?),
            _ => return None,
        })
    }
}

/// Appends a number in the encoding that [`Reader::number`] describes.
fn put_number(out: &mut Vec<u8>, number: u64) {
    // Returns the lowest byte. An `as` cast could truncate a number unnoticed.
    let low = |number: u64| number.to_le_bytes()[0];
    if number < 0xf0 {
        out.push(low(number));
        return;
    }
    out.push(low(number) | 0xf0);
    let mut rest = (number - 0xf0) >> 4;
    while rest >= 0x80 {
        out.push(low(rest) | 0x80);
        rest = (rest - 0x80) >> 7;
    }
    out.push(low(rest));
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
    out.extend_from_slice(bytes);
}

fn put_value(out: &mut Vec<u8>, value: SpopValue<'_>) {
    match value {
        SpopValue::Null => out.push(0),
        SpopValue::Bool(is_true) => out.push(if is_true { 0x11 } else { 0x01 }),
        SpopValue::Signed(number) => {
            out.push(4);
            put_number(out, number.cast_unsigned());
        }
        SpopValue::Unsigned(number) => {
            out.push(5);
            put_number(out, number);
        }
        SpopValue::Ip(IpAddr::V4(ip)) => {
            out.push(6);
            out.extend_from_slice(&ip.octets());
        }
        SpopValue::Ip(IpAddr::V6(ip)) => {
            out.push(7);
            out.extend_from_slice(&ip.octets());
        }
        SpopValue::Bytes(bytes) => {
            out.push(8);
            put_bytes(out, bytes);
        }
    }
}

/// Appends a frame to `out`. The closure `payload` appends the frame's payload.
fn put_frame(out: &mut Vec<u8>, kind: u8, id: FrameId, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    out.push(kind);
    out.extend_from_slice(&FIN.to_be_bytes());
    put_number(out, id.stream);
    put_number(out, id.frame);
    payload(out);
    // The agent's frames do not exceed the maximum frame length, which fits in 32 bits.
    let length = u32::try_from(out.len() - start - PREFIX_BYTES).unwrap_or(u32::MAX);
    out[start..start + PREFIX_BYTES].copy_from_slice(&length.to_be_bytes());
}

fn put_pairs(out: &mut Vec<u8>, pairs: &[(&str, SpopValue<'_>)]) {
    for (name, value) in pairs {
        put_bytes(out, name.as_bytes());
        put_value(out, *value);
    }
}

/// Appends an AGENT-HELLO frame with this maximum frame length.
pub(super) fn put_hello(out: &mut Vec<u8>, max_frame_bytes: u32, capabilities: &str) {
    let pairs = [
        ("version", SpopValue::Bytes(b"2.0")),
        ("capabilities", SpopValue::Bytes(capabilities.as_bytes())),
    ];
    put_frame(out, AGENT_HELLO, FrameId::default(), |out| {
        put_pairs(out, &pairs);
        put_bytes(out, b"max-frame-size");
        put_number_32(out, max_frame_bytes);
    });
}

/// Appends an AGENT-DISCONNECT frame.
pub(super) fn put_disconnect(out: &mut Vec<u8>, reason: Disconnect) {
    put_frame(out, AGENT_DISCONNECT, FrameId::default(), |out| {
        put_bytes(out, b"status-code");
        put_number_32(out, reason.status);
        put_pairs(
            out,
            &[("message", SpopValue::Bytes(reason.message.as_bytes()))],
        );
    });
}

/// Appends an unsigned 32-bit integer. The protocol requires this type in some places.
fn put_number_32(out: &mut Vec<u8>, number: u32) {
    out.push(3);
    put_number(out, number.into());
}

/// Writes the actions in an ACK. The actions set and unset variables in HAProxy's transaction scope
/// (`txn`).
#[derive(Debug)]
pub(super) struct Actions<'o> {
    out: &'o mut Vec<u8>,
    /// The maximum length of `out`, so that the frame does not exceed its maximum length.
    end: usize,
}

/// The protocol's number for the transaction scope (`txn`).
const TRANSACTION: u8 = 2;

impl Actions<'_> {
    /// Sets the variable `name`. An action that does not fit into the frame is left out.
    pub(super) fn set(&mut self, name: &str, value: SpopValue<'_>) {
        self.put(&[1, 3, TRANSACTION], name, |out| put_value(out, value));
    }

    /// Removes the variable `name`, which an earlier event of the same transaction may have set.
    pub(super) fn unset(&mut self, name: &str) {
        self.put(&[2, 2, TRANSACTION], name, |_| {});
    }

    fn put(&mut self, head: &[u8], name: &str, value: impl FnOnce(&mut Vec<u8>)) {
        let start = self.out.len();
        self.out.extend_from_slice(head);
        put_bytes(self.out, name.as_bytes());
        value(self.out);
        if self.out.len() > self.end {
            self.out.truncate(start);
        }
    }
}

/// Appends the ACK for the NOTIFY with this ID. The frame has at most `max_bytes`, without its
/// length prefix.
pub(super) fn put_ack(
    out: &mut Vec<u8>,
    id: FrameId,
    max_bytes: usize,
    actions: impl FnOnce(&mut Actions<'_>),
) {
    let end = out.len() + PREFIX_BYTES + max_bytes;
    put_frame(out, ACK, id, |out| actions(&mut Actions { out, end }));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(number: u64) -> Vec<u8> {
        let mut out = Vec::new();
        put_number(&mut out, number);
        out
    }

    #[test]
    fn numbers_have_the_lengths_of_the_specification() {
        for (number, bytes) in [
            (0, 1),
            (239, 1),
            (240, 2),
            (2_287, 2),
            (2_288, 3),
            (264_431, 3),
            (264_432, 4),
            (33_818_863, 4),
            (33_818_864, 5),
            (4_328_786_159, 5),
            (u64::MAX, 10),
        ] {
            let encoded = encoded(number);
            assert_eq!(encoded.len(), bytes, "{number}");
            assert_eq!(Reader(&encoded).number(), Some(number));
        }
        assert_eq!(encoded(1_234), [0xf2, 0x3e]);
    }

    #[test]
    fn a_number_that_is_too_large_or_has_no_end_is_malformed() {
        let mut larger = encoded(u64::MAX);
        *larger.last_mut().unwrap() += 1;
        for bytes in [&larger[..], &[0xff; 20], &[0xf0], &[0xf0, 0x80], &[]] {
            assert_eq!(Reader(bytes).number(), None, "{bytes:?}");
        }
    }

    fn any_value() -> impl Strategy<Value = SpopValue<'static>> {
        prop_oneof![
            Just(SpopValue::Null),
            any::<bool>().prop_map(SpopValue::Bool),
            any::<i64>().prop_map(SpopValue::Signed),
            any::<u64>().prop_map(SpopValue::Unsigned),
            any::<IpAddr>().prop_map(SpopValue::Ip),
            prop::sample::select(vec![&b""[..], b"a", b"\xff\0", &[b'x'; 300]])
                .prop_map(SpopValue::Bytes),
        ]
    }

    proptest! {
        #[test]
        fn values_and_frames_are_read_as_they_were_written(
            value in any_value(), stream: u64, frame: u64, cut in 0_usize..400,
        ) {
            let id = FrameId { stream, frame };
            let mut out = Vec::new();
            put_frame(&mut out, NOTIFY, id, |out| put_value(out, value));
            let (read, length) = Frame::first(&out, 400).unwrap().unwrap();
            prop_assert_eq!((read.kind, read.id, length), (NOTIFY, id, out.len()));
            let mut reader = Reader(read.payload);
            prop_assert_eq!(reader.value(), Some(value));
            prop_assert!(reader.is_at_end());
            // A truncated frame is reported as incomplete, never as an error.
            if cut < out.len() {
                prop_assert_eq!(Frame::first(&out[..cut], 400), Ok(None));
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = Frame::first(&bytes, 300);
            let mut reader = Reader(&bytes);
            while reader.value().is_some() {}
        }
    }

    #[test]
    fn an_ack_never_exceeds_the_maximum_of_the_peer() {
        let mut out = b"before".to_vec();
        put_ack(&mut out, FrameId::default(), 256, |actions| {
            actions.set("allowed", SpopValue::Bool(true));
            actions.set("rule", SpopValue::Bytes(&[b'x'; 300]));
            actions.set("status", SpopValue::Unsigned(200));
        });
        let ack = &out[6..];
        let (frame, length) = Frame::first(ack, 256).unwrap().unwrap();
        assert_eq!((frame.kind, length), (ACK, ack.len()));
        assert_eq!(
            frame.payload,
            b"\x01\x03\x02\x07allowed\x11\x01\x03\x02\x06status\x05\xc8"
        );
    }
}
