//! The result of evaluating one limit.

use crate::time::Span;

/// The time after which a denied request would be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetryAfter {
    /// The request would be admitted after this time; zero if the request is allowed now. The time
    /// is exact to the microsecond, provided no other request is charged. For
    /// [`Algorithm::Concurrency`](crate::Algorithm::Concurrency), the time is an estimate of when a
    /// slot becomes free.
    After(Span),
    /// The request is never admitted, because its cost exceeds the maximum of the limit.
    Never,
}

impl RetryAfter {
    /// A wait time of zero: the request is admitted now.
    pub const NOW: Self = Self::After(Span::ZERO);

    /// Returns the wait time, or `None` for [`Self::Never`].
    #[must_use]
    pub fn span(self) -> Option<Span> {
        match self {
            Self::After(span) => Some(span),
            Self::Never => None,
        }
    }
}

/// The result of evaluating one limit for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether this limit admits the request.
    pub allowed: bool,
    /// Whether the request was admitted over the limit, within the soft allowance.
    pub over_limit: bool,
    /// The quota: the maximum number of units that an idle key can spend at once.
    pub limit: u64,
    /// The number of units that can still be spent immediately after this decision, including the
    /// soft allowance.
    pub remaining: u64,
    /// The time until the key has no spent units, if no other request is charged. For
    /// [`Algorithm::Concurrency`](crate::Algorithm::Concurrency), this is the time until the last
    /// lease expires; slots can be released earlier.
    pub reset_after: Span,
    /// The time until the same request would be admitted; zero if the request is allowed.
    pub retry_after: RetryAfter,
    /// How long to delay an admitted request. Only a queueing leaky bucket returns more than zero.
    pub delay: Span,
    /// The number of units by which the count exceeds the limit after this decision. The excess is
    /// above 0 only for a fixed window that counts denied requests [in
    /// full](crate::Limit::counting_in_full), or whose limit was lowered.
    pub excess: u64,
}

/// How long a state that exceeds a limit takes to drain at the rate, or with the window length,
/// under which it was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    /// The time until the limit admits the cost, if nothing else is charged.
    pub(crate) retry_after: RetryAfter,
    /// The time until the state has no spent units, if nothing else is charged.
    pub(crate) reset_after: Span,
}

impl Outcome {
    /// A placeholder that is always overwritten before an outcome is returned.
    pub(crate) const UNSET: Self = Self {
        allowed: false,
        over_limit: false,
        limit: 0,
        remaining: 0,
        reset_after: Span::ZERO,
        retry_after: RetryAfter::Never,
        delay: Span::ZERO,
        excess: 0,
    };
}
