//! The limiter that all listeners share: the active rules, one store and one clock.
//!
//! A decision may need a call to Redis, so its result is a [`MaybeReady`]. The result is ready if
//! the decision needs no call to Redis, which is always the case with the memory store. A caller
//! that is not async uses a ready result immediately, and passes a pending result to a task.

mod admin_ops;
pub mod blocks;
mod build_cache;
pub mod candidate;
pub mod date;
pub mod denials;
pub mod entries;
pub mod events;
mod explain;
mod handover;
pub mod https_client;
mod listing;
pub mod metrics;
pub mod overrides;
mod publisher;
mod record;
pub mod reservations;
mod scratch;
pub mod snapshot;
mod store;
mod throttle_key;
pub mod top;
pub mod trace;

use std::{sync::Arc, time::Duration};

use arc_swap::{ArcSwap, ArcSwapOption};
use tidegate::{Clock, DecidedRequest, Waiters};
use tidegate_config::DenialsConfig;
use tidegate_core::{
    Accounting, BLOCK_KEY, CacheSearch, Charge, DESCRIPTOR_KEY, Decision, Effect, Limits,
    MaybeReady, MemoryStore, OnFailure, Outcome, Rule, RuleSet, Store, StoreDecision, StoreRequest,
    Timestamp, Verdict, top::TopBounds,
};
use tidegate_identity::Trust;
use tidegate_net::prometheus::{self, Format, Page};
use tidegate_redis::{FallbackStore, StoreError};
use tracing::Instrument as _;

pub use self::{
    build_cache::BuildCache,
    explain::{ExplainError, ExplainedCharge, Explanation},
    handover::{HandoverError, SendState, is_store_part},
    listing::{KeyListing, ListError},
    overrides::{DESCRIPTOR_RULE_PREFIX, DescriptorRules},
    record::RequestRecorder,
    scratch::with_scratch,
    store::{Backend, LimiterReceipt},
    throttle_key::{Database, MAX_THROTTLE_KEY_BYTES, throttle_key, throttle_key_in},
};
use crate::{
    candidate::Candidate,
    denials::{DenialLog, DescriptorDenial},
    entries::{AuditedRequest, EntryAudit},
    events::Events,
    metrics::{ListenerKind, Metrics, Stats},
    overrides::{LiveTables, OverrideKeeper},
    reservations::Reservations,
    snapshot::SnapshotHealth,
    top::TopTalkers,
};
pub use tidegate_config::{KeyMask, NoRandomBytes};
pub use tidegate_redis::random_server_id;

/// A request for a decision. The request does not depend on the backend that makes the decision.
#[derive(Clone, Copy, Debug)]
pub struct DecisionRequest<'a> {
    /// The charges of the request. Either all charges are made, or none.
    pub charges: &'a [Charge<'a>],
    /// The current time, read by the caller.
    pub now: Timestamp,
    /// The effect of the decision, for example whether to charge or only to peek.
    pub effect: Effect,
    /// The Redis timeout for this decision, if it is shorter than the configured timeout.
    pub within: Option<Duration>,
}

impl<'a> DecisionRequest<'a> {
    /// Returns the request for a store. `charges` is a copy of [`Self::charges`].
    fn in_store<'q>(
        &self,
        charges: &'q mut Vec<Charge<'a>>,
        cache_search: CacheSearch,
    ) -> StoreRequest<'q, 'a> {
        StoreRequest {
            charges,
            now: self.now,
            effect: self.effect,
            within: self.within,
            cache_search,
            accounting: Accounting::Request,
        }
    }
}

/// A decided request that contained its own limits. It is the argument of
/// [`ServerLimiter::observe_throttle`].
#[derive(Clone, Copy, Debug)]
pub struct ThrottledRequest<'a> {
    /// The charge.
    pub charge: &'a Charge<'a>,
    /// The outcomes of the charge's limits.
    pub outcomes: &'a [Outcome],
    /// The time of the decision.
    pub now: Timestamp,
}

