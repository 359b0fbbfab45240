//! The flow-control windows that an HTTP/2 client grants to the server (RFC 9113 §5.2).
//!
//! By granting a few bytes at a time, a client can make a server split a response into any number
//! of `DATA` frames. A frame that ends because of the window leaves almost none of the window. A
//! frame that ends because its message ends leaves more, unless the client reads slowly.

use std::collections::HashMap;

use super::frame_parser::FrameHeader;

/// The initial size of each window in bytes (RFC 9113 §6.9.2).
const INITIAL_BYTES: i64 = 65_535;

/// The setting identifier `SETTINGS_INITIAL_WINDOW_SIZE`.
const INITIAL_WINDOW_SIZE: u16 = 4;

/// A window with fewer bytes left is treated as used up. The threshold is above zero, because a
/// window update may arrive between the time when data is queued and the time when the data is
/// written.
const USED_UP_BYTES: i64 = 1_024;

/// The maximum number of tracked streams. h2 allows fewer concurrent streams.
const MAX_STREAMS: usize = 4_096;

/// The HTTP/2 flow-control windows of a connection and of its streams. A window is the number of
/// bytes that the server may still send.
#[derive(Debug)]
pub(super) struct SendWindows {
    /// The initial size of a stream's window, in bytes.
    initial: i64,
    connection: i64,
    /// The bytes granted to each open stream beyond `initial`, minus the bytes sent.
    streams: HashMap<u32, i64>,
    /// The ID of the newest stream that the client has opened.
    newest: u32,
    payload: Payload,
}

/// The part of a `SETTINGS` or `WINDOW_UPDATE` payload that has not been processed yet.
#[derive(Debug, Default)]
struct Payload {
    kind: u8,
    stream: u32,
    bytes_left: usize,
    /// The bytes received so far of the current setting or window increment.
    item: [u8; 6],
    item_len: usize,
}

impl SendWindows {
    pub(super) fn new() -> Self {
        Self {
            initial: INITIAL_BYTES,
            connection: INITIAL_BYTES,
            streams: HashMap::new(),
            newest: 0,
            payload: Payload::default(),
        }
    }

    /// Records a frame header from the client. The caller must then pass the bytes after the header
    /// to [`Self::receive_payload`].
    pub(super) fn receive(&mut self, frame: FrameHeader) {
        match frame.kind {
            FrameHeader::HEADERS if frame.stream > self.newest => {
                self.newest = frame.stream;
                self.open(frame.stream);
            }
            FrameHeader::RST_STREAM => {
                self.streams.remove(&frame.stream);
            }
            FrameHeader::SETTINGS | FrameHeader::WINDOW_UPDATE => {
                self.payload = Payload {
                    kind: frame.kind,
                    stream: frame.stream,
                    bytes_left: frame.length,
                    ..Payload::default()
                };
            }
            _ => {}
        }
    }

    /// Reads the payload of the last frame from `bytes`. The payload may be split across calls.
    pub(super) fn receive_payload(&mut self, bytes: &[u8]) {
        let arrived = self.payload.bytes_left.min(bytes.len());
        self.payload.bytes_left -= arrived;
        for byte in &bytes[..arrived] {
            self.payload.item[self.payload.item_len] = *byte;
            self.payload.item_len += 1;
            if self.payload.item_len == self.payload.item_bytes() {
                self.payload.item_len = 0;
                self.apply_item();
            }
        }
    }

