//! A request body with a maximum size and a timeout.

use std::{
    error::Error,
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use hyper::body::{Body, Bytes, Frame, SizeHint};

use super::IdleTimeout;

/// A request body that returns an error if it exceeds a maximum size or does not arrive in time.
#[derive(Debug)]
pub struct BoundedBody<B> {
    body: B,
    /// The number of further bytes that the body may have.
    remaining: u64,
    idle_timeout: Option<IdleTimeout>,
}

/// The reason why a request body could not be read.
#[derive(Debug)]
pub enum BodyReadError<E> {
    /// The client did not send data in time.
    IdleTimeout,
    /// The body exceeds its maximum size.
    TooLarge,
    /// The body ended early.
    Aborted(E),
}

impl<E: fmt::Display> fmt::Display for BodyReadError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IdleTimeout => f.write_str("the body did not arrive in time"),
            Self::TooLarge => f.write_str("the body is too large"),
            Self::Aborted(error) => write!(f, "the body ended early: {error}"),
        }
    }
}

impl<E: Error + 'static> Error for BodyReadError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Aborted(error) => Some(error),
            Self::IdleTimeout | Self::TooLarge => None,
        }
    }
}

impl<B> BoundedBody<B> {
    /// Wraps `body` with a maximum of `max_bytes`, without an idle timeout. Use this function if
    /// another timeout limits the whole request.
    pub const fn new(body: B, max_bytes: u64) -> Self {
        Self {
            body,
            remaining: max_bytes,
            idle_timeout: None,
        }
    }

    /// Adds an idle timeout.
    #[must_use]
    pub fn with_idle_timeout(self, idle_timeout: IdleTimeout) -> Self {
        Self {
            idle_timeout: Some(idle_timeout),
            ..self
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> BoundedBody<B> {
    /// Reads the whole body, and discards trailers.
    ///
    /// # Errors
    ///
    /// The future returns an error if the body cannot be read. If the declared size exceeds the
    /// maximum, the future returns the error without reading anything.
    pub fn read(self) -> ReadBody<B> {
        ReadBody {
            body: self,
            first: Bytes::new(),
            whole: Vec::new(),
        }
    }
}

/// The future of [`BoundedBody::read`]. A future written as an async function would contain the
/// body twice, and is moved for each request.
#[derive(Debug)]
pub struct ReadBody<B> {
    body: BoundedBody<B>,
    /// The first piece.
    first: Bytes,
    /// All pieces, if there are several.
    whole: Vec<u8>,
}

impl<B: Body<Data = Bytes> + Unpin> Future for ReadBody<B> {
    type Output = Result<Bytes, BodyReadError<B::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { body, first, whole } = self.get_mut();
        if body.size_hint().lower() > body.remaining {
            return Poll::Ready(Err(BodyReadError::TooLarge));
        }
        while !body.is_end_stream() {
            let Some(frame) = ready!(Pin::new(&mut *body).poll_frame(cx)) else {
                break;
            };
            let Ok(piece) = frame?.into_data() else {
                continue;
            };
            // Nearly every body arrives in one piece, which needs no copy.
            if first.is_empty() {
                *first = piece;
            } else {
                if whole.is_empty() {
                    whole.extend_from_slice(first);
                }
                whole.extend_from_slice(&piece);
            }
        }
        Poll::Ready(Ok(match whole.is_empty() {
            true => mem::take(first),
            false => mem::take(whole).into(),
        }))
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for BoundedBody<B> {
    type Data = Bytes;
    type Error = BodyReadError<B::Error>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            let Some(idle_timeout) = &mut this.idle_timeout else {
                return Poll::Pending;
            };
            ready!(idle_timeout.poll_expired(cx));
            return Poll::Ready(Some(Err(BodyReadError::IdleTimeout)));
        };
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok());
        let bytes = data.and_then(Frame::data_ref).map_or(0, Bytes::len);
        if let Some(idle_timeout) = &mut this.idle_timeout {
            idle_timeout.record_bytes(bytes);
        }
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let Some(remaining) = this.remaining.checked_sub(bytes) else {
            return Poll::Ready(Some(Err(BodyReadError::TooLarge)));
        };
        this.remaining = remaining;
        Poll::Ready(frame.map(|frame| frame.map_err(BodyReadError::Aborted)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, time::Duration};

    use futures_util::{StreamExt as _, stream};
    use http_body_util::{Full, StreamBody};
    use tokio::time::Instant;

    use super::*;

    /// Returns a body of unknown size that consists of `pieces`.
    fn chunked(pieces: &[&'static str]) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames: Vec<_> = pieces
            .iter()
            .map(|piece| Ok(Frame::data(Bytes::from_static(piece.as_bytes()))))
            .collect();
        StreamBody::new(stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_is_read_up_to_its_maximum_size() {
        for pieces in [&[][..], &["abcd"], &["ab", "cd"], &["a", "", "b", "cd"]] {
            let read = BoundedBody::new(chunked(pieces), 4).read().await.unwrap();
            assert_eq!(read, pieces.concat());
        }
        for pieces in [&["abcde"][..], &["abcd", "e"]] {
            let read = BoundedBody::new(chunked(pieces), 4).read().await;
            assert!(matches!(read, Err(BodyReadError::TooLarge)), "{pieces:?}");
        }
    }

    #[tokio::test]
    async fn a_body_that_is_announced_as_too_large_is_not_read() {
        let mut polls = 0;
        let frames = stream::poll_fn(|_| {
            polls += 1;
            Poll::Ready(None::<Result<Frame<Bytes>, Infallible>>)
        });
        let announced = Announced(StreamBody::new(frames));
        let read = BoundedBody::new(announced, 4).read().await;
        assert!(matches!(read, Err(BodyReadError::TooLarge)));
        assert_eq!(polls, 0);
        let complete = Full::new(Bytes::from_static(b"abcd"));
        assert_eq!(BoundedBody::new(complete, 4).read().await.unwrap(), "abcd");
    }

    /// A body with a `Content-Length` of five bytes.
    struct Announced<B>(B);

    impl<B: Body + Unpin> Body for Announced<B> {
        type Data = B::Data;
        type Error = B::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
            Pin::new(&mut self.0).poll_frame(cx)
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(5)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_times_out() {
        let start = Instant::now();
        let first = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"ab")))]);
        let body = StreamBody::new(first.chain(stream::pending()));
        let body = BoundedBody::new(body, 4);
        let read = body
            .with_idle_timeout(IdleTimeout::new(Duration::from_secs(7)))
            .read()
            .await;
        assert!(matches!(read, Err(BodyReadError::IdleTimeout)));
        assert_eq!(start.elapsed().as_secs(), 7);
    }
}
