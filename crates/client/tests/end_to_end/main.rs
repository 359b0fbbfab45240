//! Tests of the layers around hyper's client and against hyper's server. In-memory pipes replace
//! the network, and tokio's time is paused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod guards;
mod retry;
mod support;
mod throttle;
