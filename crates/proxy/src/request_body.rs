//! Request bodies on their way to an upstream, with timeouts. The module `response_body` handles
//! response bodies.
//!
//! The proxy drops request trailers, because no rule was evaluated on them and some upstreams merge
//! them into the headers. nginx also drops request trailers, as does Envoy for HTTP/1.1.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use http::HeaderMap;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use tidegate_net::{BodyReadError, BoundedBody, IdleTimeout, MinRate};

use super::{
    body_error::BodyError, error::ProxyError, inspected_bytes::InspectedBytes,
    permit::PermitHandle, stream_slots::StreamSlot, write_stall::StreamReset,
};

/// The upload progress of a request body, for the task that waits for the response; `None` if the
/// request has no body.
#[derive(Clone, Debug)]
pub(crate) struct UploadProgress(Option<Arc<UploadState>>);

#[derive(Debug, Default)]
struct UploadState {
    state: AtomicU8,
    /// Whether the body had trailers.
    has_trailers: AtomicBool,
    /// Wakes the task that sends the body when the rest of the body is no longer needed.
    sender: AtomicWaker,
    /// The handle that resets the body's HTTP/2 stream. The reset works even while the upstream's
    /// flow-control window is closed.
    reset: Mutex<Option<StreamReset>>,
    /// Wakes the task that waits for the response, if another task sends the body.
    waiter: AtomicWaker,
}

// The states of a request body: see `UploadState::state`.
const SENDING: u8 = 0;
const SENT: u8 = 1;
const TIMED_OUT: u8 = 2;
const TOO_LARGE: u8 = 3;
const ABORTED: u8 = 4;
const UNWANTED: u8 = 5;

impl UploadProgress {
    /// Returns the progress of a body before anything has been sent.
    #[cfg(test)]
    pub(crate) fn started() -> Self {
        Self(Some(Arc::default()))
    }

    /// Marks the body as completely sent.
    #[cfg(test)]
    pub(crate) fn end(&self) {
        self.set(SENT);
    }

    /// Returns whether the body is still being sent.
    pub(crate) fn is_sending(&self) -> bool {
        self.state() == SENDING
    }

    /// Returns the same as [`Self::is_sending`]. Also registers the task of `cx`, which is woken
    /// when the body ends or fails.
    pub(crate) fn poll_is_sending(&self, cx: &Context<'_>) -> bool {
        if let Some(shared) = &self.0 {
            shared.waiter.register(cx.waker());
        }
        self.is_sending()
    }

    /// Returns whether the request had a body that has arrived completely and without trailers.
    pub(crate) fn is_complete_without_trailers(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| {
            shared.state.load(Ordering::Relaxed) == SENT
                && !shared.has_trailers.load(Ordering::Relaxed)
        })
    }

    /// Stops the upload of the remaining body, because the response is complete.
    pub(crate) fn abandon(&self) {
        if let Some(shared) = &self.0 {
            shared.state.store(UNWANTED, Ordering::Relaxed);
            if let Some(reset) = &*shared.reset.lock().unwrap_or_else(PoisonError::into_inner) {
                reset.reset();
            }
            shared.sender.wake();
        }
    }

    /// Returns the body's error, if the body has failed. `max_bytes` is the maximum body size, for
    /// the error message.
    pub(crate) fn error(&self, max_bytes: u64) -> Option<ProxyError> {
        match self.state() {
            TIMED_OUT => Some(ProxyError::BodyTooSlow),
            TOO_LARGE => Some(ProxyError::TooLarge(max_bytes)),
            ABORTED => Some(ProxyError::BodyAborted),
            _ => None,
        }
    }

    fn note_trailers(&self) {
        if let Some(shared) = &self.0 {
            shared.has_trailers.store(true, Ordering::Relaxed);
        }
    }

    fn state(&self) -> u8 {
        self.0
            .as_ref()
            .map_or(SENT, |shared| shared.state.load(Ordering::Relaxed))
    }

    fn set(&self, state: u8) {
        if let Some(shared) = &self.0 {
            shared.state.store(state, Ordering::Relaxed);
            shared.waiter.wake();
        }
    }
}

/// A request body from the client.
#[derive(Debug)]
pub(crate) enum RequestBody {
    /// A body that the proxy streams from the client.
    Incoming(Incoming),
    /// A body that the proxy has already read, because the request's cost depends on it.
    Buffered(BufferedBody),
}

/// A completely read request body.
#[derive(Debug)]
pub(crate) struct BufferedBody {
    pub(crate) data: Bytes,
    /// Whether the body had trailers, which are dropped.
    pub(crate) had_trailers: bool,
    /// Counts the bytes of `data` towards the worker's maximum until they have been sent.
    pub(crate) memory: InspectedBytes,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Incoming(body) => Pin::new(body).poll_frame(cx),
            Self::Buffered(body) => Poll::Ready(body.next().map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Incoming(body) => body.is_end_stream(),
            Self::Buffered(body) => body.data.is_empty() && !body.had_trailers,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Incoming(body) => body.size_hint(),
            // The length of a buffer in memory fits in 64 bits.
            Self::Buffered(body) => SizeHint::with_exact(body.data.len() as u64),
        }
    }
}

