//! The limiter that all listeners share: the current rules, one store, one clock.
//!
//! A decision may need a call to Redis, so its result is a [`MaybeReady`]: ready if the memory store
//! decides, or if no call to Redis is needed. A caller that is not async takes a result that is
//! ready, and leaves the others to a task.

mod admin_ops;
pub mod blocks;
mod build_cache;
pub mod date;
pub mod entries;
pub mod metrics;
pub mod snapshot;
mod store;

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tidegate::Clock;
use tidegate_core::{
    Charge, Effect, Limits, MAX_KEY_SPACE, MaybeReady, MemoryStore, Outcome, RequestError, Rule,
    RuleSet, Store, StoreDecision, StoreRequest, Timestamp, Verdict, free_key_in,
};
use tidegate_identity::Trust;
use tidegate_net::prometheus::{self, Format, Page};
use tidegate_redis::{FallbackStore, StoreError};

pub use self::{
    build_cache::BuildCache,
    store::{Backend, LimiterReceipt},
};
use crate::{
    entries::{AuditedRequest, EntryAudit},
    metrics::{ListenerKind, Metrics, Stats},
    snapshot::SnapshotHealth,
};

/// A request for a decision, independent of the backend that decides it.
#[derive(Clone, Copy, Debug)]
pub struct DecisionRequest<'a> {
    /// The charges. Either all of them are made, or none.
    pub charges: &'a [Charge<'a>],
    /// The current time, read by the caller.
    pub now: Timestamp,
    /// The effect of the decision: for example to charge, or only to peek.
    pub effect: Effect,
    /// The time limit for Redis, if it is shorter than the configured maximum.
    pub within: Option<Duration>,
}

/// The limiter that all listeners share. A process has one, behind an [`Arc`].
#[derive(Debug)]
pub struct Limiter {
    rules: ArcSwap<RuleSet>,
    backend: Backend,
    clock: Clock,
    metrics: Metrics,
    trust: Trust,
    snapshots: SnapshotHealth,
    audit: ArcSwap<EntryAudit>,
}

impl Limiter {
    /// Creates a limiter that enforces `rules` with `backend`.
    #[must_use]
    pub fn new(rules: RuleSet, backend: impl Into<Backend>, clock: Clock) -> Self {
        let metrics = Metrics::new(clock.now());
        metrics.name_rules(rules.iter().map(Rule::name));
        Self {
            audit: ArcSwap::from_pointee(EntryAudit::new(&rules, &metrics)),
            rules: ArcSwap::from_pointee(rules),
            backend: backend.into(),
            clock,
            metrics,
            trust: Trust::default(),
            snapshots: SnapshotHealth::default(),
        }
    }

    /// Sets the trusted-proxy and address settings that `/v1/check` and `TIDEGATE.CHECK` use to
    /// normalise addresses.
    #[must_use]
    pub fn with_trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// Returns how client addresses are trusted and normalised.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Returns the current time. A listener reads it once per request.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Returns the clock that decisions use.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the current rules. A request uses one rule set from start to finish, even across a
    /// reload.
    #[must_use]
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    /// Replaces the current rules with `rules`.
    pub fn swap_rules(&self, rules: RuleSet) {
        self.metrics.name_rules(rules.iter().map(Rule::name));
        let audit = EntryAudit::new(&rules, &self.metrics);
        self.audit.store(Arc::new(audit));
        self.rules.store(Arc::new(rules));
        if let Some(redis_store) = self.redis_store() {
            redis_store.forget_denials();
        }
    }

    /// Returns the memory store of this process. With Redis it is the fallback for when Redis is
    /// unreachable. To decide a request, use the limiter itself as a [`Store`].
    #[must_use]
    pub fn local_store(&self) -> &MemoryStore {
        match &self.backend {
            Backend::Memory(store) => store,
            Backend::Redis(redis_store) => redis_store.local(),
        }
    }

    /// Returns the Redis-backed store, if there is one.
    #[must_use]
    pub fn redis_store(&self) -> Option<&FallbackStore> {
        match &self.backend {
            Backend::Memory(_) => None,
            Backend::Redis(redis_store) => Some(redis_store),
        }
    }

    /// Returns the health of this store's snapshots.
    #[must_use]
    pub fn snapshots(&self) -> &SnapshotHealth {
        &self.snapshots
    }

    /// Returns whether a block that is added now would survive a restart of this process: with
    /// Redis, and with working snapshots.
    #[must_use]
    pub fn keeps_blocks(&self) -> bool {
        self.redis_store().is_some() || self.snapshots.is_kept()
    }

