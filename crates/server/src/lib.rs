//! The Tidegate server: configuration, the listeners (HTTP, Redis protocol, Envoy's rate limit
//! service, reverse proxy, admin), metrics, hot reload and snapshots, all around one limiter.

mod admin_ops;
mod date;
mod entries;
pub mod envoy;
pub mod geoip;
pub mod limiter;

pub mod listener;
pub mod metrics;

pub mod quota;
mod redis_runtime;
pub mod reload;
pub mod serve;
pub mod snapshot;
