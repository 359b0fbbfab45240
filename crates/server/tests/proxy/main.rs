//! Tests of the reverse proxy over real sockets: the exact bytes that reach upstreams and clients.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../http/client.rs"]
#[allow(dead_code, reason = "used by other tests")]
mod client;
#[path = "../../../envoy/tests/grpc/client.rs"]
#[allow(dead_code, reason = "used by other tests")]
mod grpc_client;
#[path = "../../../redis/tests/support/ports.rs"]
#[allow(unreachable_pub, reason = "other crates re-export it")]
mod ports;

mod access_log;
mod adaptive;
mod bounds;
mod client_certificate;
mod failures;
mod forwarding;
mod gated_upstream;
mod grpc;
mod headers;
mod health;
mod http2;
mod http2_messages;
mod http2_smuggling;
mod language_model;
mod limits;
mod listener;
mod manual;
mod normalisation;
mod pool;
mod reload;
mod routing;
mod slow_clients;
mod smuggling;
mod upgrade;
mod upstream;
mod upstream_http2;
mod upstream_streams;
mod upstream_tls;
mod waiting;
mod websocket;
