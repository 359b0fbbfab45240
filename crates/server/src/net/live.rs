//! A stream that ends when its client falls silent or reads nothing.
//!
//! HTTP/2 pings tell whether the other side is alive, but begin only after its preface, and nobody waits for the
//! preface. Here one lazy timer per connection sees to the first octets, to silence and to answers that are not
//! taken; it costs a reading of the clock per read.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Bounds, LazyTimer};

/// A socket under the times of its listener's [`Bounds`]: `request` for its first octets, `idle` for the next
/// ones (an alive HTTP/2 client answers pings sooner), `write` for taking what is ready for it.
#[derive(Debug)]
pub(crate) struct LiveStream<S> {
    stream: S,
    bounds: Bounds,
    silence: LazyTimer,
    /// Runs while the client does not take what is ready for it.
    stall: Option<LazyTimer>,
}

impl<S> LiveStream<S> {
    pub(crate) fn new(stream: S, bounds: Bounds) -> Self {
        Self {
            stream,
            bounds,
            silence: LazyTimer::new(bounds.request),
            stall: None,
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
            this.silence.set(this.bounds.idle);
            return read;
        }
        ready!(this.silence.poll_due(cx));
        Poll::Ready(Err(late("the client fell silent")))
    }
}

impl<S: AsyncWrite + Unpin> LiveStream<S> {
    /// What a write came to, unless the client has been taking nothing for too long.
    fn in_time<T>(
        &mut self,
        cx: &mut Context<'_>,
        wrote: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.stall = None;
            return wrote;
        }
        let write = self.bounds.write;
        let stall = self.stall.get_or_insert_with(|| LazyTimer::new(write));
        ready!(stall.poll_due(cx));
        Poll::Ready(Err(late("the client did not read its answers in time")))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LiveStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, octets);
        self.in_time(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.in_time(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.in_time(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.in_time(cx, shut)
    }
}

fn late(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}
