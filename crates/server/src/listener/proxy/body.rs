//! Request bodies on their way to an upstream, with timeouts. Response bodies are in `download`.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};

use super::{
    forwarded::remove_claims, place::Turn, refusal::Refusal, shared::Stream, silence::Silence,
    taken::Stop,
};
use crate::config::MinRate;

pub(super) use super::download::{Body, Source};

/// Why a body was not passed on completely.
#[derive(Debug)]
pub(super) enum BodyError {
    /// Nothing arrived before the timeout.
    Silent,
    /// It exceeds its maximum size.
    TooLarge,
    /// The client reads the response too slowly.
    ClientSlow,
    /// The response is complete, so the rest of the request body is not sent.
    Unwanted,
    /// The sender closed or reset the stream early.
    Broken(Box<dyn Error + Send + Sync>),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("the body did not arrive in time"),
            Self::TooLarge => f.write_str("the body is too large"),
            Self::ClientSlow => f.write_str("the client read the body too slowly"),
            Self::Unwanted => f.write_str("the response was complete before the request body"),
            Self::Broken(error) => write!(f, "the body ended early: {error}"),
        }
    }
}

impl Error for BodyError {}

/// How an upstream can end a response early, as metric labels and log values.
pub(super) const BREAKS: [&str; 2] = ["broken_off", "idle_timeout"];

impl BodyError {
    /// Returns the index in [`BREAKS`].
    pub(super) const fn at(&self) -> usize {
        match self {
            Self::Broken(_) | Self::TooLarge | Self::ClientSlow | Self::Unwanted => 0,
            Self::Silent => 1,
        }
    }

    /// Returns the name in the access log.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::ClientSlow => "client_slow",
            _ => BREAKS[self.at()],
        }
    }
}

/// How much of a request body has been sent, for the task that waits for the response. `None` if
/// there is no body.
#[derive(Clone, Debug)]
pub(super) struct Progress(Option<Arc<Sending>>);

#[derive(Debug, Default)]
struct Sending {
    state: AtomicU8,
    /// Whether the body had trailers.
    has_trailers: AtomicBool,
    /// The task that sends the body; woken when the rest is unwanted.
    sends: AtomicWaker,
    /// Resets the stream of the body, even while the upstream's flow-control window is closed.
    stop: Mutex<Option<Stop>>,
    /// The task that waits for the response, if another task sends the body.
    waits: AtomicWaker,
}

// The states of a request body: see `Sending::state`.
const SENDING: u8 = 0;
const SENT: u8 = 1;
const SILENT: u8 = 2;
const TOO_LARGE: u8 = 3;
const BROKEN: u8 = 4;
const UNWANTED: u8 = 5;

impl Progress {
    /// Returns the progress of a body of which nothing has been sent yet.
    #[cfg(test)]
    pub(super) fn begun() -> Self {
        Self(Some(Arc::default()))
    }

    /// Marks the body as completely sent.
    #[cfg(test)]
    pub(super) fn end(&self) {
        self.set(SENT);
    }

    /// Returns whether more of the body may follow.
    pub(super) fn is_sending(&self) -> bool {
        self.state() == SENDING
    }

    /// Like [`Self::is_sending`], and wakes the task when the body ends or fails.
    pub(super) fn poll_is_sending(&self, cx: &Context<'_>) -> bool {
        if let Some(sending) = &self.0 {
            sending.waits.register(cx.waker());
        }
        self.is_sending()
    }

    /// Returns whether there was a body that has arrived completely and without trailers.
    pub(super) fn is_plainly_over(&self) -> bool {
        self.0.as_ref().is_some_and(|sending| {
            sending.state.load(Ordering::Relaxed) == SENT
                && !sending.has_trailers.load(Ordering::Relaxed)
        })
    }

    /// Stops sending the body, because the response is complete.
    pub(super) fn abandon(&self) {
        if let Some(sending) = &self.0 {
            sending.state.store(UNWANTED, Ordering::Relaxed);
            if let Some(stop) = &*sending.stop.lock().unwrap_or_else(PoisonError::into_inner) {
                stop.stop();
            }
            sending.sends.wake();
        }
    }

    /// Returns the error of the body, if it has failed. `most` is the maximum size, for the
    /// message.
    pub(super) fn failure(&self, most: u64) -> Option<Refusal> {
        match self.state() {
            SILENT => Some(Refusal::BodyTooSlow),
            TOO_LARGE => Some(Refusal::TooLarge(most)),
            BROKEN => Some(Refusal::BodyBroke),
            _ => None,
        }
    }

