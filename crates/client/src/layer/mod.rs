//! The tower layers.

mod guard;
mod retry;

use http::{Request, header::HOST};

pub use guard::GuardService;
pub use retry::RetryService;

/// Returns the host and port of a request; empty if it has none.
pub(crate) fn host_of<B>(request: &Request<B>) -> String {
    let named = || request.headers().get(HOST)?.to_str().ok();
    let authority = request.uri().authority().map(http::uri::Authority::as_str);
    let host = authority.or_else(named).unwrap_or_default();
    // Drop user information, which must not end up in the key of a store.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    host.to_ascii_lowercase()
}
