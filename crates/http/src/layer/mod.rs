//! A tower layer: a limiter around any service that answers HTTP requests, in axum, tonic and plain hyper alike.
//!
//! ```text
//! request ─▶ entries ─▶ verdict ─┬─▶ allowed ─▶ (a queue's delay) ─▶ inner service ─▶ its answer, and headers
//!            Described    Gate   └─▶ denied ──────────────────────────────────────▶ 429 or 503, or a gRPC status
//! ```
//!
//! Being ready costs nothing: `poll_ready` is the inner service's, and a limit is charged when a request comes. What is denied
//! never reaches the inner service.
//!
//! # What rules can name
//!
//! | entry | where it comes from |
//! | --- | --- |
//! | any NAME | what the application says in [`Entries`], an extension of the request; it comes before all of these |
//! | `method` | the method |
//! | `path` | the path, without the query, in RFC 3986 normal form, runs of slashes as one; of a gRPC call `/package.Service/Method` |
//! | `host` | the host that is asked for, in small letters and without the port |
//! | `ip` | the client's address, of an IPv6 address its network; see [`LimiterLayer::trust`] |
//! | `ip.exact` | the client's address, whole |
//! | `country`, `asn` | where that address is, and in whose network; see [`LimiterLayer::atlas`] |
//! | `query.NAME`, `cookie.NAME`, `header.NAME` | the client's own words |
//! | a name of [`LimiterLayer::part`] | a part of another entry |
//!
//! What a rule charges [in the end](tidegate_core::Bill) goes by the entries of the answer: `status`, `header.NAME`,
//! `grpc-status`, `bytes`, and what the application says in a [`Report`]. Until then it is reserved.
//!
//! What has several values, and a path with `.` or `..` segments, is refused where rules look at it: see [`Unclear`](crate::Unclear).
//! A rule that counts by an entry which a request does not have does not apply to it. No header stands in for what only the
//! application can know: there is no way from `X-Customer` to `customer` here.

mod answer;
mod asking;
mod body;
mod denial;
mod entries;
mod future;
mod grpc;
mod held;
mod lasting;
mod renewals;
mod reservation;
mod ruling;
mod service;

use std::{fmt, net::IpAddr, sync::Arc};

use bytes::Bytes;
use http::{Extensions, Response, request::Parts};
use tidegate_core::{Cost, Span, Timestamp, When};
use tower_layer::Layer;

pub use self::{
    answer::Report,
    body::LimitedBody,
    entries::{Entries, Peer},
    future::ResponseFuture,
    grpc::call as grpc_call,
    lasting::Lasting,
    ruling::{Denied, Passed, overloaded},
    service::Limited,
};
use self::{
    entries::{Described, Identity, PeerOf, Spelled},
    renewals::Renewals,
    ruling::Terms,
};
use crate::{Atlas, Gate, HeaderWriter, Part, Trust, Unclear};

/// A tower layer that lets a service have only such requests as a [`Gate`] lets pass.
///
/// Clones, and all services that they wrap, share one gate. Several layers may stand behind each other, each with rules of its
/// own; what an outer one has charged stays charged when an inner one denies.
///
/// Put it behind what verifies who is asking, if it counts by that: in axum, `Router::layer` wraps what was there before, so
/// the layer that is added *last* sees a request *first*.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use tidegate_core::{MemoryBounds, MemoryStore, RuleSet};
/// use tidegate_http::{Clock, Limiter, LimiterLayer};
///
/// let store = MemoryStore::new(MemoryBounds::default());
/// let limiter = Arc::new(Limiter::new(RuleSet::default(), store, Clock::real()));
/// let layer = LimiterLayer::new(limiter).cost_by(|request| {
///     let bytes = request.headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
///     tidegate_core::Cost::new(bytes.unwrap_or(1)).unwrap_or(tidegate_core::Cost::ONE)
/// });
/// # let _ = layer;
/// ```
pub struct LimiterLayer<G> {
    gate: Arc<G>,
    settings: Arc<Settings>,
    renewals: Arc<Renewals>,
}

/// What a layer was told.
#[derive(Clone, Debug, Default)]
struct Settings {
    identity: Identity,
    terms: Terms,
    cost: CostOf,
}

/// What a request costs.
#[derive(Clone)]
enum CostOf {
    Fixed(Cost),
    Parts(Arc<dyn Fn(&Parts) -> Cost + Send + Sync>),
}

impl Default for CostOf {
    fn default() -> Self {
        Self::Fixed(Cost::ONE)
    }
}

impl fmt::Debug for CostOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(cost) => cost.fmt(f),
            Self::Parts(_) => f.write_str("a function of the request"),
        }
    }
}

impl CostOf {
    fn of(&self, parts: &Parts) -> Cost {
        match self {
            Self::Fixed(cost) => *cost,
            Self::Parts(of) => of(parts),
        }
    }
}

impl<G: Gate> LimiterLayer<G> {
    /// A layer that asks `gate`, believes no proxy, and finds the other end of the socket in a [`Peer`] extension.
    #[must_use]
    pub fn new(gate: Arc<G>) -> Self {
        Self {
            gate,
            settings: Arc::default(),
            renewals: Arc::default(),
        }
    }

