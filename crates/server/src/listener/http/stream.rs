//! A stream with idle, read and write timeouts.
//!
//! hyper can limit the time for a request head, at the cost of one timer per request, but not the
//! time for a body or for a client that reads slowly. Here one lazy timer per connection covers all
//! three. The timer is set only when the connection has to wait, so it costs one clock read per
//! request.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tidegate_net::{Bounds, LazyTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A socket with the timeouts of its listener's [`Bounds`].
#[derive(Debug)]
pub(super) struct TimedStream<S> {
    stream: S,
    bounds: Bounds,
    timer: LazyTimer,
    awaited: Awaited,
    /// Whether the timer has been set for `awaited`.
    is_timed: bool,
}

/// The event for which the connection is waiting.
///
/// ```text
/// Request --first bytes--> Rest --response written--> Request
///                            write blocks: Reading --response written--> Request
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// The next request, within `idle`.
    Request,
    /// The rest of a request, within `request` in total, even if the bytes arrive slowly.
    Rest,
    /// For the client to read the response, within `write`.
    Reading,
}

impl<S> TimedStream<S> {
    pub(super) fn new(stream: S, bounds: Bounds) -> Self {
        // A new connection must send its first request within `request`, not within `idle`.
        let timer = LazyTimer::new(bounds.request);
        Self {
            stream,
            bounds,
            timer,
            awaited: Awaited::Rest,
            is_timed: true,
        }
    }

    fn await_now(&mut self, awaited: Awaited) {
        if self.awaited != awaited {
            self.awaited = awaited;
            self.is_timed = false;
        }
    }

    /// Returns pending, or an error if the timeout has expired.
    fn poll_time<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if !self.is_timed {
            self.is_timed = true;
            self.timer.set(match self.awaited {
                Awaited::Request => self.bounds.idle,
                Awaited::Rest => self.bounds.request,
                Awaited::Reading => self.bounds.write,
            });
        }
        ready!(self.timer.poll_due(cx));
        let late = match self.awaited {
            Awaited::Request => "no request arrived",
            Awaited::Rest => "the request did not arrive",
            Awaited::Reading => "the response was not read",
        };
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("{late} in time"),
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buffer) {
            Poll::Ready(Ok(())) => {
                if buffer.filled().len() > before && this.awaited == Awaited::Request {
                    this.await_now(Awaited::Rest);
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => this.poll_time(cx),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        match Pin::new(&mut this.stream).poll_write(cx, octets) {
            Poll::Ready(Ok(written)) => {
                let all = written == octets.len();
                this.await_now(if all {
                    Awaited::Request
                } else {
                    Awaited::Reading
                });
                Poll::Ready(Ok(written))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                this.await_now(Awaited::Reading);
                this.poll_time(cx)
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
