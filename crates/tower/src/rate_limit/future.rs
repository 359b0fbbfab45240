//! The states of one request in the layer.
//!
//! ```text
//! Asking ─▶ Waiting ─▶ Calling ─▶ the inner service's response, with headers
//!   │ └───────────────────▲
//!   └─▶ Denied ─▶ the denial
//! ```
//!
//! The future may be dropped in any state. Before Calling, the inner service has not seen the
//! request, and its charges are refunded; see [`Reservation`].

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use super::{
    LimitedBody,
    action::{Pass, Passed, Ruling},
    admit::Asking,
    reservation::Reservation,
};
use crate::headers;

pin_project! {
    /// The response future of a service behind a rate limiter.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B, S::Future>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, B, F> {
        // The waiting request is boxed: most requests do not wait, and the space would make all of
        // them larger to move.
        Asking { asking: Asking, held: Option<Box<Held<S, B>>> },
        Waiting {
            sleep: Pin<Box<Sleep>>,
            held: Option<Box<Held<S, B>>>,
            headers: HeaderMap,
            reservation: Reservation,
        },
        Calling { #[pin] answered: F, headers: HeaderMap, reservation: Reservation },
        Denied { response: Option<Box<Response<Bytes>>> },
    }
}

/// A request that has not reached the service yet, with the service, which is ready for it.
struct Held<S, B> {
    service: S,
    request: Request<B>,
}

impl<S, B> Held<S, B>
where
    S: Service<Request<B>> + Clone,
{
    /// Takes the ready service and leaves a clone, which must become ready again.
    fn new(request: Request<B>, service: &mut S) -> Self {
        let unready = service.clone();
        Self {
            service: mem::replace(service, unready),
            request,
        }
    }

    fn call(mut self) -> S::Future {
        self.service.call(self.request)
    }
}

fn tell<B>(request: &mut Request<B>, passed: Option<Passed>) {
    if let Some(passed) = passed {
        request.extensions_mut().insert(passed);
    }
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>> + Clone,
{
    /// Creates the future of a request whose ruling is already known.
    pub(super) fn ruled(ruling: Ruling, mut request: Request<B>, service: &mut S) -> Self {
        let state = match ruling {
            Ruling::Pass(Pass {
                passed,
                delay: Duration::ZERO,
                headers,
                reservation,
            }) => {
                tell(&mut request, passed);
                State::calling(|| service.call(request), headers, reservation)
            }
            Ruling::Pass(pass) => State::after(pass, Box::new(Held::new(request, service))),
            Ruling::Deny(response) => State::denied(response),
        };
        Self { state }
    }

    /// Creates the future of a request that waits for a remote store.
    pub(super) fn asking(asking: Asking, request: Request<B>, service: &mut S) -> Self {
        let held = Some(Box::new(Held::new(request, service)));
        Self {
            state: State::Asking { asking, held },
        }
    }
}

impl<S, B> State<S, B, S::Future>
where
    S: Service<Request<B>> + Clone,
{
    /// Returns the state after admission: calling the service, or waiting first.
    fn after(pass: Pass, mut held: Box<Held<S, B>>) -> Self {
        let Pass {
            passed,
            delay,
            headers,
            reservation,
        } = pass;
        tell(&mut held.request, passed);
        if delay.is_zero() {
            return Self::calling(|| held.call(), headers, reservation);
        }
        Self::Waiting {
            sleep: Box::pin(sleep(delay)),
            held: Some(held),
            headers,
            reservation,
        }
    }

    fn calling(
        call: impl FnOnce() -> S::Future,
        headers: HeaderMap,
        mut reservation: Reservation,
    ) -> Self {
        reservation.begin();
        Self::Calling {
            answered: call(),
            headers,
            reservation,
        }
    }

    fn denied(response: Box<Response<Bytes>>) -> Self {
        let response = Some(response);
        Self::Denied { response }
    }
}

/// # Panics
///
/// Panics if polled after completion.
impl<S, B, R> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    R: Body<Data = Bytes>,
{
    type Output = Result<Response<LimitedBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        const ONCE: &str = "the future was polled after completion";
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Asking { asking, held } => {
                    let ruling = ready!(asking.poll(context));
                    let held = held.take().expect(ONCE);
                    match ruling {
                        Ruling::Pass(pass) => State::after(pass, held),
                        Ruling::Deny(response) => State::denied(response),
                    }
                }
                StateProjection::Waiting {
                    sleep,
                    held,
                    headers,
                    reservation,
                } => {
                    ready!(sleep.as_mut().poll(context));
                    let held = held.take().expect(ONCE);
                    State::calling(|| held.call(), mem::take(headers), mem::take(reservation))
                }
                StateProjection::Calling {
                    answered,
                    headers,
                    reservation,
                } => {
                    let answered = ready!(answered.poll(context));
                    // On an error of the inner service, the reservation is dropped and settled
                    // here.
                    let reservation = mem::take(reservation);
                    let mut response = answered?;
                    let reservation = reservation.answered(&response);
                    headers::merge(mem::take(headers), response.headers_mut());
                    let body = |body| LimitedBody::ending(body, reservation);
                    return Poll::Ready(Ok(response.map(body)));
                }
                StateProjection::Denied { response } => {
                    let response = response.take().expect(ONCE);
                    return Poll::Ready(Ok(response.map(LimitedBody::denial)));
                }
            };
            state.set(next);
        }
    }
}

impl<S: Service<Request<B>>, B> fmt::Debug for ResponseFuture<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::Asking { .. } => "ResponseFuture(asking)",
            State::Waiting { .. } => "ResponseFuture(waiting)",
            State::Calling { .. } => "ResponseFuture(calling)",
            State::Denied { .. } => "ResponseFuture(denied)",
        })
    }
}
