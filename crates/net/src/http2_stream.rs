//! The stream of an HTTP/2 connection, with timeouts and with detection of control-frame floods.
//!
//! HTTP/2 pings detect a dead peer, but only after the preface, and h2 has no timeout for the
//! preface. HTTP/2 requests and responses overlap, so this stream does not use the phases of a
//! [`TimedStream`] as HTTP/1.1 does. The request phase lasts until the first frame header. Each
//! later read restarts the idle phase. [`FrameMeter`] limits control frames.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{Activity, StreamTimeouts, TimedStream, frame_meter::FrameMeter};

/// The error for a client that sends too many control frames.
const FLOOD: &str = "too many HTTP/2 control frames: closed the connection and counted it in \
     tidegate_http2_floods_total; see \"HTTP/2 floods\" in docs/security.md";

/// The stream of an HTTP/2 connection. The timeout `request` limits the total time for the preface
/// and the first frame header. The timeout `idle` limits the time until the next bytes; a live
/// client replies to pings sooner.
#[derive(Debug)]
pub struct Http2Stream<S> {
    stream: TimedStream<S>,
    frames: FrameMeter,
    activity: Activity,
}

impl<S> Http2Stream<S> {
    /// Wraps `stream`. Control-frame floods are reported to `activity`.
    pub fn new(stream: S, timeouts: StreamTimeouts, activity: Activity) -> Self {
        Self {
            stream: TimedStream::new(stream, timeouts),
            frames: FrameMeter::new(Instant::now()),
            activity,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Http2Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buffer))?;
        let bytes = buffer.filled().get(before..).unwrap_or_default();
        if this.frames.read(bytes, Instant::now).is_err() {
            this.activity.note_flood();
            return Poll::Ready(Err(io::Error::other(FLOOD)));
        }
        if this.frames.has_begun() {
            this.stream.phase().await_request();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Http2Stream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.frames.wrote(bytes.get(..written).unwrap_or(bytes));
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, pieces))?;
        let mut left = written;
        for piece in pieces {
            let part = piece.get(..left).unwrap_or(piece);
            self.frames.wrote(part);
            left -= part.len();
        }
        Poll::Ready(Ok(written))
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