    fn note_trailers(&self) {
        if let Some(sending) = &self.0 {
            sending.has_trailers.store(true, Ordering::Relaxed);
        }
    }

    fn state(&self) -> u8 {
        self.0
            .as_ref()
            .map_or(SENT, |sending| sending.state.load(Ordering::Relaxed))
    }

    fn set(&self, state: u8) {
        if let Some(sending) = &self.0 {
            sending.state.store(state, Ordering::Relaxed);
            sending.waits.wake();
        }
    }
}

/// A request body on its way to an upstream.
#[derive(Debug)]
pub(super) struct Upload {
    /// `None` for a request that the proxy makes without a body.
    body: Option<Incoming>,
    silence: Silence,
    /// How many more bytes are allowed.
    left: u64,
    progress: Progress,
    /// The body's stream on a shared HTTP/2 connection, held until the body is sent.
    stream: Option<Arc<Stream>>,
    turn: Turn,
}

/// Limits of a request body.
#[derive(Clone, Copy, Debug)]
pub(super) struct UploadBounds {
    /// The maximum size in bytes.
    pub(super) most: u64,
    /// The idle timeout: how long the client may send nothing.
    pub(super) idle: Duration,
    pub(super) min_rate: Option<MinRate>,
}

impl Upload {
    /// Wraps `body` with the limits of `bounds`. `turn` pauses the concurrency permit while the
    /// client has to send more.
    pub(super) fn new(body: Incoming, bounds: UploadBounds, turn: Turn) -> Self {
        // Most requests have no body, so they need no allocation for shared progress.
        let progress = (!body.is_end_stream()).then(Arc::default);
        Self {
            body: Some(body),
            silence: Silence::paced(bounds.idle, bounds.min_rate),
            left: bounds.most,
            progress: Progress(progress),
            stream: None,
            turn,
        }
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Returns an empty body.
    pub(super) fn nothing() -> Self {
        Self {
            body: None,
            silence: Silence::new(Duration::ZERO),
            left: 0,
            progress: Progress(None),
            stream: None,
            turn: Turn::default(),
        }
    }

    /// Sets `stop` as the way to reset the stream on which the body is sent.
    pub(super) fn ended_by(&self, stop: Stop) {
        if let Some(sending) = &self.progress.0 {
            *sending.stop.lock().unwrap_or_else(PoisonError::into_inner) = Some(stop);
        }
    }

    /// Sets the HTTP/2 stream on which the body is sent.
    pub(super) fn enter(&mut self, stream: Option<Arc<Stream>>) {
        self.stream = stream;
    }

    fn failed(&self, state: u8, error: BodyError) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.progress.set(state);
        Poll::Ready(Some(Err(error)))
    }
}

/// Counts a dropped body as sent: nothing will follow, so the response timeout starts.
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
        // Over HTTP/2, hyper sends the body in its own task, which does not end when the response
        // does.
        if let (Some(sending), Some(_)) = (&this.progress.0, &this.stream) {
            sending.sends.register(cx.waker());
            if sending.state.load(Ordering::Relaxed) == UNWANTED {
                return Poll::Ready(Some(Err(BodyError::Unwanted)));
            }
        }
        let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) else {
            this.turn.is_clients();
            ready!(this.silence.poll_too_long(cx));
            return this.failed(SILENT, BodyError::Silent);
        };
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok());
        let bytes = data.and_then(Frame::data_ref).map_or(0, Bytes::len);
        this.silence.broken(bytes);
        this.turn.is_upstreams();
        match frame {
            Some(Ok(mut frame)) => {
                // An upstream that merges trailers into headers must not see forged client
                // addresses.
                if let Some(trailers) = frame.trailers_mut() {
                    remove_claims(trailers);
                    this.progress.note_trailers();
                }
                match this
                    .left
                    .checked_sub(u64::try_from(bytes).unwrap_or(u64::MAX))
                {
                    Some(left) => this.left = left,
                    None => return this.failed(TOO_LARGE, BodyError::TooLarge),
                }
                if body.is_end_stream() {
                    this.progress.set(SENT);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => this.failed(BROKEN, BodyError::Broken(error.into())),
            None => {
                this.progress.set(SENT);
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}
