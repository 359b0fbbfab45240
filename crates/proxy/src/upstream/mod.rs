//! Upstreams: load balancing, connection pools, HTTP clients, retries, outlier detection and health
//! checks.

pub(crate) mod balancer;
pub(crate) mod checkout;
mod connect;
pub(crate) mod connection;
pub(crate) mod dispatch;
pub(crate) mod endpoint;
mod failure_log;
pub(crate) mod h1;
pub(crate) mod h2;
mod health_check;
mod interim;
pub(crate) mod outlier;
mod pool;
mod retry;
pub(crate) mod tls;

/// The maximum number of interim responses (1xx) before the response itself. Some services send a
/// `102 Processing` every few seconds while they work, or a handful of `103 Early Hints`. They are
/// read and dropped, so an upstream that sends nothing else would keep a worker busy until
/// `timeouts.head`.
const MAX_INTERIM_RESPONSES: u32 = 100;
