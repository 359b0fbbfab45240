//! Response bodies on their way from an upstream to a client.
//!
//! An upstream connection is held no longer than necessary. A body that has arrived completely
//! releases it at once. For other bodies, a task reads ahead of the client, up to
//! `proxy.response_buffer`. With the last byte the connection returns to the pool, however slow the
//! client is. A client that reads the rest more slowly than `proxy.min_rate` is disconnected.
//!
//! ```text
//! Whole       the body arrived with the head: the connection is free at once
//! Pieces      the same, for chunked bodies and trailers
//! Download    a task reads from the upstream into a Pipe, from which the client connection takes
//! ```

use std::{
    cell::Cell,
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use http::header::CONTENT_LENGTH;
use http_body_util::Full;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use tokio::task::AbortHandle;

use super::{
    body::{BodyError, Progress},
    exchange::Received,
    lease::Lease,
    silence::Silence,
};
use crate::config::Slow;

/// The maximum number of bytes read ahead on one worker, for all clients together. Above it, each
/// body waits for its client.
const MAX_READ_AHEAD_BYTES: usize = 64 << 20;

thread_local! {
    /// The number of bytes read ahead on this worker.
    static READ_AHEAD: Cell<usize> = const { Cell::new(0) };
}

/// A response body.
#[derive(Debug)]
pub(super) enum Body {
    /// All of it is here, with a known length.
    Whole(Full<Bytes>, Option<Ahead>),
    /// All of it is here, as a sequence of frames.
    Pieces(VecDeque<Frame<Bytes>>, Ahead),
    /// The upstream has more to send.
    Passed(Download),
}

/// Where a response body comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// The HTTP/1.1 connection itself, which carries nothing else.
    Link,
    /// An HTTP/2 stream.
    Stream(Incoming),
}

/// How to stream a body to the client.
#[derive(Clone, Debug)]
pub(super) struct Passage {
    /// The idle timeout: how long the upstream may send nothing.
    pub(super) idle: Duration,
    pub(super) slow: Slow,
    /// How much of the request body has been sent.
    pub(super) progress: Progress,
}

/// A number of bytes that count as read ahead until they are taken.
#[derive(Debug, Default)]
pub(super) struct Ahead(usize);

impl Ahead {
    fn of(bytes: usize) -> Self {
        let mut ahead = Self(0);
        ahead.add(bytes);
        ahead
    }

    fn add(&mut self, bytes: usize) {
        self.0 += bytes;
        READ_AHEAD.set(READ_AHEAD.get().saturating_add(bytes));
    }

    fn subtract(&mut self, bytes: usize) {
        let bytes = bytes.min(self.0);
        self.0 -= bytes;
        READ_AHEAD.set(READ_AHEAD.get().saturating_sub(bytes));
    }

    /// Returns whether this worker may read ahead any more bytes.
    fn has_room() -> bool {
        READ_AHEAD.get() < MAX_READ_AHEAD_BYTES
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.subtract(self.0);
    }
}

impl Body {
    /// Returns the body of a local reply.
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self::Whole(Full::new(bytes), None)
    }

    /// Returns the body from `source`, on the connection of `lease`. Releases the connection at
    /// once if the body is complete.
    pub(super) fn passed(source: Source, mut lease: Lease, passage: Passage) -> Self {
        let mut frames = VecDeque::new();
        let mut ahead = Ahead::default();
        if matches!(source, Source::Link) && Ahead::has_room() && passage.slow.response_buffer > 0 {
            if let Some(bytes) = lease.link.take_whole() {
                end(lease, &passage.progress);
                let ahead = (!bytes.is_empty()).then(|| Ahead::of(bytes.len()));
                return Self::Whole(Full::new(bytes), ahead);
            }
            while let Received::Frame(frame) = lease.link.take_received() {
                ahead.add(frame.data_ref().map_or(0, Bytes::len));
                frames.push_back(without_length(frame));
            }
            if lease.link.left() == Some(0) {
                end(lease, &passage.progress);
                return Self::Pieces(frames, ahead);
            }
        }
        let left = match &source {
            Source::Stream(body) => body.size_hint().exact(),
            Source::Link => lease.link.left().map(|left| {
                let here: usize = frames
                    .iter()
                    .filter_map(Frame::data_ref)
                    .map(Bytes::len)
                    .sum();
                left.saturating_add(u64::try_from(here).unwrap_or(u64::MAX))
            }),
        };
        let is_over = match &source {
            Source::Stream(body) => body.is_end_stream(),
            Source::Link => left == Some(0),
        };
        if is_over {
            end(lease, &passage.progress);
            return Self::Pieces(frames, ahead);
        }
        Self::Passed(Download::begin(
            Pipe {
                frames,
                ahead,
                left,
                ..Pipe::default()
            },
            source,
            lease,
            passage,
        ))
    }
}

