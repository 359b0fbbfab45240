//! A request body that is stored while it is sent, so that it can be sent again.
//!
//! The body is not buffered before it is sent. On a retry, the stored frames are sent first, and
//! the rest of the body follows.

use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use crate::{error::BoxError, sync::lock};

/// A request body that may be sent more than once.
pub struct ReplayBody<B> {
    source: Arc<Mutex<ReplaySource<B>>>,
    /// The sequence number of this copy. All copies of a body share its source, and only the copy
    /// with the highest number may read from the source.
    number: u32,
    /// The number of buffered frames that this copy has sent.
    sent: usize,
}

/// The original body, and the frames that have been read from it.
struct ReplaySource<B> {
    rest: Pin<Box<B>>,
    ended: bool,
    /// The sequence number of the latest copy. Only the latest copy may read from the source.
    latest: u32,
    buffered: Vec<BufferedFrame>,
    /// The number of bytes for which the buffer still has room; `None` after the body has exceeded
    /// the limit or has failed.
    capacity_left: Option<usize>,
}

#[derive(Clone)]
enum BufferedFrame {
    Data(Bytes),
    Trailers(HeaderMap),
}

impl<B> fmt::Debug for ReplayBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody")
            .field("sent", &self.sent)
            .finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> ReplayBody<B> {
    /// Wraps `body`, and stores up to `most` bytes of its data.
    pub(crate) fn new(body: B, most: usize) -> Self {
        let known = body.size_hint().lower();
        let fits = usize::try_from(known).is_ok_and(|known| known <= most);
        let source = ReplaySource {
            ended: body.is_end_stream(),
            rest: Box::pin(body),
            latest: 0,
            buffered: Vec::new(),
            capacity_left: fits.then_some(most),
        };
        Self {
            source: Arc::new(Mutex::new(source)),
            number: 0,
            sent: 0,
        }
    }

    /// Returns whether the body can be sent again from its beginning.
    pub(crate) fn is_replayable(&self) -> bool {
        self.lock().capacity_left.is_some()
    }

    /// Returns a copy that starts at the beginning of the body. After this call, reading an earlier
    /// copy fails.
    pub(crate) fn restart(&self) -> Self {
        let mut source = self.lock();
        source.latest += 1;
        Self {
            source: Arc::clone(&self.source),
            number: source.latest,
            sent: 0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ReplaySource<B>> {
        lock(&self.source)
    }
}

impl<B> ReplaySource<B> {
    /// Buffers `frame`. If the buffer has no room for the frame, drops all buffered frames and
    /// never buffers again.
    fn buffer(&mut self, frame: &Frame<Bytes>) {
        let length = frame.data_ref().map_or(0, Bytes::len);
        self.capacity_left = self
            .capacity_left
            .and_then(|capacity_left| capacity_left.checked_sub(length));
        if self.capacity_left.is_none() {
            self.buffered = Vec::new();
        } else if let Some(data) = frame.data_ref() {
            self.buffered.push(BufferedFrame::Data(data.clone()));
        } else if let Some(trailers) = frame.trailers_ref() {
            self.buffered
                .push(BufferedFrame::Trailers(trailers.clone()));
        }
    }
}

impl<B> Body for ReplayBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let mut source = lock(&this.source);
        debug_assert!(this.number <= source.latest);
        if source.latest != this.number {
            return Poll::Ready(Some(Err(
                "the request was sent again, so this attempt's body ends".into(),
            )));
        }
        if let Some(frame) = source.buffered.get(this.sent) {
            this.sent += 1;
            return Poll::Ready(Some(Ok(frame.to_frame())));
        }
        if source.ended {
            return Poll::Ready(None);
        }
        match ready!(source.rest.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => {
                source.buffer(&frame);
                this.sent = source.buffered.len();
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                source.capacity_left = None;
                Poll::Ready(Some(Err(error.into())))
            }
            None => {
                source.ended = true;
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let source = self.lock();
        let all_sent = self.sent >= source.buffered.len();
        all_sent && (source.ended || source.rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let source = self.lock();
        let buffered = source
            .buffered
            .iter()
            .skip(self.sent)
            .map(BufferedFrame::len)
            .sum();
        let rest = if source.ended {
            SizeHint::with_exact(0)
        } else {
            source.rest.size_hint()
        };
        extend_hint(rest, buffered)
    }
}

impl BufferedFrame {
    fn to_frame(&self) -> Frame<Bytes> {
        match self.clone() {
            Self::Data(data) => Frame::data(data),
            Self::Trailers(trailers) => Frame::trailers(trailers),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Trailers(_) => 0,
        }
    }
}

/// Returns `hint` increased by `bytes` bytes.
pub(super) fn extend_hint(hint: SizeHint, bytes: usize) -> SizeHint {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    let mut sum = SizeHint::new();
    if let Some(upper) = hint.upper().and_then(|upper| upper.checked_add(bytes)) {
        sum.set_upper(upper);
    }
    let lower = hint.lower().saturating_add(bytes);
    sum.set_lower(lower.min(sum.upper().unwrap_or(u64::MAX)));
    sum
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{FutureExt as _, stream};
    use http_body_util::{BodyExt as _, Full, StreamBody};

    use super::*;

    fn streamed(parts: &[&'static str]) -> impl Body<Data = Bytes, Error = Infallible> + use<> {
        let trailers =
            HeaderMap::from_iter([(http::header::ETAG, http::HeaderValue::from_static("x"))]);
        let data = parts
            .iter()
            .map(|part| Frame::data(Bytes::from_static(part.as_bytes())));
        let frames: Vec<_> = data.chain([Frame::trailers(trailers)]).map(Ok).collect();
        StreamBody::new(stream::iter(frames))
    }

    fn all<B: Body<Data = Bytes>>(body: B) -> Option<(Bytes, bool)>
    where
        B::Error: fmt::Debug,
    {
        let collected = body.collect().now_or_never()?.ok()?;
        let trailers = collected.trailers().is_some();
        Some((collected.to_bytes(), trailers))
    }

    #[test]
    fn buffered_frames_are_sent_before_the_rest() {
        let mut first = ReplayBody::new(streamed(&["a", "bc", "def"]), 6);
        for part in ["a", "bc"] {
            let frame = first.frame().now_or_never().unwrap().unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), part);
        }
        let copy = first.restart();
        assert_eq!(all(copy), Some((Bytes::from_static(b"abcdef"), true)));
        assert!(all(first.restart()).is_some(), "as often as needed");
        assert!(all(first).is_none(), "an earlier copy fails");
    }

    #[test]
    fn a_long_body_is_sent_once() {
        let body = ReplayBody::new(streamed(&["abc", "def"]), 5);
        assert!(body.is_replayable());
        let first = ReplayBody {
            source: Arc::clone(&body.source),
            ..body
        };
        assert_eq!(all(first), Some((Bytes::from_static(b"abcdef"), true)));
        assert!(!body.is_replayable());
        assert!(!ReplayBody::new(Full::new(Bytes::from_static(b"abcdef")), 5).is_replayable());
    }

    #[test]
    fn the_size_hint_is_that_of_the_remaining_frames() {
        let mut body = ReplayBody::new(Full::new(Bytes::from_static(b"abc")), 5);
        assert_eq!(body.size_hint().exact(), Some(3));
        body.frame().now_or_never().unwrap().unwrap().unwrap();
        assert!(body.is_end_stream());
        assert_eq!(body.restart().size_hint().exact(), Some(3));
        assert!(ReplayBody::new(http_body_util::Empty::<Bytes>::new(), 0).is_end_stream());
    }
}
