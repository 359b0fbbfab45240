//! Predictions: the consequences of a denial for later requests of a `generate` operation, which
//! sends the same request at regular intervals.
//!
//! A denied request changes nothing, and the reported wait time is exact: until it has elapsed, the
//! same request is denied. A response that differs from the prediction is a failure. Sending
//! 864,000 requests over a socket, for example, would take minutes. With predictions, the runner
//! does not have to send a request at every instant.
//!
//! ```text
//! denied, wait 8 s                             test   test   test   over: admitted
//! |---------------------- skipped -------------|------|------|------|
//! 0                                            4      6      7      8
//! ```

use tidegate_core::{RetryAfter, Span, Timestamp};

use super::{format::LimitFields, runner::Answer};

/// The instants of a `generate` operation at which a request is sent to the system under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instants {
    /// A request is sent at every instant of the operation.
    Every,
    /// After a denial, a request is sent each time half of the remaining wait time has elapsed.
    #[allow(dead_code, reason = "for subjects behind a socket")]
    Halving,
}

/// The predictions from the latest denial, if the last request was denied.
pub(crate) struct Prediction {
    instants: Instants,
    precision: Span,
    /// Whether a denial predicts the results of later requests. A denial predicts nothing if denied
    /// requests are counted, because each denial then changes the result of the next request.
    predicts: bool,
    denial: Option<Denial>,
}

struct Denial {
    /// The end of the wait. Because of rounding, the end can be up to `precision` too late. `None`
    /// if the request is never admitted.
    until: Option<Timestamp>,
    /// The next instant at which a request is sent.
    again: Timestamp,
}

impl Prediction {
    pub(crate) fn new(instants: Instants, precision: Span, limits: &[LimitFields]) -> Self {
        let counted = limits.iter().any(|limit| limit.count_denied == Some(true));
        Self {
            instants,
            precision,
            predicts: !counted,
            denial: None,
        }
    }

    /// Returns true if a request at `now` would certainly be denied and can be skipped.
    pub(crate) fn is_certain(&self, now: Timestamp) -> bool {
        let denial = self.denial.as_ref();
        self.instants == Instants::Halving && denial.is_some_and(|denial| now < denial.again)
    }

    /// Records the response at `now`. If the response differs from the prediction, returns a
    /// description of the difference.
    pub(crate) fn check(&mut self, now: Timestamp, answer: &Answer) -> Option<&'static str> {
        let latest = self.predicts.then(|| Denial::of(answer, now)).flatten();
        let earlier = std::mem::replace(&mut self.denial, latest);
        match (earlier?.until, &self.denial) {
            (None, None) => Some("admitted although the wait was never"),
            (Some(until), None) if now.after(self.precision) <= until => {
                Some("admitted before the wait was over")
            }
            (Some(until), Some(_)) if until <= now => Some("denied although the wait is over"),
            (until, Some(denial)) if !self.are_alike(until, denial.until) => {
                Some("the end of the wait has moved")
            }
            _ => None,
        }
    }

    /// Returns true if two waits end at the same time, except for rounding.
    fn are_alike(&self, one: Option<Timestamp>, other: Option<Timestamp>) -> bool {
        match (one, other) {
            (Some(one), Some(other)) => {
                one.as_micros().abs_diff(other.as_micros()) < self.precision.as_micros()
            }
            (one, other) => one == other,
        }
    }
}

impl Denial {
    /// Returns the predictions from `answer`. A denial by a manual block predicts nothing, because
    /// limits can deny requests after the block has expired.
    fn of(answer: &Answer, now: Timestamp) -> Option<Self> {
        if answer.allowed || answer.reason.as_deref() == Some("blocked") {
            return None;
        }
        Some(match answer.retry {
            RetryAfter::Never => Self {
                until: None,
                again: now,
            },
            RetryAfter::After(wait) => Self {
                until: Some(now.after(wait)),
                again: now.after(Span::from_micros(wait.as_micros() / 2)),
            },
        })
    }
}
