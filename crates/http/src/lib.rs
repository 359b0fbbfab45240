//! HTTP support: rate limits as a tower layer, and verdicts as headers.
//!
//! This crate does not use sockets. A [`Limiter`] combines rules, a store and the [`Clock`]. An
//! application calls it directly, or passes it as the [`Gate`] of a [`LimiterLayer`], which wraps a
//! tower service. A [`ShedLayer`] wraps a service with an adaptive concurrency limit.
//! [`HeaderWriter`] writes the response headers of a verdict. All HTTP programs of the workspace
//! use it, so headers are the same everywhere. Who sends a request is the part of [`identity`].

mod fields;
pub mod headers;
mod layer;
mod shed;

pub use headers::{HeaderWriter, Legacy, RuleNames};
pub use layer::{
    Denied, Lasting, Limited, LimitedBody, LimiterLayer, Passed, Report, ResponseFuture, grpc_call,
    overloaded,
};
pub use shed::{Gauge, Held, Load, Room, Share, ShedFuture, ShedLayer, Shedding};
pub use tidegate::{Clock, Gate, Limiter};
pub use tidegate_identity as identity;
