//! The gRPC door: Envoy's rate limit services, health and reflection.
//!
//! Connections live on the workers of [`crate::net`] like those of every other door, so HTTP/2 is served by hyper
//! itself, a connection at a time, and not by tonic's server, which has threads and listeners of its own. What tonic
//! generates answers the calls that stream, and `unary` the one that every request makes.

mod connection;
mod fields;
mod health;
mod proto;
mod quota;
mod rate_limit;
mod routes;
mod timeout;
mod transcript;
mod unary;

use std::{io, net::TcpListener, sync::Arc};

use self::routes::Routes;
pub use self::{
    connection::Http2,
    transcript::{QuotaStream, rate_limit_transcript},
};
use crate::{
    envoy::RateLimitService,
    limiter::Limiter,
    net::{Bounds, Listener, Server},
};

/// The service that is asked for every request, and what it was called before.
const RATE_LIMIT: &str = "envoy.service.ratelimit.v3.RateLimitService";
const RATE_LIMIT_V2: &str = "envoy.service.ratelimit.v2.RateLimitService";

/// The service whose quotas are assigned ahead of the requests.
const QUOTA: &str = "envoy.service.rate_limit_quota.v3.RateLimitQuotaService";

/// The largest message, in bytes: as large as a body of the HTTP door. A connection may send as many at once as it may
/// have calls, and a report of quotas takes fifty times its size in memory.
pub const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// What is served.
#[derive(Clone, Debug)]
pub struct Served {
    /// Whose quotas are assigned.
    pub limiter: Arc<Limiter>,
    /// What decides about requests; `None` answers them as the service does that has no configuration.
    pub rate_limits: Option<Arc<RateLimitService>>,
}

/// Answers Envoy on `socket`, in the way of `http2`.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    served: Served,
    http2: Http2,
) -> io::Result<Listener> {
    let routes = Arc::new(Routes::new(served, &server.shutdown_signal())?);
    let http2 = Arc::new(http2);
    server.listen(socket, bounds, move |stream, connection| {
        let (http2, routes) = (Arc::clone(&http2), Arc::clone(&routes));
        async move { http2.serve(stream, &connection, routes).await }
    })
}
