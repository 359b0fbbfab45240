//! The systems under test: the service itself, or a listener in front of it.

use std::sync::Arc;

use tidegate::Clock;
use tidegate_config::{
    ReservationsConfig,
    envoy::{DomainFiles, RlsSettings},
};
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_envoy::{
    self as envoy, File, RateLimitAnswer, RateLimitRequest, RateLimitService, Variables,
    settings_from_variables,
};
use tidegate_limiter::{Backend, ServerLimiter, reservations::Reservations};
use tidegate_redis::{FallbackSettings, FallbackStore, Redis};

use crate::format::ConfigFile;

/// A way to send requests to the service.
pub(crate) trait Subject {
    /// Loads `files`. An `Err` contains all errors in the files.
    async fn load(&self, started: &Started, files: &[ConfigFile]) -> Result<(), String> {
        started.load(files)
    }

    /// Sends a request. An `Err` contains the error message.
    async fn ask(&self, request: &RateLimitRequest) -> Result<RateLimitAnswer, String>;
}

/// The service, called in process.
pub(crate) struct InProcess(Arc<RateLimitService>);

impl InProcess {
    pub(crate) fn new(started: &Started) -> Self {
        Self(Arc::clone(&started.service))
    }
}

impl Subject for InProcess {
    async fn ask(&self, request: &RateLimitRequest) -> Result<RateLimitAnswer, String> {
        self.0
            .should_rate_limit(request)
            .await
            .map_err(|error| error.to_string())
    }
}

/// The store for a service's counters.
#[derive(Clone, Copy)]
pub(crate) enum StoreKind<'r> {
    Memory,
    /// Redis, with a key prefix that is unique to the case.
    Redis(&'r Arc<Redis>, &'r str),
}

/// A service with an empty store and a clock that the test case controls.
pub(crate) struct Started {
    pub(crate) service: Arc<RateLimitService>,
    pub(crate) limiter: Arc<ServerLimiter>,
    clock: Clock,
    merging: DomainFiles,
}

impl Started {
    pub(crate) fn new(variables: &Variables, seconds: u64) -> Result<Self, String> {
        Self::on(StoreKind::Memory, variables, seconds)
    }

    pub(crate) fn on(
        store_kind: StoreKind<'_>,
        variables: &Variables,
        seconds: u64,
    ) -> Result<Self, String> {
        let settings =
            settings_from_variables(variables).map_err(|problems| problems.join("; "))?;
        let is_merged = variables
            .get("MERGE_DOMAIN_CONFIG")
            .is_some_and(|text| text == "true");
        let merging = if is_merged {
            DomainFiles::Merged
        } else {
            DomainFiles::One
        };
        Ok(Self::with(store_kind, settings, merging, seconds))
    }

    pub(crate) fn with(
        store_kind: StoreKind<'_>,
        settings: RlsSettings,
        merging: DomainFiles,
        seconds: u64,
    ) -> Self {
        let clock = Clock::manual(at(seconds));
        let store = MemoryStore::new(MemoryBounds::default());
        let backend = match store_kind {
            StoreKind::Redis(redis, prefix) => {
                let settings = FallbackSettings::default();
                let redis_store = FallbackStore::new(Arc::clone(redis), prefix, store, settings);
                redis_store.store().pin_clock(at(seconds));
                Backend::Redis(redis_store)
            }
            StoreKind::Memory => Backend::Memory(store),
        };
        let reservations = Reservations::new(ReservationsConfig::default(), None).unwrap();
        let limiter = ServerLimiter::new(RuleSet::default(), backend, clock.clone());
        let limiter = Arc::new(limiter.with_reservations(reservations));
        Self {
            service: Arc::new(RateLimitService::new(Arc::clone(&limiter), settings)),
            limiter,
            clock,
            merging,
        }
    }

    pub(crate) fn set(&self, seconds: u64) {
        self.set_at(at(seconds));
    }

    pub(crate) fn set_at(&self, now: Timestamp) {
        self.clock.set(now);
        if let Some(redis_store) = self.limiter.redis_store() {
            redis_store.store().pin_clock(now);
        }
    }

    pub(crate) fn merging(&self) -> DomainFiles {
        self.merging
    }

    /// Loads `files`. An `Err` contains all errors in the files, one per line.
    pub(crate) fn load(&self, files: &[ConfigFile]) -> Result<(), String> {
        let files = files.iter().map(|file| File {
            name: file.name.clone(),
            text: file.yaml.clone(),
        });
        let loaded = envoy::read(files.collect(), self.merging).map_err(|mistakes| {
            let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
            lines.join("\n")
        })?;
        self.service.load(loaded);
        Ok(())
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_micros(seconds * 1_000_000)
}
