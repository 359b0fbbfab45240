//! Tests that run each application as a separate process.

#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

#[path = "../../../../crates/redis/tests/support/mod.rs"]
mod support;

mod app;
mod grpc;
mod http;
mod inside;
