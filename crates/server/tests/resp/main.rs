//! Tests of the Redis protocol listener over real sockets, with a manual clock.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod auth;
mod bounds;
mod check;
mod handshake;
mod listener;
mod protocol;
mod real_clients;
mod redis_cell;
mod reserve;
mod reset;
mod throttlecrab;
mod top;
mod transactions;
mod value;
mod waiting;
