//! The Tidegate server: the listeners (HTTP, Redis protocol, Envoy's rate limit service, reverse
//! proxy, admin) around one limiter, and hot reload.

pub mod envoy;
pub mod geoip;
pub mod listener;
pub mod quota;
mod redis_runtime;
pub mod reload;
pub mod serve;
