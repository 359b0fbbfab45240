//! Bodies on their way through: never held back, never gathered, and timed.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use http::header::CONTENT_LENGTH;
use http_body_util::Full;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};

use super::{
    forwarded::remove_claims, lease::Lease, place::Turn, refusal::Refusal, shared::Stream,
    silence::Silence,
};

/// Why a body was not passed on to its end.
#[derive(Debug)]
pub(super) enum BodyError {
    /// Nothing came for too long.
    Silent,
    /// It is longer than it may be.
    TooLarge,
    /// Its sender broke off.
    Broken(Box<dyn Error + Send + Sync>),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("the body did not arrive in time"),
            Self::TooLarge => f.write_str("the body is too large"),
            Self::Broken(error) => write!(f, "the body broke off: {error}"),
        }
    }
}

impl Error for BodyError {}

/// How an answer can end before its end, for metrics and logs.
pub(super) const BREAKS: [&str; 2] = ["broken_off", "idle_timeout"];

impl BodyError {
    /// Which of [`BREAKS`] it is.
    pub(super) const fn at(&self) -> usize {
        match self {
            Self::Broken(_) | Self::TooLarge => 0,
            Self::Silent => 1,
        }
    }
}

/// How far the body of a request has come, for who waits for the answer.
#[derive(Clone, Debug)]
pub(super) struct Progress(Option<Arc<Sending>>);

#[derive(Debug, Default)]
struct Sending {
    state: AtomicU8,
    /// Who waits for the answer, where the body is sent by another task.
    waits: AtomicWaker,
}

const SENDING: u8 = 0;
const SENT: u8 = 1;
const SILENT: u8 = 2;
const TOO_LARGE: u8 = 3;
const BROKEN: u8 = 4;

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

    /// What went wrong with the body, if something did.
    pub(super) fn failure(&self, most: u64) -> Option<Refusal> {
        match self.state() {
            SILENT => Some(Refusal::BodyTooSlow),
            TOO_LARGE => Some(Refusal::TooLarge(most)),
            BROKEN => Some(Refusal::BodyBroke),
            _ => None,
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

impl Upload {
    /// `body`, of which there may be `most` bytes, and never nothing for longer than `idle`. `turn` is told whom it waits for.
    pub(super) fn new(body: Incoming, most: u64, idle: Duration, turn: Turn) -> Self {
        // Most requests have no body, and nothing to share.
        let progress = (!body.is_end_stream()).then(Arc::default);
        Self {
            body: Some(body),
            silence: Silence::new(idle),
            left: most,
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
        let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) else {
            this.turn.is_clients();
            ready!(this.silence.poll_too_long(cx));
            return this.failed(SILENT, BodyError::Silent);
        };
        this.silence.broken();
        this.turn.is_upstreams();
        match frame {
            Some(Ok(mut frame)) => {
                // Where trailers are taken for headers, they would say who the client is.
                if let Some(trailers) = frame.trailers_mut() {
                    remove_claims(trailers);
                }
                let bytes = frame.data_ref().map_or(0, Bytes::len);
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

/// The body of an answer.
#[derive(Debug)]
pub(super) enum Body {
    /// The proxy's own words.
    Whole(Full<Bytes>),
    /// An upstream's, as they come.
    Passed(Download),
}

/// The body of an answer on its way from an upstream. When it is over, the connection goes back to the pool; when it is
/// dropped before, the connection goes with it.
#[derive(Debug)]
pub(super) struct Download {
    source: Source,
    silence: Silence,
    lease: Option<Lease>,
    is_over: bool,
    /// What is told when what came before is on its way to the client.
    broken: Option<BodyError>,
}

/// Where the body of an answer comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// The connection itself, which has nothing else to do.
    Link,
    /// A stream of HTTP/2.
    Stream(Incoming),
}

impl Download {
    /// The body from `source`, which comes on the connection of `lease`, and never nothing for longer than `idle`.
    pub(super) fn new(source: Source, lease: Lease, idle: Duration) -> Self {
        Self {
            source,
            silence: Silence::new(idle),
            lease: Some(lease),
            is_over: false,
            broken: None,
        }
    }

    fn poll_passed(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let frame = match (&mut self.source, &mut self.lease) {
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
        };
        let Poll::Ready(frame) = frame else {
            ready!(self.silence.poll_too_long(cx));
            return Poll::Ready(Some(Err(self.breaks(BodyError::Silent))));
        };
        self.silence.broken();
        self.is_over |= frame.is_none();
        match frame {
            // hyper forgets what it has not sent when it hears of an error. It sends while it waits.
            Some(Err(error)) => {
                self.broken = Some(self.breaks(error));
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Ok(mut frame)) => {
                // It would say how long a body is that has come, and may say otherwise.
                if let Some(trailers) = frame.trailers_mut() {
                    trailers.remove(CONTENT_LENGTH);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            None => Poll::Ready(None),
        }
    }

    /// Takes note that the answer ends by this `error`.
    fn breaks(&self, error: BodyError) -> BodyError {
        if let Some(lease) = &self.lease {
            let address = lease.load.address();
            tracing::debug!(address = %address.url, "an answer broke off: {error}");
            address.health.count_break(error.at());
        }
        error
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Stream(body) => body.is_end_stream(),
            Source::Link => self.left() == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Stream(body) => body.size_hint(),
            Source::Link => self.left().map(SizeHint::with_exact).unwrap_or_default(),
        }
    }

    fn left(&self) -> Option<u64> {
        self.lease.as_ref().and_then(|lease| lease.link.left())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // A body of a known length ends with its last octet, and is not asked for more.
        let is_over = self.is_over || self.is_end_stream();
        if let Some(lease) = self.lease.take()
            && is_over
        {
            lease.give_back();
        }
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
            Self::Whole(whole) => {
                let frame = ready!(Pin::new(whole).poll_frame(cx));
                Poll::Ready(frame.map(|frame| frame.map_err(|never| match never {})))
            }
            Self::Passed(passed) => passed.poll_passed(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(whole) => whole.is_end_stream(),
            Self::Passed(passed) => passed.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(whole) => whole.size_hint(),
            Self::Passed(passed) => passed.size_hint(),
        }
    }
}
