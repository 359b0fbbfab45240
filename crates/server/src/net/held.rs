//! A response body that keeps a guard alive until it has been sent.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use hyper::body::{Body, Frame, SizeHint};

/// A body that drops its guard once it has been sent or the connection has failed.
pub(crate) struct Held<B, H> {
    body: B,
    _held: H,
}

impl<B, H> Held<B, H> {
    pub(crate) const fn new(body: B, held: H) -> Self {
        Self { body, _held: held }
    }
}

impl<B: Body + Unpin, H: Unpin> Body for Held<B, H> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
