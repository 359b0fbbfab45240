//! Tests of several nodes on a real Redis: shared state, and what each node does while Redis is
//! unreachable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../../../redis/tests/support/mod.rs"]
mod support;

#[path = "../http/client.rs"]
#[allow(dead_code, reason = "the HTTP door's own tests use more of it")]
mod client;

mod doors;
mod failures;
mod node;
mod shared;
