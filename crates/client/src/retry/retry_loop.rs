//! Makes a whole call, with its tries and the waits between the tries. This module is independent
//! of the HTTP client.

use std::{
    error::Error as StdError,
    future::Future,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use tidegate_core::Timestamp;
use tokio::time::{sleep, timeout};

use super::{
    Attempt, AttemptOutcome, Idempotency, NeverSentTest, RetryDecision, RetryReport, RetryState,
    outcome::is_connection_refused, refusal,
};
use crate::{
    GiveUpReason, RetryBudget,
    advice::{Advice, Wait, is_refusal},
    clock::to_duration,
    error::{BoxError, Error},
    response_head::ResponseHead,
    sync::lock,
};

/// A request that can be sent several times.
pub(crate) trait RequestSender: Send {
    type Response: AttemptResponse;

    /// Sends the request.
    fn send(&mut self) -> impl Future<Output = Result<Self::Response, BoxError>> + Send;

    /// Returns whether the request can be sent again.
    fn is_replayable(&self) -> bool;

    /// Returns whether `error` means that nothing was sent. `test` is the function that the
    /// application has set to recognise such errors, if any.
    fn was_never_sent(
        &self,
        error: &(dyn StdError + 'static),
        test: Option<NeverSentTest>,
    ) -> bool {
        test.map_or_else(|| is_connection_refused(error), |test| test(error))
    }
}

/// A response, independent of the HTTP client that received it.
pub(crate) trait AttemptResponse: ResponseHead + Sized {
    /// Reads the beginning of the body. Returns the response, whose body is still complete, and at
    /// least the first [`refusal::MAX_BYTES`] of the body.
    fn peek_body(self) -> impl Future<Output = (Self, Bytes)> + Send;

    /// Adds the report to the extensions of the response.
    fn add_report(&mut self, report: RetryReport);
}

/// Makes a call to `host` within the deadline of the policy.
pub(crate) async fn run<S: RequestSender>(
    state: &RetryState,
    host: &str,
    idempotency: Idempotency,
    sender: S,
) -> Result<S::Response, Error> {
    let deadline = state.policy.deadline;
    let retry_loop = RetryLoop {
        state,
        budget: state.budgets.get(host),
        started_at: state.clock.now(),
        idempotency,
        sender,
    };
    let in_time = timeout(to_duration(deadline), retry_loop.run()).await;
    in_time.unwrap_or(Err(Error::DeadlineExceeded { deadline }))
}

struct RetryLoop<'a, S> {
    state: &'a RetryState,
    budget: Arc<Mutex<RetryBudget>>,
    started_at: Timestamp,
    idempotency: Idempotency,
    sender: S,
}

/// The result of one attempt to send a request.
enum AttemptResult<R> {
    Response(R, Advice),
    /// The try failed without a response.
    Failed {
        error: BoxError,
        /// The outcome, which says whether anything was sent.
        outcome: AttemptOutcome<'static>,
    },
    /// An inner layer of this crate rejected the request. The request is not retried.
    Rejected(Error),
}

impl<S: RequestSender> RetryLoop<'_, S> {
    async fn run(mut self) -> Result<S::Response, Error> {
        self.with_budget(|budget| budget.deposit(self.started_at));
        let mut number = 1;
        loop {
            let result = self.attempt().await;
            match self.decide(number, &result) {
                RetryDecision::Done => return result.finish(number, None),
                RetryDecision::GiveUp(reason) => return result.finish(number, Some(reason)),
                RetryDecision::Retry { after } => {
                    // Drop the response, which frees its connection for the retry.
                    drop(result);
                    sleep(to_duration(after)).await;
                    number += 1;
                }
            }
        }
    }

    /// Sends the request once.
    async fn attempt(&mut self) -> AttemptResult<S::Response> {
        match self.sender.send().await {
            Ok(response) => {
                let now = self.state.clock.now();
                let (response, advice) = read_advice(response, now).await;
                AttemptResult::Response(response, advice)
            }
            Err(error) => self.classify(error),
        }
    }

    fn classify(&self, error: BoxError) -> AttemptResult<S::Response> {
        let error = match Error::from_inner(error) {
            Error::Inner(source) => source,
            own => return AttemptResult::Rejected(own),
        };
        let outcome = if self.sender.was_never_sent(&*error, self.state.never_sent) {
            AttemptOutcome::NeverSent
        } else {
            AttemptOutcome::NoResponse
        };
        AttemptResult::Failed { error, outcome }
    }

    fn decide(&self, number: u32, result: &AttemptResult<S::Response>) -> RetryDecision {
        let (outcome, advice) = match result {
            AttemptResult::Response(response, advice) => {
                let (status, headers) = (response.status(), response.headers());
                (AttemptOutcome::Response { status, headers }, *advice)
            }
            AttemptResult::Failed { outcome, .. } => (*outcome, Advice::default()),
            AttemptResult::Rejected(_) => return RetryDecision::Done,
        };
        let attempt = Attempt {
            number,
            call_started_at: self.started_at,
            idempotency: self.idempotency,
            outcome,
            advice,
            replayable: self.sender.is_replayable(),
        };
        let (policy, now) = (&self.state.policy, self.state.clock.now());
        let mut rng = self.state.rng();
        self.with_budget(|budget| policy.decide(&attempt, budget, &mut rng, now))
    }

    fn with_budget<T>(&self, use_it: impl FnOnce(&mut RetryBudget) -> T) -> T {
        use_it(&mut lock(&self.budget))
    }
}

impl<R: AttemptResponse> AttemptResult<R> {
    /// Returns the result of the whole call.
    fn finish(self, tries: u32, gave_up: Option<GiveUpReason>) -> Result<R, Error> {
        match (self, gave_up) {
            (Self::Response(mut response, _), gave_up) => {
                if tries > 1 || gave_up.is_some() {
                    response.add_report(RetryReport { tries, gave_up });
                }
                Ok(response)
            }
            (Self::Failed { error, .. }, Some(gave_up)) => Err(Error::Failed {
                tries,
                gave_up,
                source: error,
            }),
            (Self::Failed { error, .. }, None) => Err(Error::Inner(error)),
            (Self::Rejected(error), _) => Err(error),
        }
    }
}

/// Reads the advice in the head of a response that arrived at `now`. If the response is a refusal
/// without a time to retry, also reads the beginning of the body. The body may say that a retry can
/// never succeed.
async fn read_advice<R: AttemptResponse>(response: R, now: Timestamp) -> (R, Advice) {
    let (status, headers) = (response.status(), response.headers());
    let mut advice = Advice::from_response(status, headers, now);
    let is_untimed = is_refusal(status, headers) && advice.wait.is_none();
    if !is_untimed || !refusal::has_document(headers) {
        return (response, advice);
    }
    let (response, body) = response.peek_body().await;
    if refusal::is_permanent(&body) {
        advice.wait = Some(Wait::Never);
    }
    (response, advice)
}
