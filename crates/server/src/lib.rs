//! The Tidegate server: the listeners (HTTP, Redis protocol, Envoy's rate limit service, reverse
//! proxy, admin) around one limiter, and hot reload.

pub mod geoip;
pub mod listener;
mod metrics_page;
mod redis_runtime;
pub mod reload;
mod runtime_thread;
pub mod serve;

pub use self::metrics_page::MetricsPage;
