//! Limiters that count in Redis.

use std::sync::Arc;

use tidegate_core::{MemoryBounds, MemoryStore};
use tidegate_redis::{
    Address, FallbackSettings, FallbackStore, Redis, RedisSettings, StoreError, Topology,
};
use tokio::runtime::Handle;

use crate::{Clock, IntoPolicy, Limiter};

impl<P> Limiter<FallbackStore, P> {
    /// Creates a limiter that counts in the Redis or Valkey server at `url`, with default settings.
    /// Limiters with the same `prefix` share their counts, so use a separate prefix for each kind
    /// of limiter.
    ///
    /// The connection is opened in the background. While Redis is unreachable, this process uses
    /// its local share of the limits. For other settings, Sentinel or Redis Cluster, pass a
    /// [`FallbackStore`] to [`Limiter::new`].
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] if the URL is invalid.
    ///
    /// # Panics
    ///
    /// Panics if it is not called within a tokio runtime.
    pub fn in_redis(
        limits: impl IntoPolicy<Policy = P>,
        url: &str,
        prefix: &str,
    ) -> Result<Self, StoreError> {
        let (address, login) = Address::parse(url).map_err(StoreError::Refused)?;
        let settings = RedisSettings {
            login,
            ..RedisSettings::new(Topology::Standalone(address))
        };
        let redis = Arc::new(Redis::start(settings, &Handle::current()));
        let local = MemoryStore::new(MemoryBounds::default());
        let store = FallbackStore::new(redis, prefix, local, FallbackSettings::default());
        Ok(Self::new(limits, store, Clock::real()))
    }
}
