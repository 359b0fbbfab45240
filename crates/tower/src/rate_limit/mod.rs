//! A tower layer that applies rate limits to any HTTP service, such as axum, tonic and plain hyper.
//!
//! ```text
//! request ─▶ entries ─▶ verdict ─┬─▶ allowed ─▶ (delay) ─▶ inner service ─▶ response + headers
//!                   RateLimiter  └─▶ denied ─────────────▶ 429 or 503, or a gRPC status
//! ```
//!
//! `poll_ready` polls only the inner service. Limits are charged when a request arrives. Denied
//! requests never reach the inner service.
//!
//! # Entries that rules can use
//!
//! | entry | source |
//! | --- | --- |
//! | any NAME | the application, in the extension [`Entries`]; overrides all others |
//! | `method` | the method |
//! | `path` | the path without query, in RFC 3986 normal form, repeated slashes merged |
//! | `host` | the requested host in lower case, without the port |
//! | `ip` | the client address, for IPv6 its network; see [`RateLimitLayer::trust`] |
//! | `ip.exact` | the complete client address |
//! | `country`, `asn` | GeoIP data of the client address; see [`RateLimitLayer::geoip`] |
//! | `query.NAME`, `cookie.NAME`, `header.NAME` | the request, as the client sent it |
//! | a name of [`RateLimitLayer::derived`] | a part of another entry |
//!
//! For a gRPC call, the `path` is `/package.Service/Method`. The `asn` is the number of the
//! autonomous system.
//!
//! The [final charge](tidegate_core::ResponseCost) of a rule can depend on the entries of the
//! response: `status`, `header.NAME`, `grpc-status`, `bytes`, and the entries that the application
//! sets in a [`ResponseEntries`]. Until the response determines the final charge, the initial
//! charge of the request stays reserved.
//!
//! A request is rejected as an [`AmbiguousRequest`] in two cases: an entry used by rules has
//! several values, or the rules use the path and the path has `.` or `..` segments. If a request
//! lacks an entry in a rule's key, the rule does not apply.
//!
//! A header never sets an entry that only the application can set. For example, the header
//! `X-Customer` does not set the entry `customer`.
//!
//! [`Entries`]: tidegate_identity::Entries

mod action;
mod admit;
mod body;
mod body_costs;
mod future;
mod keepalive;
mod pending_action;
mod receipt_guard;
mod reservation;
mod response;
mod service;
mod used_entries;

use std::{fmt, net::IpAddr, sync::Arc};

use bytes::Bytes;
use http::{Extensions, Response, request::Parts};
use tidegate::RateLimiter;
use tidegate_core::{Cost, Span, Timestamp, When};
use tidegate_identity::{
    AmbiguousRequest, DerivedEntry, EntrySources, GeoIpSource, RequestEntries, Trust,
};
use tower_layer::Layer;

use self::{action::ActionPolicy, keepalive::LeaseKeepalive};
pub use self::{
    action::{DenialInfo, RateLimitStatus},
    body::LimitedBody,
    body_costs::{BodyCosts, RuleBodyCost},
    future::ResponseFuture,
    reservation::LongLivedPermit,
    response::ResponseEntries,
    service::RateLimit,
};
use crate::{
    HeaderWriter,
    denial::{self, ErrorFormat, ResponseTarget},
};

