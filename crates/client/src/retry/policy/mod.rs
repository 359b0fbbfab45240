//! The retry decision: whether and when to retry. The decision needs no I/O and no clock.

use std::fmt;

use tidegate_core::{Span, Timestamp};

use super::outcome::{AttemptOutcome, Idempotency, OutcomeKind};
use crate::{
    Backoff, Rng,
    advice::{Advice, Wait},
    budget::RetryBudget,
};

/// Decides whether to retry, and when.
///
/// The wait before a retry is [the wait that the server asked for, plus a
/// backoff](Backoff::wait_after) with jitter. So a retry is never earlier than the server asked
/// for, and clients that got the same advice do not retry at the same time.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// The wait if the server does not ask for a wait; otherwise, an addition to the server's wait.
    pub backoff: Backoff,
    /// The maximum number of times that a request is sent; 4. With 1, requests are not retried.
    pub max_tries: u32,
    /// The longest wait that a server may ask for; 60 s. If the server asks for a longer wait, its
    /// response is returned immediately.
    pub max_wait: Span,
    /// The deadline of the whole call, including its waits; 2 min. If a retry could not start
    /// before the deadline, the call ends immediately. A try that is in flight at the deadline is
    /// cancelled. A response whose body has begun is not cancelled.
    pub deadline: Span,
    /// How to treat requests that are not idempotent.
    pub non_idempotent: NonIdempotentPolicy,
    /// The retries that are charged to the budget.
    pub budget_scope: BudgetScope,
    /// The number of bytes of a request body that the tower layer keeps for retries; 64 KiB. A
    /// request with a larger body is sent once and never retried. This limit does not apply to
    /// reqwest, where every body in memory can be retried, and a stream is never retried.
    pub max_replay_bytes: usize,
}

/// The failures after which a request that is not idempotent is retried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonIdempotentPolicy {
    /// Retry only failures before anything was sent; with gRPC, also retry refusals by the server.
    #[default]
    NeverSent,
    /// Also retry refusals with a time to retry. Use this setting only if the server is known not
    /// to process a request to which it responds 429 or 503 with a time.
    Refused,
    /// Retry all failures. The request may be processed more than once.
    Always,
}

/// The retries that are charged to the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BudgetScope {
    /// All retries, so that the bound of the budget holds whatever the server responds.
    #[default]
    Everything,
    /// All retries except those after a 429 (or `RESOURCE_EXHAUSTED`) with a time to retry, which
    /// the server has scheduled itself.
    AllButScheduled,
}

/// An attempt to send a request, which has ended.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// The number of the attempt, from 1.
    pub number: u32,
    /// When the whole call began.
    pub call_started_at: Timestamp,
    /// Whether the request may be processed twice.
    pub idempotency: Idempotency,
    /// The outcome of the attempt.
    pub outcome: AttemptOutcome<'a>,
    /// The advice in the response about the server's limits.
    pub advice: Advice,
    /// Whether the request can be sent again, because its body was kept.
    pub replayable: bool,
}

/// What to do after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// Return the outcome, because no retry is needed.
    Done,
    /// Send the request again after this wait. The retry has been charged to the budget.
    Retry {
        /// How long to wait.
        after: Span,
    },
    /// Return the outcome, although a retry would be needed.
    GiveUp(GiveUpReason),
}

/// The reason why a request is not sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GiveUpReason {
    /// The server may have processed the request, and the request is not idempotent.
    NotIdempotent,
    /// The server says that a retry will never succeed.
    Permanent,
    /// The maximum number of tries in the policy is reached.
    Tries,
    /// The body was too long to be kept.
    Body,
    /// The server asks for a longer wait than the policy allows.
    MaxWait {
        /// The wait that the server asks for.
        server_wait: Span,
    },
    /// The deadline would pass before the retry could start.
    Deadline,
    /// The retry budget is exhausted.
    Budget,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            backoff: Backoff::default(),
            max_tries: 4,
            max_wait: Span::from_secs(60),
            deadline: Span::from_secs(120),
            non_idempotent: NonIdempotentPolicy::default(),
            budget_scope: BudgetScope::default(),
            max_replay_bytes: 64 * 1024,
        }
    }
}

