//! The limiter that all listeners share.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tidegate::{Clock, Waiters};
use tidegate_config::{DenialsConfig, KeyMask};
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Store as _, Timestamp, top::TopBounds};
use tidegate_identity::Trust;
use tidegate_net::prometheus::{self, Format, Page};
use tidegate_redis::FallbackStore;

use crate::{
    RequestRecorder,
    backend::Backend,
    candidate::{Candidate, CandidateRules},
    denials::DenialLog,
    events::Events,
    metrics::{self, Metrics, Stats},
    observers::Observers,
    override_state::OverrideState,
    reservation_state::Reservations,
    snapshot::SnapshotHealth,
    top::TopTalkers,
};

/// The limiter that all listeners share. A process has only one limiter, behind an [`Arc`].
#[derive(Debug)]
pub struct ServerLimiter {
    pub(crate) rules: ArcSwap<RuleSet>,
    pub(crate) backend: Backend,
    pub(crate) clock: Clock,
    pub(crate) observers: Observers,
    pub(crate) reservations: Reservations,
    pub(crate) override_state: OverrideState,
    /// The queues of the requests that wait for concurrency slots.
    pub(crate) waiters: Waiters,
    snapshots: SnapshotHealth,
    trust: Trust,
    key_mask: KeyMask,
}

impl ServerLimiter {
    /// Creates a limiter that enforces `rules` with `backend`.
    #[must_use]
    pub fn new(rules: RuleSet, backend: impl Into<Backend>, clock: Clock) -> Self {
        let override_state = OverrideState::default();
        let rules = override_state.apply_to(rules);
        Self {
            observers: Observers::new(&rules, clock.now()),
            rules: ArcSwap::from_pointee(rules),
            backend: backend.into(),
            clock,
            reservations: Reservations::off(),
            override_state,
            waiters: Waiters::default(),
            snapshots: SnapshotHealth::default(),
            trust: Trust::default(),
            key_mask: KeyMask::plain(),
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
    pub fn with_top(mut self, bounds: Option<TopBounds>) -> Self {
        self.observers.top = bounds.map(|bounds| TopTalkers::new(bounds, &self.rules.load()));
        self
    }

    /// Returns the lists of top talkers; `None` if they are off.
    #[must_use]
    pub fn top_talkers(&self) -> Option<&TopTalkers> {
        self.observers.top.as_ref()
    }

    /// Sets how many recent denials are kept, and how many are logged.
    #[must_use]
    pub fn with_denials(mut self, settings: &DenialsConfig) -> Self {
        self.observers.denials = DenialLog::new(settings);
        self
    }

    /// Returns the recent denials.
    #[must_use]
    pub fn denials(&self) -> &DenialLog {
        &self.observers.denials
    }

    /// Records requests with `recorder`. By default, and with `None`, no request is recorded.
    #[must_use]
    pub fn with_recorder(mut self, recorder: Option<RequestRecorder>) -> Self {
        self.observers.recorder = recorder;
        self
    }

    /// Returns the recorder of requests, if there is one.
    #[must_use]
    pub fn recorder(&self) -> Option<&RequestRecorder> {
        self.observers.recorder.as_ref()
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
    pub fn with_events(mut self, events: Option<Arc<Events>>) -> Self {
        if let (Some(events), Some(redis_store)) = (&events, self.redis_store()) {
            let (events, clock) = (Arc::clone(events), self.clock.clone());
            redis_store.observe_outages(move |change| events.emit_outage(change, clock.now()));
        }
        self.observers.events = events;
        self
    }

    /// Returns the events; `None` if they are off.
    #[must_use]
    pub fn events(&self) -> Option<&Arc<Events>> {
        self.observers.events.as_ref()
    }

    /// Replaces the candidate rules; `None` ends the comparison. If there already was a candidate,
    /// its counters are kept, but the comparison restarts. `bounds` apply only if a new memory
    /// store is created for the candidate.
    ///
    /// The active rule set must name all entries that the candidate rules use. The listeners
    /// extract only the entries that the active rule set names. See
    /// [`RuleSet::with_extra_entries_of`].
    pub fn set_candidate(&self, read: Option<CandidateRules>, bounds: MemoryBounds) {
        let old = self.candidate();
        let now = self.now();
        let new = read.map(|read| {
            let read = CandidateRules {
                rules: read.rules.with_overrides(self.overrides()),
                ..read
            };
            Arc::new(Candidate::new(
                read,
                &self.backend,
                bounds,
                old.as_deref(),
                now,
            ))
        });
        self.observers.candidate.store(new);
    }

    /// Returns the candidate rules, if there are any.
    #[must_use]
    pub fn candidate(&self) -> Option<Arc<Candidate>> {
        self.observers.candidate.load_full()
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
        let rules = self.override_state.apply_to(rules);
        self.observers.swap_rules(&self.rules.load(), &rules);
        self.waiters.retain_rules(|rule| rules.rule(rule).is_some());
        self.rules.store(Arc::new(rules));
        if let Some(redis_store) = self.redis_store() {
            redis_store.clear_denial_cache();
        }
    }

    /// Returns the memory store of the process. With Redis, the memory store is the fallback while
    /// Redis is unreachable. To decide a request, use the limiter itself as a
    /// [`Store`](tidegate_core::Store).
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
        &self.observers.metrics
    }

    /// Adds all metrics to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        let stats = Stats {
            store: self.local_store().stats(),
            redis: self.redis_store().map(FallbackStore::stats),
            now: self.now(),
            rules: self.rules(),
            missing_key_entries: self.observers.audit.load().missing_key_entries(),
        };
        self.observers.metrics.collect(&stats, page);
        self.observers.collect(page);
        self.reservations.collect(page);
        self.override_state.collect(page);
        metrics::collect_waiting(&self.waiters, page);
    }

    /// Returns all metrics in the Prometheus text format.
    #[must_use]
    pub fn exposition(self: &Arc<Self>) -> String {
        let limiter = Arc::clone(self);
        prometheus::encode(Format::Text, move |page| limiter.collect(page))
    }
}