/// A tower layer that forwards only the requests that a [`RateLimiter`] admits.
///
/// Clones of the layer, and all services that they wrap, share one limiter. Several layers can be
/// stacked, each with its own rules. If an inner layer denies a request, the charges of the outer
/// layers remain.
///
/// If rules are keyed by an authenticated identity, place the layer inside the authentication. In
/// axum, `Router::layer` wraps the layers that were added before, so the layer that is added *last*
/// sees a request *first*.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use tidegate_core::{MemoryBounds, MemoryStore, RuleSet};
/// use tidegate::{Clock, Limiter};
/// use tidegate_tower::RateLimitLayer;
///
/// let store = MemoryStore::new(MemoryBounds::default());
/// let limiter = Arc::new(Limiter::new(RuleSet::default(), store, Clock::real()));
/// let layer = RateLimitLayer::new(limiter).cost_by(|request| {
///     let length = request.headers.get("content-length");
///     let bytes = length.and_then(|length| length.to_str().ok()?.parse().ok());
///     tidegate_core::Cost::new(bytes.unwrap_or(1)).unwrap_or(tidegate_core::Cost::ONE)
/// });
/// # let _ = layer;
/// ```
pub struct RateLimitLayer<L> {
    limiter: Arc<L>,
    settings: Arc<Settings>,
    keepalive: Arc<LeaseKeepalive>,
}

/// The settings of a rate limit layer.
#[derive(Clone, Debug, Default)]
struct Settings {
    sources: EntrySources,
    policy: ActionPolicy,
    cost: RequestCost,
}

/// The source of a request's cost.
#[derive(Clone)]
enum RequestCost {
    Fixed(Cost),
    Parts(Arc<dyn Fn(&Parts) -> Cost + Send + Sync>),
}

impl Default for RequestCost {
    fn default() -> Self {
        Self::Fixed(Cost::ONE)
    }
}

impl fmt::Debug for RequestCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(cost) => cost.fmt(f),
            Self::Parts(_) => f.write_str("a function of the request"),
        }
    }
}

impl RequestCost {
    fn of(&self, parts: &Parts) -> Cost {
        match self {
            Self::Fixed(cost) => *cost,
            Self::Parts(of) => of(parts),
        }
    }
}

impl<L: RateLimiter> RateLimitLayer<L> {
    /// Creates a layer that uses `limiter`. By default, the layer does not trust any proxy, and
    /// reads the socket's peer from the [`Peer`](tidegate_identity::Peer) extension.
    #[must_use]
    pub fn new(limiter: Arc<L>) -> Self {
        Self {
            limiter,
            settings: Arc::default(),
            keepalive: Arc::default(),
        }
    }

    /// Reads the socket's peer from another extension, such as axum's `ConnectInfo` or tonic's
    /// `TcpConnectInfo`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tidegate_core::{MemoryBounds, MemoryStore, RuleSet};
    /// # use tidegate::{Clock, Limiter};
    /// # use tidegate_tower::RateLimitLayer;
    /// # #[derive(Clone)] struct ConnectInfo<T>(T);
    /// # let store = MemoryStore::new(MemoryBounds::default());
    /// # let limiter = Arc::new(Limiter::new(RuleSet::default(), store, Clock::real()));
    /// use std::net::SocketAddr;
    ///
    /// let layer = RateLimitLayer::new(limiter)
    ///     .peer(|extensions| Some(extensions.get::<ConnectInfo<SocketAddr>>()?.0.ip()));
    /// # let _ = layer;
    /// ```
    #[must_use]
    pub fn peer(mut self, peer: fn(&Extensions) -> Option<IpAddr>) -> Self {
        self.settings().sources.set_peer_extension(peer);
        self
    }

    /// Sets `peer` as the socket's peer for all requests. Use this method for a layer that serves a
    /// single connection. The requests of that connection then do not need the peer extension.
    #[must_use]
    pub fn connection_from(mut self, peer: IpAddr) -> Self {
        self.settings().sources.set_connection_peer(peer);
        self
    }

    /// Sets whether admitted requests get a [`RateLimitStatus`] extension. By default, admitted
    /// requests get the extension. Disabling the extension saves time if the inner service does not
    /// use it.
    #[must_use]
    pub fn insert_status(mut self, tells: bool) -> Self {
        self.settings().policy.inserts_status = tells;
        self
    }

    /// Sets the proxies that are trusted to report the client address. By default, no proxy is
    /// trusted.
    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Self {
        self.settings().sources.set_trust(trust);
        self
    }

