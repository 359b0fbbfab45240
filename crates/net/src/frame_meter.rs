//! Detects HTTP/2 control-frame floods.
//!
//! Control frames are `PING`, `SETTINGS`, `PRIORITY`, `WINDOW_UPDATE`, `RST_STREAM`, unknown frames
//! and empty `DATA` frames. A client can send such a frame with as little as 9 bytes, but the
//! server must then send a reply or look up a stream. h2 accepts any number of these frames.
//! Therefore, each control frame uses one of the connection's credits. Requests, responses and
//! bodies earn credits, because they make some control frames necessary. A connection also earns
//! credits over time.
//!
//! A client responds to `DATA` frames with control frames, even if the `DATA` frames contain only
//! small messages. For example, a client sends a `WINDOW_UPDATE` for the stream, another for the
//! connection, and a `PING` to measure the bandwidth. Therefore, each `DATA` frame sent to the
//! client earns credits. Window updates may arrive long after the data that they acknowledge.
//! Therefore, each window update is first charged to a separate account with a higher maximum. A
//! `DATA` frame that uses up a flow-control window earns credits only for its bytes, because the
//! client determines the number of such frames in a response. Envoy also allows a number of window
//! updates per `DATA` frame sent (`max_inbound_window_update_frames_per_data_frame_sent`).

use std::time::Duration;

use tokio::time::Instant;

use super::{
    frame_parser::{FrameHeader, FrameParser},
    send_windows::SendWindows,
};

/// The maximum number of credits. A connection starts with this number of credits.
const BURST: u64 = 1_000;

/// The maximum number of credits for window updates. A client earns this number of credits by
/// receiving 64 MiB of data.
const WINDOW_UPDATE_BURST: u64 = 65_536;

/// The credits earned per second.
const PER_SECOND: u64 = 100;

/// The credits earned per request.
const PER_REQUEST: u64 = 4;

/// The credits earned per `DATA` frame that is sent to the client without using up a window.
const PER_DATA_FRAME: u64 = 4;

/// The number of body bytes, in either direction, that earn one credit. Some clients send window
/// updates for the stream and for the connection after every 4 KiB.
const BYTES_PER_CREDIT: u64 = 1_024;

/// Parses the frame headers in both directions of a connection, and manages the credits.
#[derive(Debug)]
pub(super) struct FrameMeter {
    received: FrameParser,
    sent: FrameParser,
    /// Whether the first frame header has been received.
    has_begun: bool,
    credits: Credits,
    /// Credits for window updates only, earned by response frames.
    window_updates: Credits,
    windows: SendWindows,
    refilled: Instant,
}

/// An account of credits.
#[derive(Debug)]
struct Credits {
    left: u64,
    max: u64,
    /// The number of body bytes that have not yet been counted towards a credit.
    bytes: u64,
}

/// The error for a client that sends too many control frames for its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flood;

