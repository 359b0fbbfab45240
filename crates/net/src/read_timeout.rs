//! The stream of an HTTP/2 connection, with idle, read and write timeouts and flood detection.
//!
//! HTTP/2 pings detect a dead peer, but only after the preface, and h2 has no timeout for the
//! preface. Here one lazy timer per connection covers the first bytes and idleness, [`WriteTimeoutStream`]
//! covers responses that the client does not read, and [`FrameMeter`] covers control frames. The
//! cost is one clock read per read.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{Activity, Bounds, LazyTimer, WriteTimeoutStream, frame_meter::FrameMeter};

/// The error for a client that sends too many control frames.
const FLOOD: &str = "too many HTTP/2 control frames: closed the connection and counted it in \
     tidegate_http2_floods_total; see \"HTTP/2 floods\" in docs/security.md";

/// A socket with the timeouts of its listener's [`Bounds`]. `request` is the total time for the
/// preface and the first frame header. `idle` is the time until the next bytes; a live HTTP/2
/// client answers pings sooner. `write` is the time for the client to read pending output.
#[derive(Debug)]
pub struct ReadTimeoutStream<S> {
    stream: WriteTimeoutStream<S>,
    idle: Duration,
    read_timer: LazyTimer,
    frames: FrameMeter,
    activity: Activity,
}

impl<S> ReadTimeoutStream<S> {
    /// Wraps `stream`. `activity` learns of floods.
    pub fn new(stream: S, bounds: Bounds, activity: Activity) -> Self {
        Self {
            stream: WriteTimeoutStream::new(stream, bounds.write),
            idle: bounds.idle,
            read_timer: LazyTimer::new(bounds.request),
            frames: FrameMeter::new(Instant::now()),
            activity,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadTimeoutStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if read.is_ready() {
            let bytes = buffer.filled().get(before..).unwrap_or_default();
            if this.frames.read(bytes, Instant::now).is_err() {
                this.activity.note_flood();
                return Poll::Ready(Err(io::Error::other(FLOOD)));
            }
            // Until then the timer keeps running with the `request` timeout it was created with.
            if this.frames.has_begun() {
                this.read_timer.set(this.idle);
            }
            return read;
        }
        ready!(this.read_timer.poll_due(cx));
        let silent = "the client sent nothing in time";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, silent)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadTimeoutStream<S> {
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
