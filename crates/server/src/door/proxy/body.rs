//! The body of a request on its way to an upstream, timed; that of its answer is in `download`.

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

/// Why a body was not passed on to its end.
#[derive(Debug)]
pub(super) enum BodyError {
    /// Nothing came for too long.
    Silent,
    /// It is longer than it may be.
    TooLarge,
    /// The client takes it too slowly.
    ClientSlow,
    /// The upstream has answered, and wants no more of it.
    Unwanted,
    /// Its sender broke off.
    Broken(Box<dyn Error + Send + Sync>),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("the body did not arrive in time"),
            Self::TooLarge => f.write_str("the body is too large"),
            Self::ClientSlow => f.write_str("the client took the body too slowly"),
            Self::Unwanted => f.write_str("the request was answered before its body had come"),
            Self::Broken(error) => write!(f, "the body broke off: {error}"),
        }
    }
}

impl Error for BodyError {}

/// How an upstream can end an answer before its end, for metrics and logs.
pub(super) const BREAKS: [&str; 2] = ["broken_off", "idle_timeout"];

impl BodyError {
    /// Which of [`BREAKS`] it is.
    pub(super) const fn at(&self) -> usize {
        match self {
            Self::Broken(_) | Self::TooLarge | Self::ClientSlow | Self::Unwanted => 0,
            Self::Silent => 1,
        }
    }

    /// What the access log calls it.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::ClientSlow => "client_slow",
            _ => BREAKS[self.at()],
        }
    }
}

/// How far the body of a request has come, for who waits for the answer.
#[derive(Clone, Debug)]
pub(super) struct Progress(Option<Arc<Sending>>);

#[derive(Debug, Default)]
struct Sending {
    state: AtomicU8,
    /// Whether trailers have come.
    has_trailers: AtomicBool,
    /// Who sends the body, and is to hear when it is not wanted any more.
    sends: AtomicWaker,
    /// Ends the stream on which it is sent, also while the upstream takes nothing.
    stop: Mutex<Option<Stop>>,
    /// Who waits for the answer, where the body is sent by another task.
    waits: AtomicWaker,
}

const SENDING: u8 = 0;
const SENT: u8 = 1;
const SILENT: u8 = 2;
const TOO_LARGE: u8 = 3;
const BROKEN: u8 = 4;
const UNWANTED: u8 = 5;

impl Progress {
    /// Of a body that has begun to come.
    #[cfg(test)]
    pub(super) fn begun() -> Self {
        Self(Some(Arc::default()))
    }

    /// All of it has been sent.
    #[cfg(test)]
    pub(super) fn end(&self) {
        self.set(SENT);
    }

    /// Whether there may be more to come.
    pub(super) fn is_sending(&self) -> bool {
        self.state() == SENDING
    }

    /// The same for who is woken when there is no more, or something is wrong.
    pub(super) fn poll_is_sending(&self, cx: &Context<'_>) -> bool {
        if let Some(sending) = &self.0 {
            sending.waits.register(cx.waker());
        }
        self.is_sending()
    }

    /// Whether there was a body, and it has come whole and without trailers.
    pub(super) fn is_plainly_over(&self) -> bool {
        self.0.as_ref().is_some_and(|sending| {
            sending.state.load(Ordering::Relaxed) == SENT
                && !sending.has_trailers.load(Ordering::Relaxed)
        })
    }

    /// No more of the body is sent: the answer is over.
    pub(super) fn abandon(&self) {
        if let Some(sending) = &self.0 {
            sending.state.store(UNWANTED, Ordering::Relaxed);
            if let Some(stop) = &*sending.stop.lock().unwrap_or_else(PoisonError::into_inner) {
                stop.stop();
            }
            sending.sends.wake();
        }
    }

    /// What went wrong with the body, if something did.
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

/// The body of a request on its way to an upstream.
#[derive(Debug)]
pub(super) struct Upload {
    /// `None` if there is none, and never was.
    body: Option<Incoming>,
    silence: Silence,
    /// How many bytes may still come.
    left: u64,
    progress: Progress,
    /// Its part of a connection that it shares, which it has until it is sent.
    stream: Option<Arc<Stream>>,
    turn: Turn,
}

/// What the body of a request may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct UploadBounds {
    /// The most bytes.
    pub(super) most: u64,
    /// How long nothing may come.
    pub(super) idle: Duration,
    pub(super) min_rate: Option<MinRate>,
}

impl Upload {
    /// `body`, which may have as many bytes and take as long as `bounds` have it. `turn` is told whom it waits for.
    pub(super) fn new(body: Incoming, bounds: UploadBounds, turn: Turn) -> Self {
        // Most requests have no body, and nothing to share.
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

    /// No body, which is sent at once.
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

    /// It is sent on a stream that `stop` ends.
    pub(super) fn ended_by(&self, stop: Stop) {
        if let Some(sending) = &self.progress.0 {
            *sending.stop.lock().unwrap_or_else(PoisonError::into_inner) = Some(stop);
        }
    }

    /// It is to be sent as this part of a connection.
    pub(super) fn enter(&mut self, stream: Option<Arc<Stream>>) {
        self.stream = stream;
    }

    fn failed(&self, state: u8, error: BodyError) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.progress.set(state);
        Poll::Ready(Some(Err(error)))
    }
}

/// What nobody asks for any more is sent as far as it ever will be: the upstream's time to answer runs.
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
        // One of a connection that takes many requests is sent by a task that nobody else ends.
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
                // Where trailers are taken for headers, they would say who the client is.
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
