//! The body of a response, which comes from the inner service or from a denial.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::reservation::RequestReservation;

pin_project! {
    /// The body of a response, which comes from the inner service or from a denial.
    #[derive(Debug)]
    pub struct LimitedBody<B> {
        #[pin]
        content: BodyContent<B>,
        // The charges of the request. The charges are kept until the body has ended.
        reservation: RequestReservation,
    }
}

pin_project! {
    #[project = ContentProjection]
    #[derive(Debug)]
    enum BodyContent<B> {
        Inner { #[pin] body: B },
        Denial { rest: Bytes },
    }
}

impl<B> LimitedBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self {
            content: BodyContent::Inner { body },
            reservation: RequestReservation::default(),
        }
    }

    /// Wraps the inner service's body. The charges in `reservation` are settled when the body ends.
    pub(super) fn ending(body: B, reservation: RequestReservation) -> Self {
        Self {
            content: BodyContent::Inner { body },
            reservation,
        }
    }

    /// Creates the complete body of a denial.
    #[must_use]
    pub fn denial(rest: Bytes) -> Self {
        Self {
            content: BodyContent::Denial { rest },
            reservation: RequestReservation::default(),
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
        let this = self.project();
        match this.content.project() {
            ContentProjection::Inner { mut body } => {
                let frame = ready!(body.as_mut().poll_frame(context));
                note(this.reservation, frame.as_ref(), body.is_end_stream());
                Poll::Ready(frame)
            }
            ContentProjection::Denial { rest } => {
                let rest = std::mem::take(rest);
                Poll::Ready((!rest.is_empty()).then(|| Ok(Frame::data(rest))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            BodyContent::Inner { body } => body.is_end_stream(),
            BodyContent::Denial { rest } => rest.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            BodyContent::Inner { body } => body.size_hint(),
            // The length of a buffer in memory fits in 64 bits.
            BodyContent::Denial { rest } => SizeHint::with_exact(rest.len() as u64),
        }
    }
}

/// Updates the reservation after a frame. Settles the reservation after the last frame.
fn note<E>(
    reservation: &mut RequestReservation,
    frame: Option<&Result<Frame<Bytes>, E>>,
    is_end: bool,
) {
    let Some(response) = reservation.response() else {
        return;
    };
    let Some(Ok(frame)) = frame else {
        if frame.is_none() {
            response.end();
        }
        *reservation = RequestReservation::default();
        return;
    };
    if let Some(data) = frame.data_ref() {
        response.read(data);
    }
    if let Some(trailers) = frame.trailers_ref() {
        response.learn(trailers);
    }
    if is_end {
        response.end();
        *reservation = RequestReservation::default();
    }
}
