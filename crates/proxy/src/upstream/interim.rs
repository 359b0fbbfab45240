//! Limits the number of interim responses (1xx) from an HTTP/2 upstream.
//!
//! h2 queues interim responses, and hyper's client drops them without notifying its caller.
//! Therefore, this module counts interim responses by their HTTP/2 frames. The limit is the same as
//! for HTTP/1.1 upstreams.
//!
//! To fail a stream that exceeds the limit, this module inserts a `RST_STREAM` into the bytes from
//! the upstream. The inserted frame precedes the first response head above the limit. When h2 reads
//! the head above the limit, it sends a reset for the stream to the upstream. All other streams of
//! the connection continue.
//!
//! If the upstream ignores the resets, the whole connection fails. The failures of the other
//! requests on the connection do not count as endpoint failures.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use tidegate_net::{FrameHeader, FrameParser};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::interim_allowance::{InterimAllowance, TooManyInterim};

/// The maximum number of concurrent streams per connection, even if the upstream allows more.
pub(super) const MAX_STREAMS: usize = 100;

/// The maximum number of streams to track, including streams that the proxy has reset.
const MAX_COUNTERS: usize = 2 * MAX_STREAMS;

/// The maximum number of excess heads: response heads above the limit that do not reset their
/// stream. A head cannot reset its stream if the stream was already reset, or if h2 has already
/// read the first part of the head's frame header. The library h2 replies to each head that follows
/// a reset, and would itself fail the connection after 1,024 such heads.
const MAX_EXCESS_HEADS: u32 = 500;

/// A byte stream to an upstream that resets HTTP/2 streams with too many interim responses.
#[derive(Debug)]
pub(super) struct InterimLimitStream<S> {
    stream: S,
    counter: InterimCounter,
    /// Bytes from the upstream, with inserted frames. h2 has not read these bytes yet.
    rewritten: BytesMut,
    has_failed: bool,
}

/// Counts response heads per HTTP/2 stream.
#[derive(Debug)]
struct InterimCounter {
    parser: FrameParser,
    /// The streams that have received a response head, interim or final, but no body yet.
    heads: HashMap<u32, StreamHeads>,
    /// The number of excess heads: see [`MAX_EXCESS_HEADS`].
    excess_heads: u32,
}

/// The response heads of a stream.
#[derive(Debug)]
struct StreamHeads {
    allowance: InterimAllowance,
    is_reset: bool,
}

/// A reset of `stream` to be inserted at `position` in the bytes of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ResetAt {
    position: usize,
    stream: u32,
}

impl<S> InterimLimitStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            counter: InterimCounter {
                parser: FrameParser::of_server(),
                heads: HashMap::new(),
                excess_heads: 0,
            },
            rewritten: BytesMut::new(),
            has_failed: false,
        }
    }
}

