//! Detects HTTP/2 control-frame floods.
//!
//! Control frames (`PING`, `SETTINGS`, `PRIORITY`, `WINDOW_UPDATE`, `RST_STREAM`, unknown frames,
//! empty `DATA`) cost the client as little as 9 bytes each and the server a reply or a lookup, and
//! h2 accepts any number of them. So each costs one credit. Requests, responses and bodies make
//! some control frames necessary, so they earn credits, and so does time.

use std::time::Duration;

use tokio::time::Instant;

/// The length of the connection preface, RFC 9113 §3.4.
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;

/// The maximum number of credits, and the initial number.
const BURST: u64 = 1_000;

/// The credits earned per second.
const PER_SECOND: u64 = 100;

/// The credits earned per request.
const PER_REQUEST: u64 = 4;

/// The body bytes, in either direction, that earn one credit. Some clients update the windows of a
/// stream and of the connection after every 4 KiB.
const BYTES_PER_CREDIT: u64 = 1_024;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;

/// Parses the frame headers of the bytes that a client sends, and keeps the credits.
#[derive(Debug)]
pub(super) struct FrameMeter {
    preface_left: usize,
    header: [u8; HEADER_BYTES],
    header_read: usize,
    payload_left: usize,
    /// Whether the first frame header has been received.
    has_begun: bool,
    credits: u64,
    /// Body bytes that do not add up to a credit yet.
    bytes: u64,
    refilled: Instant,
}

/// The error for a client that sends too many control frames for its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flood;

impl FrameMeter {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            preface_left: PREFACE_BYTES,
            header: [0; HEADER_BYTES],
            header_read: 0,
            payload_left: 0,
            has_begun: false,
            credits: BURST,
            bytes: 0,
            refilled: now,
        }
    }

    /// Returns whether the preface and the first frame header have been received.
    pub(super) const fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Meters bytes that were read from the client.
    ///
    /// # Errors
    ///
    /// Returns [`Flood`] if the connection must be closed.
    pub(super) fn read(
        &mut self,
        mut octets: &[u8],
        now: impl Fn() -> Instant,
    ) -> Result<(), Flood> {
        let mut read = Ok(());
        let preface = self.preface_left.min(octets.len());
        self.preface_left -= preface;
        octets = &octets[preface..];
        while !octets.is_empty() {
            let payload = self.payload_left.min(octets.len());
            self.payload_left -= payload;
            octets = &octets[payload..];
            if self.payload_left > 0 || octets.is_empty() {
                break;
            }
            let part = (HEADER_BYTES - self.header_read).min(octets.len());
            self.header[self.header_read..self.header_read + part].copy_from_slice(&octets[..part]);
            self.header_read += part;
            octets = &octets[part..];
            if self.header_read == HEADER_BYTES {
                self.header_read = 0;
                self.has_begun = true;
                let frame = self.frame(&now);
                read = read.and(frame);
            }
        }
        read
    }

    /// Meters bytes that were written to the client.
    pub(super) fn wrote(&mut self, octets: usize) {
        self.earn_for(u64::try_from(octets).unwrap_or(u64::MAX));
    }

    fn frame(&mut self, now: impl Fn() -> Instant) -> Result<(), Flood> {
        let [high, middle, low, kind, flags, ..] = self.header;
        self.payload_left = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        match kind {
            HEADERS => self.earn(PER_REQUEST),
            DATA if self.payload_left > 0 || flags & END_STREAM != 0 => {
                self.earn_for(u64::try_from(self.payload_left).unwrap_or(u64::MAX));
            }
            _ => return self.spend(now),
        }
        Ok(())
    }

    fn spend(&mut self, now: impl Fn() -> Instant) -> Result<(), Flood> {
        if self.credits == 0 {
            // The clock is read only when the credits are used up.
            let now = now();
            let passed = now.saturating_duration_since(self.refilled);
            let millis = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
            let earned = millis.saturating_mul(PER_SECOND) / 1_000;
            if earned == 0 {
                return Err(Flood);
            }
            // Advances by whole credits only, so that fractions are not lost.
            self.refilled += Duration::from_millis(earned.min(BURST) * 1_000 / PER_SECOND);
            if earned >= BURST {
                self.refilled = now;
            }
            self.earn(earned);
        }
        self.credits -= 1;
        Ok(())
    }

    fn earn_for(&mut self, octets: u64) {
        self.bytes = self.bytes.saturating_add(octets);
        self.earn(self.bytes / BYTES_PER_CREDIT);
        self.bytes %= BYTES_PER_CREDIT;
    }

    fn earn(&mut self, credits: u64) {
        self.credits = self.credits.saturating_add(credits).min(BURST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const PING: u8 = 6;
    const WINDOW_UPDATE: u8 = 8;

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

    /// Sends `frame` up to `count` times at `now` and returns how many pass.
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
            let mut octets = PREFACE.to_vec();
            octets.extend(frame(PING, 1, 8).repeat(1_001));
            let read = |octets: &[u8]| meter.read(octets, || start);
            let flood = octets.chunks(size).map(read).any(|read| read.is_err());
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
        for _ in 0..100_000 {
            meter.wrote(4_096);
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
    fn a_connection_begins_with_the_header_of_its_first_frame() {
        let start = Instant::now();
        let mut meter = FrameMeter::new(start);
        let mut octets = PREFACE.to_vec();
        octets.extend(frame(4, 0, 0));
        let (last, before) = octets.split_last().unwrap();
        for octet in before {
            meter.read(&[*octet], || start).unwrap();
            assert!(!meter.has_begun());
        }
        meter.read(&[*last], || start).unwrap();
        assert!(meter.has_begun());
    }
}
