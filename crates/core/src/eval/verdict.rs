//! The verdict on a request: a summary of the outcomes of all limits that apply to it.

use std::ops::Deref;

use smallvec::SmallVec;

use crate::{
    algorithm::{Outcome, RetryAfter},
    eval::{Charge, Decision, Limits},
    limit::{Algorithm, Limit, QuotaUnit},
    time::Span,
};

/// The reason why a request was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A limit is exhausted.
    Limit,
    /// An operator has blocked the key, or the entries of the request.
    Blocked,
    /// The store could not decide, and the request was denied: the store is full, or slow or
    /// unreachable while the fallback policy is to deny, or it cannot store the key.
    Store,
}

impl Reason {
    /// Returns the name of the reason, as used in verdicts and metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Blocked => "blocked",
            Self::Store => "store",
        }
    }
}

/// How exact a verdict is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Exactness {
    /// The request was decided with the authoritative state.
    #[default]
    Exact,
    /// The store was slow or unreachable, and the request was decided with this node's share of the
    /// limits.
    Local,
    /// The store was slow or unreachable; the request was decided by the rule's fallback policy,
    /// and was not counted.
    None,
}

impl Exactness {
    /// Returns the name of the exactness, as used in verdicts.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Local => "local",
            Self::None => "none",
        }
    }
}

/// The component that decided a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Source {
    /// The memory store, in a configuration without Redis.
    #[default]
    Memory,
    /// Redis.
    Redis,
    /// This process, without a call to Redis. Either an earlier denial by Redis for the key is
    /// cached, or a [block by entries](crate::EntryBlocks) denies the request.
    Cache,
    /// This node's share of the limits, used while Redis is slow or unreachable.
    Local,
    /// The rule's fallback policy, used while Redis is slow or unreachable.
    Policy,
}

impl Source {
    /// Returns the name of the source, as used in verdicts and metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Redis => "redis",
            Self::Cache => "cache",
            Self::Local => "local",
            Self::Policy => "policy",
        }
    }
}

/// One limit in a verdict, with its outcome.
#[derive(Clone, Copy, Debug)]
pub struct Line<'r> {
    /// The rule's name; `None` if the limit was sent with the request.
    pub rule: Option<&'r str>,
    /// The limit.
    pub limit: &'r Limit,
    /// Whether the rule is in shadow mode, in which it counts and reports requests, but never
    /// denies them.
    pub shadow: bool,
    /// Whether all clients share one count, as in a rule without a key.
    pub service_wide: bool,
    /// The unit in which the rule counts.
    pub unit: QuotaUnit,
    /// The limit's outcome.
    pub outcome: Outcome,
}

impl Line<'_> {
    /// Returns whether the retry time is an estimate. The retry time is an estimate for concurrency
    /// limits, because the store cannot know when a slot becomes free.
    #[must_use]
    pub fn is_retry_estimated(&self) -> bool {
        matches!(self.limit.algorithm(), Algorithm::Concurrency { .. })
            && !self.outcome.allowed
            && self.outcome.retry_after != RetryAfter::Never
    }
}

/// The limits in a verdict, with their outcomes. A single limit, the most common case, is stored
/// without heap memory.
#[derive(Clone, Debug, Default)]
pub struct Lines<'r>(SmallVec<[Line<'r>; 1]>);