impl BufferedBody {
    fn next(&mut self) -> Option<Frame<Bytes>> {
        if !self.data.is_empty() {
            self.memory = InspectedBytes::default();
            return Some(Frame::data(std::mem::take(&mut self.data)));
        }
        // Return empty trailers, so that `Upload` knows that the body had trailers.
        let had_trailers = std::mem::take(&mut self.had_trailers);
        had_trailers.then(|| Frame::trailers(HeaderMap::new()))
    }
}

/// A request body on its way to an upstream.
#[derive(Debug)]
pub(crate) struct Upload {
    /// The body from the client; `None` after its trailers, and for the proxy's own requests.
    body: Option<BoundedBody<RequestBody>>,
    progress: UploadProgress,
    /// The reservation of the HTTP/2 stream on which the body is sent. The stream stays reserved
    /// until the body is sent.
    stream: Option<Arc<StreamSlot>>,
    permit: PermitHandle,
}

/// The limits of a request body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UploadLimits {
    /// The maximum size in bytes.
    pub(crate) max_bytes: u64,
    /// The idle timeout: the maximum time during which the client sends nothing.
    pub(crate) idle: Duration,
    pub(crate) min_rate: Option<MinRate>,
}

impl Upload {
    /// Wraps `body` with `limits`. Uses `permit` to pause the concurrency permit while the proxy
    /// waits for more data from the client.
    pub(crate) fn new(body: RequestBody, limits: UploadLimits, permit: PermitHandle) -> Self {
        // Most requests have no body, and so need no allocation for the shared progress.
        let progress = (!body.is_end_stream()).then(Arc::default);
        let idle_timeout = IdleTimeout::with_min_rate(limits.idle, limits.min_rate);
        let body = BoundedBody::new(body, limits.max_bytes).with_idle_timeout(idle_timeout);
        Self {
            body: Some(body),
            progress: UploadProgress(progress),
            stream: None,
            permit,
        }
    }

    pub(crate) fn progress(&self) -> UploadProgress {
        self.progress.clone()
    }

    /// Returns an empty body.
    pub(crate) fn empty() -> Self {
        Self {
            body: None,
            progress: UploadProgress(None),
            stream: None,
            permit: PermitHandle::default(),
        }
    }

    /// Sets the handle that resets the stream on which the body is sent.
    pub(crate) fn set_reset(&self, reset: StreamReset) {
        if let Some(shared) = &self.progress.0 {
            *shared.reset.lock().unwrap_or_else(PoisonError::into_inner) = Some(reset);
        }
    }

    /// Sets the HTTP/2 stream on which the body is sent.
    pub(crate) fn set_stream(&mut self, stream: Option<Arc<StreamSlot>>) {
        self.stream = stream;
    }

    fn failed(&self, state: u8, error: BodyError) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.progress.set(state);
        Poll::Ready(Some(Err(error)))
    }
}

/// A body that is dropped early counts as sent. No more data follows, so the timeout for the
/// response starts.
impl Drop for Upload {
    fn drop(&mut self) {
        if self.progress.is_sending() {
            self.progress.set(SENT);
        }
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        // Over HTTP/2, hyper sends the body in a separate task, which keeps running after the
        // response has ended.
        if let (Some(shared), Some(_)) = (&this.progress.0, &this.stream) {
            shared.sender.register(cx.waker());
            if shared.state.load(Ordering::Relaxed) == UNWANTED {
                return Poll::Ready(Some(Err(BodyError::Unwanted)));
            }
        }
        let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) else {
            this.permit.pause();
            return Poll::Pending;
        };
        // After an idle timeout, the permit stays paused, because the client has sent nothing.
        if !matches!(frame, Some(Err(BodyReadError::IdleTimeout))) {
            this.permit.resume();
        }
        match frame {
            // No frames follow the trailers.
            Some(Ok(frame)) if frame.is_trailers() => {
                this.body = None;
                this.progress.note_trailers();
                this.progress.set(SENT);
                Poll::Ready(None)
            }
            Some(Ok(frame)) => {
                if body.is_end_stream() {
                    this.progress.set(SENT);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(BodyReadError::IdleTimeout)) => this.failed(TIMED_OUT, BodyError::IdleTimeout),
            Some(Err(BodyReadError::TooLarge)) => this.failed(TOO_LARGE, BodyError::TooLarge),
            Some(Err(BodyReadError::Aborted(error))) => {
                this.failed(ABORTED, BodyError::Aborted(error.into()))
            }
            None => {
                this.progress.set(SENT);
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}
