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
mod interim_allowance;
pub(crate) mod outlier;
mod pool;
mod retry;
pub(crate) mod tls;
