//! The SPOP session of a connection: performs the handshake and answers frames.

use futures_util::{StreamExt as _, stream};
use tidegate_limiter::{ServerLimiter, metrics::ListenerKind};
use tidegate_net::StateFormat;
use tidegate_tower::HeaderWriter;

use super::{
    bounds::{MAX_FRAME_BYTES, MAX_TOGETHER, MIN_FRAME_BYTES, OUTPUT_BYTES},
    check,
    frame::{
        Disconnect, FRAGMENTED, Frame, HAPROXY_DISCONNECT, HAPROXY_HELLO, MALFORMED,
        NO_CAPABILITIES, NO_FRAME_SIZE, NO_VERSION, NORMAL, NOT_SPOP, NOTIFY, OTHER_VERSION,
        Reader, SMALL_FRAMES, SpopValue, TOO_BIG, UNEXPECTED, put_disconnect, put_hello,
    },
};

/// The format of the state that moves to another process.
const MOVED: StateFormat = StateFormat {
    protocol: b'S',
    version: 1,
};

/// The state of one connection.
#[derive(Debug)]
pub(super) struct SpopSession {
    writer: HeaderWriter,
    /// The maximum frame length in both directions. Before the handshake, the maximum is
    /// [`MAX_FRAME_BYTES`].
    max_frame_bytes: usize,
    is_established: bool,
}

/// How much of the input has been answered, and the next action on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpopProgress {
    /// The number of input bytes that have been consumed.
    pub(super) consumed: usize,
    pub(super) next: Next,
}

/// The next action on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// More input is needed.
    Read,
    /// The output must be written before more frames are answered.
    Write,
    /// The connection must be closed after the output is written.
    Close,
}

/// The content of a HAPROXY-HELLO frame.
#[derive(Debug, PartialEq, Eq)]
struct Hello {
    max_frame_bytes: u32,
    has_pipelining: bool,
    is_health_check: bool,
}

impl SpopSession {
    pub(super) fn new(writer: HeaderWriter) -> Self {
        Self {
            writer,
            max_frame_bytes: MAX_FRAME_BYTES,
            is_established: false,
        }
    }

    /// Returns the state of this session and its connection for another process; `unread` are the
    /// bytes that were read from the connection but not processed.
    ///
    /// ```text
    /// | S | version: 1 | handshake is done: 1 | maximum length of a frame: 4 | unread |
    /// ```
    pub(super) fn state_to_move(&self, unread: &[u8]) -> Vec<u8> {
        let max = u32::try_from(self.max_frame_bytes).unwrap_or(u32::MAX);
        let mut state = MOVED.header().to_vec();
        state.push(u8::from(self.is_established));
        state.extend(max.to_le_bytes());
        state.extend(unread);
        state
    }

    /// Continues the session with the `state` of another process. Returns the bytes that the other
    /// process had read and not used. Returns `None`, and changes nothing, if the state is not
    /// valid.
    pub(super) fn resume(&mut self, state: &[u8]) -> Option<Vec<u8>> {
        let (is_established @ (0 | 1), rest) = MOVED.strip(state)?.split_first()? else {
            return None;
        };
        let (max, unread) = rest.split_first_chunk()?;
        let max = usize::try_from(u32::from_le_bytes(*max)).ok()?;
        if !(MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&max) {
            return None;
        }
        self.is_established = *is_established == 1;
        self.max_frame_bytes = max;
        Some(unread.to_vec())
    }