impl<'r> Deref for Lines<'r> {
    type Target = [Line<'r>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'a, 'r> IntoIterator for &'a Lines<'r> {
    type Item = &'a Line<'r>;
    type IntoIter = std::slice::Iter<'a, Line<'r>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// The verdict on one request.
#[derive(Clone, Debug)]
pub struct Verdict<'r> {
    /// Whether the request is admitted.
    pub allowed: bool,
    /// The reason why the request was denied; `None` if the request was admitted.
    pub reason: Option<Reason>,
    /// The name of the rule with the tightest limit: the limit with the longest retry time or, if
    /// no limit denies the request, with the fewest remaining units. For a blocked key, the name of
    /// the key's rule. For a [block by entries](crate::EntryBlocks), the name of the block's rule
    /// or, if the block applies to all rules, of the first rule that matched. `None` if no rule
    /// matched, the limit was sent with the request, or the store was full.
    pub rule: Option<&'r str>,
    /// The time until the same request would be admitted, or zero if the request is admitted. If
    /// limits deny the request, `retry_after` is their longest retry time. For a block,
    /// `retry_after` is the time until the block ends. For a full store, `retry_after` is the
    /// estimated time until the store has memory for a new key.
    pub retry_after: RetryAfter,
    /// How long to delay an admitted request: the longest delay of the queueing limits that apply
    /// to it.
    pub delay: Span,
    /// The exactness of the decision.
    pub exactness: Exactness,
    /// The component that decided the request.
    pub source: Source,
    /// The evaluated limits with their outcomes, in the order of the rules. The list is empty if no
    /// rule matched, a block denies the request, or the store was full.
    pub lines: Lines<'r>,
    leading: Option<usize>,
}

impl<'r> Verdict<'r> {
    /// Returns the verdict on a request to which no rule applies: it is admitted.
    #[must_use]
    pub fn unlimited() -> Self {
        Self {
            allowed: true,
            reason: None,
            rule: None,
            retry_after: RetryAfter::NOW,
            delay: Span::ZERO,
            exactness: Exactness::Exact,
            source: Source::Memory,
            lines: Lines::default(),
            leading: None,
        }
    }

    /// Summarises a store's decision on `charges`. The request is denied if any enforced limit
    /// denies it. The verdict names the rule of the tightest limit.
    ///
    /// `outcomes` must contain the outcomes of all limits of all charges, in the order in which
    /// [`MemoryStore::check`] returns them.
    ///
    /// [`MemoryStore::check`]: crate::MemoryStore::check
    #[must_use]
    pub fn of(decision: &Decision, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Self {
        Self::on(
            decision,
            charges.iter().map(|charge| charge.limits),
            outcomes,
        )
    }

    /// Summarises a store's decision like [`Self::of`], given only the charges' limits.
    ///
    /// The verdict borrows only the limits, so it can outlive the charges' keys.
    #[must_use]
    pub fn on(
        decision: &Decision,
        mut charged: impl Iterator<Item = &'r Limits> + Clone,
        outcomes: &[Outcome],
    ) -> Self {
        // A loop is faster than `flat_map` and `collect`, for which the compiler cannot see that
        // there is usually one limit.
        let mut lines = SmallVec::new();
        let mut outcomes = outcomes.iter();
        for limits in charged.clone() {
            for (limit, outcome) in limits.iter().zip(&mut outcomes) {
                lines.push(Line {
                    rule: limits.name(),
                    limit,
                    shadow: limits.is_shadow(),
                    service_wide: limits.is_service_wide(),
                    unit: limits.unit(),
                    outcome: *outcome,
                });
            }
        }
        let mut verdict = Self {
            lines: Lines(lines),
            ..Self::unlimited()
        };
        match decision {
            Decision::Admitted => verdict.lead_with(None),
            Decision::Limited => {
                verdict.deny(Reason::Limit, verdict.longest_wait());
                verdict.lead_with(Some(verdict.retry_after));
            }
            Decision::Blocked {
                charge,
                retry_after,
                ..
            } => {
                verdict.deny(Reason::Blocked, *retry_after);
                verdict.rule = charged.nth(*charge).and_then(Limits::name);
            }
            Decision::Full { retry_after } => verdict.deny(Reason::Store, *retry_after),
        }
        verdict
    }

    /// Returns the same verdict as [`Self::of`] for a request with a single charge on a single
    /// enforced limit.
    #[inline]
    pub(crate) fn of_one(limits: &'r Limits, outcome: Outcome) -> Self {
        debug_assert!(!limits.is_shadow(), "only `of` knows shadow mode");
        let rule = limits.name();
        let line = Line {
            rule,
            limit: limits.first(),
            shadow: false,
            service_wide: limits.is_service_wide(),
            unit: limits.unit(),
            outcome,
        };
        Self {
            allowed: outcome.allowed,
            reason: if outcome.allowed {
                None
            } else {
                Some(Reason::Limit)
            },
            rule,
            retry_after: outcome.retry_after,
            delay: outcome.delay,
            exactness: Exactness::Exact,
            source: Source::Memory,
            lines: Lines(SmallVec::from_buf([line])),
            leading: Some(0),
        }
    }

    /// Returns the tightest limit's remaining units immediately after the decision, or `None` if no
    /// limit was evaluated.
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.leading().map(|line| line.outcome.remaining)
    }