impl FrameMeter {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            received: FrameParser::of_client(),
            sent: FrameParser::of_server(),
            has_begun: false,
            credits: Credits {
                left: BURST,
                max: BURST,
                bytes: 0,
            },
            window_updates: Credits {
                left: 0,
                max: WINDOW_UPDATE_BURST,
                bytes: 0,
            },
            windows: SendWindows::new(),
            refilled: now,
        }
    }

    /// Returns whether the preface and the first frame header have been received.
    pub(super) const fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Meters bytes read from the client.
    ///
    /// # Errors
    ///
    /// Returns [`Flood`] if the connection must be closed.
    pub(super) fn read(
        &mut self,
        mut bytes: &[u8],
        now: impl Fn() -> Instant,
    ) -> Result<(), Flood> {
        let mut read = Ok(());
        self.windows.receive_payload(bytes);
        while let Some(frame) = self.received.next_header(&mut bytes) {
            self.has_begun = true;
            self.windows.receive(frame);
            self.windows.receive_payload(bytes);
            match frame.kind {
                FrameHeader::HEADERS => self.credits.earn(PER_REQUEST),
                FrameHeader::DATA if frame.length > 0 || frame.is_end_stream() => {
                    self.credits.earn_for(frame.length);
                }
                FrameHeader::WINDOW_UPDATE if self.window_updates.spend() => {}
                _ => read = read.and_then(|()| self.spend(&now)),
            }
        }
        read
    }

    /// Meters bytes written to the client.
    pub(super) fn wrote(&mut self, mut bytes: &[u8]) {
        while let Some(frame) = self.sent.next_header(&mut bytes) {
            let uses_up_window = frame.kind == FrameHeader::DATA && self.windows.send_data(frame);
            let is_end = frame.kind == FrameHeader::HEADERS && frame.is_end_stream();
            if is_end || frame.kind == FrameHeader::RST_STREAM {
                self.windows.end(frame.stream);
            }
            // Replies to control frames earn no credits.
            let credits = match frame.kind {
                FrameHeader::DATA if frame.length > 0 && !uses_up_window => PER_DATA_FRAME,
                FrameHeader::DATA if frame.length > 0 => 0,
                FrameHeader::HEADERS | FrameHeader::CONTINUATION => 0,
                _ => continue,
            };
            for account in [&mut self.credits, &mut self.window_updates] {
                account.earn(credits);
                account.earn_for(frame.length);
            }
        }
    }

    fn spend(&mut self, now: impl Fn() -> Instant) -> Result<(), Flood> {
        if self.credits.spend() {
            return Ok(());
        }
        // The clock is read only if no credits are left.
        let now = now();
        let passed = now.saturating_duration_since(self.refilled);
        let millis = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
        let earned = millis.saturating_mul(PER_SECOND) / 1_000;
        // Advance the refill time only by the time of the whole credits earned, so that fractions
        // of a credit are not lost.
        self.refilled += Duration::from_millis(earned.min(BURST) * 1_000 / PER_SECOND);
        if earned >= BURST {
            self.refilled = now;
        }
        self.credits.earn(earned);
        if self.credits.spend() {
            Ok(())
        } else {
            Err(Flood)
        }
    }
}

impl Credits {
    fn spend(&mut self) -> bool {
        let has_credit = self.left > 0;
        self.left = self.left.saturating_sub(1);
        has_credit
    }

    fn earn_for(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.bytes = self.bytes.saturating_add(bytes);
        self.earn(self.bytes / BYTES_PER_CREDIT);
        self.bytes %= BYTES_PER_CREDIT;
    }

    fn earn(&mut self, credits: u64) {
        self.left = self.left.saturating_add(credits).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const PING: u8 = 6;

    const DATA: u8 = FrameHeader::DATA;
    const HEADERS: u8 = FrameHeader::HEADERS;
    const WINDOW_UPDATE: u8 = FrameHeader::WINDOW_UPDATE;
    const HEADER_BYTES: usize = 9;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u16::try_from(payload).unwrap().to_be_bytes();
        let mut frame = vec![0, length[0], length[1], kind, flags, 0, 0, 0, 1];
        frame.resize(HEADER_BYTES + payload, 0);
        frame
    }

    fn begun(start: Instant) -> FrameMeter {
        let mut meter = FrameMeter::new(start);
        meter.read(PREFACE, || start).unwrap();
        meter
    }

    /// Sends `frame` up to `count` times at `now`, and returns the number of accepted frames.
    fn pass(meter: &mut FrameMeter, frame: &[u8], count: usize, now: Instant) -> usize {
        (0..count)
            .take_while(|_| meter.read(frame, || now).is_ok())
            .count()
    }

    #[test]
    fn a_flood_is_detected_and_credits_return_over_time() {
        let start = Instant::now();
        let mut meter = begun(start);
        let ping = frame(PING, 0, 8);
        assert_eq!(pass(&mut meter, &ping, 5_000, start), 1_000);
        let later = start + Duration::from_secs(2);
        assert_eq!(pass(&mut meter, &ping, 5_000, later), 200);
        assert_eq!(pass(&mut meter, &ping, 5_000, later), 0);
        let much_later = start + Duration::from_secs(3_600);
        assert_eq!(pass(&mut meter, &ping, 5_000, much_later), 1_000);
        assert_eq!(pass(&mut meter, &ping, 5_000, much_later), 0);
    }

    #[test]
    fn a_flood_is_detected_however_reads_are_split() {
        let start = Instant::now();
        for size in [1, 7, 9, 10, 4_096] {
            let mut meter = FrameMeter::new(start);
            let mut bytes = PREFACE.to_vec();
            bytes.extend(frame(PING, 1, 8).repeat(1_001));
            let read = |bytes: &[u8]| meter.read(bytes, || start);
            let flood = bytes.chunks(size).map(read).any(|read| read.is_err());
            assert!(flood, "{size}");
        }
    }

