//! Tests of the admin listener over real sockets, with a manual clock.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod access;
#[path = "../http/access_cases.rs"]
mod access_cases;
mod blocks;
#[path = "../http/client.rs"]
#[allow(dead_code, reason = "used by the tests of the HTTP listener")]
mod client;
mod console;
mod denials;
mod entry_blocks;
mod events;
mod keys;
mod listener;
mod metrics;
mod overrides;
mod rules;
mod status;
mod top;
mod traffic;
