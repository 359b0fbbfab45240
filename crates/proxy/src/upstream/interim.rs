//! Bounds the interim responses (1xx) of an HTTP/2 upstream.
//!
//! h2 queues them, and hyper's client drops them without showing them to its caller. So they are
//! counted here, by their frames. The limit is that of HTTP/1.1 upstreams. Only the connection can
//! be failed here, not the single stream.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tidegate_net::{FrameHeader, FrameParser};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{MAX_INTERIM_RESPONSES, h2::MAX_STREAMS};

/// The maximum number of streams to remember. Those that the proxy has reset are among them.
const MAX_COUNTERS: usize = 2 * MAX_STREAMS;

/// A stream to an upstream. A read fails after too many interim responses to one request.
#[derive(Debug)]
pub(super) struct InterimLimitStream<S> {
    stream: S,
    counter: InterimCounter,
}

/// Counts response heads by stream.
#[derive(Debug)]
struct InterimCounter {
    parser: FrameParser,
    /// The number of heads, interim or not, of streams without a body so far.
    heads: HashMap<u32, u32>,
}

/// The error for an upstream that sends too many interim responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("over {MAX_INTERIM_RESPONSES} interim responses (1xx) before the response")]
struct TooManyInterim;

impl<S> InterimLimitStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            counter: InterimCounter {
                parser: FrameParser::of_server(),
                heads: HashMap::new(),
            },
        }
    }
}

impl InterimCounter {
    fn read(&mut self, mut bytes: &[u8]) -> Result<(), TooManyInterim> {
        while let Some(frame) = self.parser.next_header(&mut bytes) {
            match frame.kind {
                // The last of these heads is the response, so one more is allowed. A head with
                // `END_STREAM` is the response, or trailers.
                FrameHeader::HEADERS if !frame.is_end_stream() => self.count(frame.stream)?,
                FrameHeader::HEADERS | FrameHeader::DATA | FrameHeader::RST_STREAM => {
                    self.heads.remove(&frame.stream);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn count(&mut self, stream: u32) -> Result<(), TooManyInterim> {
        let heads = self.heads.entry(stream).or_default();
        *heads += 1;
        if *heads > MAX_INTERIM_RESPONSES + 1 {
            return Err(TooManyInterim);
        }
        if self.heads.len() > MAX_COUNTERS
            && let Some(oldest) = self.heads.keys().min().copied()
        {
            self.heads.remove(&oldest);
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for InterimLimitStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let bytes = buffer.filled().get(before..).unwrap_or_default();
        let read = self.counter.read(bytes);
        Poll::Ready(read.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)))
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
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8) -> [u8; 9] {
        [0, 0, 0, kind, flags, 0, 0, 0, stream]
    }

    fn counter() -> InterimCounter {
        InterimLimitStream::new(()).counter
    }

    #[test]
    fn interim_responses_are_counted_by_stream_up_to_the_body() {
        let (head, last) = (FrameHeader::HEADERS, 1);
        let most = usize::try_from(MAX_INTERIM_RESPONSES).unwrap() + 1;
        for (end, flags) in [
            (FrameHeader::DATA, 0),
            (head, last),
            (FrameHeader::RST_STREAM, 0),
        ] {
            let mut counter = counter();
            for stream in [1, 3] {
                let heads = frame(head, 0, stream).repeat(most);
                assert_eq!(counter.read(&heads), Ok(()));
            }
            assert_eq!(counter.read(&frame(end, flags, 1)), Ok(()));
            assert_eq!(counter.read(&frame(head, 0, 1)), Ok(()), "trailers");
            assert_eq!(counter.read(&frame(head, 0, 3)), Err(TooManyInterim));
        }
    }

    #[test]
    fn streams_without_an_end_are_forgotten() {
        let mut counter = counter();
        for stream in 0..10_000_u32 {
            assert_eq!(counter.count(2 * stream + 1), Ok(()));
        }
        assert_eq!(counter.heads.len(), MAX_COUNTERS);
        assert!(counter.heads.contains_key(&19_999));
    }
}