impl RetryPolicy {
    /// Decides what to do after `attempt`. If the decision is a retry, withdraws the retry from
    /// `budget`.
    pub fn decide(
        &self,
        attempt: &Attempt<'_>,
        budget: &mut RetryBudget,
        rng: &mut Rng,
        now: Timestamp,
    ) -> RetryDecision {
        let kind = attempt.outcome.kind(&attempt.advice);
        if kind == OutcomeKind::Done {
            return RetryDecision::Done;
        }
        match self.schedule(attempt, kind, rng.u64(..), now) {
            Err(reason) => RetryDecision::GiveUp(reason),
            // The budget is checked last, so that a retry that is not made is not charged.
            Ok(_) if self.uses_budget(attempt, kind) && !budget.withdraw(now) => {
                RetryDecision::GiveUp(GiveUpReason::Budget)
            }
            Ok(after) => RetryDecision::Retry { after },
        }
    }

    /// Returns the wait before the retry, or the reason why the request is not retried.
    fn schedule(
        &self,
        attempt: &Attempt<'_>,
        kind: OutcomeKind,
        random: u64,
        now: Timestamp,
    ) -> Result<Span, GiveUpReason> {
        let server_wait = self.server_wait(attempt, kind)?;
        let retry = attempt.number.saturating_sub(1);
        let after = self.backoff.wait_after(server_wait, retry, random);
        debug_assert!(
            after >= server_wait,
            "a retry must not be sent earlier than the server allows"
        );
        if now.after(after) < attempt.call_started_at.after(self.deadline) {
            Ok(after)
        } else {
            Err(GiveUpReason::Deadline)
        }
    }

    /// Returns the wait that the server asks for, unless the request must not be retried.
    fn server_wait(&self, attempt: &Attempt<'_>, kind: OutcomeKind) -> Result<Span, GiveUpReason> {
        let server_wait = match attempt.advice.wait {
            Some(Wait::Never) => return Err(GiveUpReason::Permanent),
            Some(Wait::After(wait)) => wait,
            None => Span::ZERO,
        };
        if !self.may_repeat(attempt, kind) {
            Err(GiveUpReason::NotIdempotent)
        } else if attempt.number >= self.max_tries {
            Err(GiveUpReason::Tries)
        } else if !attempt.replayable {
            Err(GiveUpReason::Body)
        } else if server_wait > self.max_wait {
            Err(GiveUpReason::MaxWait { server_wait })
        } else {
            Ok(server_wait)
        }
    }

    fn may_repeat(&self, attempt: &Attempt<'_>, kind: OutcomeKind) -> bool {
        let has_time = attempt.advice.wait.is_some();
        match (attempt.idempotency, self.non_idempotent, kind) {
            (Idempotency::Idempotent, ..)
            | (_, NonIdempotentPolicy::Always, _)
            | (.., OutcomeKind::NeverSent) => true,
            (Idempotency::Grpc, _, OutcomeKind::Refused) => true,
            // A refusal with a time comes from a limit that was checked before the request was
            // processed. A refusal without a time may have occurred after part of the processing.
            (Idempotency::NotIdempotent, NonIdempotentPolicy::Refused, OutcomeKind::Refused) => {
                has_time
            }
            (Idempotency::Grpc | Idempotency::NotIdempotent, ..) => false,
        }
    }

    /// Returns whether the retry of this attempt is charged to the budget.
    fn uses_budget(&self, attempt: &Attempt<'_>, kind: OutcomeKind) -> bool {
        let is_scheduled = kind == OutcomeKind::Refused && attempt.advice.wait.is_some();
        match (self.budget_scope, attempt.outcome) {
            // A server that responds with 503 and a time is still failing, so the budget must bound
            // the load on it.
            (BudgetScope::AllButScheduled, AttemptOutcome::Response { status, .. })
                if is_scheduled =>
            {
                status == http::StatusCode::SERVICE_UNAVAILABLE
            }
            (BudgetScope::Everything | BudgetScope::AllButScheduled, _) => true,
        }
    }
}

impl fmt::Display for GiveUpReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotIdempotent => {
                f.write_str("the request is not idempotent, and the server could have processed it")
            }
            Self::Permanent => f.write_str("the server would reject the request every time"),
            Self::Tries => f.write_str("the policy allows no more tries"),
            Self::Body => {
                f.write_str("the request body is too long to be buffered for another try")
            }
            Self::MaxWait { server_wait } => write!(
                f,
                "the server asks for a wait of {server_wait}, which is longer than the policy allows"
            ),
            Self::Deadline => f.write_str("the deadline would pass before another try"),
            Self::Budget => f.write_str("the retry budget is exhausted"),
        }
    }
}

#[cfg(test)]
mod tests;
