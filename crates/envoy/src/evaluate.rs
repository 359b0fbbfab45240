//! Evaluates the descriptors of a request.

use std::{
    collections::{HashMap, hash_map::Entry},
    ops::Deref,
    sync::Arc,
};

use futures_util::future::join_all;
use tidegate_config::envoy::{Ratio, StoreFailure};
use tidegate_core::{
    Charge, Cost, Decision, Effect, Exactness, Limits, Outcome, StoreDecision, Timestamp,
};
use tidegate_limiter::{DecisionRequest, ServerLimiter};
use tokio::time::Instant;

use super::{
    RlsError,
    counters::Counters,
    over_limit_cache::{CacheEpoch, OverLimitCache},
    rules::{Rule, RuleLimits},
    service::DescriptorMatch,
};

/// The operation of a descriptor on its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    /// Query the status without charging.
    None,
    /// Charge this number of hits.
    Charge(Cost),
    /// Refund this number of hits.
    Refund(Cost),
}

/// The origin of a descriptor's limits: a rule, or an override in the request.
#[derive(Debug)]
pub(super) enum Source<'d> {
    Rule(&'d Rule, &'d RuleLimits),
    Request(Arc<RuleLimits>),
}

impl Deref for Source<'_> {
    type Target = RuleLimits;

    fn deref(&self) -> &RuleLimits {
        match self {
            Self::Rule(_, limits) => limits,
            Self::Request(limits) => limits,
        }
    }
}

/// A limit that applies to a descriptor, and its result.
#[derive(Debug)]
pub(super) struct AppliedLimit<'d> {
    pub(super) limits: Source<'d>,
    pub(super) key: Vec<u8>,
    pub(super) counters: Arc<Counters>,
    pub(super) hits: Hits,
    /// The state of the over-limit cache when the decision began.
    pub(super) epoch: CacheEpoch,
    pub(super) result: LimitResult,
}

/// The result of evaluating a descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LimitResult {
    /// Whether the descriptor is over its limit, even if the rule is in shadow mode.
    pub(super) over: bool,
    /// Whether the result came from the cache, without a query to the store.
    pub(super) was_cached: bool,
    /// The index of the limit that the status reports.
    pub(super) limit: usize,
    /// The outcome of the limit at the index `limit`; `None` if the store was not queried.
    pub(super) outcome: Option<Outcome>,
}

impl<'d> AppliedLimit<'d> {
    pub(super) fn rule(&self) -> Option<&'d Rule> {
        match self.limits {
            Source::Rule(rule, _) => Some(rule),
            Source::Request(_) => None,
        }
    }

    /// Returns whether the rule of this limit is in quota mode. Rules in quota mode deny a request
    /// only if all of the request's rules in quota mode are over their limits.
    pub(super) fn is_quota(&self) -> bool {
        self.rule().is_some_and(|rule| rule.quota)
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits.limits
    }

    pub(super) fn charge(&self, cost: Cost) -> Charge<'_> {
        Charge {
            key: &self.key,
            limits: self.limits(),
            cost,
            longest_wait: None,
        }
    }
}

/// The context of a decision, which includes the store, the settings and the time.
#[derive(Debug)]
pub(super) struct Evaluator<'s> {
    pub(super) limiter: &'s ServerLimiter,
    pub(super) store_failure: StoreFailure,
    pub(super) over: Option<&'s OverLimitCache>,
    pub(super) now: Timestamp,
    /// The common deadline for all store queries of the request. If Redis has not answered a query
    /// by the deadline, the store is treated as unavailable.
    pub(super) until: Option<Instant>,
    pub(super) near_limit_ratio: Ratio,
}

