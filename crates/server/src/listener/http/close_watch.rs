//! Detects when a client disconnects while its request is waiting.
//!
//! While a request is handled, hyper does not read from the connection, because half-closed
//! connections are permitted. A request must not keep waiting for a concurrency slot after its
//! client has disconnected. hyper flushes the stream after each poll of the request's future. While
//! a request is waiting, each of these flushes also checks the connection.

use std::{
    cell::Cell,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use tidegate_net::{PeerClosed, TimedStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The interval between periodic connection checks. These periodic checks do not depend on socket
/// events. The checks are needed if the client sends further bytes before it closes the connection:
/// while these bytes are unread, they hide the end of the stream.
const RECHECK: Duration = Duration::from_secs(1);

/// A handle that a request uses to detect that its client has closed the connection.
#[derive(Clone, Debug, Default)]
pub(super) struct CloseWatch(Rc<WatchState>);

#[derive(Debug, Default)]
struct WatchState {
    /// Whether a request is waiting, so that the connection has to be checked.
    is_wanted: Cell<bool>,
    is_closed: Cell<bool>,
}

impl CloseWatch {
    /// Returns the result of `waiting`, or `None` if the client closes or half-closes the
    /// connection before the result is ready. Once the client has closed the connection, `cancel`
    /// is called after each poll of `waiting`. As long as `cancel` returns true, `waiting` is still
    /// polled.
    pub(super) async fn unless_closed<T>(
        &self,
        waiting: impl Future<Output = T>,
        cancel: impl Fn() -> bool,
    ) -> Option<T> {
        let mut waiting = pin!(waiting);
        let mut recheck = pin!(tokio::time::sleep(RECHECK));
        let _wanted = WatchGuard::new(&self.0);
        poll_fn(|cx| {
            if let Poll::Ready(result) = waiting.as_mut().poll(cx) {
                return Poll::Ready(Some(result));
            }
            if self.0.is_closed.get() && !cancel() {
                return Poll::Ready(None);
            }
            while recheck.as_mut().poll(cx).is_ready() {
                let next = tokio::time::Instant::now() + RECHECK;
                recheck.as_mut().reset(next);
            }
            Poll::Pending
        })
        .await
    }
}

/// Requests checks of the connection until the guard is dropped.
struct WatchGuard<'w>(&'w WatchState);

impl<'w> WatchGuard<'w> {
    fn new(state: &'w WatchState) -> Self {
        state.is_wanted.set(true);
        Self(state)
    }
}

impl Drop for WatchGuard<'_> {
    fn drop(&mut self) {
        self.0.is_wanted.set(false);
    }
}

/// A stream that notifies a [`CloseWatch`] when the client has closed the connection.
#[derive(Debug)]
pub(super) struct WatchedStream<S> {
    stream: TimedStream<S>,
    watch: CloseWatch,
}

impl<S> WatchedStream<S> {
    pub(super) fn new(stream: TimedStream<S>, watch: &CloseWatch) -> Self {
        let watch = watch.clone();
        Self { stream, watch }
    }

    pub(super) fn into_stream(self) -> TimedStream<S> {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + PeerClosed + Unpin> AsyncWrite for WatchedStream<S> {
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
        let state = &self.watch.0;
        if state.is_wanted.get()
            && !state.is_closed.get()
            && self.stream.get_ref().poll_peer_closed(cx).is_ready()
        {
            state.is_closed.set(true);
            // The request's future has already been polled, so it must be polled again to see that
            // the connection is closed.
            cx.waker().wake_by_ref();
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
