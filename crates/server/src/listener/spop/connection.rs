//! Serves one connection: reads frames and writes the answers, within the bounds on memory and
//! time.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    ops::ControlFlow,
    pin::Pin,
    task::{Poll, ready},
};

use tidegate_limiter::ServerLimiter;
use tidegate_net::{
    Connection, MaybeMovable, MovableConnection, Stage, StreamTimeouts, TimedStream, WriteTimeout,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

use super::{
    bounds::{MAX_HELD_BYTES, READ_BYTES, SMALL_BYTES},
    frame::{NORMAL, put_disconnect},
    session::{Next, SpopProgress, SpopSession},
};

thread_local! {
    /// The read buffer of this worker. Only one connection at a time uses the read buffer.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The total size of the buffers that hold incomplete frames, over all connections of this
    /// worker.
    static HELD_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Serves one connection from HAProxy until either side closes it, or until it is handed over to
/// another process.
pub(super) async fn serve<S>(
    mut session: SpopSession,
    stream: S,
    mut connection: Connection,
    limiter: &ServerLimiter,
) where
    S: AsyncRead + AsyncWrite + MaybeMovable + Unpin,
{
    let bounds = connection.bounds;
    let timeouts = StreamTimeouts {
        idle: bounds.idle,
        request: bounds.request,
        write: WriteTimeout::Drain(bounds.write),
    };
    let mut stream = TimedStream::new(stream, timeouts);
    let mut input = FrameBuffer::default();
    if let Some(state) = connection.handover.resumed.take() {
        let Some(unread) = session.resume(&state) else {
            return connection.log_unknown_state();
        };
        if unread.is_empty() {
            stream.phase().await_request();
        }
        input.bytes = unread;
    }
    let movable = connection.handover.movable::<S>(&connection.shutdown);
    let mut serving = ConnectionLoop {
        session: &mut session,
        stream: &mut stream,
        input: &mut input,
        connection: &connection,
        movable: movable.as_ref(),
    };
    match (serving.run(limiter).await, movable) {
        (Ok(ConnectionEnd::HandOver), Some(movable)) => {
            let state = session.state_to_move(&input.bytes);
            let (stream, _) = stream.into_parts();
            movable.hand_over(stream, state);
        }
        (Ok(_), _) => {}
        (Err(error), _) => tracing::debug!(peer = %connection.peer, %error, "connection lost"),
    }
}

/// The state of an SPOP connection's loop: its session, its stream and its buffered input.
struct ConnectionLoop<'c, S> {
    session: &'c mut SpopSession,
    stream: &'c mut TimedStream<S>,
    input: &'c mut FrameBuffer,
    connection: &'c Connection,
    /// The guard of a connection that can be handed over to another process.
    movable: Option<&'c MovableConnection>,
}

/// The reason why a connection is no longer served.
enum ConnectionEnd {
    Closed,
    HandOver,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionLoop<'_, S> {
    async fn run(&mut self, limiter: &ServerLimiter) -> io::Result<ConnectionEnd> {
        loop {
            let progress = self.answer_frames(limiter).await?;
            match progress.next {
                Next::Read => {}
                Next::Write => continue,
                Next::Close => {
                    self.stream.shutdown().await?;
                    return Ok(ConnectionEnd::Closed);
                }
            }
            // With pipelining, a read usually ends in the middle of a frame, so a busy connection
            // is never idle. Therefore, during a shutdown, the connection is closed as soon as the
            // complete frames have been answered.
            let stage = self.connection.shutdown.stage();
            if progress.consumed > 0 && stage.must_close(self.movable) {
                return disconnect(self.stream).await;
            }
            if let ControlFlow::Break(ended) = self.await_input().await? {
                return Ok(ended);
            }
        }
    }

    /// Answers the complete frames of the input, and writes the answers.
    async fn answer_frames(&mut self, limiter: &ServerLimiter) -> io::Result<SpopProgress> {
        let mut out = Vec::new();
        let progress = {
            let _in_flight = self.connection.activity.begin();
            let input = &self.input.bytes;
            self.session.answer(limiter, input, &mut out).await
        };
        if !out.is_empty() {
            self.stream.write_all(&out).await?;
            self.stream.flush().await?;
        }
        self.input.remove(progress.consumed);
        if progress.consumed > 0 {
            let phase = self.stream.phase();
            if self.input.bytes.is_empty() {
                phase.await_request();
            } else {
                phase.await_rest();
            }
            self.connection.activity.note_request();
        }
        Ok(progress)
    }

    /// Reads more input. Returns `Break` if the connection has ended.
    async fn await_input(&mut self) -> io::Result<ControlFlow<ConnectionEnd>> {
        let movable = self.movable;
        let is_idle = self.input.bytes.is_empty();
        let must_stop =
            |stage: Stage| stage.must_hand_over(movable) || is_idle && stage.must_close(movable);
        let read = tokio::select! {
            biased;
            stage = self.connection.shutdown.reached(must_stop) => {
                return Ok(ControlFlow::Break(match stage.must_hand_over(movable) {
                    true => ConnectionEnd::HandOver,
                    false => disconnect(self.stream).await?,
                }));
            }
            read = self.input.read(self.stream) => read?,
        };
        if read == 0 {
            return Ok(ControlFlow::Break(ConnectionEnd::Closed));
        }
        if !self.input.fits() {
            tracing::warn!(
                peer = %self.connection.peer,
                "connection closed: the incomplete frames of this worker exceed their memory limit"
            );
            return Ok(ControlFlow::Break(ConnectionEnd::Closed));
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Sends a DISCONNECT frame, and closes the connection.
async fn disconnect(stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<ConnectionEnd> {
    let mut out = Vec::new();
    put_disconnect(&mut out, NORMAL);
    stream.write_all(&out).await?;
    stream.shutdown().await?;
    Ok(ConnectionEnd::Closed)
}

/// The received bytes that belong to frames without an answer yet.
#[derive(Debug, Default)]
struct FrameBuffer {
    bytes: Vec<u8>,
    /// The memory of this connection that is counted in [`HELD_BYTES`].
    counted: usize,
}

impl FrameBuffer {
    /// Reads once. Returns the number of bytes read, which is 0 at the end of the stream.
    async fn read(&mut self, stream: &mut (impl AsyncRead + Unpin)) -> io::Result<usize> {
        poll_fn(|cx| {
            READ_BUFFER.with_borrow_mut(|buffer| {
                buffer.resize(READ_BYTES, 0);
                let mut buffer = ReadBuf::new(buffer);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
                self.bytes.extend_from_slice(buffer.filled());
                Poll::Ready(Ok(buffer.filled().len()))
            })
        })
        .await
    }

    /// Removes the first `count` bytes. If no bytes remain, frees the buffer.
    fn remove(&mut self, count: usize) {
        self.bytes.drain(..count);
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
        self.count();
    }

    /// Updates the worker's total. Returns false if the total exceeds [`MAX_HELD_BYTES`] and this
    /// connection's buffer exceeds [`SMALL_BYTES`].
    fn fits(&mut self) -> bool {
        self.count() <= MAX_HELD_BYTES || self.counted <= SMALL_BYTES
    }

    fn count(&mut self) -> usize {
        let total = HELD_BYTES.get() - self.counted + self.bytes.capacity();
        self.counted = self.bytes.capacity();
        HELD_BYTES.set(total);
        total
    }
}

impl Drop for FrameBuffer {
    fn drop(&mut self) {
        HELD_BYTES.set(HELD_BYTES.get() - self.counted);
    }
}