    /// Sets `geoip` as the source of the entries `country` and `asn` (autonomous system number) of
    /// the client address.
    #[must_use]
    pub fn geoip(mut self, geoip: Arc<dyn GeoIpSource>) -> Self {
        self.settings().sources.set_geoip(geoip);
        self
    }

    /// Adds the entry `name`, which is derived from another entry. For example, the new entry can
    /// be the owner part of an API key, without the secret part.
    #[must_use]
    pub fn derived(mut self, name: &str, derived: DerivedEntry) -> Self {
        self.settings().sources.add_derived(name, derived);
        self
    }

    /// Sets the cost of every request for rules that do not define a cost. The default is 1.
    #[must_use]
    pub fn cost(mut self, cost: Cost) -> Self {
        self.settings().cost = RequestCost::Fixed(cost);
        self
    }

    /// Sets a function that computes the cost of a request from its head, for rules that do not
    /// define a cost.
    #[must_use]
    pub fn cost_by(mut self, of: impl Fn(&Parts) -> Cost + Send + Sync + 'static) -> Self {
        self.settings().cost = RequestCost::Parts(Arc::new(of));
        self
    }

    /// Sets the headers in which responses report limits. The default is `RateLimit` and
    /// `RateLimit-Policy`, without rule names. The body of a denial contains rule names only if the
    /// headers contain them.
    #[must_use]
    pub fn headers(mut self, headers: HeaderWriter) -> Self {
        self.settings().policy.headers = headers;
        self
    }

    /// Sets the maximum delay of a request in a queue. The default is 30 s. A request with a longer
    /// delay is denied.
    #[must_use]
    pub fn longest_wait(mut self, longest: Span) -> Self {
        self.settings().policy.longest_wait = longest;
        self
    }

    /// Sets the body format of denials. The default is problem details (RFC 9457).
    #[must_use]
    pub fn error_format(mut self, format: ErrorFormat) -> Self {
        self.settings().policy.error_format = format;
        self
    }

    /// Returns the layer's response to a request with this head that cannot be counted because of
    /// `error`.
    pub fn malformed_response(&self, error: &dyn fmt::Display, head: &Parts) -> Response<Bytes> {
        let target = ResponseTarget::of(head, self.settings.policy.error_format);
        denial::malformed(error, &target)
    }

    /// Returns true if the condition `when` holds at `now` for the request with this head. The
    /// condition can use the same entries as the rules.
    ///
    /// # Errors
    ///
    /// If an entry that `when` uses is ambiguous or too long, returns the layer's response to a
    /// malformed request.
    pub fn holds(
        &self,
        when: &When,
        request: &Parts,
        now: Timestamp,
    ) -> Result<bool, Box<Response<Bytes>>> {
        let malformed =
            |error: &dyn fmt::Display| Box::new(self.malformed_response(error, request));
        let entries = RequestEntries::new(request, &self.settings.sources);
        let values = when.entry_names().filter_map(|name| {
            let value = entries.entry(name).transpose()?;
            Some(value.map(|value| (name, value)))
        });
        let values: Vec<_> = values
            .collect::<Result<_, AmbiguousRequest>>()
            .map_err(|ambiguous| malformed(&ambiguous))?;
        let entries: Vec<(&str, &str)> = values
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        let request = tidegate_core::Request::new(&entries, Cost::ONE);
        request
            .map(|request| when.holds_at(&request, now))
            .map_err(|error| malformed(&error))
    }

    fn settings(&mut self) -> &mut Settings {
        Arc::make_mut(&mut self.settings)
    }
}

impl<L> Clone for RateLimitLayer<L> {
    fn clone(&self) -> Self {
        Self {
            limiter: Arc::clone(&self.limiter),
            settings: Arc::clone(&self.settings),
            keepalive: Arc::clone(&self.keepalive),
        }
    }
}

impl<L> fmt::Debug for RateLimitLayer<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        f.debug_tuple("RateLimitLayer").field(settings).finish()
    }
}

impl<S, L> Layer<S> for RateLimitLayer<L> {
    type Service = RateLimit<S, L>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.clone())
    }
}
