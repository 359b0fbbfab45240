//! A store with a local fallback: Redis makes the decisions. If Redis is slow or unreachable, or
//! refuses the call, this server decides.
//!
//! ```text
//! request ─▶ denial cached? ─▶ Redis ─▶ answered: exact, and the local counts are updated
//!                  │               └───▶ slow or unreachable: the `on_failure` policy decides
//!                  └─▶ denied, without a call
//! ```
//!
//! A request that Redis admits is also charged to this node's share of the limits. Therefore, if
//! Redis becomes slow or unreachable, a client that has exhausted its limit does not start again
//! with an unused limit.

mod block_sync;
mod census;
mod denial_cache;
mod outage;
mod receipt;
mod server_errors;
mod share;
mod stats;

use std::{sync::Arc, time::Duration};

use futures_util::{
    FutureExt as _, TryFutureExt as _,
    future::{Either, ready},
};
use tidegate_core::{
    Accounting, CacheSearch, Charge, Decision, DecisionAndReceipt, Effect, Exactness,
    FallbackShare, MaybeReady, MemoryStore, OnFailure, Outcome, Renewal, Settlement, Source, Span,
    Store, StoreDecision, StoreRequest, Timestamp,
};
use tokio::{runtime::Handle, time::Instant};

use self::{
    block_sync::BlockSync,
    census::Census,
    denial_cache::{DecisionTime, DenialCache, Epoch},
    outage::{OutageLog, OutageTracker, OutageWatch},
    server_errors::ServerErrors,
    stats::FallbackCounters,
};
pub use self::{outage::OutageChange, receipt::FallbackReceipt, stats::FallbackStats};
use crate::{Redis, RedisStore, StoreError};

/// The `retry_after` value of a denial by the `closed` policy.
const CLOSED_RETRY_AFTER: Span = Span::from_secs(1);

/// The settings for decisions while Redis is slow or unreachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FallbackSettings {
    /// The failure policy of rules that do not set their own; default [`OnFailure::Local`].
    pub on_failure: OnFailure,
    /// This node's share of each limit while Redis is slow or unreachable; default
    /// [`NodeShare::Auto`].
    pub share: NodeShare,
    /// Maximum time to live of a cached denial; zero disables the cache. The default is 1 s. If
    /// another node resets a key or lifts a block, this node may notice the change only after this
    /// time.
    pub denial_ttl: Span,
}

impl Default for FallbackSettings {
    fn default() -> Self {
        Self {
            on_failure: OnFailure::default(),
            share: NodeShare::default(),
            denial_ttl: Span::from_secs(1),
        }
    }
}

/// A node's share of every limit while Redis is slow or unreachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeShare {
    /// 1/n of every limit, where n is the number of servers with the same Redis and the same
    /// prefix, according to the last count. If the servers have never been counted, because Redis
    /// has not replied since the start, the share is one half.
    #[default]
    Auto,
    /// A fixed share.
    Fixed(FallbackShare),
}

/// A store that makes its decisions in Redis. While Redis is slow or unreachable, the store uses
/// the local counts of this server, which is one node of the fleet that shares Redis.
#[derive(Debug)]
pub struct FallbackStore {
    store: RedisStore,
    redis: Arc<Redis>,
    local: Arc<MemoryStore>,
    settings: FallbackSettings,
    denial_cache: DenialCache,
    counters: FallbackCounters,
    server_errors: Arc<ServerErrors>,
    outage: Arc<OutageTracker>,
    outage_log: Arc<OutageLog>,
    _outage_watch: OutageWatch,
    /// The server count; present only if the share depends on it.
    census: Option<Census>,
    block_sync: BlockSync,
}

