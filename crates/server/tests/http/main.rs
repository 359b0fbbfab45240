//! Tests of the HTTP listener over real sockets, with a manual clock.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod access;
mod access_cases;
mod authorize;
mod bad_input;
mod check;
mod client;
mod connection;
mod entries;
mod headers;
mod identity;
mod listener;
mod reserve;
mod throttle;
mod tls;
mod vectors;
mod waiting;
