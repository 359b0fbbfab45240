//! The tower service for a [`RetryLayer`].

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{call_when_ready, host_of};
use crate::{
    body::{PeekedBody, ReplayBody},
    error::{BoxError, Error},
    retry::{AttemptResponse, Idempotency, RequestSender, RetryLayer, RetryReport, refusal, run},
};

/// A service whose requests are [retried](RetryLayer). The service itself is always ready. Before
/// each try, the inner service is polled for readiness.
#[derive(Clone, Debug)]
pub struct RetryService<S> {
    retry: RetryLayer,
    inner: S,
}

impl<S> Layer<S> for RetryLayer {
    type Service = RetryService<S>;

    fn layer(&self, inner: S) -> RetryService<S> {
        let retry = self.clone();
        RetryService { retry, inner }
    }
}

impl<S, B, R> Service<Request<B>> for RetryService<S>
where
    S: Service<Request<ReplayBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    type Response = Response<PeekedBody<R>>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let host = host_of(&request);
        let idempotency = Idempotency::of_request(request.method(), request.headers());
        let (head, body) = request.into_parts();
        let most = self.retry.state().policy.max_replay_bytes;
        let sender = ServiceSender {
            service: self.inner.clone(),
            head,
            body: ReplayBody::new(body, most),
        };
        let retry = self.retry.clone();
        Box::pin(async move { run(retry.state(), &host, idempotency, sender).await })
    }
}

/// A request, and the inner service that sends the request once or several times.
struct ServiceSender<S, B> {
    service: S,
    head: Parts,
    body: ReplayBody<B>,
}

impl<S, B, R> RequestSender for ServiceSender<S, B>
where
    S: Service<Request<ReplayBody<B>>, Response = Response<R>> + Send,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: Body<Data = Bytes> + Send,
    R: Body<Data = Bytes> + Send,
    R::Error: Send,
{
    type Response = Response<PeekedBody<R>>;

    async fn send(&mut self) -> Result<Self::Response, BoxError> {
        let request = Request::from_parts(self.head.clone(), self.body.restart());
        let response = call_when_ready(&mut self.service, request).await?;
        Ok(response.map(PeekedBody::new))
    }

    fn is_replayable(&self) -> bool {
        self.body.is_replayable()
    }
}

impl<R> AttemptResponse for Response<PeekedBody<R>>
where
    R: Body<Data = Bytes> + Send,
    R::Error: Send,
{
    async fn peek_body(mut self) -> (Self, Bytes) {
        let beginning = self.body_mut().peek(refusal::MAX_BYTES).await;
        (self, beginning)
    }

    fn add_report(&mut self, report: RetryReport) {
        self.extensions_mut().insert(report);
    }
}
