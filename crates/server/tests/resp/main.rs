//! The Redis-protocol door, over real sockets, under a clock that the tests set.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod auth;
mod bounds;
mod check;
mod door;
mod handshake;
mod protocol;
mod real_clients;
mod redis_cell;
mod reset;
mod throttlecrab;
mod transactions;
mod value;
