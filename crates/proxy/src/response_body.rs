//! Response bodies on their way from an upstream to a client.
//!
//! An upstream connection is held no longer than necessary. A body that has arrived completely
//! releases the connection immediately. For any other body, a task reads up to
//! `proxy.response_buffer` bytes ahead of the client. The connection returns to the pool when its
//! last byte has been read, even if the client is slow. A client that reads the rest more slowly
//! than `proxy.min_rate` is disconnected.
//!
//! ```text
//! Complete    the body arrived with the head, so the connection is released immediately
//! Frames      the body also arrived with the head, but is chunked or has trailers
//! Streaming   a task reads from the upstream into a Pipe; the client's task takes from the Pipe
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
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tidegate_config::Slow;
use tidegate_net::IdleTimeout;
use tokio::task::AbortHandle;

use super::{
    body_error::BodyError,
    request_body::UploadProgress,
    upstream::{checkout::Checkout, connection::ResponseSource},
};

/// The maximum number of bytes read ahead on one worker, for all clients together. While the
/// maximum is exceeded, no body is read ahead, so each body is read only as fast as its client
/// reads.
const MAX_READ_AHEAD_BYTES: usize = 64 << 20;

thread_local! {
    /// The number of bytes read ahead on this worker.
    static READ_AHEAD: Cell<usize> = const { Cell::new(0) };
}

/// A response body.
#[derive(Debug)]
pub(crate) enum ResponseBody {
    /// A complete body of known length.
    Complete(Full<Bytes>, Option<ReadAheadBytes>),
    /// A complete body, as a sequence of frames.
    Frames(VecDeque<Frame<Bytes>>, ReadAheadBytes),
    /// A body that is streamed from the upstream.
    Streaming(StreamingBody),
}

/// The options for streaming a body to the client.
#[derive(Clone, Debug)]
pub(crate) struct StreamingOptions {
    /// The idle timeout: the maximum time during which the upstream sends nothing.
    pub(crate) idle: Duration,
    pub(crate) slow: Slow,
    /// The progress of sending the request body.
    pub(crate) progress: UploadProgress,
}

/// Bytes that count as read ahead until the client has taken them or this value is dropped.
#[derive(Debug, Default)]
pub(crate) struct ReadAheadBytes(usize);

impl ReadAheadBytes {
    fn of(bytes: usize) -> Self {
        let mut read_ahead = Self(0);
        read_ahead.add(bytes);
        read_ahead
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

    /// Returns whether this worker may read more bytes ahead.
    fn has_room() -> bool {
        READ_AHEAD.get() < MAX_READ_AHEAD_BYTES
    }
}

impl Drop for ReadAheadBytes {
    fn drop(&mut self) {
        self.subtract(self.0);
    }
}

impl ResponseBody {
    /// Creates the body of a local reply from `bytes`.
    pub(crate) fn complete(bytes: Bytes) -> Self {
        Self::Complete(Full::new(bytes), None)
    }

    /// Creates a body that is read from `source` on the connection of `checkout`. Releases the
    /// connection immediately if the body is already complete.
    pub(crate) fn streaming(
        source: ResponseSource,
        mut checkout: Checkout,
        options: StreamingOptions,
    ) -> Self {
        let mut frames = VecDeque::new();
        let mut read_ahead = ReadAheadBytes::default();
        if matches!(source, ResponseSource::Http1)
            && ReadAheadBytes::has_room()
            && options.slow.response_buffer > 0
        {
            if let Some(bytes) = checkout.connection.take_complete_body() {
                finish(checkout, &options.progress);
                let read_ahead = (!bytes.is_empty()).then(|| ReadAheadBytes::of(bytes.len()));
                return Self::Complete(Full::new(bytes), read_ahead);
            }
            while let Some(frame) = checkout.connection.take_buffered_frame() {
                read_ahead.add(frame.data_ref().map_or(0, Bytes::len));
                frames.push_back(strip_content_length(frame));
            }
            if checkout.connection.remaining() == Some(0) {
                finish(checkout, &options.progress);
                return Self::Frames(frames, read_ahead);
            }
        }
        let remaining = match &source {
            ResponseSource::Http2(body) => body.size_hint().exact(),
            ResponseSource::Http1 => checkout.connection.remaining().map(|remaining| {
                let here: usize = frames
                    .iter()
                    .filter_map(Frame::data_ref)
                    .map(Bytes::len)
                    .sum();
                remaining.saturating_add(u64::try_from(here).unwrap_or(u64::MAX))
            }),
        };
        let is_over = match &source {
            ResponseSource::Http2(body) => body.is_end_stream(),
            ResponseSource::Http1 => remaining == Some(0),
        };
        if is_over {
            finish(checkout, &options.progress);
            return Self::Frames(frames, read_ahead);
        }
        Self::Streaming(StreamingBody::start(
            Pipe {
                frames,
                read_ahead,
                remaining,
                ..Pipe::default()
            },
            source,
            checkout,
            options,
        ))
    }
}

/// Returns the connection of `checkout` to the pool after a complete response.
///
/// If the upstream responded before it had received the whole request, the rest of the request is
/// not sent. If the rest were sent, a slow client could keep the upstream connection busy with a
/// request that no longer counts as in flight.
pub(crate) fn finish(checkout: Checkout, progress: &UploadProgress) {
    if progress.is_sending() {
        progress.abandon();
    }
    checkout.return_to_pool();
}

/// Removes `Content-Length` from trailers, because it may contradict the length of the body that
/// has already been sent.
fn strip_content_length(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        trailers.remove(CONTENT_LENGTH);
    }
    frame
}

