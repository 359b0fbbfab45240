//! The gRPC door: Envoy's rate limit services, health and reflection.
//!
//! Connections live on the workers of [`crate::net`] like those of every other door, so HTTP/2 is served by hyper
//! itself, a connection at a time, and not by tonic's server, which has threads and listeners of its own. What tonic
//! generates answers the calls that stream.

mod connection;
mod health;
mod proto;
mod quota;
mod routes;
mod stream;
mod timeout;
mod tls;

use std::{io, net::TcpListener, sync::Arc};

use self::routes::Routes;
pub use self::{
    connection::Http2,
    tls::{Tls, TlsError},
};
use crate::{
    limiter::Limiter,
    net::{Bounds, Listener, Server},
};

/// The service whose quotas are assigned ahead of the requests.
const QUOTA: &str = "envoy.service.rate_limit_quota.v3.RateLimitQuotaService";

/// The largest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Answers Envoy on `socket`, in the way of `http2`.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    limiter: &Arc<Limiter>,
    http2: Http2,
) -> io::Result<Listener> {
    let routes = Arc::new(Routes::new(limiter, &server.shutdown_signal())?);
    let http2 = Arc::new(http2);
    server.listen(socket, bounds, move |stream, connection| {
        let (http2, routes) = (Arc::clone(&http2), Arc::clone(&routes));
        async move { http2.serve(stream, &connection, routes).await }
    })
}
