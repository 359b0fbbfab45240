//! The reverse proxy: applies rate limits to requests, and forwards the permitted requests to
//! upstreams.
//!
//! The proxy runs hyper on the workers of [`tidegate_net`], as the other listeners do. Each client
//! connection stays on one thread, together with its requests and its upstream connections. Every
//! buffer between client and upstream is bounded in bytes, and every wait is bounded in time.
//!
//! A request passes these layers, from the outermost to the innermost:
//!
//! ```text
//! downstream    client connections: HTTP/1.1, HTTP/2, TLS, timeouts
//! access_log    one line per request, if the access log is enabled
//! admission     normalises the head, sheds load for upstreams at their concurrency limit
//! body_cost     reads the body of a request whose cost depends on it
//! rate_limit    the rate limiting layer of `tidegate-tower`: a denied request reaches no upstream
//! handler       picks the upstream, sends the request, returns the response
//! upstream      balancing, retries, connection pools, HTTP clients, health
//! ```

mod access_log;
mod admission;
mod bad_request;
mod body_cost;
mod body_error;
mod client_limit;
mod concurrency;
mod downstream;
mod error;
mod handler;
mod headers;
mod inspected_bytes;
mod json_numbers;
mod metrics;
mod normalise;
mod permit;
mod rate_limit;
mod request_body;
mod response_body;
mod runtime;
mod stream_slots;
mod tunnel;
mod upstream;
mod write_stall;

use std::{io, net::TcpListener, sync::Arc};

use tidegate_config::{Headers, Identity, Proxy};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Bounds, Connection, Listener, Server, Tls};
use tidegate_tower::RateLimitLayer;
use tokio::net::TcpStream;
use tower_layer::Layer as _;

#[cfg(any(test, fuzzing))]
pub use self::upstream::h1::{ParsedResponse, ScriptedConnection};
pub use self::{
    access_log::AccessLog,
    runtime::ProxyRuntime,
    upstream::{
        config::RuntimeConfig,
        tls::{TrustAnchorError, check_trust_anchors},
    },
};
use self::{
    access_log::{AccessLogService, LogContext},
    admission::{AdmissionContext, AdmissionService},
    body_cost::{BodyCostContext, BodyCostService},
    client_limit::ClientRegistry,
    downstream::ClientConnection,
    handler::{HandlerContext, ProxyHandler},
    headers::forwarded::{ClientSide, ForwardingHeaders},
    rate_limit::ProxyLimiter,
    tunnel::PendingTunnel,
};

/// The server components that the proxy needs.
#[derive(Clone, Debug)]
pub struct Dependencies {
    /// The limiter, which decides whether a request is forwarded.
    pub limiter: Arc<ServerLimiter>,
    /// The settings for the rate limit headers of responses.
    pub headers: Headers,
    /// The proxy's settings and upstreams, which a reload can replace.
    pub runtime: Arc<ProxyRuntime>,
    /// How clients are identified, including the trusted proxies in front of this proxy.
    pub identity: Arc<Identity>,
    /// The server certificate. Without a certificate, clients connect in plaintext.
    pub tls: Option<Arc<Tls>>,
}

/// Serves the reverse proxy on `socket`.
///
/// # Errors
///
/// Returns the operating system's error if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    dependencies: Dependencies,
) -> io::Result<Listener> {
    let settings = Arc::clone(&dependencies.runtime.current().settings);
    let fitted = settings.fitted_connections;
    let bounds = Bounds {
        connections: fitted.unwrap_or(settings.max_connections),
        connections_per_client: settings.max_connections_per_client,
        write: settings.timeouts.idle,
        ..Bounds::default()
    };
    let writer = dependencies.headers.writer();
    let layer = rate_limit::layer(&dependencies.limiter, &dependencies.identity, writer)
        .error_format(settings.error_format);
    let clients = Arc::<ClientRegistry>::default();
    let exempt = dependencies.identity.exempt();
    server.listen_exempting(socket, bounds, exempt, move |stream, connection| {
        let context = ConnectionContext {
            dependencies: dependencies.clone(),
            layer: layer.clone().connection_from(connection.peer.ip()),
            clients: Arc::clone(&clients),
            connection,
        };
        context.serve(stream)
    })
}

/// The context for building the services of one client connection.
struct ConnectionContext {
    dependencies: Dependencies,
    layer: RateLimitLayer<ProxyLimiter>,
    clients: Arc<ClientRegistry>,
    connection: Connection,
}

impl ConnectionContext {
    async fn serve(self, stream: TcpStream) {
        let Dependencies {
            limiter,
            runtime,
            identity,
            tls,
            ..
        } = self.dependencies;
        let peer = self.connection.peer.ip();
        let settings = Arc::clone(&runtime.current().settings);
        let log = runtime.log().cloned();
        let has_tls = tls.is_some() || self.connection.handover.relayed.is_some();
        let scheme = if has_tls { "https" } else { "http" };
        let is_trusted = identity.trust.is_trusted(peer);
        let forwarding = forwarding_of(&settings, ClientSide::new(peer, scheme, is_trusted));
        // Do not limit a trusted proxy, because it forwards requests from many clients, and must
        // limit each client itself.
        let in_flight = (!is_trusted).then(|| {
            let client = identity.trust.counted(peer.to_canonical());
            self.clients.counter(client)
        });
        let pending_tunnel = PendingTunnel::default();
        let handler = ProxyHandler::new(HandlerContext {
            runtime: Arc::clone(&runtime),
            forwarding: Arc::clone(&forwarding),
            in_flight: in_flight.clone(),
            worker: self.connection.worker,
            pending_tunnel: pending_tunnel.clone(),
            logs_upstream: log.is_some(),
        });
        let client = ClientConnection {
            connection: self.connection,
            settings,
            tls,
            pending_tunnel,
            bad_requests: Arc::clone(runtime.bad_requests()),
            in_flight,
        };
        let limited = BodyCostService::new(
            self.layer.layer(handler),
            BodyCostContext {
                runtime: Arc::clone(&runtime),
                layer: self.layer.clone(),
            },
        );
        let service = AdmissionService::new(
            limited,
            AdmissionContext {
                runtime,
                forwarding,
                limiter: Arc::clone(&limiter),
                layer: self.layer,
            },
        );
        let Some(log) = log else {
            return client.serve(stream, service).await;
        };
        let log_context = LogContext {
            log,
            limiter,
            identity,
            peer,
        };
        client
            .serve(stream, AccessLogService::new(service, log_context))
            .await;
    }
}

/// Returns the forwarding headers that describe `client` to upstreams.
fn forwarding_of(settings: &Proxy, client: ClientSide) -> Arc<ForwardingHeaders> {
    let via = settings.heads.via.clone();
    Arc::new(ForwardingHeaders::new(settings.forwarded, via, client))
}