    /// Returns the metrics.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Adds all metrics to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        let stats = Stats {
            store: self.local_store().stats(),
            redis: self.redis_store().map(FallbackStore::stats),
            now: self.now(),
            missing_key_entries: self.audit.load().missing_key_entries(),
        };
        self.metrics.collect(&stats, page);
    }

    /// Returns all metrics in the Prometheus text format.
    #[must_use]
    pub fn exposition(self: &Arc<Self>) -> String {
        let limiter = Arc::clone(self);
        prometheus::encode(Format::Text, move |page| limiter.collect(page))
    }

    /// Counts a verdict that `listener` is about to return.
    pub fn observe(&self, listener: ListenerKind, verdict: &Verdict<'_>) {
        self.metrics.observe(listener, verdict);
    }

    /// Audits the entries of a request answered with `verdict`, so that entries that no rule uses
    /// are reported.
    pub fn audit(&self, audited: AuditedRequest<'_>, verdict: &Verdict<'_>) {
        self.audit.load().observe(audited, verdict, &self.metrics);
    }

    /// Counts a decision on a limit that was sent with the request, which `listener` is about to
    /// return.
    pub fn observe_throttle(&self, listener: ListenerKind, decided: &StoreDecision) {
        self.metrics.observe_throttle(listener, decided);
    }

    /// Prefetches the memory of keys that are about to be decided one after the other; see
    /// [`MemoryStore::prefetch`]. Does nothing with Redis.
    pub fn prefetch<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Backend::Memory(store) = &self.backend {
            store.prefetch(keys);
        }
    }

    /// Decides `request`. The result is ready if it needs no call to Redis. Clears and fills
    /// `outcomes`, a buffer that the caller can reuse. It stays empty if the fallback policy `open`
    /// or `closed` decides.
    pub fn decide(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        let DecisionRequest {
            charges,
            now,
            effect,
            within,
        } = request;
        let redis_store = match &self.backend {
            Backend::Memory(store) => {
                let decided = self.decide_in_memory(store, charges, now, effect, outcomes);
                return MaybeReady::Ready(decided);
            }
            Backend::Redis(redis_store) => redis_store,
        };
        let mut charges = charges.to_vec();
        let store_request = StoreRequest {
            charges: &mut charges,
            now,
            effect,
            within,
        };
        if let Some(decided) = redis_store.decide(store_request, outcomes).ready() {
            return MaybeReady::Ready(decided);
        }
        MaybeReady::Pending(async move {
            let store_request = StoreRequest {
                charges: &mut charges,
                now,
                effect,
                within,
            };
            self.with_latency(redis_store.decide(store_request, outcomes))
                .await
        })
    }

    /// Works like [`Self::decide`], but returns an error instead of applying the fallback policy
    /// when Redis fails.
    ///
    /// # Errors
    ///
    /// Returns the error of Redis. Nothing was decided.
    pub async fn decide_or_fail(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<StoreDecision, StoreError> {
        let DecisionRequest {
            charges,
            now,
            effect,
            within,
        } = request;
        let redis_store = match &self.backend {
            Backend::Memory(store) => {
                return Ok(self.decide_in_memory(store, charges, now, effect, outcomes));
            }
            Backend::Redis(redis_store) => redis_store,
        };
        let store_request = StoreRequest {
            charges: &mut charges.to_vec(),
            now,
            effect,
            within,
        };
        match redis_store.cached_denial(&store_request, outcomes) {
            Some(decided) => Ok(decided),
            None => {
                let decision = Box::pin(redis_store.decide_in_redis(&store_request, outcomes));
                self.with_latency(decision).await
            }
        }
    }

    /// Awaits `decided` and, for sampled decisions, records the latency.
    async fn with_latency<T>(&self, decided: impl IntoFuture<Output = T>) -> T {
        let began = self.sample_start();
        let decided = decided.await;
        self.record_latency(began);
        decided
    }

    /// Decides with the memory store and, for sampled decisions, records the latency.
    fn decide_in_memory(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let began = self.sample_start();
        let decision = store.check(charges, now, effect, outcomes);
        self.record_latency(began);
        StoreDecision::in_memory(decision)
    }

    /// Returns the start time in nanoseconds if this decision is sampled for the latency metric.
    fn sample_start(&self) -> Option<u64> {
        Metrics::is_sampled().then(|| self.clock.nanos())
    }

    fn record_latency(&self, began: Option<u64>) {
        if let Some(began) = began {
            let took = self.clock.nanos().saturating_sub(began);
            self.metrics.observe_latency(took);
        }
    }

    /// Encodes a key as [`Self::throttle_key_in`] does for database 0, which `/v1/throttle` uses
    /// too.
    ///
    /// # Errors
    ///
    /// Rejects an empty key and one longer than [`MAX_THROTTLE_KEY_BYTES`].
    pub fn throttle_key<'b>(
        key: &'b [u8],
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], RequestError> {
        Self::throttle_key_in(Database::default(), key, buffer)
    }

    /// Encodes `key` as the store key of a limit that is sent with the request, in the given
    /// database of the Redis protocol. The result can never equal the key of a rule. `buffer` is
    /// reused between calls.
    ///
    /// # Errors
    ///
    /// Rejects an empty key and one longer than [`MAX_THROTTLE_KEY_BYTES`], or one byte less in
    /// databases other than 0.
    pub fn throttle_key_in<'b>(
        database: Database,
        key: &'b [u8],
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], RequestError> {
        if key.is_empty() {
            return Err(RequestError::new("key", "must not be empty"));
        }
        let most = MAX_THROTTLE_KEY_BYTES - usize::from(database.0 > 0);
        if key.len() > most {
            let problem = format!("{} bytes is over the maximum of {most}", key.len());
            return Err(RequestError::new("key", problem));
        }
        Ok(free_key_in(database.0, key, buffer))
    }
}

/// A database number of the Redis protocol. Keys of limits that are sent with the request are
/// separate in each database; rules are the same in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Database(u8);

impl Database {
    /// Returns the database with this number, or `None` unless it is from 0 to 15, as in Redis.
    #[must_use]
    pub fn new(number: i64) -> Option<Self> {
        let number = u8::try_from(number).ok()?;
        (number <= MAX_KEY_SPACE).then_some(Self(number))
    }

    /// Returns the number.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

/// The maximum length in bytes of a key of a limit that is sent with the request. Encoding may add
/// one byte, or two in databases other than 0.
pub const MAX_THROTTLE_KEY_BYTES: usize = tidegate_core::bounds::MAX_KEY_BYTES - 1;

/// Wraps the single limit of a throttle request, which has no rule.
///
/// # Errors
///
/// Never fails for a valid limit.
pub fn single(limit: tidegate_core::Limit) -> Result<Limits, tidegate_core::LimitError> {
    Limits::new(vec![limit])
}
