//! Tests of the gRPC listener over real sockets, with a manual clock.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod authorization;
mod client;
mod health;
mod http2;
mod kuadrant;
mod listener;
mod overrides;
mod proto;
mod quota;
mod rate_limit;
mod reflection;
mod tls;
