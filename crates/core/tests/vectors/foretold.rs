//! What a denial foretells of the instants of a `generate` that follow it.
//!
//! A denied request leaves no mark, and a wait is exact: until it is over, the same request is denied. So an
//! answer that differs from what an earlier one foretold is a failure, and a subject behind a socket, for which
//! 864,000 requests take minutes, need not be asked at each instant.
//!
//! ```text
//! denied, wait 8 s                              asked  asked  asked  over: admitted
//! |---------------------- passed over ----------|------|------|------|
//! 0                                             4      6      7      8
//! ```

use tidegate_core::{Retry, Span, Timestamp};

use super::{format::LimitFields, runner::Answer};

/// Which instants of a `generate` a subject is asked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instants {
    /// All of them.
    Every,
    /// While a denial stands, each time that half of the wait that was left has passed.
    #[allow(dead_code, reason = "for those who answer over a socket")]
    Halving,
}

/// The denial that stands, if one does.
pub(crate) struct Foretold {
    instants: Instants,
    precision: Span,
    /// False where denied requests are counted, so that one changes what comes after it.
    foretells: bool,
    denial: Option<Denial>,
}

struct Denial {
    /// When the wait is over, up to a precision too late; `None` is never.
    until: Option<Timestamp>,
    /// When to ask again.
    again: Timestamp,
}

impl Foretold {
    pub(crate) fn new(instants: Instants, precision: Span, limits: &[LimitFields]) -> Self {
        let counted = limits.iter().any(|limit| limit.count_denied == Some(true));
        Self {
            instants,
            precision,
            foretells: !counted,
            denial: None,
        }
    }

    /// Whether the subject need not be asked at `now`, because it would deny.
    pub(crate) fn is_certain(&self, now: Timestamp) -> bool {
        let denial = self.denial.as_ref();
        self.instants == Instants::Halving && denial.is_some_and(|denial| now < denial.again)
    }

    /// Takes note of the answer at `now`. Says how it differs from what was foretold.
    pub(crate) fn heed(&mut self, now: Timestamp, answer: &Answer) -> Option<&'static str> {
        let latest = self.foretells.then(|| Denial::of(answer, now)).flatten();
        let earlier = std::mem::replace(&mut self.denial, latest);
        match (earlier?.until, &self.denial) {
            (None, None) => Some("admitted although it never was to be"),
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

    /// Whether the ends of two waits are the same but for rounding up.
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
    /// After a block, limits may deny; so a block foretells nothing.
    fn of(answer: &Answer, now: Timestamp) -> Option<Self> {
        if answer.allowed || answer.reason.as_deref() == Some("blocked") {
            return None;
        }
        Some(match answer.retry {
            Retry::Never => Self {
                until: None,
                again: now,
            },
            Retry::After(wait) => Self {
                until: Some(now.after(wait)),
                again: now.after(Span::from_micros(wait.as_micros() / 2)),
            },
        })
    }
}
