//! The verdict on a request, summarized from the outcomes of all its limits.

use crate::{
    algorithm::{Outcome, Retry},
    eval::{Charge, Decision},
    limit::Limit,
    time::Span,
};

/// Why a request was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A limit is exhausted.
    Limit,
    /// The key is blocked manually.
    Blocked,
    /// The store is full or unreachable, and its policy is to deny.
    Store,
}

impl Reason {
    /// Returns the reason as it appears in verdicts and metric labels.
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
    /// Decided on the authoritative state.
    #[default]
    Exact,
    /// Decided with this node's share of the limits, because the store was unreachable.
    Local,
    /// Nothing was counted: the store was unreachable, and the rule's fallback policy decided.
    None,
}

impl Exactness {
    /// Returns the exactness as it appears in verdicts.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Local => "local",
            Self::None => "none",
        }
    }
}

/// The component that decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Source {
    /// The memory store, as the only store.
    #[default]
    Memory,
    /// Redis.
    Redis,
    /// The denial cache: Redis denied the key earlier, and the time to retry has not come yet.
    Cache,
    /// This node's share of the limits, because Redis was unreachable.
    Local,
    /// The rule's fallback policy, because Redis was unreachable.
    Policy,
}

impl Source {
    /// Returns the source as it appears in verdicts and metric labels.
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

/// One limit in a verdict.
#[derive(Clone, Copy, Debug)]
pub struct Line<'r> {
    /// The rule's name; `None` if the limit was sent with the request.
    pub rule: Option<&'r str>,
    /// The limit.
    pub limit: &'r Limit,
    /// Whether the rule is in shadow mode, which counts and reports but never denies.
    pub shadow: bool,
    /// The limit's outcome.
    pub outcome: Outcome,
}

/// The verdict on one request.
#[derive(Clone, Debug)]
pub struct Verdict<'r> {
    /// Whether the request is admitted.
    pub allowed: bool,
    /// Why it was denied; `None` if it was admitted.
    pub reason: Option<Reason>,
    /// The rule of the leading limit: the one that denies longest, or else the one with the fewest
    /// remaining units. For a blocked key it is the blocked rule. `None` if no rule matched, the
    /// limit was sent with the request, or the store was full.
    pub rule: Option<&'r str>,
    /// The time until the same request would be admitted. That is the longest wait of the denying
    /// limits, or the end of the manual block, or when a full store may have room. Zero if
    /// admitted.
    pub retry_after: Retry,
    /// How long to delay an admitted request: the longest delay of its queues.
    pub delay: Span,
    /// How exact the decision is.
    pub exactness: Exactness,
    /// Which component decided.
    pub source: Source,
    /// Every evaluated limit, in the order of the rules. Empty if no rule matched, a key is
    /// blocked, or the store was full.
    pub lines: Vec<Line<'r>>,
    leading: Option<usize>,
}

impl<'r> Verdict<'r> {
    /// Returns the verdict for a request to which no rule applies: admitted.
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

    /// Summarizes the decision of a store about `charges`. The request is denied if any enforced
    /// limit denies, and the tightest limit leads.
    ///
    /// `outcomes` contains those of all limits of all charges, in order, as [`MemoryStore::check`]
    /// returns them.
    ///
    /// [`MemoryStore::check`]: crate::MemoryStore::check
    #[must_use]
    pub fn of(decision: &Decision, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Self {
        let limits = charges.iter().flat_map(|charge| {
            let (rule, shadow) = (charge.limits.name(), charge.limits.is_shadow());
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

    /// Returns the tightest limit, whose numbers are reported for the request as a whole.
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

    /// Selects the leading limit and sets the rule and the delay. The limit that denies longest
    /// leads. If none denies, it is the enforced limit with the fewest remaining units; of several,
    /// the one that takes longest to recover.
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