/// A bounded buffer between the task that reads from the upstream and the client connection.
#[derive(Debug, Default)]
struct Pipe {
    frames: VecDeque<Frame<Bytes>>,
    read_ahead: ReadAheadBytes,
    /// The number of body bytes that the client has not taken yet; `None` if unknown.
    remaining: Option<u64>,
    /// The number of bytes handed to the client's connection.
    delivered: usize,
    end: Option<Result<(), BodyError>>,
    /// Whether the next poll may return the error that ended the body: see
    /// [`StreamingBody::poll_frame`].
    is_announced: bool,
    /// Wakes the task that sends frames to the client when new frames have arrived.
    reader: Option<Waker>,
    /// Wakes the reading task when frames have been taken.
    writer: Option<Waker>,
}

impl Pipe {
    fn push(&mut self, frame: Frame<Bytes>) {
        self.read_ahead.add(frame.data_ref().map_or(0, Bytes::len));
        self.frames.push_back(frame);
        self.wake_reader();
    }

    fn take(&mut self) -> Option<Frame<Bytes>> {
        let frame = self.frames.pop_front()?;
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        self.read_ahead.subtract(bytes);
        self.delivered = self.delivered.saturating_add(bytes);
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.remaining = self
            .remaining
            .map(|remaining| remaining.saturating_sub(bytes));
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
        is_empty && (self.remaining == Some(0) || matches!(self.end, Some(Ok(()))))
    }

    /// Returns whether the reading task may read more. `max_bytes` limits the unread bytes, but an
    /// empty pipe always has room.
    fn has_room(&self, max_bytes: usize) -> bool {
        self.frames.is_empty() || self.read_ahead.0 < max_bytes && ReadAheadBytes::has_room()
    }
}

type SharedPipe = Arc<Mutex<Pipe>>;

fn lock(pipe: &SharedPipe) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A body that the proxy is still receiving. If this value is dropped before the upstream has sent
/// the whole body, the reading task stops and closes the connection.
#[derive(Debug)]
pub(crate) struct StreamingBody {
    pipe: SharedPipe,
    task: AbortHandle,
}

impl StreamingBody {
    fn start(
        pipe: Pipe,
        source: ResponseSource,
        checkout: Checkout,
        options: StreamingOptions,
    ) -> Self {
        let pipe = Arc::new(Mutex::new(pipe));
        let pump = BodyReader {
            pipe: Arc::clone(&pipe),
            source,
            checkout: Some(checkout),
            idle_timeout: IdleTimeout::new(options.idle),
            // No idle timeout is set here: if a client reads nothing at all, the write timeout of
            // its connection applies.
            client_rate: IdleTimeout::with_min_rate(Duration::MAX, options.slow.min_rate),
            counted: 0,
            is_done: false,
            options,
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
            // When a body returns an error, hyper discards its unsent bytes. Return `Pending` once
            // before the error, so that hyper flushes the bytes first.
            Some(Err(_)) if !pipe.is_announced => {
                pipe.is_announced = true;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Err(_)) => Poll::Ready(pipe.end.replace(Ok(())).and_then(Result::err).map(Err)),
        }
    }
}

