//! The client socket of an HTTP/1.1 connection, with a timeout per phase.
//!
//! The head of a request must arrive within one deadline, so that a client cannot hold a connection
//! by sending a header a minute (slowloris). While a response is pending the client owes nothing
//! here: the request body is timed where it is read, the response by [`WriteTimeoutStream`]. One lazy timer
//! serves all phases, at the cost of one clock reading per request.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::rejected::Rejected;
use crate::{
    config::Timeouts,
    net::{LazyTimer, WriteTimeoutStream},
};

/// The phase of a connection, shared by the socket and the request handler.
///
/// ```text
/// Head --head complete--> Answer --response sent--> Idle --first bytes--> Head
/// ```
#[derive(Clone, Debug)]
pub(super) struct Turn(Arc<Whose>);

#[derive(Debug)]
struct Whose {
    turn: AtomicU8,
    /// The number of requests so far.
    requests: AtomicU64,
}

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const ANSWER: u8 = 2;

/// Starts in the head phase: a new connection gets the head timeout, not the longer keep-alive
/// timeout.
impl Default for Turn {
    fn default() -> Self {
        Self(Arc::new(Whose {
            turn: AtomicU8::new(HEAD),
            requests: AtomicU64::new(0),
        }))
    }
}

impl Turn {
    /// Begins the answer phase of a request. The phase lasts until the result is dropped.
    pub(super) fn take(&self) -> Taken {
        self.set(ANSWER);
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        Taken(self.clone())
    }

    fn now(&self) -> u8 {
        self.0.turn.load(Ordering::Relaxed)
    }

    fn set(&self, turn: u8) {
        self.0.turn.store(turn, Ordering::Relaxed);
    }

    fn requests(&self) -> u64 {
        self.0.requests.load(Ordering::Relaxed)
    }
}

/// The answer phase of a request; dropping it makes the connection idle.
#[derive(Debug)]
pub(super) struct Taken(Turn);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.set(IDLE);
    }
}

/// A client socket under the proxy's [`Timeouts`].
#[derive(Debug)]
pub(super) struct ClientStream<S> {
    stream: WriteTimeoutStream<S>,
    times: Timeouts,
    turn: Turn,
    timer: LazyTimer,
    /// The phase that the timer runs for.
    timed: u8,
    rejected: Arc<Rejected>,
    /// The number of requests so far at the last flush outside an answer phase: those have their
    /// response.
    settled: u64,
    /// The rest of an explained rejection, written in place of hyper's bare one.
    explained: Option<Bytes>,
}

impl<S> ClientStream<S> {
    /// Wraps `stream`. Where hyper rejects a head, `rejected` adds an explanation to the reply.
    pub(super) fn new(stream: S, times: Timeouts, turn: Turn, rejected: Arc<Rejected>) -> Self {
        Self {
            stream: WriteTimeoutStream::new(stream, times.idle),
            times,
            turn,
            timer: LazyTimer::new(times.request_head),
            timed: HEAD,
            rejected,
            settled: 0,
            explained: None,
        }
    }

    /// Returns `Pending`, or an error once the timeout of the current phase has passed.
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
            "no request arrived in time"
        } else {
            "the request head did not arrive in time"
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
            this.turn.set(HEAD);
            // Makes `poll_time` restart the timer, even if it last ran for a head as well.
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
        let this = &mut *self;
        // If no response is due, hyper can only be writing its rejection of an invalid head.
        let is_due = this.turn.now() == ANSWER || this.settled < this.turn.requests();
        if this.explained.is_none() && !is_due {
            this.explained = this.rejected.explain(octets);
        }
        let Some(explained) = &mut this.explained else {
            return Pin::new(&mut this.stream).poll_write(cx, octets);
        };
        while explained.has_remaining() {
            let written = ready!(Pin::new(&mut this.stream).poll_write(cx, explained))?;
            if written == 0 {
                return Poll::Ready(Ok(0));
            }
            explained.advance(written);
        }
        this.explained = None;
        Poll::Ready(Ok(octets.len()))
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
        // hyper flushes when it has nothing left to write, which may be before the response to the
        // last request.
        if self.turn.now() != ANSWER {
            self.settled = self.turn.requests();
        }
        // Starts the keep-alive timeout with the response. hyper knows already that there is
        // nothing to read, and does not poll for reading again until there is.
        if self.turn.now() == IDLE && self.timed != IDLE {
            // The timer was just set, so it cannot be due.
            let _ = self.poll_time::<()>(cx);
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