impl FallbackStore {
    /// Creates a store that makes its decisions in `redis`. All keys of the store begin with
    /// `prefix`. `local` is this node's own memory store, which decides requests while Redis is
    /// slow or unreachable.
    #[must_use]
    pub fn new(
        redis: Arc<Redis>,
        prefix: &str,
        local: MemoryStore,
        settings: FallbackSettings,
    ) -> Self {
        let store = RedisStore::new(Arc::clone(&redis), prefix);
        let counts = settings.share == NodeShare::Auto;
        let census = counts.then(|| Census::start(store.clone(), redis.runtime()));
        let local = Arc::new(local);
        let block_sync = BlockSync::start(store.clone(), Arc::clone(&local), redis.runtime());
        let outage = Arc::<OutageTracker>::default();
        let server_errors = Arc::<ServerErrors>::default();
        let outage_log = Arc::<OutageLog>::default();
        let log = Arc::clone(&outage_log);
        let (watched, errors) = (Arc::clone(&redis), Arc::clone(&server_errors));
        let outage_watch = OutageWatch::start(
            Arc::clone(&outage),
            // A Redis server that refuses commands is connected, but makes no decisions.
            move || watched.health().error.is_none() && !errors.has_recent(),
            move |summary| log.end(summary),
            redis.runtime(),
        );
        Self {
            store,
            redis,
            local,
            settings,
            denial_cache: DenialCache::default(),
            counters: FallbackCounters::default(),
            server_errors,
            outage,
            outage_log,
            _outage_watch: outage_watch,
            census,
            block_sync,
        }
    }

