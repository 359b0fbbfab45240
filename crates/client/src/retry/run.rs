//! A whole call, with its tries and the waits between them, independent of the HTTP client.

use std::{
    error::Error as StdError,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use tokio::time::{sleep, timeout};

use super::{
    Attempt, GiveUp, NeverSent, Next, Retried, Safety, Seen, Shared, refusal,
    seen::connection_refused,
};
use crate::{
    advice::{Advice, Wait, refuses},
    budget::RetryBudget,
    clock::duration,
    error::{BoxError, Error},
    head::Head,
};

/// A request that can be sent several times.
pub(crate) trait Sender: Send {
    type Answer: Answer;

    /// Sends the request.
    fn send(&mut self) -> impl Future<Output = Result<Self::Answer, BoxError>> + Send;

    /// Returns whether the request can be sent again.
    fn is_replayable(&self) -> bool;

    /// Returns whether this error means that nothing was sent. Uses the application's function
    /// `told` if there is one.
    fn never_sent(&self, error: &(dyn StdError + 'static), told: Option<NeverSent>) -> bool {
        told.map_or_else(|| connection_refused(error), |told| told(error))
    }
}

/// A response of any HTTP client.
pub(crate) trait Answer: Head + Sized {
    /// Returns at least the first [`refusal::MAX_BYTES`] of the body, and the response with its
    /// whole body.
    fn peeked(self) -> impl Future<Output = (Self, Bytes)> + Send;

    fn note(&mut self, retried: Retried);
}

/// Makes a call to `host`, within the policy's deadline.
pub(crate) async fn run<S: Sender>(
    shared: &Shared,
    host: &str,
    safety: Safety,
    sender: S,
) -> Result<S::Answer, Error> {
    let deadline = shared.policy.deadline;
    let call = Call {
        shared,
        budget: shared.budgets.of(host),
        began: shared.clock.now(),
        safety,
        sender,
    };
    let in_time = timeout(duration(deadline), call.run()).await;
    in_time.unwrap_or(Err(Error::DeadlineExceeded { deadline }))
}

struct Call<'a, S> {
    shared: &'a Shared,
    budget: Arc<Mutex<RetryBudget>>,
    began: tidegate_core::Timestamp,
    safety: Safety,
    sender: S,
}

/// The outcome of a try.
enum Tried<A> {
    Answer(A, Advice),
    /// It failed. The second value says whether anything was sent.
    Failed(BoxError, Seen<'static>),
    /// An inner layer of this crate rejected the request, which is final.
    KeptBack(Error),
}

impl<S: Sender> Call<'_, S> {
    async fn run(mut self) -> Result<S::Answer, Error> {
        self.with_budget(|budget| budget.deposit(self.began));
        let mut number = 1;
        loop {
            let tried = self.tried().await;
            let next = match &tried {
                Tried::Answer(answer, advice) => {
                    let (status, headers) = (answer.status(), answer.headers());
                    self.next(number, Seen::Answer { status, headers }, *advice)
                }
                Tried::Failed(_, seen) => self.next(number, *seen, Advice::default()),
                Tried::KeptBack(_) => Next::Done,
            };
            match next {
                Next::Done => return tried.ended(number, None),
                Next::GiveUp(reason) => return tried.ended(number, Some(reason)),
                Next::Retry { after } => {
                    drop(tried);
                    sleep(duration(after)).await;
                    number += 1;
                }
            }
        }
    }

    fn next(&self, number: u32, seen: Seen<'_>, advice: Advice) -> Next {
        let attempt = Attempt {
            number,
            began: self.began,
            safety: self.safety,
            seen,
            advice,
            replayable: self.sender.is_replayable(),
        };
        let (policy, now) = (&self.shared.policy, self.shared.clock.now());
        let mut rng = self.shared.rng();
        self.with_budget(|budget| policy.next(&attempt, budget, &mut rng, now))
    }

    async fn tried(&mut self) -> Tried<S::Answer> {
        match self.answered().await {
            Ok((answer, advice)) => Tried::Answer(answer, advice),
            Err(error) => self.failed(error),
        }
    }

    fn failed(&self, error: BoxError) -> Tried<S::Answer> {
        match Error::of(error) {
            Error::Inner(source) if self.sender.never_sent(&*source, self.shared.never_sent) => {
                Tried::Failed(source, Seen::NeverSent)
            }
            Error::Inner(source) => Tried::Failed(source, Seen::NoAnswer),
            own => Tried::KeptBack(own),
        }
    }

    async fn answered(&mut self) -> Result<(S::Answer, Advice), BoxError> {
        let answer = self.sender.send().await?;
        let (status, headers) = (answer.status(), answer.headers());
        let mut advice = Advice::of(status, headers, self.shared.clock.now());
        let untimed = refuses(status, headers) && advice.wait.is_none();
        if !untimed || !refusal::may_say(headers) {
            return Ok((answer, advice));
        }
        let (answer, body) = answer.peeked().await;
        if refusal::is_permanent(&body) {
            advice.wait = Some(Wait::Never);
        }
        Ok((answer, advice))
    }

    fn with_budget<T>(&self, use_it: impl FnOnce(&mut RetryBudget) -> T) -> T {
        // No panic leaves the budget inconsistent, so a poisoned lock is safe to use.
        use_it(&mut self.budget.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<A: Answer> Tried<A> {
    /// Returns the result of the call.
    fn ended(self, tries: u32, gave_up: Option<GiveUp>) -> Result<A, Error> {
        match (self, gave_up) {
            (Self::Answer(mut answer, _), gave_up) => {
                if tries > 1 || gave_up.is_some() {
                    answer.note(Retried { tries, gave_up });
                }
                Ok(answer)
            }
            (Self::Failed(source, _), Some(gave_up)) => Err(Error::Failed {
                tries,
                gave_up,
                source,
            }),
            (Self::Failed(source, _), None) => Err(Error::Inner(source)),
            (Self::KeptBack(error), _) => Err(error),
        }
    }
}
