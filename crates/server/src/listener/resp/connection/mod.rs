//! Serves one connection: reads commands and writes replies, within the bounds on memory for
//! commands and replies.
//!
//! The connection is implemented as a hand-written `poll` function instead of `async` code. If each
//! packet contains only one request, the overhead of `async` code would exceed the cost of the
//! request itself. The `poll` function needs only one `read`, one `write` and two clock reads per
//! request.

#[cfg(test)]
mod tests;

use std::{
    cell::{Cell, RefCell},
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tidegate_limiter::ServerLimiter;
use tidegate_net::{
    Connection, MaybeMovable, MovableConnection, PeerClosed, Stage, StreamTimeouts, TimedStream,
    WriteTimeout,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::{
    bounds::{LINGER_BYTES, MAX_HELD_BYTES, READ_BYTES, SMALL_BYTES},
    moved::MovedState,
    pending::PendingBatch,
    session::{CloseAfterReply, RespSession},
    worker::CommandExecutor,
};

/// The time between the final error and the end of the connection, so that the client can read the
/// error.
const LINGER: Duration = Duration::from_secs(1);

thread_local! {
    static BUFFERS: RefCell<WorkerBuffers> = RefCell::default();
    /// The total size of the buffers of all connections of this worker, in bytes.
    static BUFFERED_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Buffers that the connections of a worker share. Only one connection at a time uses the buffers.
#[derive(Debug, Default)]
struct WorkerBuffers {
    input: Vec<u8>,
    executor: CommandExecutor,
}

/// Serves one client until either side closes the connection, or until the connection is handed
/// over to another process.
pub(super) async fn serve<S>(
    session: RespSession,
    stream: S,
    mut connection: Connection,
    limiter: Arc<ServerLimiter>,
) where
    S: AsyncRead + AsyncWrite + PeerClosed + MaybeMovable + Unpin,
{
    let resumed = connection.handover.resumed.take();
    let mut client = Client::new(session, stream, connection, limiter);
    if let Some(state) = resumed
        && !client.resume(&state)
    {
        client.connection.log_unknown_state();
        return;
    }
    let shutdown = client.connection.shutdown.clone();
    shutdown
        .watch(|cx, stage| {
            client.stage = stage;
            BUFFERS.with_borrow_mut(|worker| client.poll(cx, worker))
        })
        .await;
    if client.must_hand_over() {
        client.hand_over();
    } else if client.session.close == CloseAfterReply::Broken {
        client.linger().await;
    }
}

#[derive(Debug)]
struct Client<S> {
    stream: TimedStream<S>,
    connection: Connection,
    limiter: Arc<ServerLimiter>,
    session: RespSession,
    /// An incomplete command, or complete commands that are run once `unsent` has been written.
    unread: Vec<u8>,
    /// Whether `unread` may contain complete commands.
    more: bool,
    /// The current batch, while its decisions are pending.
    pending: Option<PendingBatch>,
    /// Replies that have not been written to the stream yet.
    unsent: Vec<u8>,
    sent: usize,
    /// Whether the stream may still hold written bytes in a buffer, as TLS streams do.
    must_flush: bool,
    counted_bytes: CountedBytes,
    stage: Stage,
    /// Set if the connection can be handed over to another process.
    movable: Option<MovableConnection>,
    /// Whether the connection has ended so that it can be handed over.
    has_paused: bool,
}

/// The error for a connection that has to be closed.
#[derive(Debug)]
struct ConnectionClosed;

impl From<io::Error> for ConnectionClosed {
    fn from(error: io::Error) -> Self {
        tracing::debug!(%error, "connection lost");
        Self
    }
}

impl<S: AsyncRead + AsyncWrite + PeerClosed + MaybeMovable + Unpin> Client<S> {
    fn new(
        session: RespSession,
        stream: S,
        connection: Connection,
        limiter: Arc<ServerLimiter>,
    ) -> Self {
        let bounds = connection.bounds;
        let timeouts = StreamTimeouts {
            idle: bounds.idle,
            request: bounds.request,
            write: WriteTimeout::Drain(bounds.write),
        };
        let movable = connection.handover.movable::<S>(&connection.shutdown);
        Self {
            movable,
            stage: Stage::Serving,
            has_paused: false,
            session,
            stream: TimedStream::new(stream, timeouts),
            connection,
            limiter,
            unread: Vec::new(),
            more: false,
            pending: None,
            unsent: Vec::new(),
            sent: 0,
            must_flush: false,
            counted_bytes: CountedBytes::default(),
        }
    }

    /// Returns ready when the connection has to be closed.
    fn poll(&mut self, cx: &mut Context<'_>, worker: &mut WorkerBuffers) -> Poll<()> {
        let mut turn = PollProgress::default();
        loop {
            match self.poll_step(cx, worker, &mut turn) {
                Poll::Ready(Ok(Step::Go)) => turn.has_replied = true,
                Poll::Ready(Ok(Step::Yield)) => {
                    // Yields after a full batch, so that the worker can serve its other
                    // connections.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(Err(ConnectionClosed)) => return Poll::Ready(()),
                // The client has disconnected, so cancel its waiting request.
                Poll::Pending if self.is_waiting() && self.is_peer_closed(cx) => {
                    let calls_store = self.pending.as_ref().is_some_and(PendingBatch::cancel);
                    return if calls_store {
                        Poll::Pending
                    } else {
                        Poll::Ready(())
                    };
                }
                // The store has its own timeout for decisions, so this loop needs no timeout.
                Poll::Pending if self.pending.is_some() => return Poll::Pending,
                // An idle connection is closed, so that it does not delay the shutdown.
                Poll::Pending if self.is_idle() && self.must_close() => {
                    return Poll::Ready(());
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Performs one step. First writes any unsent replies. Then finishes the pending batch, runs
    /// commands that have already been read, or reads and runs new commands.
    fn poll_step(
        &mut self,
        cx: &mut Context<'_>,
        worker: &mut WorkerBuffers,
        turn: &mut PollProgress,
    ) -> Poll<Result<Step, ConnectionClosed>> {
        ready!(self.poll_flush(cx))?;
        if let Some(pending) = &mut self.pending {
            let mut output = ready!(pending.poll(cx));
            self.pending = None;
            self.send(cx, &mut output)?;
            self.account()?;
            return Poll::Ready(Ok(Step::Go));
        }
        if self.session.close != CloseAfterReply::No
            || (turn.has_replied && self.unread.is_empty() && self.must_close())
        {
            return Poll::Ready(Err(ConnectionClosed));
        }
        if self.stage.must_hand_over(self.movable.as_ref()) {
            self.has_paused = true;
            return Poll::Ready(Err(ConnectionClosed));
        }
        if self.more {
            self.answer_unread(&mut worker.executor);
        } else {
            turn.read_bytes += ready!(self.poll_read(cx, worker))?;
        }
        self.pending = worker.executor.take_pending(&self.limiter);
        if let Some(batch) = &mut self.pending
            && batch.can_wait
        {
            batch.hold(self.connection.activity.begin());
        }
        self.send(cx, &mut worker.executor.output)?;
        self.account()?;
        // The number of bytes read per turn is bounded. Without the bound, a client that sends
        // commands faster than the worker replies could occupy the worker without end, because
        // every read would succeed. The bound applies to the sum of several reads, because with TLS
        // one read returns at most 16 KiB.
        let is_over = self.more || turn.read_bytes >= READ_BYTES;
        Poll::Ready(Ok(if is_over { Step::Yield } else { Step::Go }))
    }

    /// Reads once and runs the complete commands. Returns the number of bytes read.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        worker: &mut WorkerBuffers,
    ) -> Poll<Result<usize, ConnectionClosed>> {
        let WorkerBuffers { input, executor } = worker;
        input.resize(SMALL_BYTES + READ_BYTES, 0);
        // A short incomplete command is copied to the front of the new bytes. A long command stays
        // in place and the new bytes are appended, because copying a long command at each read
        // would take quadratic time.
        let small = self.unread.len() <= SMALL_BYTES;
        let start = if small { self.unread.len() } else { 0 };
        let mut buffer = ReadBuf::new(&mut input[start..start + READ_BYTES]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
        let end = start + buffer.filled().len();
        if end == start {
            return Poll::Ready(Err(ConnectionClosed));
        }
        if small {
            input[..start].copy_from_slice(&self.unread);
            let batch = &input[..end];
            let progress = executor.answer(&self.limiter, &mut self.session, batch);
            self.unread.clear();
            self.unread.extend_from_slice(&batch[progress.used..]);
            self.note(progress);
        } else {
            self.unread.extend_from_slice(&input[..end]);
            self.answer_unread(executor);
        }
        Poll::Ready(Ok(end - start))
    }

    fn answer_unread(&mut self, executor: &mut CommandExecutor) {
        let progress = executor.answer(&self.limiter, &mut self.session, &self.unread);
        self.unread.drain(..progress.used);
        self.note(progress);
    }

    fn note(&mut self, progress: super::worker::BatchProgress) {
        self.more = progress.more && !self.unread.is_empty();
        if progress.used > 0 {
            let phase = self.stream.phase();
            if self.unread.is_empty() {
                phase.await_request();
            } else {
                phase.await_rest();
            }
            self.connection.activity.note_request();
        }
    }

    /// Writes as much of `output` as the socket accepts without blocking, and keeps the rest in
    /// `unsent`.
    fn send(&mut self, cx: &mut Context<'_>, output: &mut Vec<u8>) -> Result<(), ConnectionClosed> {
        if output.is_empty() {
            return Ok(());
        }
        let sent = match Pin::new(&mut self.stream).poll_write(cx, output) {
            Poll::Ready(sent) => sent.inspect_err(|_| output.clear())?,
            Poll::Pending => 0,
        };
        self.must_flush = true;
        self.unsent.extend_from_slice(&output[sent..]);
        output.clear();
        Ok(())
    }

    /// Returns ready when all replies have been sent.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ConnectionClosed>> {
        while self.sent < self.unsent.len() {
            let sent =
                ready!(Pin::new(&mut self.stream).poll_write(cx, &self.unsent[self.sent..]))?;
            if sent == 0 {
                return Poll::Ready(Err(ConnectionClosed));
            }
            self.sent += sent;
        }
        if self.sent > 0 {
            self.unsent = Vec::new();
            self.sent = 0;
        }
        if self.must_flush {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.must_flush = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Frees unused memory and updates the worker's total. Fails if the total exceeds
    /// [`MAX_HELD_BYTES`] and this connection holds more than `SMALL_BYTES + READ_BYTES`.
    fn account(&mut self) -> Result<(), ConnectionClosed> {
        if self.unread.is_empty() && self.unread.capacity() > 0 {
            self.unread = Vec::new();
        }
        let pending = self
            .pending
            .as_ref()
            .map_or(0, |pending| pending.heap_bytes);
        let holds =
            self.unread.capacity() + self.unsent.capacity() + self.session.heap_bytes() + pending;
        if holds == self.counted_bytes.0 {
            return Ok(());
        }
        let total = self.counted_bytes.set(holds);
        if total > MAX_HELD_BYTES && holds > SMALL_BYTES + READ_BYTES {
            tracing::warn!(peer = %self.connection.peer, "connection closed: the client buffers of this worker exceed their memory limit");
            return Err(ConnectionClosed);
        }
        Ok(())
    }

    /// Returns whether an idle connection must be closed.
    const fn must_close(&self) -> bool {
        self.stage.must_close(self.movable.as_ref())
    }

    /// Returns whether the connection has ended and can be handed over: all commands that were run
    /// are answered, and the replies are written.
    const fn must_hand_over(&self) -> bool {
        self.has_paused
    }

    /// Continues a connection with the `state` in which another process has handed it over. Returns
    /// false if the state is not valid.
    fn resume(&mut self, state: &[u8]) -> bool {
        let Some(MovedState { unread }) = self.session.resume(state) else {
            return false;
        };
        self.unread = unread;
        // The other process may have paused between two commands that it had already read.
        self.more = !self.unread.is_empty();
        if self.unread.is_empty() {
            self.stream.phase().await_request();
        }
        self.connection.activity.note_request();
        true
    }

    fn hand_over(mut self) {
        let state = self.session.state_to_move(&self.unread);
        if let Some(movable) = self.movable.take() {
            let (stream, _) = self.stream.into_parts();
            movable.hand_over(stream, state);
        }
    }

    /// Returns whether a request may be waiting for a concurrency slot.
    fn is_waiting(&self) -> bool {
        self.pending.as_ref().is_some_and(|batch| batch.can_wait)
    }

    fn is_peer_closed(&self, cx: &mut Context<'_>) -> bool {
        self.stream.get_ref().poll_peer_closed(cx).is_ready()
    }

    /// Returns whether the connection is idle: there is no unprocessed input, and all replies have
    /// been written.
    const fn is_idle(&self) -> bool {
        self.unsent.is_empty() && !self.must_flush && self.unread.is_empty()
    }

    /// Reads and discards input for a while before the connection is closed, so that the client can
    /// read the last reply. If a socket with unread input were closed, the kernel would send a RST,
    /// and the client could lose the reply.
    async fn linger(mut self) {
        // The connection is not handed over, so a handover must not wait for it.
        self.movable = None;
        // The response phase has no read timeout; the timeout `LINGER` below limits the time.
        let _response = self.stream.phase().begin_response();
        let stream = &mut self.stream;
        let drained = async {
            stream.shutdown().await?;
            tokio::io::copy(
                &mut stream.take(LINGER_BYTES as u64),
                &mut tokio::io::sink(),
            )
            .await
        };
        // The result does not matter, because the connection is closed in any case.
        let _ = tokio::time::timeout(LINGER, drained).await;
    }
}

/// The number of bytes that a connection holds, as counted in [`BUFFERED_BYTES`].
#[derive(Debug, Default)]
struct CountedBytes(usize);

impl CountedBytes {
    /// Replaces the number of bytes, and returns the total of the worker.
    fn set(&mut self, bytes: usize) -> usize {
        let total = BUFFERED_BYTES.get() - self.0 + bytes;
        BUFFERED_BYTES.set(total);
        self.0 = bytes;
        total
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// What a connection has done since the current poll began.
#[derive(Debug, Default)]
struct PollProgress {
    has_replied: bool,
    read_bytes: usize,
}

/// The next action after a step.
#[derive(Debug)]
enum Step {
    Go,
    Yield,
}
