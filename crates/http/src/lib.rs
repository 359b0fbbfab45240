//! The HTTP edge: what a request's parts are called in the rules, and how a verdict looks as headers.
//!
//! Nothing here reads a socket. A [`Limiter`] brings rules, a store and the [`Clock`] together: it is what an application
//! asks, and a [`Gate`] for a [`LimiterLayer`], which stands in front of a tower service; a [`ShedLayer`] does so by what the
//! service can bear. [`Forwarded`] turns the headers of a proxy's
//! forward-auth request into the entries that rules match on, and [`HeaderWriter`] turns a verdict into
//! the headers of its answer, so that every program that speaks HTTP names and shows them alike.

mod address;
mod atlas;
pub mod client;
mod clock;
mod cookies;
pub mod describe;
mod fields;
mod gate;
pub mod headers;
mod layer;
mod limiter;
#[cfg(feature = "maxmind")]
mod maxmind;
mod normalize;
pub mod part;
mod path;
mod proxy;
mod rfc7239;
mod shed;
mod target;
mod unclear;

pub use atlas::{Atlas, Place};
pub use client::{AddressHeader, Proxies, Trust};
pub use clock::Clock;
pub use describe::{Forwarded, Source, bare_host};
pub use gate::Gate;
pub use headers::{HeaderWriter, Legacy, RuleNames};
pub use layer::{
    Denied, Entries, Lasting, Limited, LimitedBody, LimiterLayer, Passed, Peer, Report,
    ResponseFuture, grpc_call, overloaded,
};
pub use limiter::Limiter;
#[cfg(feature = "maxmind")]
pub use maxmind::{MaxMind, MaxMindError};
pub use part::Part;
pub use path::normal as normal_path;
pub use proxy::Proxy;
pub use shed::{Gauge, Held, Load, Room, Share, ShedFuture, ShedLayer, Shedding};
pub use unclear::Unclear;
