//! The pieces as tower layers.

mod guard;
mod retry;

use http::{Request, header::HOST};

pub use guard::GuardedService;
pub use retry::RetryService;

/// Whom a request is for; empty if it does not say.
pub(crate) fn host_of<B>(request: &Request<B>) -> String {
    let named = || request.headers().get(HOST)?.to_str().ok();
    let authority = request.uri().authority().map(http::uri::Authority::as_str);
    let host = authority.or_else(named).unwrap_or_default();
    // Who asks is nobody's business, least of all that of a key in a store.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    host.to_ascii_lowercase()
}
