//! The Tidegate server: configuration, the listeners (HTTP, Redis protocol, Envoy's rate limit
//! service, reverse proxy, admin), metrics, hot reload and snapshots, all around one limiter.

pub mod config;
mod entries;
pub mod envoy;
pub mod geoip;
pub mod limiter;
mod link;
pub mod listener;
pub mod log_throttle;
pub mod metrics;
pub mod net;
mod operate;
pub mod quota;
pub mod reload;
pub mod serve;
pub mod snapshot;
