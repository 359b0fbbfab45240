//! A stream with read and write timeouts, used for the connections of all listeners and for
//! connections to upstreams.
//!
//! The [`Phase`] of the connection determines which read timeout applies. The stream itself ends
//! the idle phase when bytes arrive. The protocol code begins the other phases, because only that
//! code knows where a request or a response ends. Each direction has a lazy timer, which is set
//! only when the connection has to wait. Therefore, the timeouts take only one clock read per
//! request.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::LazyTimer;

/// The timeouts of a [`TimedStream`].
#[derive(Clone, Copy, Debug)]
pub struct StreamTimeouts {
    /// The timeout for the next request, from the end of the previous response.
    pub idle: Duration,
    /// The timeout for a whole request, from its first byte. Arriving bytes do not extend the
    /// timeout. For the first request of a connection, the timeout starts with the connection.
    pub request: Duration,
    /// The timeout for a peer that does not read, or reads too slowly.
    pub write: WriteTimeout,
}

/// How the timeout for a peer that does not read, or reads too slowly, is measured.
#[derive(Clone, Copy, Debug)]
pub enum WriteTimeout {
    /// The maximum time during which the peer reads nothing. Suitable for output of any length.
    Stall(Duration),
    /// The maximum time from a blocked write until the peer has read all pending output. Suitable
    /// for short responses. A peer cannot extend the timeout by reading a few bytes at a time.
    Drain(Duration),
}

/// The phase of a connection, shared by the stream and the code that responds to requests.
///
/// ```text
/// request ──response begins──▶ response ──response ends──▶ idle ──first bytes──▶ request
/// ```
///
/// A new connection is in the request phase, so the timeout for its first request is `request` and
/// not `idle`.
#[derive(Clone, Debug)]
pub struct Phase(Arc<PhaseState>);

#[derive(Debug)]
struct PhaseState {
    current: AtomicU8,
    /// Whether the read timer has been set for the current phase.
    is_timed: AtomicBool,
    /// Whether bytes written now belong to a response: see [`Phase::is_response_due`].
    is_response_due: AtomicBool,
    /// Whether the last write is blocked.
    is_write_blocked: AtomicBool,
    /// Whether a shutdown of the stream has no effect.
    is_held_open: AtomicBool,
    /// Whether reads wait, although bytes may have arrived.
    is_reading_held: AtomicBool,
}

const IDLE: u8 = 0;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

impl Phase {
    fn new(phase: u8) -> Self {
        Self(Arc::new(PhaseState {
            current: AtomicU8::new(phase),
            is_timed: AtomicBool::new(false),
            is_response_due: AtomicBool::new(false),
            is_write_blocked: AtomicBool::new(false),
            is_held_open: AtomicBool::new(false),
            is_reading_held: AtomicBool::new(false),
        }))
    }

    /// Begins the idle phase, in which the connection waits for the next request. Restarts the idle
    /// timeout.
    pub fn await_request(&self) {
        self.enter(IDLE);
    }

    /// Begins the request phase, in which the connection waits for the rest of a request. Restarts
    /// the request timeout.
    pub fn await_rest(&self) {
        self.enter(REQUEST);
    }

    /// Begins the response phase, which has no read timeout. The phase lasts until the returned
    /// value is dropped.
    #[must_use]
    pub fn begin_response(&self) -> ResponsePhase {
        self.enter(RESPONSE);
        self.0.is_response_due.store(true, Ordering::Relaxed);
        ResponsePhase(self.clone())
    }

    /// Returns whether bytes written now belong to a response. The result is true from the
    /// beginning of a response until the first flush after its end.
    #[must_use]
    pub fn is_response_due(&self) -> bool {
        self.0.is_response_due.load(Ordering::Relaxed)
    }

    /// Returns whether the last write is blocked, because the peer does not read.
    pub(crate) fn is_write_blocked(&self) -> bool {
        self.0.is_write_blocked.load(Ordering::Relaxed)
    }

    /// Sets whether the stream stays open when it is shut down, so that the connection can be
    /// handed over.
    pub(crate) fn hold_open(&self, is_held_open: bool) {
        self.0.is_held_open.store(is_held_open, Ordering::Relaxed);
    }

    /// Sets whether reads are pending. A read that was held registers no waker, so the stream must
    /// be polled again.
    pub(crate) fn hold_reading(&self, is_held: bool) {
        self.0.is_reading_held.store(is_held, Ordering::Relaxed);
    }

    fn current(&self) -> u8 {
        self.0.current.load(Ordering::Relaxed)
    }

    fn enter(&self, phase: u8) {
        self.0.current.store(phase, Ordering::Relaxed);
        self.0.is_timed.store(false, Ordering::Relaxed);
    }

    fn is_timed(&self) -> bool {
        self.0.is_timed.load(Ordering::Relaxed)
    }
}

/// The response phase of a connection. Dropping the value begins the idle phase.
#[derive(Debug)]
pub struct ResponsePhase(Phase);

impl Drop for ResponsePhase {
    fn drop(&mut self) {
        self.0.await_request();
    }
}

