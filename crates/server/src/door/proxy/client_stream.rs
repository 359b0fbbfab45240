//! A client's socket, which ends when its client is too slow.
//!
//! The head of a request must arrive whole within its time, so that nobody holds a connection with a header a minute
//! (slowloris). While a request is being answered its client owes nothing here: its body is timed where it is read, and
//! the answer by [`Stalling`]. One lazy timer sees to the rest, and costs a reading of the clock per request.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    config::Timeouts,
    net::{LazyTimer, Stalling},
};

/// Whose turn it is on a connection; both ends of the proxy's work hold a clone.
///
/// ```text
/// Head --whole--> Answer --answered--> Idle --first octets--> Head
/// ```
#[derive(Clone, Debug)]
pub(super) struct Turn(Arc<AtomicU8>);

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const ANSWER: u8 = 2;

/// A new client has come to ask, so it is not granted an idle one's time.
impl Default for Turn {
    fn default() -> Self {
        Self(Arc::new(AtomicU8::new(HEAD)))
    }
}

impl Turn {
    /// A request has come; until the result is dropped, the proxy is at work on it.
    pub(super) fn take(&self) -> Taken {
        self.0.store(ANSWER, Ordering::Relaxed);
        Taken(self.clone())
    }

    fn now(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The proxy's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Taken(Turn);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.0.store(IDLE, Ordering::Relaxed);
    }
}

/// A socket under the proxy's [`Timeouts`].
#[derive(Debug)]
pub(super) struct ClientStream<S> {
    stream: Stalling<S>,
    times: Timeouts,
    turn: Turn,
    timer: LazyTimer,
    /// The turn that the timer runs for.
    timed: u8,
}

impl<S> ClientStream<S> {
    pub(super) fn new(stream: S, times: Timeouts, turn: Turn) -> Self {
        Self {
            stream: Stalling::new(stream, times.idle),
            times,
            turn,
            timer: LazyTimer::new(times.request_head),
            timed: HEAD,
        }
    }

    /// Pending, or an error if the client's time is up.
    fn poll_time<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        let turn = self.turn.now();
        if turn == ANSWER {
            self.timed = ANSWER;
            return Poll::Pending;
        }
        if turn != self.timed {
            self.timed = turn;
            self.timer.set(if turn == IDLE {
                self.times.keep_alive
            } else {
                self.times.request_head
            });
        }
        ready!(self.timer.poll_due(cx));
        let late = if turn == IDLE {
            "no request came in time"
        } else {
            "the head of the request did not arrive in time"
        };
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, late)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if read.is_pending() {
            return this.poll_time(cx);
        }
        if buffer.filled().len() > before && this.turn.now() == IDLE {
            this.turn.0.store(HEAD, Ordering::Relaxed);
            // What it ran for before is over, even if it was a head as well.
            this.timed = ANSWER;
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
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
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        // With its answer a client gets the time for its next request. hyper, which knows already that there is nothing
        // to read, does not ask again until there is.
        if self.turn.now() == IDLE && self.timed != IDLE {
            // It has just begun, so it is not over.
            let _ = self.poll_time::<()>(cx);
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
