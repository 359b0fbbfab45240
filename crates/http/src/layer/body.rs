//! The body of an answer: the inner service's, as it is, or that of a denial.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

pin_project! {
    /// The body of an answer: the inner service's, as it is, or that of a denial.
    #[derive(Debug)]
    pub struct LimitedBody<B> {
        #[pin]
        content: Content<B>,
    }
}

pin_project! {
    #[project = ContentProjection]
    #[derive(Debug)]
    enum Content<B> {
        Inner { #[pin] body: B },
        Denial { rest: Bytes },
    }
}

impl<B> LimitedBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self {
            content: Content::Inner { body },
        }
    }

    pub(crate) fn denial(rest: Bytes) -> Self {
        Self {
            content: Content::Denial { rest },
        }
    }
}

impl<B: Body<Data = Bytes>> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().content.project() {
            ContentProjection::Inner { body } => body.poll_frame(context),
            ContentProjection::Denial { rest } => {
                let rest = std::mem::take(rest);
                Poll::Ready((!rest.is_empty()).then(|| Ok(Frame::data(rest))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Inner { body } => body.is_end_stream(),
            Content::Denial { rest } => rest.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Inner { body } => body.size_hint(),
            // What is in memory fits 64 bits.
            Content::Denial { rest } => SizeHint::with_exact(rest.len() as u64),
        }
    }
}