impl Evaluator<'_> {
    /// Decides every descriptor on its own. No result affects the result of another descriptor.
    ///
    /// # Errors
    ///
    /// Returns [`RlsError::Store`] under the conditions of [`Self::query_store`].
    pub(super) async fn evaluate_each(
        &self,
        matches: &mut [DescriptorMatch<'_>],
    ) -> Result<(), RlsError> {
        let decided = self.evaluate_separately(limited(matches)).await;
        self.count(matches, &decided);
        decided
    }

    /// Decides each of `descriptors` on its own. With Redis, descriptors with different keys are
    /// queried concurrently, so that their commands are pipelined. Descriptors with the same key
    /// are decided in order. With the memory store, descriptors are decided one after the other,
    /// because this store never waits.
    pub(super) async fn evaluate_separately<'a, 'd: 'a>(
        &self,
        descriptors: impl Iterator<Item = &'a mut AppliedLimit<'d>>,
    ) -> Result<(), RlsError> {
        if self.limiter.redis_store().is_none() {
            for applied in descriptors {
                self.evaluate_one(applied).await?;
            }
            return Ok(());
        }
        let mut keys: HashMap<Vec<u8>, usize> = HashMap::new();
        let mut of_one_key: Vec<Vec<&mut AppliedLimit<'d>>> = Vec::new();
        for applied in descriptors {
            let next = of_one_key.len();
            match keys.entry(applied.key.clone()) {
                Entry::Occupied(known) => of_one_key[*known.get()].push(applied),
                Entry::Vacant(new) => {
                    new.insert(next);
                    of_one_key.push(vec![applied]);
                }
            }
        }
        let each = of_one_key.into_iter().map(|descriptors| async move {
            for applied in descriptors {
                self.evaluate_one(applied).await?;
            }
            Ok(())
        });
        join_all(each).await.into_iter().collect()
    }

    async fn evaluate_one(&self, applied: &mut AppliedLimit<'_>) -> Result<(), RlsError> {
        let mut exactness = Exactness::Exact;
        applied.result = match applied.hits {
            Hits::None | Hits::Charge(_)
                if applied.result.was_cached || self.is_cached_over(applied) =>
            {
                LimitResult::cached()
            }
            Hits::None => {
                let (decided, outcomes) = self
                    .query_store(&[applied.charge(Cost::ONE)], Effect::Look)
                    .await?;
                exactness = decided.exactness;
                LimitResult::of_query(&outcomes)
            }
            Hits::Charge(cost) => {
                let (decided, outcomes) = self
                    .query_store(&[applied.charge(cost)], Effect::Charge)
                    .await?;
                exactness = decided.exactness;
                LimitResult::of_charge(&decided.decision, &outcomes)
            }
            Hits::Refund(cost) => {
                // When the guard is dropped, it removes the cached entry. So the entry is also
                // removed if the request is cancelled, or if the outcome of the refund is unknown.
                let _invalidated = self
                    .over
                    .map(|cache| cache.invalidate_on_drop(&applied.key));
                let (_, outcomes) = self
                    .query_store(&[applied.charge(cost)], Effect::Refund)
                    .await?;
                LimitResult {
                    over: false,
                    ..LimitResult::of_query(&outcomes)
                }
            }
        };
        self.remember(applied, exactness);
        Ok(())
    }

    /// # Errors
    ///
    /// Returns [`RlsError::Store`] if the store is unavailable and the settings require an error in
    /// this case.
    pub(super) async fn query_store(
        &self,
        charges: &[Charge<'_>],
        effect: Effect,
    ) -> Result<(StoreDecision, Vec<Outcome>), RlsError> {
        let (limiter, mut outcomes) = (self.limiter, Vec::new());
        let request = DecisionRequest {
            charges,
            now: self.now,
            effect,
            within: self.until.map(|until| until.duration_since(Instant::now())),
        };
        let decided = match self.store_failure {
            StoreFailure::Answer => limiter.decide(request, &mut outcomes).await,
            StoreFailure::Error => {
                let decided = limiter.decide_or_fail(request, &mut outcomes).await;
                decided.map_err(|_| RlsError::Store)?
            }
        };
        Ok((decided, outcomes))
    }

    pub(super) fn is_cached_over(&self, applied: &AppliedLimit<'_>) -> bool {
        self.over
            .is_some_and(|cache| cache.is_over(&applied.key, self.now))
    }

    /// Caches that a descriptor is over its limit, if no hit can be admitted before its window
    /// ends. The count must exceed the limit itself, not just this node's share of the limit.
    ///
    /// The cache does not notice refunds on other nodes until the entry expires.
    /// envoyproxy/ratelimit has the same limitation.
    pub(super) fn remember(&self, applied: &AppliedLimit<'_>, exactness: Exactness) {
        if let (Some(cache), Some(outcome)) = (self.over, &applied.result.outcome)
            && applied.result.over
            && exactness == Exactness::Exact
            && outcome.excess > 0
        {
            let until = self.now.after(outcome.reset_after);
            cache.remember(&applied.key, until, applied.epoch);
        }
    }
}

impl LimitResult {
    /// Creates the result of a descriptor that is over its limit according to the cache.
    pub(super) fn cached() -> Self {
        Self {
            over: true,
            was_cached: true,
            ..Self::default()
        }
    }

    /// Creates the result of a query without charge. The descriptor is over its limit if the count
    /// exceeds the limit.
    pub(super) fn of_query(outcomes: &[Outcome]) -> Self {
        let over = outcomes.iter().position(|outcome| outcome.excess > 0);
        Self::reporting(over, outcomes)
    }

    /// Creates the result of a charge. The descriptor is over its limit if any limit denied the
    /// charge, if the store is full, or if the key is blocked.
    pub(super) fn of_charge(decision: &Decision, outcomes: &[Outcome]) -> Self {
        if let Decision::Full { .. } | Decision::Blocked { .. } = decision {
            return Self {
                over: true,
                ..Self::default()
            };
        }
        let denying = outcomes
            .iter()
            .enumerate()
            .filter(|(_, outcome)| !outcome.allowed);
        let longest = denying.max_by_key(|(_, outcome)| outcome.retry_after);
        Self::reporting(longest.map(|(at, _)| at), outcomes)
    }

    fn reporting(over: Option<usize>, outcomes: &[Outcome]) -> Self {
        let tightest = || {
            let least = outcomes
                .iter()
                .enumerate()
                .min_by_key(|(_, outcome)| outcome.remaining);
            least.map_or(0, |(at, _)| at)
        };
        let limit = over.unwrap_or_else(tightest);
        Self {
            over: over.is_some(),
            was_cached: false,
            limit,
            outcome: outcomes.get(limit).copied(),
        }
    }
}

/// Returns the descriptors of the request to which a limit applies.
pub(super) fn limited<'s, 'd>(
    matches: &'s mut [DescriptorMatch<'d>],
) -> impl Iterator<Item = &'s mut AppliedLimit<'d>> {
    matches.iter_mut().filter_map(|matched| match matched {
        DescriptorMatch::Limited(applied) => Some(applied),
        DescriptorMatch::NoLimit | DescriptorMatch::Unlimited(_) => None,
    })
}
