//! The layers around hyper's client, against hyper's server, over in-memory pipes. Only the network
//! is replaced, and time is paused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod guards;
mod retry;
mod support;
mod throttle;
