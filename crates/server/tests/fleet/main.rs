//! Tests of several nodes with a real Redis: their shared state, and each node's fallback while
//! Redis is unreachable.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../redis/tests/support/mod.rs"]
mod support;

#[path = "../http/client.rs"]
#[allow(dead_code, reason = "used by the tests of the HTTP listener")]
mod client;

mod candidate;
mod denials;
mod entry_blocks;
mod failures;
mod kuadrant;
mod listeners;
mod node;
mod orphans;
mod overrides;
mod reservations;
mod shared;
mod slots;
mod top;
mod waiting;