    /// Returns the denial of `request` if a block by entries denies one of its charges. The store
    /// need not call Redis, because every server has a copy of these blocks. Therefore, these
    /// blocks are also enforced during an outage.
    pub fn block_by_entries(
        &self,
        request: &StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<StoreDecision> {
        let StoreRequest {
            ref charges,
            now,
            effect,
            ..
        } = *request;
        let decision = Decision::of_blocked_charges(charges, effect, now)?;
        outcomes.clear();
        if !matches!(
            request.accounting,
            Accounting::Inspection | Accounting::Attempt
        ) {
            self.counters.count(Source::Cache);
        }
        Some(StoreDecision {
            decision,
            exactness: Exactness::Exact,
            source: Source::Cache,
        })
    }

    /// Returns a cached denial of `request`, if one is valid.
    pub fn cached_denial(
        &self,
        request: &StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<StoreDecision> {
        let is_denied = request.cache_search == CacheSearch::Due
            && request.effect.can_deny()
            && self
                .denial_cache
                .find(request.charges, request.now, outcomes);
        is_denied.then(|| {
            if request.accounting != Accounting::Attempt {
                self.counters.count(Source::Cache);
            }
            StoreDecision {
                decision: Decision::Limited,
                exactness: Exactness::Exact,
                source: Source::Cache,
            }
        })
    }

    /// Decides in Redis, without any fallback.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if no decision was made, or if it is unknown whether one was made. The
    /// counters of the store record the error.
    pub async fn decide_in_redis(
        &self,
        request: &StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<StoreDecision, StoreError> {
        let epoch = self.denial_cache.epoch(request.charges);
        let began = Instant::now();
        // The guard also invalidates the denials if the caller stops waiting or the outcome is
        // unknown.
        let invalidation = matches!(request.effect, Effect::Charge | Effect::Refund)
            .then(|| self.denial_cache.invalidate_on_drop(request.charges.iter()));
        let call = self.store.check(request.charges, request.effect, outcomes);
        let decision = self.with_timeout(call, request.within, request.now).await?;
        let is_denied = request.effect == Effect::Charge && decision != Decision::Admitted;
        if let Some(invalidation) = invalidation.filter(|_| is_denied) {
            invalidation.disarm();
        }
        match request.effect {
            Effect::Charge => {
                self.cache_result(request, &decision, outcomes, epoch, began);
                if decision == Decision::Admitted {
                    self.update_share(request, add_elapsed(request.now, began), Effect::Charge);
                }
            }
            Effect::Refund => {
                self.update_share(request, add_elapsed(request.now, began), Effect::Refund);
            }
            Effect::Peek | Effect::Look => {}
        }
        Ok(self.record_decision(decision, request.now, request.accounting))
    }

    /// Decides in Redis. If Redis fails, applies the failure policies of the rules.
    async fn decide_remotely(
        &self,
        mut request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> StoreDecision {
        let began = Instant::now();
        match self.decide_in_redis(&request, outcomes).await {
            Ok(decided) => decided,
            Err(_) => {
                request.now = add_elapsed(request.now, began);
                self.fall_back(&mut request, outcomes, None)
            }
        }
    }

    /// Waits for `call`, but no longer than the decision timeout or `within`, whichever is shorter.
    /// The decision timeout covers all Redis calls of a decision. If `within` is zero, Redis is not
    /// called, because the caller would not learn whether the request was charged.
    // This function is not async: an async function would contain `call` twice, once as its
    // parameter and once in the timeout, and decisions would move twice the bytes.
    fn with_timeout<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
        within: Option<Duration>,
        now: Timestamp,
    ) -> impl Future<Output = Result<T, StoreError>> {
        let longest = self.redis.timeout();
        let within = within.map_or(longest, |within| within.min(longest));
        let too_late = "the timeout of the decision has expired";
        let result = if within.is_zero() {
            Either::Left(ready(Err(StoreError::NotExecuted(too_late.to_owned()))))
        } else {
            let timed = tokio::time::timeout(within, call);
            Either::Right(timed.map(move |result| {
                result.unwrap_or_else(|_| Err(StoreError::Unknown(too_late.to_owned())))
            }))
        };
        result.inspect_err(move |error| {
            self.counters.count_failure(error);
            self.server_errors.record(error, now);
        })
    }

    /// Returns whether every server is known to be down, so that no call needs to be attempted. If
    /// every server is down, counts a failure.
    fn is_unavailable(&self) -> bool {
        let is_down = self.redis.is_down();
        if is_down {
            self.counters.count_unavailable();
        }
        is_down
    }

    /// Records a decision by Redis, and logs the end of an outage if the decision ends the outage.
    fn record_decision(
        &self,
        decision: Decision,
        now: Timestamp,
        accounting: Accounting,
    ) -> StoreDecision {
        if !matches!(accounting, Accounting::Inspection | Accounting::Attempt) {
            self.counters.count(Source::Redis);
        }
        if let Some(summary) = self.outage.record_exact(now) {
            self.outage_log.end(summary);
        }
        StoreDecision {
            decision,
            exactness: Exactness::Exact,
            source: Source::Redis,
        }
    }

    /// Calls `observer` when a Redis outage begins or ends. Ignores all observers after the first.
    /// The observer is called on the thread of a decision, so it must not block.
    pub fn observe_outages(&self, observer: impl Fn(OutageChange<'_>) + Send + Sync + 'static) {
        self.outage_log.observe(Box::new(observer));
    }

    /// Returns the Redis store, for operator commands.
    #[must_use]
    pub fn store(&self) -> &RedisStore {
        &self.store
    }

    /// Returns a store on the same Redis servers, but without a fallback. The keys of the returned
    /// store begin with this store's prefix and `name`, so they differ from all keys of this store.
    #[must_use]
    pub fn separate_store(&self, name: &str) -> RedisStore {
        let prefix = [self.store.prefix(), name.as_bytes()].concat();
        RedisStore::with_executor(Arc::clone(&self.redis) as Arc<_>, &prefix)
    }

    /// Returns the runtime that serves the connections to Redis.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        self.redis.runtime()
    }

    /// Returns this node's own memory store, which decides requests while Redis is slow or
    /// unreachable.
    #[must_use]
    pub fn local(&self) -> &MemoryStore {
        &self.local
    }

    /// Copies an active block from Redis to this node, which enforces the copy while Redis is slow
    /// or unreachable. Returns false and changes nothing if there are too many blocks.
    pub fn block_locally(
        &self,
        key: &[u8],
        span: Option<Span>,
        reason: &str,
        now: Timestamp,
    ) -> bool {
        self.block_sync.copy(key, span, reason, now)
    }

    /// Returns the counters, and the health of Redis.
    #[must_use]
    pub fn stats(&self) -> FallbackStats {
        let servers = self.census.as_ref().and_then(Census::servers);
        self.counters.stats(self.redis.health(), servers)
    }

    /// Returns this node's share of every limit while Redis is slow or unreachable.
    #[must_use]
    pub fn share(&self) -> FallbackShare {
        match (self.settings.share, &self.census) {
            (NodeShare::Fixed(share), _) => share,
            (NodeShare::Auto, Some(census)) => census.share(),
            (NodeShare::Auto, None) => FallbackShare::default(),
        }
    }

    /// If Redis has refused a call within the last minute, returns the latest error. The message
    /// says how to fix the problem.
    #[must_use]
    pub fn last_server_error(&self, now: Timestamp) -> Option<String> {
        self.server_errors.latest(now)
    }

    /// Copies the result of a decision by Redis: copies a block to the local store, and a denial to
    /// the denial cache. The request was sent at `began`, after `epoch` was read.
    fn cache_result(
        &self,
        request: &StoreRequest<'_, '_>,
        decision: &Decision,
        outcomes: &[Outcome],
        epoch: Epoch,
        began: Instant,
    ) {
        let StoreRequest { charges, now, .. } = request;
        match decision {
            Decision::Limited => {
                let elapsed = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
                let time = DecisionTime {
                    sent_at: *now,
                    elapsed: Span::from_micros(elapsed),
                };
                self.denial_cache
                    .insert(charges, outcomes, epoch, time, self.settings.denial_ttl);
            }
            Decision::Blocked {
                charge,
                retry_after,
                ..
            } => {
                if let Some(charge) = charges.get(*charge) {
                    self.block_locally(charge.key, retry_after.span(), "", *now);
                }
            }
            Decision::Admitted | Decision::Full { .. } => {}
        }
    }
}

/// Returns the current time: `now`, which was read at `began`, plus the time that has elapsed
/// since. The local store must not receive the time from before the call. After a long call, the
/// local store would conclude from the older time that the clock was set back.
fn add_elapsed(now: Timestamp, began: Instant) -> Timestamp {
    let elapsed = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    now.after(Span::from_micros(elapsed))
}

/// An operation that needs no call to Redis completes immediately. No call is needed if a cached
/// denial is valid, or if every server is down and the rules' fallback policies apply. The futures
/// that call Redis are boxed, so that the callers' futures stay small.
impl Store for FallbackStore {
    type Receipt = FallbackReceipt;

    fn decide(
        &self,
        mut request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<StoreDecision, impl Future<Output = StoreDecision> + Send> {
        if let Some(decided) = self.block_by_entries(&request, outcomes) {
            return MaybeReady::Ready(decided);
        }
        if let Some(decided) = self.cached_denial(&request, outcomes) {
            return MaybeReady::Ready(decided);
        }
        if self.is_unavailable() {
            return MaybeReady::Ready(self.fall_back(&mut request, outcomes, None));
        }
        MaybeReady::Pending(async move { Box::pin(self.decide_remotely(request, outcomes)).await })
    }

    fn reserve(
        &self,
        request: StoreRequest<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> MaybeReady<
        DecisionAndReceipt<FallbackReceipt>,
        impl Future<Output = DecisionAndReceipt<FallbackReceipt>> + Send,
    > {
        self.reserve_with_fallback(request, outcomes)
    }

    fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut Option<FallbackReceipt>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> MaybeReady<(), impl Future<Output = ()> + Send> {
        self.settle_with_fallback(charges, receipt, settlements, now)
    }

    fn count(
        &self,
        _now: Timestamp,
        _charges: &[Charge<'_>],
        _evaluated: &[Charge<'_>],
        decided: &StoreDecision,
        _outcomes: &[Outcome],
    ) {
        self.counters.count(decided.source);
    }

    fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut FallbackReceipt,
        now: Timestamp,
    ) -> MaybeReady<Renewal, impl Future<Output = Renewal> + Send> {
        self.renew_with_fallback(charges, receipt, now)
    }

    fn clear_denial_cache(&self) {
        self.denial_cache.invalidate_all();
    }
}
