//! Write timeout: closes connections whose peer does not read.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::LazyTimer;

/// A socket with a timeout for writes that make no progress.
#[derive(Debug)]
pub struct WriteTimeoutStream<S> {
    stream: S,
    timeout: WriteTimeout,
}

impl<S> WriteTimeoutStream<S> {
    /// Wraps `stream`; a write may block for at most `after`.
    pub const fn new(stream: S, after: Duration) -> Self {
        let timeout = WriteTimeout { after, timer: None };
        Self { stream, timeout }
    }

    /// Returns the wrapped stream.
    pub const fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Sets the timeout. If a write is already blocked, the change applies from the next blocked
    /// write on.
    pub const fn wait_for(&mut self, after: Duration) {
        self.timeout.after = after;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeoutStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeoutStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, octets);
        self.timeout.in_time(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.timeout.in_time(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.timeout.in_time(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.timeout.in_time(cx, shut)
    }
}

/// The timer of a blocked write. A write that succeeds immediately does not start the timer.
#[derive(Debug)]
struct WriteTimeout {
    after: Duration,
    timer: Option<LazyTimer>,
}

impl WriteTimeout {
    /// Returns the result of a write, or an error if writes have been blocked for longer than the
    /// timeout.
    fn in_time<T>(
        &mut self,
        cx: &mut Context<'_>,
        wrote: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.timer = None;
            return wrote;
        }
        let after = self.after;
        let timer = self.timer.get_or_insert_with(|| LazyTimer::new(after));
        ready!(timer.poll_due(cx));
        let late = "the peer did not read the sent data in time";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, late)))
    }
}
