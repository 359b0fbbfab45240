//! Compares the reservations of a fleet with a twin that knows only integers, over random calls,
//! crashes, resets and changes of limits, on every store.
//!
//! After every step, the remaining units of every key must be those of the twin, and the twin
//! asserts that no more units are counted or reserved than a limit allows. If a reload changes only
//! how many units a limit admits, the twin is exact. If a reload may change anything (a window, a
//! rate, a lease, the number of limits, an algorithm), the twin computes bounds for the key.
//!
//! `PROPTEST_CASES` multiplies the number of sequences: the default is 256, and 25600 runs a
//! hundred times as many.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod changed_limits;
mod changed_units;
mod fleet;
mod kind;
mod plans;
mod steps;
#[path = "../../../redis/tests/support/mod.rs"]
mod support;
mod twin;

use fleet::{Backend, DEVICES, USERS};
use support::RedisServer;

use crate::steps::{Changes, compare};

#[test]
fn reservations_in_memory_equal_the_twin() {
    in_memory(Changes::OfCount, 300);
}

#[test]
fn reservations_in_redis_equal_the_twin() {
    in_redis(&RedisServer::start(), Changes::OfCount, 60);
}

#[test]
fn reservations_in_valkey_equal_the_twin() {
    in_redis(&RedisServer::start_valkey(), Changes::OfCount, 60);
}

#[test]
fn reservations_in_a_cluster_equal_the_twin() {
    in_cluster(Changes::OfCount, 50);
}

#[test]
fn reservations_in_memory_are_within_the_bounds_after_any_change() {
    in_memory(Changes::Any, 300);
}

#[test]
fn reservations_in_redis_are_within_the_bounds_after_any_change() {
    in_redis(&RedisServer::start(), Changes::Any, 60);
}

#[test]
fn reservations_in_valkey_are_within_the_bounds_after_any_change() {
    in_redis(&RedisServer::start_valkey(), Changes::Any, 60);
}

#[test]
fn reservations_in_a_cluster_are_within_the_bounds_after_any_change() {
    in_cluster(Changes::Any, 50);
}

fn in_memory(changes: Changes, cases: u32) {
    compare(&fleet::runtime(), &Backend::Memory, changes, cases);
}

/// Compares the reservations in a Redis or a Valkey.
fn in_redis(server: &RedisServer, changes: Changes, cases: u32) {
    let runtime = fleet::runtime();
    let backend = Backend::connect(&runtime, &server.url(), false);
    compare(&runtime, &backend, changes, cases);
}

/// Compares the reservations in a cluster. The keys of a request are in different slots.
fn in_cluster(changes: Changes, cases: u32) {
    let (redis, runtime) = (RedisServer::slotted("redis-server"), fleet::runtime());
    let slot = |value: &str| redis.ask(&["CLUSTER", "KEYSLOT", value]);
    for (user, device) in USERS.into_iter().zip(DEVICES) {
        assert_ne!(slot(user), slot(device));
    }
    let backend = Backend::connect(&runtime, &redis.url(), true);
    compare(&runtime, &backend, changes, cases);
}
