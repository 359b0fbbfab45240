//! Upstreams: load balancing, connection pools, HTTP clients, retries, outlier detection and health
//! checks.

mod address;
pub(crate) mod balancer;
pub(crate) mod checkout;
pub(crate) mod config;
mod connect;
pub(crate) mod connection;
mod connection_slot;
pub(crate) mod counters;
pub(crate) mod dispatch;
pub(crate) mod endpoint;
mod endpoint_settings;
mod failure_log;
pub(crate) mod h1;
pub(crate) mod h2;
pub(crate) mod health_check;
mod interim;
mod interim_allowance;
pub(crate) mod outlier;
mod pool;
mod repeatable;
mod retry;
pub(crate) mod tls;