    /// Returns the time until the key has no spent units in the tightest limit, or `None` if no
    /// limit was evaluated.
    #[must_use]
    pub fn reset_after(&self) -> Option<Span> {
        self.leading().map(|line| line.outcome.reset_after)
    }

    /// Returns the tightest limit, whose numbers are reported for the whole request.
    #[must_use]
    pub fn leading(&self) -> Option<&Line<'r>> {
        self.leading.and_then(|index| self.lines.get(index))
    }

    /// Returns whether the request is denied only because too few concurrency slots are free.
    #[must_use]
    pub fn waits_for_slots(&self) -> bool {
        self.reason == Some(Reason::Limit)
            && self.enforced_denials().next().is_some()
            && self.enforced_denials().all(Line::is_retry_estimated)
    }

    /// Returns whether the request is denied only because the service is at its capacity. The
    /// service is at its capacity if every limit that denies the request is a concurrency limit of
    /// a rule without a key, and the request does not need more slots than the limit has. If the
    /// service is at its capacity, the client has not exceeded a limit of its own.
    #[must_use]
    pub fn is_at_capacity(&self) -> bool {
        self.waits_for_slots() && self.enforced_denials().all(|line| line.service_wide)
    }

    fn deny(&mut self, reason: Reason, retry_after: RetryAfter) {
        self.allowed = false;
        self.reason = Some(reason);
        self.retry_after = retry_after;
    }

    fn enforced_denials(&self) -> impl Iterator<Item = &Line<'r>> {
        self.lines
            .iter()
            .filter(|line| !line.shadow && !line.outcome.allowed)
    }

    fn longest_wait(&self) -> RetryAfter {
        self.enforced_denials()
            .map(|line| line.outcome.retry_after)
            .max()
            .unwrap_or(RetryAfter::NOW)
    }

    /// Selects the tightest limit, and sets the verdict's rule and delay. If an enforced limit
    /// denies the request, the tightest limit is the denying limit with the longest retry time. If
    /// no enforced limit denies the request, the tightest limit is the enforced limit with the
    /// fewest remaining units. Among limits with equally many remaining units, the tightest limit
    /// is the limit with the longest reset time.
    fn lead_with(&mut self, denied_for: Option<RetryAfter>) {
        let lines = self
            .lines
            .iter()
            .enumerate()
            .filter(|(_, line)| !line.shadow);
        let leading = match denied_for {
            Some(wait) => lines
                .into_iter()
                .find(|(_, line)| !line.outcome.allowed && line.outcome.retry_after == wait),
            None => lines.min_by_key(|(_, line)| {
                (
                    line.outcome.remaining,
                    std::cmp::Reverse(line.outcome.reset_after),
                )
            }),
        };
        self.leading = leading.map(|(index, _)| index);
        self.rule = leading.and_then(|(_, line)| line.rule);
        if self.allowed {
            let enforced = self.lines.iter().filter(|line| !line.shadow);
            self.delay = enforced
                .map(|line| line.outcome.delay)
                .max()
                .unwrap_or(Span::ZERO);
        }
    }
}