/// The limiter that all listeners share. A process has only one limiter, behind an [`Arc`].
#[derive(Debug)]
pub struct ServerLimiter {
    rules: ArcSwap<RuleSet>,
    backend: Backend,
    clock: Clock,
    metrics: Metrics,
    trust: Trust,
    snapshots: SnapshotHealth,
    audit: ArcSwap<EntryAudit>,
    key_mask: KeyMask,
    top: Option<TopTalkers>,
    denials: DenialLog,
    candidate: ArcSwapOption<Candidate>,
    recorder: Option<RequestRecorder>,
    events: Option<Arc<Events>>,
    reservations: Reservations,
    live: LiveTables,
    override_keeper: OverrideKeeper,
    descriptor_rules: ArcSwapOption<DescriptorRules>,
    waiters: Waiters,
}

impl ServerLimiter {
    /// Creates a limiter that enforces `rules` with `backend`.
    #[must_use]
    pub fn new(rules: RuleSet, backend: impl Into<Backend>, clock: Clock) -> Self {
        let live = LiveTables::default();
        let rules = with_live_tables(rules, &live);
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
            key_mask: KeyMask::plain(),
            top: None,
            denials: DenialLog::new(&DenialsConfig::default()),
            candidate: ArcSwapOption::empty(),
            recorder: None,
            events: None,
            reservations: Reservations::off(),
            live,
            override_keeper: OverrideKeeper::default(),
            descriptor_rules: ArcSwapOption::empty(),
            waiters: Waiters::default(),
        }
    }

    /// Sets the trusted-proxy and address settings that `/v1/check` and `TIDEGATE.CHECK` use to
    /// normalise addresses.
    #[must_use]
    pub fn with_trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// Sets whether lists of keys show the values of keys unchanged or hashed.
    #[must_use]
    pub fn with_key_mask(self, key_mask: KeyMask) -> Self {
        Self { key_mask, ..self }
    }

    /// Returns the mask that determines whether lists of keys show values unchanged or hashed.
    #[must_use]
    pub fn key_mask(&self) -> &KeyMask {
        &self.key_mask
    }

    /// Enables lists of top talkers, which count the keys of all decisions within `bounds`. By
    /// default, and with `None`, there are no lists.
    #[must_use]
    pub fn with_top(self, bounds: Option<TopBounds>) -> Self {
        let top = bounds.map(|bounds| TopTalkers::new(bounds, &self.rules.load()));
        Self { top, ..self }
    }

    /// Returns the lists of top talkers; `None` if they are off.
    #[must_use]
    pub fn top_talkers(&self) -> Option<&TopTalkers> {
        self.top.as_ref()
    }

    /// Sets how many recent denials are kept, and how many are logged.
    #[must_use]
    pub fn with_denials(self, settings: &DenialsConfig) -> Self {
        let denials = DenialLog::new(settings);
        Self { denials, ..self }
    }

    /// Returns the recent denials.
    #[must_use]
    pub fn denials(&self) -> &DenialLog {
        &self.denials
    }

    /// Records requests with `recorder`. By default, and with `None`, no request is recorded.
    #[must_use]
    pub fn with_recorder(self, recorder: Option<RequestRecorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Returns the recorder of requests, if there is one.
    #[must_use]
    pub fn recorder(&self) -> Option<&RequestRecorder> {
        self.recorder.as_ref()
    }

    /// Permits reservations, which are off by default.
    #[must_use]
    pub fn with_reservations(self, reservations: Reservations) -> Self {
        Self {
            reservations,
            ..self
        }
    }

    /// Sends events to the destinations of `events`, including events about Redis outages. By
    /// default, and with `None`, no events are sent.
    #[must_use]
    pub fn with_events(self, events: Option<Arc<Events>>) -> Self {
        if let (Some(events), Some(redis_store)) = (&events, self.redis_store()) {
            let (events, clock) = (Arc::clone(events), self.clock.clone());
            redis_store.observe_outages(move |change| events.emit_outage(change, clock.now()));
        }
        Self { events, ..self }
    }

    /// Returns the events; `None` if they are off.
    #[must_use]
    pub fn events(&self) -> Option<&Arc<Events>> {
        self.events.as_ref()
    }

    /// Adds the decisions since the last sample to the 15-minute traffic history, and detects
    /// surges. The server calls this method every second.
    pub fn sample_traffic(&self) {
        let now = self.now();
        self.metrics.sample_traffic(now);
        if let Some(events) = &self.events {
            let total = self.metrics.total_traffic();
            self.metrics
                .with_rule_traffic(|rules| events.detect_surges(now, total, rules));
        }
    }

    /// Returns the settings that determine which client addresses are trusted and how they are
    /// normalised.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Returns the current time. A listener calls this method once per request.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Returns the clock that decisions use.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the active rules. A decision uses one rule set from start to finish, even across a
    /// reload. A request that waits for a concurrency slot is decided under the rules that are
    /// active when the request is first in its queue.
    #[must_use]
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    /// Replaces the active rules with `rules`.
    pub fn swap_rules(&self, rules: RuleSet) {
        let rules = with_live_tables(rules, &self.live);
        self.metrics.name_rules(rules.iter().map(Rule::name));
        let audit = EntryAudit::new(&rules, &self.metrics);
        self.audit.store(Arc::new(audit));
        if let Some(top) = &self.top {
            top.swap_rules(&self.rules.load(), &rules);
        }
        self.waiters.retain_rules(|rule| rules.rule(rule).is_some());
        self.rules.store(Arc::new(rules));
        if let Some(redis_store) = self.redis_store() {
            redis_store.clear_denial_cache();
        }
    }

    /// Returns the memory store of the process. With Redis, the memory store is the fallback while
    /// Redis is unreachable. To decide a request, use the limiter itself as a [`Store`].
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

    /// Returns whether a rule with these limits denies requests while Redis is unreachable.
    fn fails_closed(&self, limits: &Limits) -> bool {
        let store = self.redis_store();
        store.is_some_and(|store| store.failure_policy(limits) == OnFailure::Closed)
    }

    /// Returns the health of the snapshots of the memory store.
    #[must_use]
    pub fn snapshots(&self) -> &SnapshotHealth {
        &self.snapshots
    }

    /// Returns whether a block that is added now would survive a restart of this process. A block
    /// survives a restart if the store is Redis, or if snapshots are configured and the last
    /// snapshot was written.
    #[must_use]
    pub fn are_blocks_persistent(&self) -> bool {
        self.redis_store().is_some() || self.snapshots.is_healthy()
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
            rules: self.rules(),
            missing_key_entries: self.audit.load().missing_key_entries(),
        };
        self.metrics.collect(&stats, page);
        if let Some(top) = &self.top {
            top.collect(page);
        }
        self.denials.collect(page);
        self.collect_candidate(page);
        if let Some(recorder) = &self.recorder {
            recorder.collect(page);
        }
        self.reservations.collect(page);
        self.collect_overrides(page);
        metrics::collect_waiting(&self.waiters, page);
        if let Some(events) = &self.events {
            events.collect(page);
        }
    }

    /// Returns all metrics in the Prometheus text format.
    #[must_use]
    pub fn exposition(self: &Arc<Self>) -> String {
        let limiter = Arc::clone(self);
        prometheus::encode(Format::Text, move |page| limiter.collect(page))
    }

    /// Counts a verdict that `listener` is about to return, and records its denials. If configured,
    /// also evaluates the candidate rules on the request, and records the request.
    pub fn observe(
        &self,
        listener: ListenerKind,
        decided: DecidedRequest<'_>,
        verdict: &Verdict<'_>,
    ) {
        self.metrics.observe(listener, decided, verdict);
        trace::record_verdict(listener, verdict);
        if denials::has_denial(verdict) {
            let fails_closed = |limits: &Limits| self.fails_closed(limits);
            self.denials
                .record(listener, decided, verdict, fails_closed);
        }
        if let Some(events) = &self.events {
            events.observe(decided, verdict);
        }
        self.observe_with_candidate(decided, verdict);
        if let Some(recorder) = &self.recorder {
            recorder.record(decided, verdict);
        }
    }

    /// Calls [`Self::observe`] and [`Self::audit`].
    pub fn observe_and_audit(&self, audited: AuditedRequest<'_>, verdict: &Verdict<'_>) {
        self.observe(audited.listener, audited.decided, verdict);
        self.audit(audited, verdict);
    }

    /// Audits the entries of a request that received `verdict`, so that unused entries are
    /// reported.
    pub fn audit(&self, audited: AuditedRequest<'_>, verdict: &Verdict<'_>) {
        self.audit.load().observe(audited, verdict, &self.metrics);
    }

    /// Counts a decision that `listener` is about to return for a request that contained its own
    /// limits.
    pub fn observe_throttle(
        &self,
        listener: ListenerKind,
        request: ThrottledRequest<'_>,
        decided: &StoreDecision,
    ) {
        self.metrics.observe_throttle(listener, decided);
        let verdict = || decided.verdict(&[*request.charge], request.outcomes);
        trace::record_with(listener, verdict);
        if decided.decision != Decision::Admitted {
            self.denials.record_throttle(listener, request, decided);
        }
    }

    /// Records that an Envoy rate limit descriptor is over its limit.
    pub fn observe_descriptor_denial(&self, denied: &DescriptorDenial<'_>) {
        self.denials.record_descriptor(denied);
    }

    /// Prefetches the memory of keys that are about to be decided in sequence; see
    /// [`MemoryStore::prefetch`]. Has no effect with Redis.
    pub fn prefetch<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Backend::Memory(store) = &self.backend {
            store.prefetch(keys);
        }
    }

    /// Prefetches the overrides of requests that are about to be decided in sequence; see
    /// [`RuleSet::prefetch_overrides`].
    pub fn prefetch_overrides<'p>(&self, pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8])>) {
        self.rules.load().prefetch_overrides(pairs);
    }

    /// Decides `request`. The result is ready if the decision needs no call to Redis. Clears
    /// `outcomes`, a buffer that the caller can reuse, and fills it with the outcomes. `outcomes`
    /// stays empty if the fallback policy `open` or `closed` is applied.
    pub fn decide(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        if let Backend::Memory(store) = &self.backend {
            let DecisionRequest {
                charges,
                now,
                effect,
                ..
            } = request;
            let decided = self.decide_in_memory(store, charges, now, effect, outcomes);
            return MaybeReady::Ready(decided);
        }
        let mut charges = request.charges.to_vec();
        let store_request = request.in_store(&mut charges, CacheSearch::Due);
        if let Some(decided) = Store::decide(self, store_request, outcomes).ready() {
            return MaybeReady::Ready(decided);
        }
        MaybeReady::Pending(self.decide_after_pending(request, outcomes))
    }

    /// Decides `request` after [`Self::decide`] has just returned a pending result. Works like that
    /// method, but does not search the denial cache again.
    pub async fn decide_after_pending(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let mut charges = request.charges.to_vec();
        let store_request = request.in_store(&mut charges, CacheSearch::Skip);
        Store::decide(self, store_request, outcomes).await
    }

    /// Works like [`Self::decide`], but returns a Redis error instead of applying the fallback
    /// policy.
    ///
    /// # Errors
    ///
    /// Returns the Redis error. If Redis returns an error, no decision was made.
    pub async fn decide_or_fail(
        &self,
        request: DecisionRequest<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<StoreDecision, StoreError> {
        let redis_store = match &self.backend {
            Backend::Memory(store) => {
                let DecisionRequest {
                    charges,
                    now,
                    effect,
                    ..
                } = request;
                return Ok(self.decide_in_memory(store, charges, now, effect, outcomes));
            }
            Backend::Redis(redis_store) => redis_store,
        };
        let mut charges = request.charges.to_vec();
        let store_request = request.in_store(&mut charges, CacheSearch::Due);
        let decided = match redis_store.cached_denial(&store_request, outcomes) {
            Some(decided) => decided,
            None => {
                let decision = redis_store.decide_in_redis(&store_request, &mut *outcomes);
                let (decided, latency) = self.timed(Box::pin(decision)).await;
                let decided = decided?;
                self.record_sample(latency, &charges, outcomes);
                decided
            }
        };
        if request.effect == Effect::Charge {
            self.record_keys(request.now, request.charges, &decided, outcomes);
        }
        Ok(decided)
    }

    /// Counts a decision on `charges` for the lists of top talkers. `outcomes` contains one outcome
    /// for each limit, in the order of `charges`. Charges whose limits were not evaluated have no
    /// outcomes and come last.
    #[inline]
    fn record_keys(
        &self,
        now: Timestamp,
        charges: &[Charge<'_>],
        decided: &StoreDecision,
        outcomes: &[Outcome],
    ) {
        let Some(top) = &self.top else { return };
        // Do not record the descriptors of Envoy's rate limit service, because the service has its
        // own statistics. A blocked request to which no rule applies has no key.
        let is_counted = |charge: &Charge<'_>| {
            !charge.key.starts_with(&DESCRIPTOR_KEY) && charge.key != BLOCK_KEY
        };
        if charges.first().is_some_and(is_counted) {
            let fails_closed = |limits: &Limits| self.fails_closed(limits);
            top.record(now, charges, decided, outcomes, fails_closed);
        }
    }

    /// Awaits `decided`. If the decision is sampled, also returns its latency in nanoseconds.
    async fn timed<T>(&self, decided: impl IntoFuture<Output = T>) -> (T, Option<u64>) {
        let began = self.sample_start();
        let decided = decided.into_future().instrument(trace::redis_span()).await;
        (decided, self.latency_since(began))
    }

    /// Decides with the memory store, and counts the decision for the lists of top talkers.
    fn decide_in_memory(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let decided = self.check_in_memory(store, charges, now, effect, outcomes);
        if effect == Effect::Charge {
            self.record_keys(now, charges, &decided, outcomes);
        }
        decided
    }

    /// Decides with the memory store. If the decision is sampled, measures its latency.
    fn check_in_memory(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let began = self.sample_start();
        let decision = store.check(charges, now, effect, outcomes);
        self.record_sample(self.latency_since(began), charges, outcomes);
        StoreDecision::in_memory(decision)
    }

    /// Returns the start time in nanoseconds if this decision is sampled for the latency metric.
    fn sample_start(&self) -> Option<u64> {
        Metrics::take_sample().then(|| self.clock.nanos())
    }

    /// Returns the latency in nanoseconds of a decision that began at `began`; `None` if the
    /// decision is not sampled.
    fn latency_since(&self, began: Option<u64>) -> Option<u64> {
        began.map(|began| self.clock.nanos().saturating_sub(began))
    }

    /// Records the latency of a sampled decision, and what percentage of each limit is used.
    #[inline]
    fn record_sample(&self, latency: Option<u64>, charges: &[Charge<'_>], outcomes: &[Outcome]) {
        if let Some(nanos) = latency {
            self.metrics.observe_sample(nanos, charges, outcomes);
            if let Some(trace_id) = trace::trace_id() {
                self.metrics.keep_exemplar(nanos, trace_id, self.now());
            }
        }
    }
}

/// Applies overrides and blocks by entries to `rules`.
fn with_live_tables(rules: RuleSet, live: &LiveTables) -> RuleSet {
    rules
        .with_overrides(&live.overrides)
        .with_entry_blocks(&live.entry_blocks)
}

/// Wraps a throttle request's single limit in [`Limits`]. The limit does not belong to a rule.
///
/// # Errors
///
/// Never fails if `limit` is valid.
pub fn single(limit: tidegate_core::Limit) -> Result<Limits, tidegate_core::LimitError> {
    Limits::new(vec![limit])
}
