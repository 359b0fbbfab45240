//! The pieces around hyper's client, against hyper's server, over pipes in memory: everything but the wire is real, and time is paused.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod guards;
mod retry;
mod support;
mod throttle;
