//! The limit that applies to a descriptor, and its result.

use std::{ops::Deref, sync::Arc};

use tidegate_core::{Charge, Cost, Decision, Limits, Outcome};

use super::{
    counters::Counters,
    over_limit_cache::CacheEpoch,
    rules::{Rule, RuleLimits},
};

/// The result of matching a descriptor to a rule.
#[derive(Debug)]
pub(super) enum DescriptorMatch<'d> {
    /// No rule applies to the descriptor, or another rule of the request replaces the matching
    /// rule.
    NoLimit,
    /// An unlimited rule applies.
    Unlimited(&'d Rule),
    /// A limit applies. It comes from a rule or from the descriptor itself.
    Limited(AppliedLimit<'d>),
}

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

impl DescriptorMatch<'_> {
    pub(super) fn rule(&self) -> Option<&Rule> {
        match self {
            Self::NoLimit => None,
            Self::Unlimited(rule) => Some(rule),
            Self::Limited(applied) => applied.rule(),
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
