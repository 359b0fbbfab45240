//! The tests of `connect` on Valkey instead of Redis: `support::SERVER` depends on the name of this
//! test program. The TLS tests are left out, because the Valkey that `scripts/setup` installs is
//! built without TLS.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

#[path = "../connect/asked.rs"]
mod asked;
#[path = "../connect/cluster.rs"]
mod cluster;
#[path = "../connect/faults.rs"]
mod faults;
#[path = "../connect/login.rs"]
mod login;
#[path = "../connect/refused.rs"]
mod refused;
#[path = "../connect/sentinels.rs"]
mod sentinels;