    #[test]
    fn frames_of_requests_and_bodies_are_not_a_flood() {
        let start = Instant::now();
        let mut meter = begun(start);
        let (headers, update) = (frame(HEADERS, 4, 40), frame(WINDOW_UPDATE, 0, 4));
        for _ in 0..100_000 {
            meter.read(&headers, || start).unwrap();
            for _ in 0..4 {
                meter.read(&update, || start).unwrap();
            }
        }
        let sent = frame(DATA, 0, 4_096);
        for _ in 0..100_000 {
            meter.wrote(&sent);
            meter.read(&update, || start).unwrap();
            meter.read(&update, || start).unwrap();
        }
        let data = frame(DATA, 0, 16_384);
        for _ in 0..10_000 {
            meter.read(&data, || start).unwrap();
        }
        let empty = frame(DATA, 0, 0);
        assert_eq!(pass(&mut meter, &empty, 5_000, start), 1_000);
    }

    #[test]
    fn replies_to_small_messages_are_not_a_flood() {
        let start = Instant::now();
        let mut meter = begun(start);
        let (message, update, ping) = (
            frame(DATA, 0, 10),
            frame(WINDOW_UPDATE, 0, 4),
            frame(PING, 0, 8),
        );
        for _ in 0..100_000 {
            meter.wrote(&message);
            for reply in [&update, &update, &ping] {
                meter.read(reply, || start).unwrap();
            }
        }
        // The window updates may arrive after many messages.
        for _ in 0..10_000 {
            meter.wrote(&message);
        }
        assert_eq!(pass(&mut meter, &update, 20_000, start), 20_000);
    }

    #[test]
    fn a_flood_earns_nothing_from_the_replies_to_it() {
        let start = Instant::now();
        let mut meter = begun(start);
        let (ping, reply) = (frame(PING, 0, 8), frame(PING, 1, 8));
        let exchange = |_: &usize| {
            meter.wrote(&reply);
            meter.read(&ping, || start).is_ok()
        };
        assert_eq!((0..5_000).take_while(exchange).count(), 1_000);
    }

    #[test]
    fn a_download_does_not_pay_for_a_later_flood() {
        let start = Instant::now();
        let mut meter = begun(start);
        let data = frame(DATA, 0, 16_384);
        for _ in 0..100_000 {
            meter.wrote(&data);
        }
        let update = frame(WINDOW_UPDATE, 0, 4);
        assert_eq!(pass(&mut meter, &frame(PING, 0, 8), 5_000, start), 1_000);
        assert_eq!(pass(&mut meter, &update, 100_000, start), 65_536);
    }

    #[test]
    fn a_connection_begins_with_the_header_of_its_first_frame() {
        let start = Instant::now();
        let mut meter = FrameMeter::new(start);
        let mut bytes = PREFACE.to_vec();
        bytes.extend(frame(4, 0, 0));
        let (last, before) = bytes.split_last().unwrap();
        for byte in before {
            meter.read(&[*byte], || start).unwrap();
            assert!(!meter.has_begun());
        }
        meter.read(&[*last], || start).unwrap();
        assert!(meter.has_begun());
    }

    /// Regression test: by enlarging its window one byte at a time, a client makes the server send
    /// one frame per byte. Each of these frames earned more credits than one window update and four
    /// pings use.
    #[test]
    fn data_dribbled_by_a_small_window_earns_nothing_per_frame() {
        let start = Instant::now();
        for pings in [0, 1, 4] {
            let mut meter = begun(start);
            // `SETTINGS_INITIAL_WINDOW_SIZE` is 1.
            let mut settings = frame(FrameHeader::SETTINGS, 0, 6);
            settings[HEADER_BYTES..].copy_from_slice(&[0, 4, 0, 0, 0, 1]);
            meter.read(&settings, || start).unwrap();
            meter.read(&frame(HEADERS, 4, 40), || start).unwrap();
            let mut update = frame(WINDOW_UPDATE, 0, 4);
            update[HEADER_BYTES + 3] = 1;
            let round = [update, frame(PING, 0, 8).repeat(pings)].concat();
            let dribble = |_: &usize| {
                meter.wrote(&frame(DATA, 0, 1));
                meter.read(&round, || start).is_ok()
            };
            let rounds = (0..100_000).take_while(dribble).count();
            assert!(rounds <= 1_100 / (1 + pings), "{pings}: {rounds}");
        }
    }
}
