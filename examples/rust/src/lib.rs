//! What the applications have in common: their algorithm, and the way to Redis.

use std::{error::Error, sync::Arc};

use tidegate_core::{AlgorithmName, Limit, LimitError, MemoryBounds, MemoryStore};
use tidegate_redis::{Address, Fleet, FleetSettings, Redis, Settings, Topology};
use tokio::runtime::Handle;

/// The program in the documentation of the layer is compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/tower.md")]
mod tower {}

/// The greeter's messages, its client and its server.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unused_qualifications,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    reason = "as tonic writes it"
)]
pub mod greeter {
    tonic::include_proto!("greeter");
}

/// A window that never admits more than so many, such as `3/min`.
///
/// # Errors
///
/// Text that is no rate, and numbers that no limit can have.
pub fn limit(rate: &str) -> Result<Limit, LimitError> {
    Limit::shorthand(AlgorithmName::SlidingWindowLog, rate)
}

/// A store in this process: limits of its own, and nothing to install.
#[must_use]
pub fn in_memory() -> MemoryStore {
    MemoryStore::new(MemoryBounds::default())
}

/// A store in the Redis at `url`: every process that asks there shares one limit. While Redis is out of reach, each goes on
/// with its share of it.
///
/// # Errors
///
/// A URL that is none.
pub fn in_redis(url: &str) -> Result<Fleet, Box<dyn Error>> {
    let (address, login) = Address::parse(url)?;
    let settings = Settings {
        login,
        ..Settings::new(Topology::Standalone(address))
    };
    let redis = Arc::new(Redis::start(settings, &Handle::current()));
    let fleet = FleetSettings::default();
    Ok(Fleet::new(redis, "example", in_memory(), fleet))
}
