//! The tower service for a [`Guard`].

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use http::{Request, Response};
use tidegate_core::Cost;
use tower_layer::Layer;
use tower_service::Service;

use super::{call_when_ready, host_of};
use crate::{
    error::{BoxError, Error},
    guard::{Guard, GuardLayer, RequestInfo},
};

/// A service behind a guard. The service itself is always ready. After the guard has admitted a
/// request, the inner service is polled for readiness.
#[derive(Debug)]
pub struct GuardService<G, S> {
    layer: GuardLayer<G>,
    inner: S,
}

impl<G, S: Clone> Clone for GuardService<G, S> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            inner: self.inner.clone(),
        }
    }
}

impl<G: Guard, S> Layer<S> for GuardLayer<G> {
    type Service = GuardService<G, S>;

    fn layer(&self, inner: S) -> GuardService<G, S> {
        let layer = self.clone();
        GuardService { layer, inner }
    }
}

impl<G, S, B, R> Service<Request<B>> for GuardService<G, S>
where
    G: Guard,
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: Send + 'static,
    R: Send + 'static,
{
    type Response = Response<R>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (layer, mut inner) = (self.layer.clone(), self.inner.clone());
        Box::pin(async move {
            let host = host_of(&request);
            let cost = request.extensions().get().copied().unwrap_or(Cost::ONE);
            let response = call_when_ready(&mut inner, request);
            let info = RequestInfo { host: &host, cost };
            layer.send(info, response).await
        })
    }
}
