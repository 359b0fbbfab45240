//! Runs the tests of `client` on Valkey instead of Redis: `support::SERVER` depends on the name of
//! this test program. The TLS tests are omitted, because the Valkey that `scripts/setup` installs
//! is built without TLS.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

#[path = "../client/cluster.rs"]
mod cluster;
#[path = "../client/faults.rs"]
mod faults;
#[path = "../client/login.rs"]
mod login;
#[path = "../client/refused.rs"]
mod refused;
#[path = "../client/sentinels.rs"]
mod sentinels;
#[path = "../client/store_fixture.rs"]
mod store_fixture;