/// Ends the exchange on `lease`, whose response is complete.
///
/// If the upstream answered before it had the whole request, the rest is not sent. Otherwise the
/// client could keep the connection busy with a request that no longer counts as in flight.
pub(super) fn end(lease: Lease, progress: &Progress) {
    if progress.is_sending() {
        progress.abandon();
    }
    lease.give_back();
}

/// Removes `Content-Length` from trailers: it might contradict the length of the body already sent.
fn without_length(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        trailers.remove(CONTENT_LENGTH);
    }
    frame
}

/// A bounded buffer between the task that reads from the upstream and the client connection.
#[derive(Debug, Default)]
struct Pipe {
    frames: VecDeque<Frame<Bytes>>,
    ahead: Ahead,
    /// How many bytes of the body the client has not taken yet, if known.
    left: Option<u64>,
    /// How many bytes the client has taken.
    taken: usize,
    end: Option<Result<(), BodyError>>,
    /// Whether an error at the end is about to be returned: see [`Download::poll_frame`].
    is_announced: bool,
    /// Waits for frames to arrive.
    reader: Option<Waker>,
    /// Waits for frames to be taken.
    writer: Option<Waker>,
}

impl Pipe {
    fn push(&mut self, frame: Frame<Bytes>) {
        self.ahead.add(frame.data_ref().map_or(0, Bytes::len));
        self.frames.push_back(frame);
        self.wake_reader();
    }

    fn take(&mut self) -> Option<Frame<Bytes>> {
        let frame = self.frames.pop_front()?;
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        self.ahead.subtract(bytes);
        self.taken = self.taken.saturating_add(bytes);
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.left = self.left.map(|left| left.saturating_sub(bytes));
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
        Some(frame)
    }

    fn finish(&mut self, end: Result<(), BodyError>) {
        self.end = Some(end);
        self.wake_reader();
    }

    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    fn is_over(&self) -> bool {
        let is_empty = self.frames.is_empty();
        is_empty && (self.left == Some(0) || matches!(self.end, Some(Ok(()))))
    }

    /// Returns whether to read more, with `most` as the limit in bytes. An empty pipe always has
    /// room.
    fn has_room(&self, most: usize) -> bool {
        self.frames.is_empty() || self.ahead.0 < most && Ahead::has_room()
    }
}

type Shared = Arc<Mutex<Pipe>>;

fn lock(pipe: &Shared) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A body that is still being received. Dropping it stops the reading task and closes the
/// connection, unless the upstream has sent everything.
#[derive(Debug)]
pub(super) struct Download {
    pipe: Shared,
    task: AbortHandle,
}

impl Download {
    fn begin(pipe: Pipe, source: Source, lease: Lease, passage: Passage) -> Self {
        let pipe = Arc::new(Mutex::new(pipe));
        let pump = Pump {
            pipe: Arc::clone(&pipe),
            source,
            lease: Some(lease),
            silence: Silence::new(passage.idle),
            // A client that reads nothing at all is handled by the write timeout of its connection.
            slow: Silence::paced(Duration::MAX, passage.slow.min_rate),
            counted: 0,
            is_done: false,
            passage,
        };
        let task = tokio::task::spawn_local(pump).abort_handle();
        Self { pipe, task }
    }

    fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut pipe = lock(&self.pipe);
        if let Some(frame) = pipe.take() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match &pipe.end {
            None => {
                pipe.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(Ok(())) => Poll::Ready(None),
            // hyper discards its unsent bytes when a body returns an error. Returning `Pending`
            // once lets it flush them first.
            Some(Err(_)) if !pipe.is_announced => {
                pipe.is_announced = true;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Err(_)) => Poll::Ready(pipe.end.replace(Ok(())).and_then(Result::err).map(Err)),
        }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let mut pipe = lock(&self.pipe);
        if matches!(pipe.end, Some(Ok(()))) {
            // The upstream has sent everything. The task may be waiting to release the connection
            // until the last bytes are taken; dropping them lets it finish.
            pipe.frames.clear();
            if let Some(writer) = pipe.writer.take() {
                writer.wake();
            }
            return;
        }
        drop(pipe);
        self.task.abort();
    }
}

/// The task that reads a body from its upstream into a pipe.
struct Pump {
    pipe: Shared,
    source: Source,
    lease: Option<Lease>,
    /// The idle timeout of the upstream.
    silence: Silence,
    /// The minimum rate of the client, measured while the upstream has to wait for it.
    slow: Silence,
    /// How many of the taken bytes `slow` has counted.
    counted: usize,
    /// Whether the upstream has sent everything.
    is_done: bool,
    passage: Passage,
}

