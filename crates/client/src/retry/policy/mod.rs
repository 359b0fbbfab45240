//! The retry decision: whether to retry a request, and when. The decision needs no I/O and no
//! clock.

use tidegate_core::{Span, Timestamp};

use super::outcome::{AttemptOutcome, Idempotency, OutcomeKind};
use crate::{
    Backoff, GiveUpReason, Rng,
    advice::{Advice, Wait},
    budget::RetryBudget,
};

/// A policy that decides whether to retry a request, and when.
///
/// The wait before a retry is [the wait that the server asks for, plus a
/// backoff](Backoff::wait_after) with jitter. Therefore, a retry is never earlier than the server
/// asks for. Clients that got the same advice do not retry at the same time.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// The wait before a retry if the server asks for no wait. If the server asks for a wait, the
    /// backoff is added to the server's wait.
    pub backoff: Backoff,
    /// The maximum number of times that a request is sent. The default is 4. With 1, requests are
    /// not retried.
    pub max_tries: u32,
    /// The longest wait that a server may ask for. The default is 60 s. If the server asks for a
    /// longer wait, its response is returned immediately.
    pub max_wait: Span,
    /// The deadline of the whole call, including its waits. The default is 2 min. If a retry could
    /// not start before the deadline, the call ends without it. A try that is in flight at the
    /// deadline is cancelled, unless the body of its response has begun.
    pub deadline: Span,
    /// The failures after which non-idempotent requests are retried.
    pub non_idempotent: NonIdempotentPolicy,
    /// The kinds of retries that are charged to the budget.
    pub budget_scope: BudgetScope,
    /// The number of bytes of a request body that the tower layer stores for retries. The default
    /// is 64 KiB. A request with a larger body is sent once and never retried. The maximum does not
    /// apply to reqwest, which can retry every body in memory, but never a stream.
    pub max_replay_bytes: usize,
}

/// The failures after which a non-idempotent request is retried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonIdempotentPolicy {
    /// Retry only if nothing was sent. With gRPC, also retry after a refusal by the server.
    #[default]
    NeverSent,
    /// Also retry after a refusal with a time to retry. Use this setting only if the server never
    /// processes a request that it answers with 429 or 503 and a time to retry.
    Refused,
    /// Retry after every failure. The server may process the request more than once.
    Always,
}

/// The kinds of retries that are charged to the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BudgetScope {
    /// All retries are charged. Therefore, the budget's bound holds regardless of the server's
    /// responses.
    #[default]
    Everything,
    /// All retries are charged, except retries that the server itself has scheduled, by responding
    /// with 429 (or `RESOURCE_EXHAUSTED`) and a time to retry.
    AllButScheduled,
}

/// A completed attempt to send a request.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// The number of the attempt, from 1.
    pub number: u32,
    /// The time at which the whole call began.
    pub call_started_at: Timestamp,
    /// Whether the request may be processed twice.
    pub idempotency: Idempotency,
    /// The outcome of the attempt.
    pub outcome: AttemptOutcome<'a>,
    /// The advice in the response about the server's limits.
    pub advice: Advice,
    /// Whether the request can be sent again. A request can be sent again only if its whole body is
    /// still available.
    pub replayable: bool,
}

/// What to do after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// Return the outcome, because no retry is needed.
    Done,
    /// Send the request again after this wait. The retry has been charged to the budget.
    Retry {
        /// The time to wait before the retry.
        after: Span,
    },
    /// Return the outcome, although a retry is needed.
    GiveUp(GiveUpReason),
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
    /// Decides on the action after `attempt`. If the decision is to retry, withdraws one retry from
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
            // Check the budget last, so that a retry that is not made is not charged.
            Ok(_) if self.uses_budget(attempt, kind) && !budget.withdraw(now) => {
                RetryDecision::GiveUp(GiveUpReason::Budget)
            }
            Ok(after) => RetryDecision::Retry { after },
        }
    }

    /// Returns the wait before the retry, or the reason why the request must not be retried.
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

    /// Returns the wait that the server asks for. If the request must not be retried, returns a
    /// reason instead of a wait.
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
            // A refusal with a time to retry comes from a limit, which the server checks before it
            // processes the request. If a refusal has no time to retry, the server may have
            // processed a part of the request.
            (Idempotency::NotIdempotent, NonIdempotentPolicy::Refused, OutcomeKind::Refused) => {
                has_time
            }
            (Idempotency::Grpc | Idempotency::NotIdempotent, ..) => false,
        }
    }

    /// Returns whether a retry after this attempt is charged to the budget.
    fn uses_budget(&self, attempt: &Attempt<'_>, kind: OutcomeKind) -> bool {
        let is_scheduled = kind == OutcomeKind::Refused && attempt.advice.wait.is_some();
        match (self.budget_scope, attempt.outcome) {
            // A server that responds with 503 is failing, even if it sends a time to retry.
            // Therefore, the budget must bound the load that retries add.
            (BudgetScope::AllButScheduled, AttemptOutcome::Response { status, .. })
                if is_scheduled =>
            {
                status == http::StatusCode::SERVICE_UNAVAILABLE
            }
            (BudgetScope::Everything | BudgetScope::AllButScheduled, _) => true,
        }
    }
}

#[cfg(test)]
mod tests;
