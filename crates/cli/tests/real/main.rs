//! Tests of the built binary from the user's view: its sockets, command line, signals and shutdown,
//! and the example proxies in front of it.
//!
//! Every server listens on ephemeral ports and is stopped when its test ends. A test fails if a
//! required program is missing; `scripts/setup` installs all required programs.

#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

mod support;

#[path = "../../../server/tests/http/client.rs"]
#[allow(dead_code, reason = "the tests of the HTTP listener use all of it")]
mod http_client;
#[path = "../../../redis/tests/support/mod.rs"]
mod servers;

mod alerts;
mod candidate;
mod certificates;
mod check;
mod client;
mod console;
mod denials;
mod descriptors;
mod documents;
mod entries;
mod envoy;
mod envoy_rules;
mod examples;
mod fleet;
mod geoip;
mod haproxy;
mod log;
mod metrics;
mod migrate;
mod operate;
mod packages;
mod proxy;
mod record;
mod reload;
mod resp_tls;
mod secrets;
mod serve;
mod server_logs;
mod simulate;
mod snapshots;
mod top;
mod tracing;
mod traefik;
mod upgrade;
