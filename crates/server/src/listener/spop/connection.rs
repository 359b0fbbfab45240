//! Serves one connection: reads frames and writes the answers, with bounds on memory and timeouts.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    pin::Pin,
    task::ready,
};

use tidegate_limiter::ServerLimiter;
use tidegate_net::{Connection, StreamTimeouts, TimedStream, WriteTimeout};
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

/// Serves one connection from HAProxy until either side closes it.
pub(super) async fn serve<S>(
    mut session: Session,
    stream: S,
    connection: Connection,
    limiter: &ServerLimiter,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let bounds = connection.bounds;
    let timeouts = StreamTimeouts {
        idle: bounds.idle,
        request: bounds.request,
        write: WriteTimeout::Drain(bounds.write),
    };
    let mut stream = TimedStream::new(stream, timeouts);
    let served = run(&mut session, &mut stream, &connection, limiter).await;
    if let Err(error) = served {
        tracing::debug!(peer = %connection.peer, %error, "connection lost");
    }
}

async fn run<S>(
    session: &mut Session,
    stream: &mut TimedStream<S>,
    connection: &Connection,
    limiter: &ServerLimiter,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut input, mut out) = (Input::default(), Vec::new());
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
            Next::Close => return stream.shutdown().await,
        }
        // With pipelining, a read usually ends in the middle of a frame, so a busy connection is
        // never idle. Therefore, during a shutdown, the connection is closed as soon as the
        // complete frames have been answered.
        if progress.consumed > 0 && connection.shutdown.has_begun() {
            put_disconnect(&mut out, NORMAL);
            stream.write_all(&out).await?;
            return stream.shutdown().await;
        }
        let is_idle = input.bytes.is_empty();
        let read = tokio::select! {
            biased;
            () = connection.shutdown.begun(), if is_idle => {
                put_disconnect(&mut out, NORMAL);
                stream.write_all(&out).await?;
                return stream.shutdown().await;
            }
            read = input.read(stream) => read?,
        };
        if read == 0 {
            return Ok(());
        }
        if !input.fits() {
            tracing::warn!(
                peer = %connection.peer,
                "connection closed: the incomplete frames of this worker exceed their memory limit"
            );
            return Ok(());
        }
    }
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