impl InterimCounter {
    /// Counts the response heads in `bytes`. Appends the required resets to `resets`, in the order
    /// of their positions.
    fn read(&mut self, bytes: &[u8], resets: &mut Vec<ResetAt>) -> Result<(), TooManyInterim> {
        let mut rest = bytes;
        while let Some(frame) = self.parser.next_header(&mut rest) {
            match frame.kind {
                // A head with `END_STREAM` is the final response, or trailers. Of the heads without
                // `END_STREAM`, only the last one can be the final response.
                FrameHeader::HEADERS if !frame.is_end_stream() => {
                    let read = bytes.len() - rest.len();
                    // The position is `None` if h2 has already read the beginning of the frame
                    // header.
                    let position = read.checked_sub(FrameHeader::BYTES);
                    self.count(frame.stream, position, resets)?;
                }
                FrameHeader::HEADERS | FrameHeader::DATA | FrameHeader::RST_STREAM => {
                    self.heads.remove(&frame.stream);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Counts a response head of `stream`. If the stream has too many heads, resets the stream at
    /// `position`.
    fn count(
        &mut self,
        stream: u32,
        position: Option<usize>,
        resets: &mut Vec<ResetAt>,
    ) -> Result<(), TooManyInterim> {
        let Some(heads) = self.heads.get_mut(&stream) else {
            let heads = StreamHeads {
                allowance: InterimAllowance::FULL,
                is_reset: false,
            };
            self.heads.insert(stream, heads);
            if self.heads.len() > MAX_COUNTERS
                && let Some(oldest) = self.heads.keys().min().copied()
            {
                self.heads.remove(&oldest);
            }
            return Ok(());
        };
        // Another head follows, so the previous head was an interim response.
        if !heads.is_reset && heads.allowance.spend(Instant::now()).is_ok() {
            return Ok(());
        }
        if let Some(position) = position.filter(|_| !heads.is_reset) {
            heads.is_reset = true;
            resets.push(ResetAt { position, stream });
            return Ok(());
        }
        self.excess_heads += 1;
        if self.excess_heads > MAX_EXCESS_HEADS {
            return Err(TooManyInterim);
        }
        Ok(())
    }
}

impl<S> InterimLimitStream<S> {
    /// Counts the response heads in `bytes`. Returns false if [`Self::rewritten`] replaces `bytes`.
    fn meter(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let mut resets = Vec::new();
        let counted = self.counter.read(bytes, &mut resets);
        if resets.is_empty() {
            return counted.map(|()| true).map_err(aborted);
        }
        let mut from = 0;
        for reset in &resets {
            let before = &bytes[from..reset.position];
            self.rewritten.extend_from_slice(before);
            self.rewritten.extend_from_slice(&rst_stream(reset.stream));
            from = reset.position;
            tracing::debug!(
                stream = reset.stream,
                "upstream stream reset: {TooManyInterim}"
            );
        }
        // If the connection must fail, first let h2 read the resets of the streams that exceeded
        // the limit.
        self.has_failed = counted.is_err();
        if !self.has_failed {
            self.rewritten.extend_from_slice(&bytes[from..]);
        }
        Ok(false)
    }

    /// Moves bytes from [`Self::rewritten`] to `buffer`.
    fn read_rewritten(&mut self, buffer: &mut ReadBuf<'_>) {
        let length = buffer.remaining().min(self.rewritten.len());
        buffer.put_slice(&self.rewritten[..length]);
        self.rewritten.advance(length);
    }
}

/// Returns a frame that resets `stream`, with the code `ENHANCE_YOUR_CALM`.
fn rst_stream(stream: u32) -> [u8; 13] {
    let [a, b, c, d] = stream.to_be_bytes();
    let kind = FrameHeader::RST_STREAM;
    [0, 0, 4, kind, 0, a, b, c, d, 0, 0, 0, 0xb]
}

/// Returns an error that counts as a disconnect. Other requests on the connection are retried if
/// they are idempotent and have no body.
fn aborted(error: TooManyInterim) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, error)
}

impl<S: AsyncRead + Unpin> AsyncRead for InterimLimitStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.rewritten.is_empty() {
            if this.has_failed {
                return Poll::Ready(Err(aborted(TooManyInterim)));
            }
            let before = buffer.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, buffer))?;
            let bytes = buffer.filled().get(before..).unwrap_or_default();
            let metered = this.meter(bytes);
            if let Ok(true) = metered {
                return Poll::Ready(Ok(()));
            }
            // Drop the read bytes: either other bytes replace them, or this function returns an
            // error. A failed read must not return bytes.
            buffer.set_filled(before);
            metered?;
        }
        this.read_rewritten(buffer);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InterimLimitStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::{super::interim_allowance::MAX_INTERIM_RESPONSES, *};

    const HEADERS: u8 = FrameHeader::HEADERS;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    /// The maximum number of response heads on a stream before it is reset.
    const MOST: usize = MAX_INTERIM_RESPONSES as usize + 1;

    fn frame(kind: u8, flags: u8, stream: u8) -> [u8; 9] {
        [0, 0, 0, kind, flags, 0, 0, 0, stream]
    }

    fn counter() -> InterimCounter {
        InterimLimitStream::new(()).counter
    }

    /// Returns the streams to reset after the counter has read `bytes`.
    fn resets(counter: &mut InterimCounter, bytes: &[u8]) -> Vec<u32> {
        let mut resets = Vec::new();
        counter.read(bytes, &mut resets).unwrap();
        resets.iter().map(|reset| reset.stream).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn interim_responses_are_counted_by_stream_up_to_the_body() {
        for (end, flags) in [
            (FrameHeader::DATA, 0),
            (HEADERS, END_STREAM),
            (FrameHeader::RST_STREAM, 0),
        ] {
            let mut counter = counter();
            let head = |stream| frame(HEADERS, END_HEADERS, stream);
            for stream in [1, 3] {
                assert_eq!(resets(&mut counter, &head(stream).repeat(MOST)), [0; 0]);
            }
            assert_eq!(resets(&mut counter, &frame(end, flags, 1)), [0; 0]);
            assert_eq!(resets(&mut counter, &head(1)), [0; 0], "trailers");
            assert_eq!(resets(&mut counter, &head(3)), [3]);
            assert_eq!(resets(&mut counter, &head(3)), [0; 0], "reset before");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_refills_the_allowance() {
        let mut counter = counter();
        let head = frame(HEADERS, END_HEADERS, 1);
        assert_eq!(resets(&mut counter, &head.repeat(MOST)), [0; 0]);
        for _ in 0..1_000 {
            tokio::time::advance(std::time::Duration::from_secs(5)).await;
            assert_eq!(resets(&mut counter, &head), [0; 0]);
        }
        assert_eq!(resets(&mut counter, &head.repeat(MOST)), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_is_inserted_before_the_head_that_is_too_many() {
        let head = frame(HEADERS, END_HEADERS, 1);
        let rest = [head, frame(HEADERS, END_HEADERS, 3), head].concat();
        let sent = [head.repeat(MOST), rest.clone()].concat();
        let expected = [head.repeat(MOST), rst_stream(1).to_vec(), rest].concat();
        let mut received = Vec::new();
        let mut limited = InterimLimitStream::new(&sent[..]);
        limited.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, expected);
    }

    /// Checks that no reset is inserted in the middle of a frame header of which h2 has already
    /// read the first part.
    #[tokio::test(start_paused = true)]
    async fn a_reset_is_inserted_between_frames_however_reads_are_split() {
        let head = frame(HEADERS, END_HEADERS, 1);
        for size in [9, 10, 100, 4_096] {
            let mut limited = InterimLimitStream::new(split(&head.repeat(400), size));
            let mut received = Vec::new();
            limited.read_to_end(&mut received).await.unwrap();
            let is_reset = |part: &[u8]| part == rst_stream(1);
            let at = received.windows(13).position(is_reset).unwrap();
            assert_eq!(at % head.len(), 0, "{size}");
            assert!(at >= MOST * head.len(), "{size}");
            assert_eq!(received.len(), 400 * head.len() + 13, "one reset: {size}");
        }
        let bytewise = split(&head.repeat(20_000), 1);
        let mut received = Vec::new();
        let read = InterimLimitStream::new(bytewise)
            .read_to_end(&mut received)
            .await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }

    /// Returns a stream that yields `bytes` in reads of at most `size` bytes.
    fn split(bytes: &[u8], size: usize) -> impl AsyncRead + Unpin + use<> {
        let (mut upstream, stream) = tokio::io::duplex(size);
        let bytes = bytes.to_vec();
        tokio::spawn(async move {
            let _ = upstream.write_all(&bytes).await;
        });
        stream
    }

    /// Checks the order of the errors: first, the stream above the limit is reset. Then the
    /// connection fails for all other streams.
    #[tokio::test(start_paused = true)]
    async fn an_upstream_that_ignores_resets_loses_the_connection() {
        let sent = frame(HEADERS, END_HEADERS, 1).repeat(20_000);
        let mut limited = InterimLimitStream::new(&sent[..]);
        let mut received = Vec::new();
        let error = limited.read_to_end(&mut received).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        let reset = rst_stream(1);
        assert!(received.windows(reset.len()).any(|part| part == reset));
    }

    #[tokio::test(start_paused = true)]
    async fn streams_without_an_end_are_forgotten() {
        let mut counter = counter();
        for stream in 0..10_000_u32 {
            assert_eq!(
                counter.count(2 * stream + 1, Some(0), &mut Vec::new()),
                Ok(())
            );
        }
        assert_eq!(counter.heads.len(), MAX_COUNTERS);
        assert!(counter.heads.contains_key(&19_999));
    }
}