    /// Answers the complete frames in `input`, until `out` contains [`OUTPUT_BYTES`] or more.
    pub(super) async fn answer(
        &mut self,
        limiter: &ServerLimiter,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> SpopProgress {
        let mut consumed = 0;
        let reason = loop {
            if out.len() >= OUTPUT_BYTES {
                let next = Next::Write;
                return SpopProgress { consumed, next };
            }
            match self.step(limiter, &input[consumed..], out).await {
                Ok(0) => {
                    let next = Next::Read;
                    return SpopProgress { consumed, next };
                }
                // A step consumes only complete frames.
                Ok(length) => consumed += length,
                Err(End::HealthCheck) => break None,
                Err(End::Disconnect(reason)) => break Some(reason),
            }
        };
        if let Some(reason) = reason {
            if reason != NORMAL {
                limiter.metrics().count_bad_request(ListenerKind::Spop);
            }
            put_disconnect(out, reason);
        }
        SpopProgress {
            consumed: input.len(),
            next: Next::Close,
        }
    }

    /// Answers the first frame in `input`, or several NOTIFY frames at once. Returns the number of
    /// bytes consumed, which is 0 if no frame is complete.
    async fn step(
        &mut self,
        limiter: &ServerLimiter,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<usize, End> {
        let first = Frame::first(input, self.max_frame_bytes).map_err(|reason| match reason {
            // If a client sends HTTP or TLS instead of SPOP, its first four bytes look like the
            // length of a very long frame.
            TOO_BIG if !self.is_established => NOT_SPOP,
            reason => reason,
        });
        let Some((frame, length)) = first? else {
            return Ok(0);
        };
        match frame.kind {
            HAPROXY_HELLO if !self.is_established && !frame.is_fragment() => {
                let hello = Hello::read(frame.payload)?;
                self.begin(&hello, out);
                if hello.is_health_check {
                    return Err(End::HealthCheck);
                }
            }
            HAPROXY_DISCONNECT => return Err(NORMAL.into()),
            _ if !self.is_established => return Err(UNEXPECTED.into()),
            HAPROXY_HELLO => return Err(UNEXPECTED.into()),
            _ if frame.is_fragment() => return Err(FRAGMENTED.into()),
            NOTIFY => return self.notified(limiter, input, out).await,
            // Unknown frames are ignored, as the protocol allows.
            _ => {}
        }
        Ok(length)
    }

    fn begin(&mut self, hello: &Hello, out: &mut Vec<u8>) {
        let own = u32::try_from(MAX_FRAME_BYTES).unwrap_or(u32::MAX);
        let max = hello.max_frame_bytes.min(own);
        self.max_frame_bytes = usize::try_from(max).unwrap_or(MAX_FRAME_BYTES);
        self.is_established = true;
        let capabilities = if hello.has_pipelining {
            "pipelining"
        } else {
            ""
        };
        put_hello(out, max, capabilities);
    }

    /// Answers the NOTIFY frames at the beginning of `input`, and returns their total length. The
    /// decisions run concurrently, so that they share a round trip to Redis.
    async fn notified(
        &self,
        limiter: &ServerLimiter,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<usize, End> {
        let (mut frames, mut length) = (Vec::new(), 0);
        while frames.len() < MAX_TOGETHER {
            // If the next frame cannot be decoded, the next step reports the error.
            let next = Frame::first(&input[length..], self.max_frame_bytes);
            let Ok(Some((frame, bytes))) = next else {
                break;
            };
            if frame.kind != NOTIFY || frame.is_fragment() {
                break;
            }
            frames.push(frame);
            length += bytes;
        }
        let answers = stream::iter(&frames)
            .map(|frame| check::answer(limiter, &self.writer, frame, self.max_frame_bytes));
        let mut answers = answers.buffered(MAX_TOGETHER);
        while let Some(answer) = answers.next().await {
            out.extend_from_slice(&answer?);
        }
        Ok(length)
    }
}

/// The reason why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The connection was a health check, which is complete after the AGENT-HELLO.
    HealthCheck,
    Disconnect(Disconnect),
}

impl From<Disconnect> for End {
    fn from(reason: Disconnect) -> Self {
        Self::Disconnect(reason)
    }
}

impl Hello {
    fn read(payload: &[u8]) -> Result<Self, Disconnect> {
        let (mut versions, mut max_frame, mut capabilities) = (None, None, None);
        let mut is_health_check = false;
        let mut reader = Reader(payload);
        while !reader.is_at_end() {
            let name = reader.bytes().ok_or(MALFORMED)?;
            match (name, reader.value().ok_or(MALFORMED)?) {
                (b"supported-versions", SpopValue::Bytes(list)) => versions = Some(list),
                (b"max-frame-size", SpopValue::Unsigned(bytes)) => max_frame = Some(bytes),
                (b"capabilities", SpopValue::Bytes(list)) => capabilities = Some(list),
                (b"healthcheck", SpopValue::Bool(is_true)) => is_health_check = is_true,
                _ => {}
            }
        }
        let mut versions = items(versions.ok_or(NO_VERSION)?);
        // A peer that lists 2.x also supports all earlier minor versions, so it supports 2.0.
        if !versions.any(|version| version.starts_with(b"2.")) {
            return Err(OTHER_VERSION);
        }
        let max_frame_bytes = max_frame.ok_or(NO_FRAME_SIZE)?;
        let max_frame_bytes = u32::try_from(max_frame_bytes).unwrap_or(u32::MAX);
        if usize::try_from(max_frame_bytes).is_ok_and(|bytes| bytes < MIN_FRAME_BYTES) {
            return Err(SMALL_FRAMES);
        }
        let mut capabilities = items(capabilities.ok_or(NO_CAPABILITIES)?);
        Ok(Self {
            max_frame_bytes,
            has_pipelining: capabilities.any(|capability| capability == b"pipelining"),
            is_health_check,
        })
    }
}

/// Returns the items of a comma-separated list with optional spaces.
fn items(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

#[cfg(test)]
mod tests {
    use tidegate_config::Headers;

    use super::*;

    fn session() -> SpopSession {
        SpopSession::new(Headers::default().writer())
    }

    #[test]
    fn a_session_continues_with_its_state_and_an_invalid_state_is_refused() {
        let mut old = session();
        old.is_established = true;
        old.max_frame_bytes = 1_000;
        let state = old.state_to_move(b"frame");
        let mut new = session();
        assert_eq!(new.resume(&state), Some(b"frame".to_vec()));
        assert_eq!((new.is_established, new.max_frame_bytes), (true, 1_000));
        for length in 0..7 {
            assert_eq!(session().resume(&state[..length]), None);
        }
        for (at, byte) in [(0, b'R'), (1, 2), (2, 2), (4, 0), (6, 1)] {
            let mut invalid = state.clone();
            invalid[at] = byte;
            assert_eq!(session().resume(&invalid), None, "{at}");
        }
    }
}
