//! The states of a request in the rate limit layer.
//!
//! ```text
//! Admitting ─▶ Waiting ─▶ Calling ─▶ the inner service's response, with headers
//!   │ └───────────────────▲
//!   └─▶ Denied ─▶ the denial
//! ```
//!
//! The future may be dropped in any state. In the states before Calling, the inner service has not
//! seen the request, so the charges of the request are refunded: see [`RequestReservation`].

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header::ACCEPT_ENCODING};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use super::{
    LimitedBody,
    action::{Action, Forward, RateLimitStatus},
    pending_action::PendingAction,
    reservation::RequestReservation,
};
use crate::headers;

pin_project! {
    /// The response future of a service behind a rate limiter.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: ResponseFutureState<S, B, S::Future>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum ResponseFutureState<S, B, F> {
        // The waiting request is boxed, because most requests do not wait. Without the box, the
        // future of every request would be larger.
        Admitting { action: PendingAction, pending: Option<Box<UnsentRequest<S, B>>> },
        Waiting {
            sleep: Pin<Box<Sleep>>,
            pending: Option<Box<UnsentRequest<S, B>>>,
            headers: HeaderMap,
            reservation: RequestReservation,
        },
        Calling { #[pin] response: F, headers: HeaderMap, reservation: RequestReservation },
        Denied { response: Option<Box<Response<Bytes>>> },
    }
}

/// A request that has not been forwarded yet, and the inner service, which is ready.
struct UnsentRequest<S, B> {
    service: S,
    request: Request<B>,
}

impl<S, B> UnsentRequest<S, B>
where
    S: Service<Request<B>> + Clone,
{
    /// Takes the ready service. Leaves a clone in its place. The clone must become ready before it
    /// can be called.
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

/// Prepares an admitted request for the inner service.
fn prepare<B>(
    request: &mut Request<B>,
    status: Option<RateLimitStatus>,
    reservation: &RequestReservation,
) {
    if let Some(status) = status {
        request.extensions_mut().insert(status);
    }
    if reservation.reads_usage() {
        // Usage cannot be read from a compressed response.
        let identity = HeaderValue::from_static("identity");
        request.headers_mut().insert(ACCEPT_ENCODING, identity);
    }
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>> + Clone,
{
    /// Creates the future of a request whose action is already known.
    pub(super) fn decided(action: Action, mut request: Request<B>, service: &mut S) -> Self {
        let state = match action {
            Action::Forward(Forward {
                status,
                delay: Duration::ZERO,
                headers,
                reservation,
            }) => {
                prepare(&mut request, status, &reservation);
                ResponseFutureState::calling(|| service.call(request), headers, reservation)
            }
            Action::Forward(forward) => {
                ResponseFutureState::after(forward, Box::new(UnsentRequest::new(request, service)))
            }
            Action::Respond(response) => ResponseFutureState::denied(response),
        };
        Self { state }
    }

    /// Creates the future of a request whose decision is pending.
    pub(super) fn admitting(action: PendingAction, request: Request<B>, service: &mut S) -> Self {
        let pending = Some(Box::new(UnsentRequest::new(request, service)));
        Self {
            state: ResponseFutureState::Admitting { action, pending },
        }
    }
}

impl<S, B> ResponseFutureState<S, B, S::Future>
where
    S: Service<Request<B>> + Clone,
{
    /// Returns the state after admission, which is `Calling`, or `Waiting` if the request is
    /// delayed.
    fn after(forward: Forward, mut pending: Box<UnsentRequest<S, B>>) -> Self {
        let Forward {
            status,
            delay,
            headers,
            reservation,
        } = forward;
        prepare(&mut pending.request, status, &reservation);
        if delay.is_zero() {
            return Self::calling(|| pending.call(), headers, reservation);
        }
        Self::Waiting {
            sleep: Box::pin(sleep(delay)),
            pending: Some(pending),
            headers,
            reservation,
        }
    }

    fn calling(
        call: impl FnOnce() -> S::Future,
        headers: HeaderMap,
        mut reservation: RequestReservation,
    ) -> Self {
        reservation.begin();
        Self::Calling {
            response: call(),
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
                StateProjection::Admitting { action, pending } => {
                    let action = ready!(action.poll(context));
                    let pending = pending.take().expect(ONCE);
                    match action {
                        Action::Forward(forward) => ResponseFutureState::after(forward, pending),
                        Action::Respond(response) => ResponseFutureState::denied(response),
                    }
                }
                StateProjection::Waiting {
                    sleep,
                    pending,
                    headers,
                    reservation,
                } => {
                    ready!(sleep.as_mut().poll(context));
                    let pending = pending.take().expect(ONCE);
                    ResponseFutureState::calling(
                        || pending.call(),
                        mem::take(headers),
                        mem::take(reservation),
                    )
                }
                StateProjection::Calling {
                    response,
                    headers,
                    reservation,
                } => {
                    let response = ready!(response.poll(context));
                    // If the inner service has failed, `?` returns early. The early return drops
                    // the reservation, which settles its charges.
                    let reservation = mem::take(reservation);
                    let mut response = response?;
                    let reservation = reservation.responded(&response);
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
            ResponseFutureState::Admitting { .. } => "ResponseFuture(admitting)",
            ResponseFutureState::Waiting { .. } => "ResponseFuture(waiting)",
            ResponseFutureState::Calling { .. } => "ResponseFuture(calling)",
            ResponseFutureState::Denied { .. } => "ResponseFuture(denied)",
        })
    }
}
