//! Compares the reservations of a fleet with a twin that knows only integers, over random calls,
//! crashes, resets and changes of limits, on every store.
//!
//! After every step, the remaining units of every key must be those of the twin, and the twin
//! asserts that no more units are counted or reserved than a limit allows.
//!
//! `PROPTEST_CASES` multiplies the number of sequences: the default is 256, and 25600 runs a
//! hundred times as many.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod changed_limits;
mod fleet;
mod plans;
mod steps;
#[path = "../../../redis/tests/support/mod.rs"]
mod support;
mod twin;

use fleet::{Backend, DEVICES, USERS};
use support::RedisServer;

use crate::steps::compare;

#[test]
fn reservations_in_memory_equal_the_twin() {
    compare(&fleet::runtime(), &Backend::Memory, 300);
}

#[test]
fn reservations_in_redis_equal_the_twin() {
    let (redis, runtime) = (RedisServer::start(), fleet::runtime());
    let backend = Backend::connect(&runtime, &redis.url(), false);
    compare(&runtime, &backend, 60);
}

#[test]
fn reservations_in_valkey_equal_the_twin() {
    let (valkey, runtime) = (RedisServer::start_valkey(), fleet::runtime());
    let backend = Backend::connect(&runtime, &valkey.url(), false);
    compare(&runtime, &backend, 60);
}

/// The keys of a request are in different slots.
#[test]
fn reservations_in_a_cluster_equal_the_twin() {
    let (redis, runtime) = (RedisServer::slotted("redis-server"), fleet::runtime());
    let slot = |value: &str| redis.ask(&["CLUSTER", "KEYSLOT", value]);
    for (user, device) in USERS.into_iter().zip(DEVICES) {
        assert_ne!(slot(user), slot(device));
    }
    let backend = Backend::connect(&runtime, &redis.url(), true);
    compare(&runtime, &backend, 50);
}