impl Future for Pump {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        while !this.is_done {
            ready!(this.poll_room(cx));
            if this.lease.is_none() {
                return Poll::Ready(());
            }
            let Poll::Ready(frame) = this.poll_source(cx) else {
                ready!(this.silence.poll_too_long(cx));
                this.breaks(BodyError::Silent);
                return Poll::Ready(());
            };
            match frame {
                Some(Ok(frame)) => {
                    this.silence.broken(0);
                    lock(&this.pipe).push(without_length(frame));
                    // An HTTP/2 frame may carry END_STREAM, so no further poll is needed.
                    this.is_done = this.is_source_over();
                }
                Some(Err(error)) => {
                    this.breaks(error);
                    return Poll::Ready(());
                }
                None => this.is_done = true,
            }
        }
        let mut pipe = lock(&this.pipe);
        if pipe.end.is_none() {
            pipe.finish(Ok(()));
        }
        let is_kept = this.passage.slow.response_buffer > 0 && Ahead::has_room();
        if !is_kept && !pipe.frames.is_empty() {
            // Without read-ahead, the connection is held until the client has taken the last bytes.
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        drop(pipe);
        if let Some(lease) = this.lease.take() {
            end(lease, &this.passage.progress);
        }
        Poll::Ready(())
    }
}

impl Pump {
    /// Waits for room in the pipe. Also becomes ready when it has given up a client that is too
    /// slow.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut pipe = lock(&self.pipe);
        let taken = pipe.taken;
        if pipe.has_room(self.passage.slow.response_buffer) {
            drop(pipe);
            self.slow.broken(taken - self.counted);
            self.counted = taken;
            return Poll::Ready(());
        }
        pipe.writer = Some(cx.waker().clone());
        drop(pipe);
        if taken > self.counted {
            self.slow.broken(taken - self.counted);
            self.counted = taken;
        }
        ready!(self.slow.poll_too_long(cx));
        let mut pipe = lock(&self.pipe);
        pipe.frames.clear();
        pipe.ahead = Ahead::default();
        pipe.finish(Err(BodyError::ClientSlow));
        if let Some(lease) = self.lease.take() {
            let address = lease.load.address();
            tracing::debug!(endpoint = %address.url, "client read the response too slowly: connection closed");
        }
        Poll::Ready(())
    }

    fn poll_source(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match (&mut self.source, &mut self.lease) {
            (Source::Stream(body), lease) => {
                let frame = Pin::new(body).poll_frame(cx);
                if let (Some(lease), Poll::Ready(Some(Ok(_)))) = (lease, &frame) {
                    lease.link.heard();
                }
                frame.map_err(|error| BodyError::Broken(error.into()))
            }
            (Source::Link, Some(lease)) => lease
                .link
                .poll_body(cx)
                .map_err(|error| BodyError::Broken(error.into())),
            (Source::Link, None) => Poll::Ready(None),
        }
    }

    fn is_source_over(&self) -> bool {
        match (&self.source, &self.lease) {
            (Source::Stream(body), _) => body.is_end_stream(),
            (Source::Link, Some(lease)) => lease.link.left() == Some(0),
            (Source::Link, None) => true,
        }
    }

    /// Ends the body with an `error` of its upstream, and counts it against the endpoint.
    fn breaks(&mut self, error: BodyError) {
        if let Some(lease) = self.lease.take() {
            let address = lease.load.address();
            tracing::debug!(endpoint = %address.url, "response ended early: {error}");
            address.health.count_break(error.at());
        }
        lock(&self.pipe).finish(Err(error));
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Whole(whole, ahead) => {
                *ahead = None;
                let frame = ready!(Pin::new(whole).poll_frame(cx));
                Poll::Ready(frame.map(|frame| frame.map_err(|never| match never {})))
            }
            Self::Pieces(frames, ahead) => {
                let frame = frames.pop_front();
                let data = frame.as_ref().and_then(Frame::data_ref);
                ahead.subtract(data.map_or(0, Bytes::len));
                Poll::Ready(frame.map(Ok))
            }
            Self::Passed(passed) => passed.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(whole, _) => whole.is_end_stream(),
            Self::Pieces(frames, _) => frames.is_empty(),
            Self::Passed(passed) => lock(&passed.pipe).is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(whole, _) => whole.size_hint(),
            Self::Pieces(frames, _) if frames.is_empty() => SizeHint::with_exact(0),
            Self::Pieces(..) => SizeHint::default(),
            Self::Passed(passed) => {
                let left = lock(&passed.pipe).left;
                left.map(SizeHint::with_exact).unwrap_or_default()
            }
        }
    }
}