/// A stream whose reads and writes fail with [`io::ErrorKind::TimedOut`] once one of its
/// [`StreamTimeouts`] has expired.
#[derive(Debug)]
pub struct TimedStream<S> {
    stream: S,
    timeouts: StreamTimeouts,
    phase: Phase,
    /// Bytes that another process has read from the stream. The stream returns the bytes of
    /// `unread` first.
    unread: Vec<u8>,
    /// The read timer, which is created at the first wait.
    read_timer: Option<LazyTimer>,
    /// The write timer, which runs while a write is blocked.
    write_timer: Option<LazyTimer>,
}

impl<S> TimedStream<S> {
    /// Wraps `stream`, and begins the request phase.
    pub fn new(stream: S, timeouts: StreamTimeouts) -> Self {
        Self::in_phase(REQUEST, stream, timeouts)
    }

    /// Wraps `stream`; another process has read the bytes `unread` from it and not processed them.
    /// The new stream returns the bytes of `unread` first. Begins the idle phase if `unread` is
    /// empty.
    pub fn resumed(stream: S, timeouts: StreamTimeouts, unread: Vec<u8>) -> Self {
        let phase = if unread.is_empty() { IDLE } else { REQUEST };
        Self {
            unread,
            ..Self::in_phase(phase, stream, timeouts)
        }
    }

    /// Returns the wrapped stream, and the bytes of [`Self::resumed`] that have not been read
    /// again.
    pub fn into_parts(self) -> (S, Vec<u8>) {
        (self.stream, self.unread)
    }

    /// Wraps `stream` with a write timeout only.
    pub fn without_read_timeout(stream: S, write: WriteTimeout) -> Self {
        // The wrapped stream always stays in the response phase, which has no read timeout.
        let timeouts = StreamTimeouts {
            idle: Duration::MAX,
            request: Duration::MAX,
            write,
        };
        Self::in_phase(RESPONSE, stream, timeouts)
    }

    fn in_phase(phase: u8, stream: S, timeouts: StreamTimeouts) -> Self {
        Self {
            stream,
            timeouts,
            phase: Phase::new(phase),
            unread: Vec::new(),
            read_timer: None,
            write_timer: None,
        }
    }

    /// Returns the phase of the connection.
    pub const fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Returns the wrapped stream.
    pub const fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Sets the write timeout. If a write is already blocked, the change takes effect only when the
    /// next write blocks.
    pub const fn set_write_timeout(&mut self, write: WriteTimeout) {
        self.timeouts.write = write;
    }

