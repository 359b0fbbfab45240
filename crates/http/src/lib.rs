//! HTTP support: extracts the entries of a request for the rules, and writes verdicts as headers.
//!
//! This crate does not use sockets. A [`Limiter`] combines rules, a store and the [`Clock`]. An
//! application calls it directly, or passes it as the [`Gate`] of a [`LimiterLayer`], which wraps a
//! tower service. A [`ShedLayer`] wraps a service with an adaptive concurrency limit. [`Forwarded`]
//! parses the headers of a proxy's forward-auth request into the entries that rules match on.
//! [`HeaderWriter`] writes the response headers of a verdict. All HTTP programs of the workspace
//! use both, so entries and headers are the same everywhere.

mod address;
mod atlas;
pub mod client;
mod cookies;
#[path = "../../identity/src/forward_auth.rs"]
pub mod describe;
mod fields;
pub mod headers;
mod layer;
#[cfg(feature = "maxmind")]
mod maxmind;
mod normalize;
pub mod part;
mod path;
#[path = "../../identity/src/dialect.rs"]
mod proxy;
mod rfc7239;
mod shed;
mod target;
mod unclear;

pub use atlas::{Atlas, Place};
pub use client::{AddressHeader, Proxies, Trust};
pub use describe::{Forwarded, Source, bare_host};
pub use headers::{HeaderWriter, Legacy, RuleNames};
pub use layer::{
    Denied, Entries, Lasting, Limited, LimitedBody, LimiterLayer, Passed, Peer, Report,
    ResponseFuture, grpc_call, overloaded,
};
#[cfg(feature = "maxmind")]
pub use maxmind::{MaxMind, MaxMindError};
pub use part::Part;
pub use path::normal as normal_path;
pub use proxy::Proxy;
pub use shed::{Gauge, Held, Load, Room, Share, ShedFuture, ShedLayer, Shedding};
pub use tidegate::{Clock, Gate, Limiter};
pub use unclear::Unclear;
