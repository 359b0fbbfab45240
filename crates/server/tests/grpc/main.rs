//! The gRPC door, over real sockets, under a clock that the tests set.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod client;
mod door;
mod health;
mod http2;
mod proto;
mod quota;
mod rate_limit;
mod reflection;
mod tls;