    /// Finds the other end of the socket in another extension, such as axum's `ConnectInfo` or tonic's `TcpConnectInfo`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tidegate_core::{MemoryBounds, MemoryStore, RuleSet};
    /// # use tidegate_http::{Clock, Limiter, LimiterLayer};
    /// # #[derive(Clone)] struct ConnectInfo<T>(T);
    /// # let store = MemoryStore::new(MemoryBounds::default());
    /// # let limiter = Arc::new(Limiter::new(RuleSet::default(), store, Clock::real()));
    /// use std::net::SocketAddr;
    ///
    /// let layer = LimiterLayer::new(limiter)
    ///     .peer(|extensions| Some(extensions.get::<ConnectInfo<SocketAddr>>()?.0.ip()));
    /// # let _ = layer;
    /// ```
    #[must_use]
    pub fn peer(mut self, peer: fn(&Extensions) -> Option<IpAddr>) -> Self {
        self.settings().identity.peer = PeerOf::Extensions(peer);
        self
    }

    /// Takes `peer` for the other end of the socket, whatever requests say: for a layer that serves one connection, which
    /// needs no extension then.
    #[must_use]
    pub fn connection_from(mut self, peer: IpAddr) -> Self {
        self.settings().identity.peer = PeerOf::Connection(peer, Spelled::default());
        self
    }

    /// Whether requests that have passed say so in a [`Passed`] extension; by default they do. An inner service that does
    /// not look at it saves what it costs.
    #[must_use]
    pub fn tell_inner(mut self, tells: bool) -> Self {
        self.settings().terms.tells_inner = tells;
        self
    }

    /// Believes these proxies in what they say of the client's address. By default nobody is believed.
    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Self {
        self.settings().identity.trust = trust;
        self
    }

    /// Lets rules name the `country` and the `asn` (autonomous system number) of the client's address, which `atlas` knows.
    #[must_use]
    pub fn atlas(mut self, atlas: Arc<dyn Atlas>) -> Self {
        self.settings().identity.atlas = Some(atlas);
        self
    }

    /// Lets rules name the `part` of another entry: whose an API key is, without its secret.
    #[must_use]
    pub fn part(mut self, name: &str, part: Part) -> Self {
        self.settings().identity.parts.push((name.into(), part));
        self
    }

    /// What every request costs, for rules that do not say; default 1.
    #[must_use]
    pub fn cost(mut self, cost: Cost) -> Self {
        self.settings().cost = CostOf::Fixed(cost);
        self
    }

    /// What a request costs, for rules that do not say, by what is known of it before its body.
    #[must_use]
    pub fn cost_by(mut self, of: impl Fn(&Parts) -> Cost + Send + Sync + 'static) -> Self {
        self.settings().cost = CostOf::Parts(Arc::new(of));
        self
    }

    /// How answers tell of limits; by default in the `RateLimit` fields, without the names of rules. What a denial says names
    /// rules if the headers do.
    #[must_use]
    pub fn headers(mut self, headers: HeaderWriter) -> Self {
        self.settings().terms.headers = headers;
        self
    }

    /// For how long a queue may hold a request back, at most; default 30 s. What would have to wait for longer is denied.
    #[must_use]
    pub fn longest_wait(mut self, longest: Span) -> Self {
        self.settings().terms.longest_wait = longest;
        self
    }

    /// Whether `when` holds at `now` for the request with this head, by the entries that rules see.
    ///
    /// # Errors
    ///
    /// The answer to a request that cannot be counted, as the layer gives it: an entry that `when` looks at could mean several things, or
    /// is too long.
    pub fn holds(
        &self,
        when: &When,
        request: &Parts,
        now: Timestamp,
    ) -> Result<bool, Box<Response<Bytes>>> {
        let malformed = |error: &dyn fmt::Display| {
            Box::new(ruling::malformed(
                error,
                grpc_call(&request.method, &request.headers),
            ))
        };
        let described = Described::new(request, &self.settings.identity);
        let found = when.entry_names().filter_map(|name| {
            let value = described.entry(name).transpose()?;
            Some(value.map(|value| (name, value)))
        });
        let found: Vec<_> = found
            .collect::<Result<_, Unclear>>()
            .map_err(|unclear| malformed(&unclear))?;
        let entries: Vec<(&str, &str)> = found
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

impl<G> Clone for LimiterLayer<G> {
    fn clone(&self) -> Self {
        Self {
            gate: Arc::clone(&self.gate),
            settings: Arc::clone(&self.settings),
            renewals: Arc::clone(&self.renewals),
        }
    }
}

impl<G> fmt::Debug for LimiterLayer<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        f.debug_tuple("LimiterLayer").field(settings).finish()
    }
}

impl<S, G> Layer<S> for LimiterLayer<G> {
    type Service = Limited<S, G>;

    fn layer(&self, inner: S) -> Self::Service {
        Limited::new(inner, self.clone())
    }
}
