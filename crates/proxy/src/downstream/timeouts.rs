//! The client socket of an HTTP/1.1 connection, with a timeout per phase.
//!
//! The head of a request must arrive within one deadline, so that a client cannot hold a connection
//! by sending a header a minute (slowloris). While a response is pending, no timeout applies here:
//! the reader of the request body has its own timeout, and [`WriteTimeoutStream`] covers the
//! response. One lazy timer serves all phases, at the cost of one clock reading per request.

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
use tidegate_config::Timeouts;
use tidegate_net::{LazyTimer, WriteTimeoutStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::bad_request::BadRequests;

/// The phase of a connection, shared by the socket and the request handler.
///
/// ```text
/// Head --head complete--> Response --response sent--> Idle --first bytes--> Head
/// ```
#[derive(Clone, Debug)]
pub(crate) struct ConnectionPhase(Arc<PhaseState>);

#[derive(Debug)]
struct PhaseState {
    phase: AtomicU8,
    /// The number of requests so far.
    requests: AtomicU64,
}

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const RESPONSE: u8 = 2;

/// Starts in the head phase: a new connection gets the head timeout, not the longer keep-alive
/// timeout.
impl Default for ConnectionPhase {
    fn default() -> Self {
        Self(Arc::new(PhaseState {
            phase: AtomicU8::new(HEAD),
            requests: AtomicU64::new(0),
        }))
    }
}

impl ConnectionPhase {
    /// Begins the response phase of a request. The phase lasts until the result is dropped.
    pub(crate) fn begin_response(&self) -> ResponsePhase {
        self.set(RESPONSE);
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        ResponsePhase(self.clone())
    }

    fn current(&self) -> u8 {
        self.0.phase.load(Ordering::Relaxed)
    }

    fn set(&self, phase: u8) {
        self.0.phase.store(phase, Ordering::Relaxed);
    }

    fn requests(&self) -> u64 {
        self.0.requests.load(Ordering::Relaxed)
    }
}

/// The response phase of a request; dropping it makes the connection idle.
#[derive(Debug)]
pub(crate) struct ResponsePhase(ConnectionPhase);

impl Drop for ResponsePhase {
    fn drop(&mut self) {
        self.0.set(IDLE);
    }
}

/// A client socket under the proxy's [`Timeouts`].
#[derive(Debug)]
pub(crate) struct ClientStream<S> {
    stream: WriteTimeoutStream<S>,
    timeouts: Timeouts,
    phase: ConnectionPhase,
    timer: LazyTimer,
    /// The phase that the timer runs for.
    timed_phase: u8,
    bad_requests: Arc<BadRequests>,
    /// The number of requests that have their response: the request count at the last flush outside
    /// a response phase.
    answered_requests: u64,
    /// The rest of an explained rejection, written in place of hyper's bare one.
    rejection: Option<Bytes>,
}

impl<S> ClientStream<S> {
    /// Wraps `stream`. If hyper rejects a head, `bad_requests` adds an explanation to the reply.
    pub(crate) fn new(
        stream: S,
        timeouts: Timeouts,
        phase: ConnectionPhase,
        bad_requests: Arc<BadRequests>,
    ) -> Self {
        Self {
            stream: WriteTimeoutStream::new(stream, timeouts.idle),
            timeouts,
            phase,
            timer: LazyTimer::new(timeouts.request_head),
            timed_phase: HEAD,
            bad_requests,
            answered_requests: 0,
            rejection: None,
        }
    }

    /// Returns `Pending`, or an error once the timeout of the current phase has passed.
    fn poll_timeout<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        let phase = self.phase.current();
        if phase == RESPONSE {
            self.timed_phase = RESPONSE;
            return Poll::Pending;
        }
        if phase != self.timed_phase {
            self.timed_phase = phase;
            self.timer.set(if phase == IDLE {
                self.timeouts.keep_alive
            } else {
                self.timeouts.request_head
            });
        }
        ready!(self.timer.poll_due(cx));
        let message = if phase == IDLE {
            "no request arrived in time"
        } else {
            "the request head did not arrive in time"
        };
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
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
            return this.poll_timeout(cx);
        }
        if buffer.filled().len() > before && this.phase.current() == IDLE {
            this.phase.set(HEAD);
            // Makes `poll_timeout` restart the timer, even if it last ran for a head as well.
            this.timed_phase = RESPONSE;
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        // If no response is due, the bytes that hyper writes must be its rejection of an invalid
        // head.
        let is_due =
            this.phase.current() == RESPONSE || this.answered_requests < this.phase.requests();
        if this.rejection.is_none() && !is_due {
            this.rejection = this.bad_requests.explain(bytes);
        }
        let Some(rejection) = &mut this.rejection else {
            return Pin::new(&mut this.stream).poll_write(cx, bytes);
        };
        while rejection.has_remaining() {
            let written = ready!(Pin::new(&mut this.stream).poll_write(cx, rejection))?;
            if written == 0 {
                return Poll::Ready(Ok(0));
            }
            rejection.advance(written);
        }
        this.rejection = None;
        Poll::Ready(Ok(bytes.len()))
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
        if self.phase.current() != RESPONSE {
            self.answered_requests = self.phase.requests();
        }
        // Starts the keep-alive timeout with the response. hyper already knows that there is
        // nothing to read, and polls for reading again only when data arrives.
        if self.phase.current() == IDLE && self.timed_phase != IDLE {
            // The timer was just set, so it cannot be due.
            let _ = self.poll_timeout::<()>(cx);
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
