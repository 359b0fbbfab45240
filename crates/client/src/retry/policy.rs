//! Whether to try again, and when: the decision, without I/O and without a clock.

use std::fmt;

use tidegate_core::{Span, Timestamp};

use super::seen::{Kind, Safety, Seen};
use crate::{
    Rng,
    advice::{Advice, Wait},
    backoff::Backoff,
    budget::RetryBudget,
};

/// Whether to try again, and when.
///
/// The wait before a retry is [what the server asked for, and on top of it a backoff](Backoff::wait_after) with jitter: never sooner than
/// told, and not together with everybody who was told the same.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// What is waited when the server says nothing, and added when it does.
    pub backoff: Backoff,
    /// How often a request is sent at most; 4. 1 is no retry.
    pub max_tries: u32,
    /// The longest that the server may ask to be left alone for; 60 s. What asks for more is given up at once and its answer handed on.
    pub max_wait: Span,
    /// The time for the whole call, waits included; 2 min. A retry that could not begin in time is not waited for; what is
    /// under way then is given up, a body that an answer has begun is not.
    pub deadline: Span,
    /// What to do with requests that must not be carried out twice.
    pub non_idempotent: NonIdempotent,
    /// What the budget pays for.
    pub budget_for: BudgetFor,
    /// How much of a request's body the tower layer keeps to be sent again; 64 KiB. A larger one is sent once. reqwest sends again
    /// what it holds in memory anyway, and streams once.
    pub max_replay_bytes: usize,
}

/// Which failures of a request that is not idempotent are followed by a retry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonIdempotent {
    /// Those before anything was sent, and over gRPC those where the server refused.
    #[default]
    NeverSent,
    /// Also those where the server refused and said when to come back: who says 429 or 503 with a time has done nothing yet. Take
    /// it for servers of which that is known.
    Refused,
    /// All of them. The request may be carried out more than once.
    Always,
}

/// Which retries are taken from the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BudgetFor {
    /// All: the bound holds whatever the server answers.
    #[default]
    Everything,
    /// All but those that follow a 429 (or `RESOURCE_EXHAUSTED`) with a time: the server has said when it will be glad of them.
    AllButScheduled,
}

/// A try that is over.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// Which try it was, from 1.
    pub number: u32,
    /// When the whole call began.
    pub began: Timestamp,
    /// What happens if the request is carried out twice.
    pub safety: Safety,
    /// What came of it.
    pub seen: Seen<'a>,
    /// What the answer says of the server's limits.
    pub advice: Advice,
    /// Whether it can be sent again at all: its body was kept.
    pub replayable: bool,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: it is done.
    Done,
    /// Send it again after this long. The budget has paid for it.
    Retry {
        /// How long to wait.
        after: Span,
    },
    /// Nothing, although it is not done.
    GiveUp(GiveUp),
}

/// Why a request is not sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GiveUp {
    /// It may have been carried out, and must not be twice.
    NotIdempotent,
    /// The server says that it will never pass.
    Permanent,
    /// It was sent as often as the policy says.
    Tries,
    /// Its body was too long to be kept.
    Body,
    /// The server wants to be left alone for longer than the policy waits.
    MaxWait {
        /// For so long.
        asked: Span,
    },
    /// The deadline comes first.
    Deadline,
    /// The retry budget is spent.
    Budget,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            backoff: Backoff::default(),
            max_tries: 4,
            max_wait: Span::from_secs(60),
            deadline: Span::from_secs(120),
            non_idempotent: NonIdempotent::default(),
            budget_for: BudgetFor::default(),
            max_replay_bytes: 64 * 1024,
        }
    }
}

impl RetryPolicy {
    /// What to do after `attempt`. Takes from `budget` what a retry costs.
    pub fn next(
        &self,
        attempt: &Attempt<'_>,
        budget: &mut RetryBudget,
        rng: &mut Rng,
        now: Timestamp,
    ) -> Next {
        let kind = attempt.seen.kind(&attempt.advice);
        if kind == Kind::Done {
            return Next::Done;
        }
        let allowed = self.allowed(attempt, kind);
        match allowed.and_then(|asked| self.scheduled(attempt, asked, rng, now)) {
            Ok(_) if self.is_charged(attempt, kind) && !budget.withdraw(now) => {
                Next::GiveUp(GiveUp::Budget)
            }
            Ok(after) => Next::Retry { after },
            Err(reason) => Next::GiveUp(reason),
        }
    }

    /// What the server asks to be waited for, unless it may not be tried again at all.
    fn allowed(&self, attempt: &Attempt<'_>, kind: Kind) -> Result<Span, GiveUp> {
        let asked = match attempt.advice.wait {
            Some(Wait::Never) => return Err(GiveUp::Permanent),
            Some(Wait::After(asked)) => asked,
            None => Span::ZERO,
        };
        if !self.may_repeat(attempt, kind) {
            Err(GiveUp::NotIdempotent)
        } else if attempt.number >= self.max_tries {
            Err(GiveUp::Tries)
        } else if !attempt.replayable {
            Err(GiveUp::Body)
        } else if asked > self.max_wait {
            Err(GiveUp::MaxWait { asked })
        } else {
            Ok(asked)
        }
    }

    fn may_repeat(&self, attempt: &Attempt<'_>, kind: Kind) -> bool {
        let timed = attempt.advice.wait.is_some();
        match (attempt.safety, self.non_idempotent, kind) {
            (Safety::Idempotent, ..) | (_, NonIdempotent::Always, _) | (.., Kind::NeverSent) => {
                true
            }
            (Safety::Grpc, _, Kind::Refused) => true,
            (Safety::Once, NonIdempotent::Refused, Kind::Refused) => timed,
            (Safety::Grpc | Safety::Once, ..) => false,
        }
    }

    fn scheduled(
        &self,
        attempt: &Attempt<'_>,
        asked: Span,
        rng: &mut Rng,
        now: Timestamp,
    ) -> Result<Span, GiveUp> {
        let retry = attempt.number.saturating_sub(1);
        let after = self.backoff.wait_after(asked, retry, rng);
        if now.after(after) < attempt.began.after(self.deadline) {
            Ok(after)
        } else {
            Err(GiveUp::Deadline)
        }
    }

    fn is_charged(&self, attempt: &Attempt<'_>, kind: Kind) -> bool {
        let scheduled = kind == Kind::Refused && attempt.advice.wait.is_some();
        match (self.budget_for, attempt.seen) {
            (BudgetFor::AllButScheduled, Seen::Answer { status, .. }) if scheduled => {
                status == http::StatusCode::SERVICE_UNAVAILABLE
            }
            (BudgetFor::Everything | BudgetFor::AllButScheduled, _) => true,
        }
    }
}

impl fmt::Display for GiveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotIdempotent => {
                f.write_str("it may have been carried out, and is not idempotent")
            }
            Self::Permanent => f.write_str("the server will never let it pass"),
            Self::Tries => f.write_str("it was tried as often as the policy says"),
            Self::Body => f.write_str("its body is too long to be kept for another try"),
            Self::MaxWait { asked } => write!(
                f,
                "the server asks for {asked}, which is longer than the policy waits"
            ),
            Self::Deadline => f.write_str("the deadline comes before another try"),
            Self::Budget => f.write_str("the retry budget is spent"),
        }
    }
}

#[cfg(test)]
mod tests;
