//! Ids of servers that share a Redis.

use std::hash::{BuildHasher as _, RandomState};

/// Returns an id of 128 random bits, as 32 hexadecimal digits, for a server that has just started.
/// The ids must be unique, but need not be secret.
#[must_use]
pub fn random_server_id() -> String {
    let seed = RandomState::new();
    format!("{:016x}{:016x}", seed.hash_one(0), seed.hash_one(1))
}
