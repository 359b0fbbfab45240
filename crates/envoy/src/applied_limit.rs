//! The limit that applies to a descriptor, and its result.

use std::{ops::Deref, sync::Arc};

use tidegate_core::{
    Charge, Cost, Decision, Limit, Limits, Outcome, Reason, RetryAfter, Timestamp,
};

use super::{
    counters::DescriptorCounters,
    over_limit_cache::CacheEpoch,
    rules::{DescriptorRule, RuleLimits},
};

/// The result of matching a descriptor to a rule.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "most descriptors have a limit, and a box would add an allocation to every decision"
)]
pub(super) enum DescriptorMatch<'d> {
    /// No rule applies to the descriptor, or the matching rule is replaced by another rule that
    /// applies to the same request.
    NoLimit,
    /// An unlimited rule applies.
    Unlimited(&'d DescriptorRule),
    /// A limit applies. The limit comes from a rule or from the descriptor itself.
    Limited(AppliedLimit<'d>),
}

/// The operation that a descriptor requests on its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    /// Query the status without charging.
    None,
    /// Charge this number of hits.
    Charge(Cost),
    /// Refund this number of hits.
    Refund(Cost),
}

/// The origin of a descriptor's limits.
#[derive(Debug)]
pub(super) enum LimitSource<'d> {
    /// A rule.
    Rule(&'d DescriptorRule, &'d RuleLimits),
    /// An override that an operator has set for a key of a rule.
    Override(&'d DescriptorRule, Arc<RuleLimits>),
    /// An override in the request.
    Request(Arc<RuleLimits>),
}

impl Deref for LimitSource<'_> {
    type Target = RuleLimits;

    fn deref(&self) -> &RuleLimits {
        match self {
            Self::Rule(_, limits) => limits,
            Self::Override(_, limits) | Self::Request(limits) => limits,
        }
    }
}

/// A limit that applies to a descriptor, and its result.
#[derive(Debug)]
pub(super) struct AppliedLimit<'d> {
    pub(super) limits: LimitSource<'d>,
    /// The index of the descriptor in the request.
    pub(super) descriptor: usize,
    pub(super) key: Vec<u8>,
    pub(super) counters: Arc<DescriptorCounters>,
    pub(super) hits: Hits,
    /// The state of the over-limit cache before the decision started.
    pub(super) epoch: CacheEpoch,
    pub(super) result: LimitResult,
}

/// The limit that denied a descriptor's hits.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeniedLimit<'a> {
    pub(super) limit: &'a Limit,
    pub(super) reason: Reason,
    pub(super) retry_after: RetryAfter,
}

/// The result of evaluating a descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LimitResult {
    /// Whether the descriptor is over its limit, even for a rule in shadow mode.
    pub(super) over: bool,
    /// The end of the window, if the result came from the cache and the store was not queried.
    pub(super) cached_until: Option<Timestamp>,
    /// The index of the limit that is reported in the status.
    pub(super) limit: usize,
    /// The outcome of the limit at the index `limit`; `None` if the store was not queried, or if
    /// the store decided without evaluating a limit.
    pub(super) outcome: Option<Outcome>,
    /// The reason and the retry time, if the store denied the charge without evaluating a limit.
    pub(super) denied_by_store: Option<(Reason, RetryAfter)>,
}

impl<'d> AppliedLimit<'d> {
    pub(super) fn rule(&self) -> Option<&'d DescriptorRule> {
        match self.limits {
            LimitSource::Rule(rule, _) | LimitSource::Override(rule, _) => Some(rule),
            LimitSource::Request(_) => None,
        }
    }

    /// Returns whether the limits are those of an override that an operator has set. An operator
    /// can change these limits at any time, so results are not cached.
    pub(super) fn is_overridden(&self) -> bool {
        matches!(self.limits, LimitSource::Override(..))
    }

    /// Returns whether the rule of this limit is in quota mode. Rules in quota mode deny a request
    /// only if all of the request's rules in quota mode are over their limits.
    pub(super) fn is_quota(&self) -> bool {
        self.rule().is_some_and(|rule| rule.quota)
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits.limits
    }

    /// Returns the limit that denied this descriptor's hits; `None` if the hits were not denied. A
    /// query with 0 hits is never denied.
    pub(super) fn denied_limit(&self, now: Timestamp) -> Option<DeniedLimit<'_>> {
        let result = self.result;
        if !result.over || self.hits == Hits::None {
            return None;
        }
        let limit = self.limits().iter().nth(result.limit)?;
        let of_limit = || match result.outcome {
            Some(outcome) => outcome.retry_after,
            None => {
                let until = result.cached_until.unwrap_or(now);
                RetryAfter::After(until.since(now))
            }
        };
        let (reason, retry_after) = result
            .denied_by_store
            .unwrap_or_else(|| (Reason::Limit, of_limit()));
        Some(DeniedLimit {
            limit,
            reason,
            retry_after,
        })
    }

    pub(super) fn charge(&self, cost: Cost) -> Charge<'_> {
        self.charge_on(self.limits(), cost)
    }

    /// Returns a charge to this limit's counter that is evaluated under `limits`. `limits` must
    /// share the counter's state.
    pub(super) fn charge_on<'c>(&'c self, limits: &'c Limits, cost: Cost) -> Charge<'c> {
        Charge {
            key: &self.key,
            limits,
            cost,
            longest_wait: None,
            blocked: None,
        }
    }
}

impl DescriptorMatch<'_> {
    /// Sets the index of the descriptor in the request.
    pub(super) fn of_descriptor(mut self, at: usize) -> Self {
        if let Self::Limited(applied) = &mut self {
            applied.descriptor = at;
        }
        self
    }

    pub(super) fn rule(&self) -> Option<&DescriptorRule> {
        match self {
            Self::NoLimit => None,
            Self::Unlimited(rule) => Some(rule),
            Self::Limited(applied) => applied.rule(),
        }
    }
}

impl LimitResult {
    /// Creates the result of a descriptor that is over its limit until the time `until`, according
    /// to the cache.
    pub(super) fn cached(until: Timestamp) -> Self {
        Self {
            over: true,
            cached_until: Some(until),
            ..Self::default()
        }
    }

    /// Creates the result of a status query, which charges nothing. The descriptor is over its
    /// limit if the count exceeds the limit.
    pub(super) fn of_query(outcomes: &[Outcome]) -> Self {
        let over = outcomes.iter().position(|outcome| outcome.excess > 0);
        Self::reporting(over, outcomes)
    }

    /// Creates the result of a charge. The descriptor is over its limit if any limit denied the
    /// charge, if the store is full, or if the key is blocked.
    pub(super) fn of_charge(decision: &Decision, outcomes: &[Outcome]) -> Self {
        let denied_by_store = match decision {
            Decision::Full { retry_after } => Some((Reason::Store, *retry_after)),
            Decision::Blocked { retry_after, .. } => Some((Reason::Blocked, *retry_after)),
            Decision::Admitted | Decision::Limited => None,
        };
        if denied_by_store.is_some() {
            return Self {
                over: true,
                denied_by_store,
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
            cached_until: None,
            limit,
            outcome: outcomes.get(limit).copied(),
            denied_by_store: None,
        }
    }
}
