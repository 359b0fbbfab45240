//! The service that the shed layer creates.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tidegate_identity::Entries;
use tower_service::Service;

use super::{ShedLayer, limiter::Held};
use crate::{LimitedBody, overloaded};

/// A service behind an adaptive concurrency limit.
#[derive(Clone, Debug)]
pub struct Shedding<S> {
    inner: S,
    layer: ShedLayer,
}

impl<S> Shedding<S> {
    pub(super) fn new(inner: S, layer: ShedLayer) -> Self {
        Self { inner, layer }
    }
}

impl<S, B, R> Service<Request<B>> for Shedding<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = ShedFuture<S::Future>;

    /// Takes no slot; `call` does.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let share = self.layer.share((self.layer.class)(&parts));
        let Some(place) = self.layer.gauge.enter(share) else {
            return ShedFuture {
                state: State::Shed {
                    response: Some(Box::new(overloaded(&parts))),
                },
            };
        };
        if let Some((entry, room)) = &self.layer.room {
            let has_room = self.layer.gauge.has(*room);
            let known: Entries = parts.extensions.remove().unwrap_or_default();
            let told = known.with(entry, if has_room { "yes" } else { "no" });
            parts.extensions.insert(told);
        }
        let answered = self.inner.call(Request::from_parts(parts, body));
        ShedFuture {
            state: State::Calling {
                answered,
                place: Some(place),
            },
        }
    }
}

pin_project! {
    /// The response future of a service behind a concurrency limit. Dropping it releases the slot.
    pub struct ShedFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<F> {
        Calling { #[pin] answered: F, place: Option<Held> },
        Shed { response: Option<Box<Response<Bytes>>> },
    }
}

impl<F> fmt::Debug for ShedFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShedFuture").finish_non_exhaustive()
    }
}

/// # Panics
///
/// Panics if polled after completion.
impl<F, R, E> Future for ShedFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Body<Data = Bytes>,
{
    type Output = Result<Response<LimitedBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjection::Calling { answered, place } => {
                let answer = ready!(answered.poll(context));
                if let Some(place) = place.take() {
                    match &answer {
                        Ok(answer) => place.answered(answer),
                        Err(_) => place.failed(),
                    }
                }
                Poll::Ready(answer.map(|answer| answer.map(LimitedBody::inner)))
            }
            StateProjection::Shed { response } => {
                let response = response.take();
                let response = response.expect("the future was polled after completion");
                Poll::Ready(Ok(response.map(LimitedBody::denial)))
            }
        }
    }
}
