//! Tests of Envoy's rate limit service. The tests run the cases of every `envoy*.yaml` file in the
//! `vectors/` folder against the service and each of its listeners. The environment variable
//! `TIDEGATE_VECTORS` can name another folder.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod all_or_nothing;
mod cases;
#[path = "../../../server/tests/http/client.rs"]
#[allow(dead_code, reason = "other test binaries use the rest")]
mod client;
mod compare;
mod config;
mod config_watcher;
mod corrected;
mod denials;
mod environment;
mod format;
mod grpc;
#[path = "../grpc/client.rs"]
#[allow(dead_code, reason = "other test binaries use the rest")]
mod grpc_client;
mod http;
mod kuadrant;
mod limitador;
mod one_decision;
mod overrides;
mod promises;
#[path = "../grpc/proto.rs"]
mod proto;
mod runner;
mod store;
mod subject;
#[path = "../../../redis/tests/support/mod.rs"]
mod support;
mod xds;
