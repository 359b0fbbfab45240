//! The built program as its users meet it: started, asked over its sockets and at the command line, signalled
//! and stopped; and the real programs of the examples in front of it.
//!
//! Every server listens on ports that the system picks and is stopped when its test ends. A program that
//! is missing fails its test: `scripts/setup` installs them all.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

#[path = "../../../redis/tests/support/mod.rs"]
mod servers;

mod certificates;
mod check;
mod client;
mod descriptors;
mod documents;
mod entries;
mod envoy;
mod envoy_rules;
mod examples;
mod fleet;
mod geoip;
mod log;
mod operate;
mod proxy;
mod reload;
mod serve;
mod snapshots;
