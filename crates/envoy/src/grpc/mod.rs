//! The gRPC listener: Envoy's rate limit and authorization services, health and reflection.
//!
//! The workers of [`tidegate_net`] serve the connections and call hyper directly, as in all other
//! listeners. tonic's server has its own threads and listeners, and is not used. Streaming calls
//! are handled by tonic's generated services. The module `unary` handles `Check` of `ext_authz` and
//! the calls of the rate limit services, which are made for every request.

mod authorization;
mod connection;
mod fields;
mod health;
mod kuadrant;
mod quota;
mod rate_limit;
mod routes;
mod timeout;
#[cfg(any(test, fuzzing))]
mod transcript;
mod unary;

use std::{io, net::TcpListener, sync::Arc};

use tidegate_config::{Headers, Identity};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Bounds, Listener, Server};

pub use self::connection::Http2;
use self::routes::GrpcRoutes;
#[cfg(any(test, fuzzing))]
pub use self::transcript::{QuotaStream, check_transcript, rate_limit_transcript};

use crate::{RateLimitService, proto, quota::Quotas};

/// The names of the service that Envoy calls for each request: the v3 name, and the former v2 name.
const RATE_LIMIT: &str = "envoy.service.ratelimit.v3.RateLimitService";
const RATE_LIMIT_V2: &str = "envoy.service.ratelimit.v2.RateLimitService";

/// The name of Kuadrant's service, which checks, reports and reserves.
const KUADRANT: &str = "kuadrant.service.ratelimit.v1.RateLimitService";

/// The name of the quota service, which assigns requests to Envoys in advance.
const QUOTA: &str = "envoy.service.rate_limit_quota.v3.RateLimitQuotaService";

/// The maximum message size in bytes, which is also the maximum body size on the HTTP listener. The
/// maximum is low, because a connection may send one message per concurrent call, and a quota
/// report takes 50 times its wire size in memory.
pub const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// The services behind the gRPC listener.
#[derive(Clone, Debug)]
pub struct GrpcContext {
    /// The server's limiter.
    pub limiter: Arc<ServerLimiter>,
    /// The quotas. Each quota is divided among the Envoys that enforce it. The list is empty if no
    /// rule defines a quota.
    pub quotas: Arc<Quotas>,
    /// The rate limit service. If the service is `None`, calls get the same responses as from a
    /// service whose configuration is not loaded.
    pub rate_limits: Option<Arc<RateLimitService>>,
    /// The settings of the authorization service. If the settings are `None`, calls to the service
    /// fail with UNIMPLEMENTED, so that the rules are not applied to calls on this listener.
    pub authorization: Option<AuthorizationContext>,
}

/// The settings of the authorization service.
#[derive(Clone, Debug)]
pub struct AuthorizationContext {
    /// The settings with which `Check` identifies clients.
    pub identity: Arc<Identity>,
    /// The rate limit headers that `Check` adds to responses.
    pub headers: Headers,
}

/// Serves gRPC calls on `socket` with the settings in `http2`.
///
/// # Errors
///
/// Returns the operating system error if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    context: GrpcContext,
    http2: Http2,
) -> io::Result<Listener> {
    let routes = Arc::new(GrpcRoutes::new(context, &server.shutdown_signal())?);
    let http2 = Arc::new(http2);
    server.listen(socket, bounds, move |stream, connection| {
        let (http2, routes) = (Arc::clone(&http2), Arc::clone(&routes));
        async move { http2.serve(stream, &connection, routes).await }
    })
}
