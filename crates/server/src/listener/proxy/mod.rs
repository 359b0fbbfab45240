//! The reverse proxy: rate-limits requests and forwards the rest to upstreams.
//!
//! Like the other listeners, it runs hyper on the workers of [`crate::net`]. A client connection,
//! its requests and its upstream connections live on one thread; nothing moves between threads.
//! Every buffer between client and upstream is bounded in bytes, and every wait is bounded in time.
//!
//! A request passes these layers, outermost first:
//!
//! ```text
//! connection    downstream: HTTP/1.1, HTTP/2, TLS, timeouts
//! access_log    one line per request, if the access log is enabled
//! triage        admission control: normalises the head, sheds load for upstreams at their limit
//! gate          the rate limiting layer of `tidegate-http`: a denied request reaches no upstream
//! forward       picks the upstream, sends the request, returns the response
//! ```

mod access_log;
mod address;
mod authorities;
mod body;
mod capacity;
mod client_stream;
mod clients;
mod connect;
mod connection;
mod download;
mod exchange;
mod forward;
mod forwarded;
mod gate;
mod health;
mod hop;
mod lease;
mod lines;
mod link;
mod live;
mod normalise;
mod passing;
mod place;
mod refusal;
mod rejected;
mod shared;
mod silence;
mod taken;
mod tally;
mod target;
mod triage;
mod trouble;
mod tunnel;
mod upstreams;

use std::{io, net::TcpListener, sync::Arc};

pub(crate) use self::authorities::connector;
use self::upstreams::Upstreams;
pub use self::{
    access_log::AccessLog,
    authorities::AuthoritiesError,
    exchange::{Heard, UpstreamTalk},
    live::{Current, Live},
};
use tower_layer::Layer as _;

use self::{
    access_log::{Logged, Logging},
    clients::Clients,
    connection::Client,
    forward::{Forwarder, Way},
    forwarded::{ClientSide, Forwarding},
    triage::{Bearings, Triage},
    tunnel::Planned,
};
use super::http::header_writer;
use crate::{
    config::{Headers, Identity, Proxy},
    limiter::Limiter,
    net::{Bounds, Listener, Server, Tls},
};

/// The dependencies of the proxy.
#[derive(Clone, Debug)]
pub struct Served {
    /// Decides which requests pass.
    pub limiter: Arc<Limiter>,
    /// Which rate limit headers responses carry.
    pub headers: Headers,
    /// The settings and upstreams, which a reload swaps.
    pub live: Arc<Live>,
    /// The trusted proxies in front of this one, and how clients are identified.
    pub identity: Arc<Identity>,
    /// The server certificate; without one, clients connect in plaintext.
    pub tls: Option<Arc<Tls>>,
}

/// Serves the reverse proxy on `socket`.
///
/// # Errors
///
/// The operating system's error if `socket` is not a listening socket.
pub fn listen(server: &Server, socket: TcpListener, served: Served) -> io::Result<Listener> {
    let settings = Arc::clone(&served.live.now().settings);
    let fitted = settings.fitted_connections;
    let bounds = Bounds {
        connections: fitted.unwrap_or(settings.max_connections),
        connections_per_client: settings.max_connections_per_client,
        ..Bounds::default()
    };
    let writer = header_writer(served.headers);
    let layer = gate::layer(&served.limiter, &served.identity, writer);
    let clients = Arc::<Clients>::default();
    let exempt = super::exempt(&served.identity);
    server.listen_exempting(socket, bounds, exempt, move |stream, connection| {
        let Served {
            limiter,
            live,
            identity,
            tls,
            ..
        } = served.clone();
        let log = live.log().cloned();
        let rejected = Arc::clone(live.rejected());
        let settings = Arc::clone(&live.now().settings);
        let layer = layer.clone().connection_from(connection.peer.ip());
        let clients = Arc::clone(&clients);
        async move {
            let peer = connection.peer.ip();
            let planned = Planned::default();
            let scheme = if tls.is_some() { "https" } else { "http" };
            let bearings = Arc::clone(&live);
            let is_believed = identity.trust.believes(peer);
            // A trusted proxy forwards for many clients, and limits each of them itself.
            let in_flight =
                (!is_believed).then(|| clients.enter(identity.trust.counted(peer.to_canonical())));
            let forwarding = forwarding_of(&settings, ClientSide::new(peer, scheme, is_believed));
            let forwarder = Forwarder::new(Way {
                live,
                forwarding: Arc::clone(&forwarding),
                in_flight: in_flight.clone(),
                worker: connection.worker,
                planned: planned.clone(),
                names_upstream: log.is_some(),
            });
            let client = Client {
                connection,
                settings,
                tls,
                planned,
                rejected,
                in_flight,
            };
            let service = Triage::new(
                layer.layer(forwarder),
                Bearings {
                    live: bearings,
                    forwarding,
                    limiter: Arc::clone(&limiter),
                    layer,
                },
            );
            let Some(log) = log else {
                return client.serve(stream, service).await;
            };
            let logging = Logging {
                log,
                limiter,
                identity,
                peer,
            };
            client.serve(stream, Logged::new(service, logging)).await;
        }
    })
}

/// Returns how forwarded requests describe `client` to upstreams.
fn forwarding_of(settings: &Proxy, client: ClientSide) -> Arc<Forwarding> {
    let via = settings.heads.via.clone();
    Arc::new(Forwarding::new(settings.forwarded, via, client))
}
