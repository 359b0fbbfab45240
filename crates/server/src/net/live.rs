//! A stream that ends when its client falls silent or reads nothing.
//!
//! HTTP/2 pings tell whether the other side is alive, but begin only after its preface, and nobody waits for the
//! preface. Here one lazy timer per connection sees to the first octets and to silence, and [`Stalling`] to answers that
//! are not taken; it costs a reading of the clock per read.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Bounds, LazyTimer, Stalling};

/// A socket under the times of its listener's [`Bounds`]: `request` for its first octets, `idle` for the next
/// ones (an alive HTTP/2 client answers pings sooner), `write` for taking what is ready for it.
#[derive(Debug)]
pub(crate) struct LiveStream<S> {
    stream: Stalling<S>,
    idle: Duration,
    silence: LazyTimer,
}

impl<S> LiveStream<S> {
    pub(crate) fn new(stream: S, bounds: Bounds) -> Self {
        Self {
            stream: Stalling::new(stream, bounds.write),
            idle: bounds.idle,
            silence: LazyTimer::new(bounds.request),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LiveStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if read.is_ready() {
            this.silence.set(this.idle);
            return read;
        }
        ready!(this.silence.poll_due(cx));
        let silent = "the client fell silent";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, silent)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LiveStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, octets)
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
