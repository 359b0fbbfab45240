//! A response body whose beginning this crate may already have read.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

/// A response body that still yields all of its frames, even if this crate has read its
/// beginning.
pub struct PeekedBody<B: Body> {
    /// The frames that have already been read.
    peeked: VecDeque<Result<Frame<Bytes>, B::Error>>,
    rest: Pin<Box<B>>,
}

impl<B: Body> fmt::Debug for PeekedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeekedBody").finish_non_exhaustive()
    }
}

// Unpinning is safe, because the frames that were read need no pinning, and the rest of the body is
// pinned on the heap.
impl<B: Body> Unpin for PeekedBody<B> {}

impl<B: Body<Data = Bytes>> PeekedBody<B> {
    pub(crate) fn new(body: B) -> Self {
        Self {
            peeked: VecDeque::new(),
            rest: Box::pin(body),
        }
    }

    /// Reads the beginning of the body: frames with at least `most` bytes in total, or the whole
    /// body if it is shorter than `most`.
    pub(crate) async fn peek(&mut self, most: usize) -> Bytes {
        let mut beginning = BytesMut::new();
        while beginning.len() < most {
            let Some(frame) = poll_fn(|cx| self.rest.as_mut().poll_frame(cx)).await else {
                break;
            };
            let failed = frame.is_err();
            if let Some(data) = frame.as_ref().ok().and_then(Frame::data_ref) {
                beginning.extend_from_slice(data);
            }
            self.peeked.push_back(frame);
            if failed {
                break;
            }
        }
        beginning.freeze()
    }
}

impl<B: Body<Data = Bytes>> Body for PeekedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(frame) = self.peeked.pop_front() {
            return Poll::Ready(Some(frame));
        }
        Poll::Ready(ready!(self.rest.as_mut().poll_frame(cx)))
    }

    fn is_end_stream(&self) -> bool {
        self.peeked.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let frames = self.peeked.iter().filter_map(|frame| frame.as_ref().ok());
        let known: usize = frames.filter_map(Frame::data_ref).map(Bytes::len).sum();
        super::replay::extend_hint(self.rest.size_hint(), known)
    }
}
