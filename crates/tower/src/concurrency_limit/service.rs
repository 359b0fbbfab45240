//! The service created by a concurrency limit layer.

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

use super::{ConcurrencyLimitLayer, limiter::ConcurrencyPermit};
use crate::{LimitedBody, overload_response};

/// A service behind an adaptive concurrency limit.
#[derive(Clone, Debug)]
pub struct ConcurrencyLimit<S> {
    inner: S,
    layer: ConcurrencyLimitLayer,
}

impl<S> ConcurrencyLimit<S> {
    pub(super) fn new(inner: S, layer: ConcurrencyLimitLayer) -> Self {
        Self { inner, layer }
    }
}

impl<S, B, R> Service<Request<B>> for ConcurrencyLimit<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = ConcurrencyLimitFuture<S::Future>;

    /// Polls only the inner service. A slot is acquired in `call`.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let share = self.layer.share((self.layer.class)(&parts));
        let Some(permit) = self.layer.limiter.try_acquire(share) else {
            return ConcurrencyLimitFuture {
                state: ConcurrencyLimitState::Shed {
                    response: Some(Box::new(overload_response(&parts))),
                },
            };
        };
        if let Some((entry, condition)) = &self.layer.headroom {
            let has_headroom = self.layer.limiter.has_headroom(*condition);
            let entries: Entries = parts.extensions.remove().unwrap_or_default();
            let entries = entries.with(entry, if has_headroom { "yes" } else { "no" });
            parts.extensions.insert(entries);
        }
        let response = self.inner.call(Request::from_parts(parts, body));
        ConcurrencyLimitFuture {
            state: ConcurrencyLimitState::Calling {
                response,
                permit: Some(permit),
            },
        }
    }
}

pin_project! {
    /// The response future of a service behind a concurrency limit. The slot is released when the
    /// future is dropped.
    pub struct ConcurrencyLimitFuture<F> {
        #[pin]
        state: ConcurrencyLimitState<F>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum ConcurrencyLimitState<F> {
        Calling { #[pin] response: F, permit: Option<ConcurrencyPermit> },
        Shed { response: Option<Box<Response<Bytes>>> },
    }
}

impl<F> fmt::Debug for ConcurrencyLimitFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyLimitFuture")
            .finish_non_exhaustive()
    }
}

/// # Panics
///
/// Panics if polled after completion.
impl<F, R, E> Future for ConcurrencyLimitFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Body<Data = Bytes>,
{
    type Output = Result<Response<LimitedBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjection::Calling { response, permit } => {
                let answer = ready!(response.poll(context));
                if let Some(permit) = permit.take() {
                    match &answer {
                        Ok(answer) => permit.finish(answer),
                        Err(_) => permit.fail(),
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
