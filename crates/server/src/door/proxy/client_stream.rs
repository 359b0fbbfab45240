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
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::rejected::Rejected;
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
pub(super) struct Turn(Arc<Whose>);

#[derive(Debug)]
struct Whose {
    turn: AtomicU8,
    /// How many requests have come.
    requests: AtomicU64,
}

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const ANSWER: u8 = 2;

/// A new client has come to ask, so it is not granted an idle one's time.
impl Default for Turn {
    fn default() -> Self {
        Self(Arc::new(Whose {
            turn: AtomicU8::new(HEAD),
            requests: AtomicU64::new(0),
        }))
    }
}

impl Turn {
    /// A request has come; until the result is dropped, the proxy is at work on it.
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

/// The proxy's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Taken(Turn);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.set(IDLE);
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
    rejected: Arc<Rejected>,
    /// How many requests had come when everything was written.
    settled: u64,
    /// What is written in the place of an answer that says nothing.
    explained: Option<Bytes>,
}

impl<S> ClientStream<S> {
    /// `stream`, whose client is told what `rejected` says where its head is no request.
    pub(super) fn new(stream: S, times: Timeouts, turn: Turn, rejected: Arc<Rejected>) -> Self {
        Self {
            stream: Stalling::new(stream, times.idle),
            times,
            turn,
            timer: LazyTimer::new(times.request_head),
            timed: HEAD,
            rejected,
            settled: 0,
            explained: None,
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
            this.turn.set(HEAD);
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
        let this = &mut *self;
        // Nobody has an answer to what is no request, but hyper.
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
        // hyper flushes when it has nothing left to write; the answer to the last request may have yet to come.
        if self.turn.now() != ANSWER {
            self.settled = self.turn.requests();
        }
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
