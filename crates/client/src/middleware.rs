//! Middleware for reqwest: [`RetryLayer`] and [`GuardLayer`] implement
//! `reqwest_middleware::Middleware`.
//!
//! reqwest has no hook that wraps a whole request. The crate `reqwest-middleware` adds a hook for a
//! whole request. `reqwest-middleware` is small and widely used, and keeps up with the releases of
//! reqwest.

use std::error::Error as StdError;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Extensions, HeaderMap, StatusCode};
use reqwest::{Body, Request, Response, ResponseBuilderExt as _};
use reqwest_middleware::{Middleware, Next, Result};
use tidegate_core::Cost;

use crate::{
    body::PeekedBody,
    error::{BoxError, Error},
    guard::{Guard, GuardLayer, RequestInfo},
    response_head::ResponseHead,
    retry::{
        AttemptResponse, Idempotency, NeverSentTest, RequestSender, RetryLayer, RetryReport,
        refusal, run,
    },
};

#[async_trait]
impl Middleware for RetryLayer {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        let host = host_of(&request);
        let idempotency = Idempotency::of_request(request.method(), request.headers());
        let sender = MiddlewareSender {
            replayable: request.try_clone().is_some(),
            request: Some(request),
            extensions,
            next,
        };
        let response = run(self.state(), &host, idempotency, sender).await;
        response.map_err(wrap_error)
    }
}

#[async_trait]
impl<G: Guard> Middleware for GuardLayer<G> {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        let host = host_of(&request);
        let cost = extensions.get().copied().unwrap_or(Cost::ONE);
        let response = async { next.run(request, extensions).await.map_err(unwrap_error) };
        let info = RequestInfo { host: &host, cost };
        self.send(info, response).await.map_err(wrap_error)
    }
}

/// A request, and the rest of the middleware chain, which sends it.
struct MiddlewareSender<'a> {
    request: Option<Request>,
    replayable: bool,
    extensions: &'a mut Extensions,
    next: Next<'a>,
}

impl RequestSender for MiddlewareSender<'_> {
    type Response = Response;

    async fn send(&mut self) -> std::result::Result<Response, BoxError> {
        let copy = self.request.as_ref().and_then(Request::try_clone);
        // If a request cannot be copied, the original is sent, and it cannot be sent again.
        let request = copy.or_else(|| self.request.take());
        let request = request
            .ok_or("the request body is a stream, so the request cannot be sent a second time")?;
        let next = self.next.clone();
        next.run(request, self.extensions)
            .await
            .map_err(unwrap_error)
    }

    fn is_replayable(&self) -> bool {
        self.replayable
    }

    /// By default, no error means that nothing was sent: reqwest follows redirects, so only the
    /// application knows whether the first server or the target of a redirect refused the
    /// connection.
    fn was_never_sent(
        &self,
        error: &(dyn StdError + 'static),
        test: Option<NeverSentTest>,
    ) -> bool {
        test.is_some_and(|test| test(error))
    }
}

impl ResponseHead for Response {
    fn status(&self) -> StatusCode {
        self.status()
    }

    fn headers(&self) -> &HeaderMap {
        self.headers()
    }
}

impl AttemptResponse for Response {
    async fn peek_body(self) -> (Self, Bytes) {
        let url = self.url().clone();
        let (head, body) = http::Response::<Body>::from(self).into_parts();
        let mut body = PeekedBody::new(body);
        let beginning = body.peek(refusal::MAX_BYTES).await;
        let mut whole = http::Response::new(Body::wrap(body));
        // reqwest stores the URL of a response in a private type. Only reqwest's own builder
        // extension can set this type.
        if let Ok(located) = http::Response::builder().url(url).body(()) {
            *whole.extensions_mut() = located.into_parts().0.extensions;
        }
        *whole.status_mut() = head.status;
        *whole.version_mut() = head.version;
        *whole.headers_mut() = head.headers;
        whole.extensions_mut().extend(head.extensions);
        (whole.into(), beginning)
    }

    fn add_report(&mut self, report: RetryReport) {
        self.extensions_mut().insert(report);
    }
}

/// Unwraps errors of this crate and of reqwest, so that later code can recognise these errors.
fn unwrap_error(error: reqwest_middleware::Error) -> BoxError {
    match error {
        reqwest_middleware::Error::Reqwest(error) => error.into(),
        reqwest_middleware::Error::Middleware(error) => match error.downcast::<Error>() {
            Ok(own) => own.into(),
            Err(other) => other.into(),
        },
    }
}

/// Returns errors of reqwest unchanged. Wraps errors of this crate as middleware errors, so that
/// callers can recover them with `downcast_ref`.
fn wrap_error(error: Error) -> reqwest_middleware::Error {
    match error {
        Error::Inner(source) => match source.downcast::<reqwest::Error>() {
            Ok(error) => (*error).into(),
            Err(other) => reqwest_middleware::Error::middleware(Error::Inner(other)),
        },
        own => reqwest_middleware::Error::middleware(own),
    }
}

fn host_of(request: &Request) -> String {
    let url = request.url();
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}
