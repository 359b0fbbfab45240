//! Tests of the SPOP listener over real sockets, with a manual clock.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bounds;
mod handshake;
mod haproxy;
mod requests;
