//! The tower layers.

mod guard;
mod retry;

use std::future::poll_fn;

use http::{Request, header::HOST};
use tower_service::Service;

use crate::error::BoxError;

pub use guard::GuardService;
pub use retry::RetryService;

/// Returns the host and port of a request. The result is empty if the request has no host.
pub(crate) fn host_of<B>(request: &Request<B>) -> String {
    let named = || request.headers().get(HOST)?.to_str().ok();
    let authority = request.uri().authority().map(http::uri::Authority::as_str);
    let host = authority.or_else(named).unwrap_or_default();
    // Drop the user information, which must not become part of a key in a store.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    host.to_ascii_lowercase()
}

/// Waits until `service` is ready, and then calls `service`.
async fn call_when_ready<S, R>(service: &mut S, request: R) -> Result<S::Response, BoxError>
where
    S: Service<R>,
    S::Error: Into<BoxError>,
{
    let ready = poll_fn(|cx| service.poll_ready(cx)).await;
    ready.map_err(Into::into)?;
    service.call(request).await.map_err(Into::into)
}
