//! The body of an answer on its way from an upstream to a client.
//!
//! The upstream is not held for longer than it needs: a body that is here whole is passed on without it, and of any other
//! a task reads ahead of the client, up to `proxy.response_buffer`. With the last byte the connection goes back to the pool,
//! however slow the client is. A client that takes the rest slower than `proxy.min_rate` is given up.
//!
//! ```text
//! whole       head and body came together: the connection is free at once
//! pieces      the same for chunks and trailers
//! Download    a task reads from the upstream into a Pipe, and the client's connection takes from it
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

/// The most bytes that are read ahead on one worker, for all clients together. Beyond that, each body waits for its client.
const MAX_READ_AHEAD_BYTES: usize = 64 << 20;

thread_local! {
    /// How many bytes are read ahead on this worker.
    static READ_AHEAD: Cell<usize> = const { Cell::new(0) };
}

/// The body of an answer.
#[derive(Debug)]
pub(super) enum Body {
    /// All of it is here; its length is known.
    Whole(Full<Bytes>, Option<Ahead>),
    /// All of it is here, in pieces.
    Pieces(VecDeque<Frame<Bytes>>, Ahead),
    /// The upstream has more.
    Passed(Download),
}

/// Where the body of an answer comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// The connection itself, which has nothing else to do.
    Link,
    /// A stream of HTTP/2.
    Stream(Incoming),
}

/// How a body is passed on.
#[derive(Clone, Debug)]
pub(super) struct Passage {
    /// How long the upstream may send nothing.
    pub(super) idle: Duration,
    pub(super) slow: Slow,
    /// How far the body of the request has come.
    pub(super) progress: Progress,
}

/// Bytes that are read ahead, until they are taken.
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

    /// Whether this worker may read ahead at all.
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
    /// What the proxy says itself.
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self::Whole(Full::new(bytes), None)
    }

    /// The body from `source`, which comes on the connection of `lease`.
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

/// The answer on `lease` is over. Where the upstream has answered before it had the whole request, the rest is not sent: it
/// would keep the connection for as long as the client likes, although the request is no longer counted as in flight.
pub(super) fn end(lease: Lease, progress: &Progress) {
    if progress.is_sending() {
        progress.abandon();
    }
    lease.give_back();
}

/// A trailer with a length would say how long a body is that has come, and may say otherwise.
fn without_length(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        trailers.remove(CONTENT_LENGTH);
    }
    frame
}

/// What has come of a body and was not taken yet.
#[derive(Debug, Default)]
struct Pipe {
    frames: VecDeque<Frame<Bytes>>,
    ahead: Ahead,
    /// How much of the body is left to be taken, if that is known.
    left: Option<u64>,
    /// How many bytes were taken in all.
    taken: usize,
    end: Option<Result<(), BodyError>>,
    /// Whether the end by an error was announced: see [`Download::poll_frame`].
    is_announced: bool,
    /// Waits for more to come.
    reader: Option<Waker>,
    /// Waits for some to be taken.
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

    /// Whether more may be read, of which `most` bytes may wait.
    fn has_room(&self, most: usize) -> bool {
        self.frames.is_empty() || self.ahead.0 < most && Ahead::has_room()
    }
}

type Shared = Arc<Mutex<Pipe>>;

fn lock(pipe: &Shared) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A body of which the upstream has more. When it is dropped before, the task that reads ends, and the connection with it.
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
            // The time in which nothing is taken is bounded where the client is written to.
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
            // hyper forgets what it has not sent when it hears of an error. It sends while it waits.
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
            // The upstream has sent all: its connection may have waited for the last bytes to be taken, and is free now.
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

/// Reads a body from its upstream into a pipe.
struct Pump {
    pipe: Shared,
    source: Source,
    lease: Option<Lease>,
    /// For the upstream.
    silence: Silence,
    /// For the client, while it keeps the upstream waiting.
    slow: Silence,
    /// How many of the bytes that were taken `slow` has heard of.
    counted: usize,
    /// Whether the upstream has sent all.
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
                    // HTTP/2 may say with the last piece that it is the last.
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
            // What is left may not be kept here alone.
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
    /// Ready once more may be read, or the client is given up.
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
            tracing::debug!(address = %address.url, "a client took an answer too slowly: connection closed");
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

    /// Ends the body by this `error` of its upstream.
    fn breaks(&mut self, error: BodyError) {
        if let Some(lease) = self.lease.take() {
            let address = lease.load.address();
            tracing::debug!(address = %address.url, "an answer broke off: {error}");
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
