//! Evaluates the descriptors of a request.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use futures_util::future::join_all;
use tidegate_config::envoy::{Ratio, StoreFailure};
use tidegate_core::{Charge, Cost, Effect, Exactness, Outcome, StoreDecision, Timestamp};
use tidegate_limiter::{DecisionRequest, ServerLimiter};
use tokio::time::Instant;

use super::{
    RlsError,
    applied_limit::{AppliedLimit, DescriptorMatch, Hits, LimitResult},
    over_limit_cache::OverLimitCache,
};

/// The context of a decision, such as the store, the settings and the time.
#[derive(Debug)]
pub(super) struct Evaluator<'s> {
    pub(super) limiter: &'s ServerLimiter,
    pub(super) store_failure: StoreFailure,
    pub(super) over: Option<&'s OverLimitCache>,
    pub(super) now: Timestamp,
    /// The common deadline for all store queries of the request. If Redis has not replied by the
    /// deadline, the store is treated as unavailable.
    pub(super) until: Option<Instant>,
    pub(super) near_limit_ratio: Ratio,
}

impl Evaluator<'_> {
    /// Decides every descriptor separately. The result for one descriptor does not affect the other
    /// descriptors.
    ///
    /// # Errors
    ///
    /// Returns [`RlsError::Store`] under the conditions of [`Self::query_store`].
    pub(super) async fn evaluate_each(
        &self,
        matches: &mut [DescriptorMatch<'_>],
    ) -> Result<(), RlsError> {
        let decided = self.evaluate_separately(applied_limits(matches)).await;
        self.count(matches, &decided);
        decided
    }

    /// Decides each of `descriptors` separately. With Redis, descriptors with different keys are
    /// queried concurrently, so that their commands are pipelined. Descriptors with the same key
    /// are decided in order. With the memory store, descriptors are decided one after the other,
    /// because the memory store never waits.
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
        let cached_until = match applied.hits {
            Hits::Refund(_) => None,
            Hits::None | Hits::Charge(_) => applied
                .result
                .cached_until
                .or_else(|| self.cached_over_until(applied)),
        };
        if let Some(until) = cached_until {
            applied.result = LimitResult::cached(until);
            return Ok(());
        }
        applied.result = match applied.hits {
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
                // Dropping the guard removes the cached entry, even if the request is cancelled or
                // the outcome of the refund is unknown.
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
        self.cache_over_limit(applied, exactness);
        Ok(())
    }

    /// # Errors
    ///
    /// Returns [`RlsError::Store`] if the store is unavailable and the settings require an error
    /// for an unavailable store.
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
            within: self.within(),
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

    /// Returns the time until the deadline.
    pub(super) fn within(&self) -> Option<Duration> {
        let until = self.until?;
        Some(until.duration_since(Instant::now()))
    }

    /// Returns the end of the window if, according to the cache, the descriptor is over its limit.
    pub(super) fn cached_over_until(&self, applied: &AppliedLimit<'_>) -> Option<Timestamp> {
        let cache = self.over.filter(|_| !applied.is_overridden())?;
        cache.over_until(&applied.key, self.now)
    }

    /// Adds an over-limit descriptor to the cache, if no hit can be admitted before its window
    /// ends. No hit can be admitted if the count exceeds the limit itself, and not just this node's
    /// share of the limit.
    ///
    /// A refund on another node does not invalidate the cache entry, which stays in the cache until
    /// it expires. envoyproxy/ratelimit has the same limitation.
    pub(super) fn cache_over_limit(&self, applied: &AppliedLimit<'_>, exactness: Exactness) {
        if let (Some(cache), Some(outcome)) = (self.over, &applied.result.outcome)
            && applied.result.over
            && !applied.is_overridden()
            && exactness == Exactness::Exact
            && outcome.excess > 0
        {
            let until = self.now.after(outcome.reset_after);
            cache.insert(&applied.key, until, applied.epoch);
        }
    }
}

/// Returns the request's descriptors that have a limit.
pub(super) fn applied_limits<'s, 'd>(
    matches: &'s mut [DescriptorMatch<'d>],
) -> impl Iterator<Item = &'s mut AppliedLimit<'d>> {
    matches.iter_mut().filter_map(|matched| match matched {
        DescriptorMatch::Limited(applied) => Some(applied),
        DescriptorMatch::NoLimit | DescriptorMatch::Unlimited(_) => None,
    })
}