    fn apply_item(&mut self) {
        let [a, b, c, d, e, f] = self.payload.item;
        if self.payload.kind == FrameHeader::SETTINGS {
            if u16::from_be_bytes([a, b]) == INITIAL_WINDOW_SIZE {
                self.initial = i64::from(u32::from_be_bytes([c, d, e, f]));
            }
            return;
        }
        // The highest bit is reserved.
        let increment = i64::from(u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1));
        if self.payload.stream == 0 {
            self.connection = self.connection.saturating_add(increment);
        } else if let Some(granted) = self.streams.get_mut(&self.payload.stream) {
            *granted = granted.saturating_add(increment);
        }
    }

    /// Records a sent `DATA` frame. Returns whether the frame used up a window. Such a frame may be
    /// short only because the client granted a small window.
    pub(super) fn send_data(&mut self, frame: FrameHeader) -> bool {
        let bytes = i64::try_from(frame.length).unwrap_or(i64::MAX);
        self.connection = self.connection.saturating_sub(bytes);
        if frame.is_end_stream() {
            self.streams.remove(&frame.stream);
            return false;
        }
        let granted = self.open(frame.stream);
        *granted = granted.saturating_sub(bytes);
        let granted = *granted;
        let stream = granted.saturating_add(self.initial);
        // A negative window does not count as used up: only a changed setting can make a window
        // negative, and the server then sends no data until the window is positive again.
        let used_up = 0..USED_UP_BYTES;
        used_up.contains(&stream) || used_up.contains(&self.connection)
    }

    /// Records that the server has ended or reset a stream.
    pub(super) fn end(&mut self, stream: u32) {
        self.streams.remove(&stream);
    }

    fn open(&mut self, stream: u32) -> &mut i64 {
        if self.streams.len() >= MAX_STREAMS
            && !self.streams.contains_key(&stream)
            && let Some(oldest) = self.streams.keys().min().copied()
        {
            self.streams.remove(&oldest);
        }
        self.streams.entry(stream).or_default()
    }
}

impl Payload {
    /// Returns the length in bytes of a setting or of a window increment.
    const fn item_bytes(&self) -> usize {
        if self.kind == FrameHeader::SETTINGS {
            6
        } else {
            4
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u8, flags: u8, stream: u32, length: usize) -> FrameHeader {
        FrameHeader {
            length,
            kind,
            flags,
            stream,
        }
    }

    fn grant(windows: &mut SendWindows, stream: u32, bytes: u32) {
        windows.receive(header(FrameHeader::WINDOW_UPDATE, 0, stream, 4));
        for byte in bytes.to_be_bytes() {
            windows.receive_payload(&[byte]);
        }
    }

    fn set_initial(windows: &mut SendWindows, bytes: u32) {
        windows.receive(header(FrameHeader::SETTINGS, 0, 0, 12));
        let [a, b, c, d] = bytes.to_be_bytes();
        windows.receive_payload(&[0, 3, 0, 0, 0, 9, 0]);
        windows.receive_payload(&[4, a, b, c, d, 1, 2]);
    }

    fn send(windows: &mut SendWindows, stream: u32, bytes: usize) -> bool {
        windows.send_data(header(FrameHeader::DATA, 0, stream, bytes))
    }

    #[test]
    fn frames_that_use_up_a_window_are_told_from_others() {
        let mut windows = SendWindows::new();
        windows.receive(header(FrameHeader::HEADERS, 0, 1, 9));
        assert!(!send(&mut windows, 1, 60_000));
        assert!(send(&mut windows, 1, 5_535), "both windows");
        grant(&mut windows, 0, 1 << 20);
        grant(&mut windows, 1, 2_000);
        assert!(!send(&mut windows, 1, 10));
        assert!(send(&mut windows, 1, 1_990), "the stream's window");
        set_initial(&mut windows, 70_000);
        assert!(!send(&mut windows, 1, 10));
        // A new stream has the initial window. Grants to a closed stream are ignored.
        set_initial(&mut windows, 1);
        windows.receive(header(FrameHeader::HEADERS, 0, 3, 9));
        assert!(send(&mut windows, 3, 1));
        assert!(
            !windows.send_data(header(FrameHeader::DATA, 1, 3, 0)),
            "the end"
        );
        grant(&mut windows, 3, 10);
        windows.receive(header(FrameHeader::HEADERS, 1, 3, 9));
        windows.end(1);
        assert_eq!(windows.streams.len(), 0);
    }

    #[test]
    fn the_number_of_streams_is_bounded() {
        let mut windows = SendWindows::new();
        for stream in 0..20_000 {
            windows.receive(header(FrameHeader::HEADERS, 0, 2 * stream + 1, 9));
        }
        assert_eq!(windows.streams.len(), MAX_STREAMS);
    }
}
