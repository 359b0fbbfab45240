//! The request's answer: what the outcomes of all its limits come to.

use crate::{
    charge::Charge,
    limit::Limit,
    outcome::{Decision, Outcome, Retry},
    time::Span,
};

/// Why a request was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A limit is spent.
    Limit,
    /// The key is blocked by hand.
    Blocked,
    /// The store could not take the key in, or is out of reach, and the policy for that is to deny.
    Store,
}

impl Reason {
    /// The reason as it is written in a verdict and in a metric's label.
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
    /// Decided on the one true state.
    #[default]
    Exact,
    /// Decided on this node's share, because the store was out of reach.
    Local,
    /// Nothing was counted: the store was out of reach, and a policy answered.
    None,
}

impl Exactness {
    /// The exactness as it is written in a verdict.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Local => "local",
            Self::None => "none",
        }
    }
}

/// Who gave a verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Source {
    /// The memory store, which is all there is.
    #[default]
    Memory,
    /// Redis.
    Redis,
    /// What Redis said a moment ago, kept here: a denial until the moment that it named.
    Cache,
    /// This node's share, because Redis was out of reach.
    Local,
    /// The rule's policy, because Redis was out of reach.
    Policy,
}

impl Source {
    /// The source as it is written in a verdict and in a metric's label.
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

/// One limit's line in a verdict.
#[derive(Clone, Copy, Debug)]
pub struct Line<'r> {
    /// The rule's name; `None` for a limit that came with the request.
    pub rule: Option<&'r str>,
    /// The limit.
    pub limit: &'r Limit,
    /// Whether the limit only counts and reports.
    pub shadow: bool,
    /// What it answered.
    pub outcome: Outcome,
}

/// The answer to one request.
#[derive(Clone, Debug)]
pub struct Verdict<'r> {
    /// Whether the request may pass.
    pub allowed: bool,
    /// Why not; `None` when allowed.
    pub reason: Option<Reason>,
    /// The rule that speaks for the request: the one that denies longest, or the one with least remaining.
    /// `None` when no rule matched, the limit came with the request, or the store was full.
    pub rule: Option<&'r str>,
    /// How long until the same request would pass: the largest wait over the limits that deny; the end of the block; when
    /// a full store may have room. Zero when allowed.
    pub retry_after: Retry,
    /// How long to hold an admitted request back: the largest delay over its queues.
    pub delay: Span,
    /// How exact the answer is.
    pub exactness: Exactness,
    /// Who gave it.
    pub source: Source,
    /// Every limit that was asked, in the order of the rules. Empty when none matched, a key is blocked, or the store was
    /// full.
    pub lines: Vec<Line<'r>>,
    leading: Option<usize>,
}

impl<'r> Verdict<'r> {
    /// The answer when no rule applies: allowed, by nobody.
    #[must_use]
    pub fn unlimited() -> Self {
        Self {
            allowed: true,
            reason: None,
            rule: None,
            retry_after: Retry::NOW,
            delay: Span::ZERO,
            exactness: Exactness::Exact,
            source: Source::Memory,
            lines: Vec::new(),
            leading: None,
        }
    }

    /// Sums up what a store decided about `charges`: denied if any enforced limit denies, with the
    /// tightest limit leading.
    ///
    /// `outcomes` are those of all limits of all charges, in order, as [`MemoryStore::check`] fills them in.
    ///
    /// [`MemoryStore::check`]: crate::MemoryStore::check
    #[must_use]
    pub fn of(decision: &Decision, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Self {
        let limits = charges.iter().flat_map(|charge| {
            let (rule, shadow) = (charge.limits.name(), charge.limits.shadow());
            charge.limits.iter().map(move |limit| (rule, shadow, limit))
        });
        let lines: Vec<Line<'r>> = limits
            .zip(outcomes)
            .map(|((rule, shadow, limit), outcome)| Line {
                rule,
                limit,
                shadow,
                outcome: *outcome,
            })
            .collect();
        let mut verdict = Self {
            lines,
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
                verdict.rule = charges.get(*charge).and_then(|charge| charge.limits.name());
            }
            Decision::Full { retry_after } => verdict.deny(Reason::Store, *retry_after),
        }
        verdict
    }

    /// The line of the tightest limit, whose numbers speak for the request.
    #[must_use]
    pub fn leading(&self) -> Option<&Line<'r>> {
        self.leading.and_then(|index| self.lines.get(index))
    }

    fn deny(&mut self, reason: Reason, retry_after: Retry) {
        self.allowed = false;
        self.reason = Some(reason);
        self.retry_after = retry_after;
    }

    fn enforced_denials(&self) -> impl Iterator<Item = &Line<'r>> {
        self.lines
            .iter()
            .filter(|line| !line.shadow && !line.outcome.allowed)
    }

    fn longest_wait(&self) -> Retry {
        self.enforced_denials()
            .map(|line| line.outcome.retry_after)
            .max()
            .unwrap_or(Retry::NOW)
    }

    /// Lets the limit that denies longest lead, or, if none denies, the enforced limit with least
    /// remaining; of those, the one that takes longest to recover.
    fn lead_with(&mut self, denied_for: Option<Retry>) {
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