impl Drop for StreamingBody {
    fn drop(&mut self) {
        let mut pipe = lock(&self.pipe);
        if matches!(pipe.end, Some(Ok(()))) {
            // The upstream has sent the whole body. The reading task may still hold the connection
            // until the client has taken the last bytes. Drop the remaining frames, so that the
            // task finishes.
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

/// The task that reads a body from its upstream into a [`Pipe`].
struct BodyReader {
    pipe: SharedPipe,
    source: ResponseSource,
    checkout: Option<Checkout>,
    /// The idle timeout for the upstream.
    idle_timeout: IdleTimeout,
    /// The timeout for a client that reads more slowly than the minimum rate. The timeout runs only
    /// while the reading task waits for the client.
    client_rate: IdleTimeout,
    /// The number of delivered bytes already reported to `client_rate`.
    counted: usize,
    /// Whether the upstream has sent the whole body.
    is_done: bool,
    options: StreamingOptions,
}

impl Future for BodyReader {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        while !this.is_done {
            ready!(this.poll_room(cx));
            if this.checkout.is_none() {
                return Poll::Ready(());
            }
            let Poll::Ready(frame) = this.poll_source(cx) else {
                ready!(this.idle_timeout.poll_expired(cx));
                this.fail(BodyError::IdleTimeout);
                return Poll::Ready(());
            };
            match frame {
                Some(Ok(frame)) => {
                    this.idle_timeout.record_bytes(0);
                    lock(&this.pipe).push(strip_content_length(frame));
                    // Check for the end of the body at this point: if the frame carries END_STREAM,
                    // no further poll is needed.
                    this.is_done = this.is_source_over();
                }
                Some(Err(error)) => {
                    this.fail(error);
                    return Poll::Ready(());
                }
                None => this.is_done = true,
            }
        }
        let mut pipe = lock(&this.pipe);
        if pipe.end.is_none() {
            pipe.finish(Ok(()));
        }
        let reads_ahead = this.options.slow.response_buffer > 0 && ReadAheadBytes::has_room();
        if !reads_ahead && !pipe.frames.is_empty() {
            // If nothing may be read ahead, hold the connection until the client has taken the last
            // bytes.
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        drop(pipe);
        if let Some(checkout) = this.checkout.take() {
            finish(checkout, &this.options.progress);
        }
        Poll::Ready(())
    }
}

impl BodyReader {
    /// Waits for room in the pipe. If the client is too slow, disconnects it and becomes ready.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut pipe = lock(&self.pipe);
        let delivered = pipe.delivered;
        if pipe.has_room(self.options.slow.response_buffer) {
            drop(pipe);
            self.client_rate.record_bytes(delivered - self.counted);
            self.counted = delivered;
            return Poll::Ready(());
        }
        pipe.writer = Some(cx.waker().clone());
        drop(pipe);
        if delivered > self.counted {
            self.client_rate.record_bytes(delivered - self.counted);
            self.counted = delivered;
        }
        ready!(self.client_rate.poll_expired(cx));
        let mut pipe = lock(&self.pipe);
        pipe.frames.clear();
        pipe.read_ahead = ReadAheadBytes::default();
        pipe.finish(Err(BodyError::SlowClient));
        if let Some(checkout) = self.checkout.take() {
            let endpoint = checkout.active.endpoint();
            tracing::debug!(endpoint = %endpoint.address.url, "client read the response too slowly: connection closed");
        }
        Poll::Ready(())
    }

    fn poll_source(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match (&mut self.source, &mut self.checkout) {
            (ResponseSource::Http2(body), checkout) => {
                let frame = Pin::new(body).poll_frame(cx);
                if let (Some(checkout), Poll::Ready(Some(Ok(_)))) = (checkout, &frame) {
                    checkout.connection.mark_alive();
                }
                frame.map_err(|error| BodyError::Aborted(error.into()))
            }
            (ResponseSource::Http1, Some(checkout)) => checkout
                .connection
                .poll_body(cx)
                .map_err(|error| BodyError::Aborted(error.into())),
            (ResponseSource::Http1, None) => Poll::Ready(None),
        }
    }

    fn is_source_over(&self) -> bool {
        match (&self.source, &self.checkout) {
            (ResponseSource::Http2(body), _) => body.is_end_stream(),
            (ResponseSource::Http1, Some(checkout)) => checkout.connection.remaining() == Some(0),
            (ResponseSource::Http1, None) => true,
        }
    }

    /// Ends the body with `error`, and counts the error against the endpoint.
    fn fail(&mut self, error: BodyError) {
        if let Some(checkout) = self.checkout.take() {
            let endpoint = checkout.active.endpoint();
            tracing::debug!(endpoint = %endpoint.address.url, "response ended early: {error}");
            endpoint.health.count_early_end(error.early_end());
        }
        lock(&self.pipe).finish(Err(error));
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Complete(complete, read_ahead) => {
                *read_ahead = None;
                let frame = ready!(Pin::new(complete).poll_frame(cx));
                Poll::Ready(frame.map(|frame| frame.map_err(|never| match never {})))
            }
            Self::Frames(frames, read_ahead) => {
                let frame = frames.pop_front();
                let data = frame.as_ref().and_then(Frame::data_ref);
                read_ahead.subtract(data.map_or(0, Bytes::len));
                Poll::Ready(frame.map(Ok))
            }
            Self::Streaming(streaming) => streaming.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Complete(complete, _) => complete.is_end_stream(),
            Self::Frames(frames, _) => frames.is_empty(),
            Self::Streaming(streaming) => lock(&streaming.pipe).is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Complete(complete, _) => complete.size_hint(),
            Self::Frames(frames, _) if frames.is_empty() => SizeHint::with_exact(0),
            Self::Frames(..) => SizeHint::default(),
            Self::Streaming(streaming) => {
                let remaining = lock(&streaming.pipe).remaining;
                remaining.map(SizeHint::with_exact).unwrap_or_default()
            }
        }
    }
}
