//! The applications as they are printed, each a process of its own.

#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

#[path = "../../../../crates/redis/tests/support/mod.rs"]
mod support;

mod app;
mod grpc;
mod http;
mod inside;
