//! Tests connections to real servers: the errors while a server cannot be used, and the recovery
//! after an error.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod cluster;
mod faults;
mod login;
mod refused;
mod sentinels;
mod store_fixture;
mod tls;