    /// Returns pending, or an error once the read timeout of the current phase has expired.
    fn poll_read_timeout<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        let (timeout, late) = match self.phase.current() {
            IDLE => (self.timeouts.idle, "no request arrived in time"),
            REQUEST => (self.timeouts.request, "the request did not arrive in time"),
            _ => return Poll::Pending,
        };
        let is_timed = self.phase.0.is_timed.swap(true, Ordering::Relaxed);
        let timer = match &mut self.read_timer {
            Some(timer) => {
                if !is_timed {
                    timer.set(timeout);
                }
                timer
            }
            None => self.read_timer.insert(LazyTimer::new(timeout)),
        };
        ready!(timer.poll_due(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, late)))
    }

    /// Returns the result of a write of `offered` bytes, or an error once the write timeout has
    /// expired.
    fn poll_written(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        offered: usize,
    ) -> Poll<io::Result<usize>> {
        let is_partial = matches!(written, Poll::Ready(Ok(count)) if count < offered);
        if is_partial && matches!(self.timeouts.write, WriteTimeout::Drain(_)) {
            return written;
        }
        self.poll_write_timeout(cx, written)
    }

    /// Returns `written`, the result of a write or flush, or an error once the write timeout has
    /// expired. A write that succeeds immediately does not start the timer.
    fn poll_write_timeout<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let is_blocked = written.is_pending();
        let was_blocked = &self.phase.0.is_write_blocked;
        was_blocked.store(is_blocked, Ordering::Relaxed);
        if !is_blocked {
            self.write_timer = None;
            return written;
        }
        let (WriteTimeout::Stall(after) | WriteTimeout::Drain(after)) = self.timeouts.write;
        let timer = self
            .write_timer
            .get_or_insert_with(|| LazyTimer::new(after));
        ready!(timer.poll_due(cx));
        let late = "the peer did not read the sent data in time";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, late)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.phase.0.is_reading_held.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        if !this.unread.is_empty() {
            let count = this.unread.len().min(buffer.remaining());
            buffer.put_slice(&this.unread[..count]);
            this.unread.drain(..count);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if read.is_pending() {
            return this.poll_read_timeout(cx);
        }
        if buffer.filled().len() > before && this.phase.current() == IDLE {
            this.phase.await_rest();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.poll_written(cx, written, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        let offered = pieces.iter().map(|piece| piece.len()).sum();
        self.poll_written(cx, written, offered)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        let phase = self.phase.current();
        // hyper flushes when it has no more data to write. hyper may flush before it has written
        // the response to the last request.
        if phase != RESPONSE {
            let is_response_due = &self.phase.0.is_response_due;
            is_response_due.store(false, Ordering::Relaxed);
        }
        // Start the idle timeout at the end of the response. Otherwise, the timeout would start
        // only when hyper polls for reading. If hyper already knows that there is nothing to read,
        // it polls for reading only when data arrives.
        if phase == IDLE && !self.phase.is_timed() {
            // The timer was set just now, so it cannot have expired.
            let _ = self.poll_read_timeout::<()>(cx);
        }
        self.poll_write_timeout(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.phase.0.is_held_open.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.poll_write_timeout(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
        time::{Instant, advance, timeout},
    };

    use super::*;

    const IDLE_SECS: u64 = 100;
    const REQUEST_SECS: u64 = 10;
    const WRITE_SECS: u64 = 5;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn open(write: WriteTimeout) -> (TimedStream<DuplexStream>, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(8);
        let timeouts = StreamTimeouts {
            idle: secs(IDLE_SECS),
            request: secs(REQUEST_SECS),
            write,
        };
        (TimedStream::new(ours, timeouts), theirs)
    }

    /// Reads until the read times out, and returns the elapsed seconds.
    async fn seconds_to_read_timeout(stream: &mut TimedStream<DuplexStream>) -> u64 {
        let start = Instant::now();
        loop {
            match stream.read(&mut [0; 8]).await {
                Ok(bytes) => assert!(bytes > 0, "the client closed the connection"),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
                    return start.elapsed().as_secs();
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_read_timeout() {
        let (mut stream, mut client) = open(WriteTimeout::Stall(secs(WRITE_SECS)));
        let phase = stream.phase().clone();
        assert_eq!(seconds_to_read_timeout(&mut stream).await, REQUEST_SECS);
        phase.await_request();
        assert_eq!(seconds_to_read_timeout(&mut stream).await, IDLE_SECS);
        // The first bytes end the idle phase.
        phase.await_request();
        client.write_all(b"GET").await.unwrap();
        assert_eq!(seconds_to_read_timeout(&mut stream).await, REQUEST_SECS);
        let response = phase.begin_response();
        let read = timeout(secs(1_000), seconds_to_read_timeout(&mut stream)).await;
        assert!(read.is_err(), "a response has no read timeout");
        drop(response);
        assert_eq!(seconds_to_read_timeout(&mut stream).await, IDLE_SECS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_request_does_not_prolong_its_timeout() {
        let (mut stream, mut client) = open(WriteTimeout::Stall(secs(WRITE_SECS)));
        let dripping = async {
            while client.write_all(b"x").await.is_ok() {
                tokio::time::sleep(secs(3)).await;
            }
        };
        tokio::select! {
            seconds = seconds_to_read_timeout(&mut stream) => assert_eq!(seconds, REQUEST_SECS),
            () = dripping => unreachable!("the stream is open"),
        }
    }

    /// The idle timeout starts at the flush, even if no one polls the stream for reading.
    #[tokio::test(start_paused = true)]
    async fn a_flush_starts_the_idle_timeout() {
        let (mut stream, _client) = open(WriteTimeout::Stall(secs(WRITE_SECS)));
        drop(stream.phase().begin_response());
        assert!(stream.phase().is_response_due());
        stream.flush().await.unwrap();
        assert!(!stream.phase().is_response_due());
        advance(secs(IDLE_SECS + 1)).await;
        assert_eq!(seconds_to_read_timeout(&mut stream).await, 0);
    }

    /// Writes while the client reads one byte every three seconds. Returns whether the write
    /// succeeds, and the seconds until it succeeds or fails.
    async fn seconds_of_a_slow_read(write: WriteTimeout) -> (bool, u64) {
        let (mut stream, mut client) = open(write);
        let start = Instant::now();
        let reading = async {
            let mut byte = [0];
            while client.read_exact(&mut byte).await.is_ok() {
                tokio::time::sleep(secs(3)).await;
            }
        };
        tokio::select! {
            written = stream.write_all(&[0; 18]) => (written.is_ok(), start.elapsed().as_secs()),
            () = reading => unreachable!("the stream is open"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_prolongs_only_the_timeout_of_a_stall() {
        let (is_written, seconds) =
            seconds_of_a_slow_read(WriteTimeout::Stall(secs(WRITE_SECS))).await;
        assert!(is_written && seconds > WRITE_SECS, "{seconds}");
        let drained = seconds_of_a_slow_read(WriteTimeout::Drain(secs(WRITE_SECS))).await;
        assert_eq!(drained, (false, WRITE_SECS));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_without_a_read_timeout_only_limits_writes() {
        let (ours, _theirs) = tokio::io::duplex(8);
        let write = WriteTimeout::Stall(secs(WRITE_SECS));
        let mut stream = TimedStream::without_read_timeout(ours, write);
        let read = timeout(secs(1_000), stream.read(&mut [0; 8])).await;
        assert!(read.is_err(), "there is no read timeout");
        let start = Instant::now();
        let error = stream.write_all(&[0; 9]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), WRITE_SECS);
    }
}
