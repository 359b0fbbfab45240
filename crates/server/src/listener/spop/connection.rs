//! Serves one connection: reads frames and writes the answers, with bounds on memory and timeouts.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    pin::Pin,
    task::ready,
};

use tidegate_limiter::ServerLimiter;
use tidegate_net::{Connection, MaybePlaintext, Stage, StreamTimeouts, TimedStream, WriteTimeout};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

use super::{
    bounds::{MAX_HELD_BYTES, READ_BYTES, SMALL_BYTES},
    frame::{NORMAL, put_disconnect},
    session::{Next, Session},
};

thread_local! {
    /// This worker's read buffer. Only one connection uses it at a time.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The total size of the buffers that hold incomplete frames, over all connections of this
    /// worker.
    static HELD_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Serves one connection from HAProxy until either side closes it, or until it is handed over to
/// another process.
pub(super) async fn serve<S>(
    mut session: Session,
    stream: S,
    mut connection: Connection,
    limiter: &ServerLimiter,
) where
    S: AsyncRead + AsyncWrite + MaybePlaintext + Unpin,
{
    let bounds = connection.bounds;
    let timeouts = StreamTimeouts {
        idle: bounds.idle,
        request: bounds.request,
        write: WriteTimeout::Drain(bounds.write),
    };
    let mut stream = TimedStream::new(stream, timeouts);
    let mut input = Input::default();
    if let Some(state) = connection.handover.resumed.take() {
        let Some(unread) = session.resume(&state) else {
            tracing::error!(peer = %connection.peer, "connection closed: cannot read the connection state that the old process sent");
            return;
        };
        if unread.is_empty() {
            stream.phase().await_request();
        }
        input.bytes = unread;
    }
    let movable = connection.handover.movable::<S>(&connection.shutdown);
    let is_movable = movable.is_some();
    let mut served = Served {
        session: &mut session,
        stream: &mut stream,
        input: &mut input,
        is_movable,
    };
    match (run(&mut served, &connection, limiter).await, movable) {
        (Ok(Ended::HandOver), Some(movable)) => {
            let state = session.state_to_move(&input.bytes);
            let (stream, _) = stream.into_parts();
            movable.hand_over(stream, state);
        }
        (Ok(_), _) => {}
        (Err(error), _) => tracing::debug!(peer = %connection.peer, %error, "connection lost"),
    }
}

/// The parts of a connection that is served.
struct Served<'c, S> {
    session: &'c mut Session,
    stream: &'c mut TimedStream<S>,
    input: &'c mut Input,
    /// Whether the connection can be handed over to another process.
    is_movable: bool,
}

/// The reason why a connection is no longer served.
enum Ended {
    Closed,
    HandOver,
}

async fn run<S>(
    served: &mut Served<'_, S>,
    connection: &Connection,
    limiter: &ServerLimiter,
) -> io::Result<Ended>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Served {
        session,
        stream,
        input,
        is_movable,
    } = served;
    let is_movable = *is_movable;
    let must_close = |stage: Stage| match is_movable {
        true => stage == Stage::Ending,
        false => stage.is_closing(),
    };
    let mut out = Vec::new();
    loop {
        let progress = {
            let _in_flight = connection.activity.begin();
            session.answer(limiter, &input.bytes, &mut out).await
        };
        if !out.is_empty() {
            stream.write_all(&out).await?;
            stream.flush().await?;
            out = Vec::new();
        }
        input.remove(progress.consumed);
        if progress.consumed > 0 {
            let phase = stream.phase();
            if input.bytes.is_empty() {
                phase.await_request();
            } else {
                phase.await_rest();
            }
            connection.activity.note_request();
        }
        match progress.next {
            Next::Read => {}
            Next::Write => continue,
            Next::Close => {
                stream.shutdown().await?;
                return Ok(Ended::Closed);
            }
        }
        // With pipelining, a read usually ends in the middle of a frame, so a busy connection is
        // never idle. Therefore, during a shutdown, the connection is closed as soon as the
        // complete frames have been answered.
        if progress.consumed > 0 && must_close(connection.shutdown.stage()) {
            return disconnect(stream).await;
        }
        let is_idle = input.bytes.is_empty();
        let must_move = |stage: Stage| is_movable && stage.is_handing_over();
        let must_stop = |stage: Stage| must_move(stage) || is_idle && must_close(stage);
        let read = tokio::select! {
            biased;
            stage = connection.shutdown.reached(must_stop) => {
                if must_move(stage) {
                    return Ok(Ended::HandOver);
                }
                return disconnect(stream).await;
            }
            read = input.read(stream) => read?,
        };
        if read == 0 {
            return Ok(Ended::Closed);
        }
        if !input.fits() {
            tracing::warn!(
                peer = %connection.peer,
                "connection closed: the incomplete frames of this worker exceed their memory limit"
            );
            return Ok(Ended::Closed);
        }
    }
}

/// Sends a DISCONNECT frame, and closes the connection.
async fn disconnect(stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<Ended> {
    let mut out = Vec::new();
    put_disconnect(&mut out, NORMAL);
    stream.write_all(&out).await?;
    stream.shutdown().await?;
    Ok(Ended::Closed)
}

/// The received bytes that belong to frames without an answer yet.
#[derive(Debug, Default)]
struct Input {
    bytes: Vec<u8>,
    /// This connection's share of [`HELD_BYTES`].
    counted: usize,
}

impl Input {
    /// Reads once. Returns the number of bytes read, which is 0 at the end of the stream.
    async fn read(&mut self, stream: &mut (impl AsyncRead + Unpin)) -> io::Result<usize> {
        poll_fn(|cx| {
            READ_BUFFER.with_borrow_mut(|buffer| {
                buffer.resize(READ_BYTES, 0);
                let mut buffer = ReadBuf::new(buffer);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
                self.bytes.extend_from_slice(buffer.filled());
                std::task::Poll::Ready(Ok(buffer.filled().len()))
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

impl Drop for Input {
    fn drop(&mut self) {
        HELD_BYTES.set(HELD_BYTES.get() - self.counted);
    }
}
