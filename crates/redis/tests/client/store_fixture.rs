//! A store on real servers, and test helpers.

use std::{sync::Arc, time::Duration};

use tidegate_core::{AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, Limits, notation};
use tidegate_redis::{Address, Health, Redis, RedisSettings, RedisStore, StoreError, Topology};
use tokio::runtime::Handle;

use crate::support::TIMEOUT;

/// A store and its connections, for tests.
#[derive(Debug)]
pub(crate) struct StoreFixture {
    pub(crate) redis: Arc<Redis>,
    pub(crate) store: RedisStore,
    pub(crate) limits: Limits,
}

pub(crate) fn address(url: &str) -> Address {
    Address::parse(url).unwrap().0
}

pub(crate) fn standalone(url: &str) -> RedisSettings {
    RedisSettings {
        // The timeout is longer than the default, because replies take longer on a busy machine.
        timeout: Duration::from_millis(500),
        ..RedisSettings::new(Topology::Standalone(address(url)))
    }
}

/// Settings with a timeout that is long enough even for a busy machine.
pub(crate) fn without_timeout(url: &str) -> RedisSettings {
    RedisSettings {
        timeout: Duration::from_secs(30),
        ..standalone(url)
    }
}

impl StoreFixture {
    /// Creates a store with the limit `10/h`.
    pub(crate) fn with(settings: RedisSettings) -> Self {
        let redis = Arc::new(Redis::start(settings, &Handle::current()));
        let rate = notation::rate("10/h").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)
            .build()
            .unwrap();
        Self {
            store: RedisStore::new(Arc::clone(&redis), "test"),
            redis,
            limits: Limits::new(vec![limit]).unwrap(),
        }
    }

    pub(crate) async fn spend(&self, key: &str) -> Result<Decision, StoreError> {
        let charge = Charge::new(key.as_bytes(), &self.limits, Cost::ONE).unwrap();
        self.store
            .check(&[charge], Effect::Charge, &mut Vec::new())
            .await
    }

    /// Sends `tries` requests, and returns the number of admitted requests. Panics if Redis does
    /// not decide a request.
    pub(crate) async fn admitted(&self, key: &str, tries: usize) -> usize {
        let mut admitted = 0;
        for _ in 0..tries {
            admitted += usize::from(self.spend(key).await.unwrap() == Decision::Admitted);
        }
        admitted
    }

    /// Waits until the health of the servers satisfies `wanted`.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&Health) -> bool) -> Health {
        let waited = tokio::time::timeout(TIMEOUT, async {
            loop {
                let health = self.redis.health();
                if wanted(&health) {
                    return health;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        waited
            .await
            .unwrap_or_else(|_| panic!("not {what}: {:?}", self.redis.health()))
    }

    /// Waits until Redis decides a request on `key`, and returns the decision.
    pub(crate) async fn until_decided(&self, key: &str) -> Decision {
        let waited = tokio::time::timeout(TIMEOUT, async {
            loop {
                if let Ok(decision) = self.spend(key).await {
                    return decision;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        waited
            .await
            .unwrap_or_else(|_| panic!("never decided: {:?}", self.redis.health()))
    }

    /// Waits for an error in the health of the servers, and returns its message.
    pub(crate) async fn error(&self) -> String {
        let health = self
            .until("in error", |health| health.error.is_some())
            .await;
        health.error.unwrap().to_string()
    }
}
