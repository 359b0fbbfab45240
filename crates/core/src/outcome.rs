//! The result of one limit, and the decision of a store.

use crate::time::{Span, Timestamp};

/// When a denied request would be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// After this time, exact to the microsecond if no other request is charged. Zero if the
    /// request is allowed. For [`Algorithm::Concurrency`](crate::Algorithm::Concurrency) it is an
    /// estimate of when a slot becomes free.
    After(Span),
    /// Never: the cost exceeds the most that the limit can hold.
    Never,
}

impl Retry {
    /// No wait: the request is admitted now.
    pub const NOW: Self = Self::After(Span::ZERO);

    /// Returns the wait, or `None` for never.
    #[must_use]
    pub fn span(self) -> Option<Span> {
        match self {
            Self::After(span) => Some(span),
            Self::Never => None,
        }
    }
}

/// The result of one limit for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether this limit admits the request.
    pub allowed: bool,
    /// Whether the request was admitted over the limit, within the soft allowance.
    pub over_limit: bool,
    /// The quota: the most units that an idle key can spend at once.
    pub limit: u64,
    /// The units that can still be spent at this instant, after this decision, including the soft
    /// allowance.
    pub remaining: u64,
    /// The time until the key has fully recovered, if no other request is charged. For
    /// [`Algorithm::Concurrency`](crate::Algorithm::Concurrency) it is the end of the last lease:
    /// slots that are released come back earlier.
    pub reset_after: Span,
    /// The time until the same request would be admitted; zero if allowed.
    pub retry_after: Retry,
    /// How long to delay an admitted request. Only a queue returns more than zero.
    pub delay: Span,
    /// By how much the count exceeds the limit after this decision. It is above 0 only for a fixed
    /// window that counts [in full](crate::Limit::counting_in_full) or whose limit was lowered.
    pub excess: u64,
}

impl Outcome {
    /// A placeholder that is always overwritten before an outcome is returned.
    pub(crate) const UNSET: Self = Self {
        allowed: false,
        over_limit: false,
        limit: 0,
        remaining: 0,
        reset_after: Span::ZERO,
        retry_after: Retry::Never,
        delay: Span::ZERO,
        excess: 0,
    };
}

/// The decision of a store, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every enforced limit admits the request, and all limits were charged.
    Admitted,
    /// At least one enforced limit denies the request. Only limits that count denied requests were
    /// charged.
    Limited,
    /// The key of charge number `charge` is blocked manually. Nothing was charged, and no limit was
    /// evaluated.
    Blocked {
        /// The index of the charge.
        charge: usize,
        /// When the block ends; `None` if it lasts until it is lifted.
        until: Option<Timestamp>,
        /// The time from now until the block ends.
        retry_after: Retry,
    },
    /// The store is full and found nothing among the sampled entries that it may evict. Or the
    /// store is unreachable, and the rule's fallback policy is to deny. Nothing was charged.
    ///
    /// A call with two charges on the same key also gets this decision, with [`Retry::Never`],
    /// because no store can decide it ([`has_repeated_key`](crate::has_repeated_key)).
    Full {
        /// When to retry: when the first of the sampled entries expires. `Never` if the new entry
        /// is too large for the store.
        retry_after: Retry,
    },
}

impl Decision {
    /// The decision for a call with two charges on the same key.
    pub const REPEATED_KEY: Self = Self::Full {
        retry_after: Retry::Never,
    };

    /// Returns the decision of the limits, given whether all enforced limits admit the request.
    #[must_use]
    #[inline]
    pub fn of_limits(admitted: bool) -> Self {
        if admitted {
            Self::Admitted
        } else {
            Self::Limited
        }
    }

    /// Returns the decision for a key of charge number `charge` that is blocked `until` then, or
    /// forever with `None`.
    #[must_use]
    pub fn blocked(charge: usize, until: Option<Timestamp>, now: Timestamp) -> Self {
        let retry_after = until.map_or(Retry::Never, |until| Retry::After(until.since(now)));
        Self::Blocked {
            charge,
            until,
            retry_after,
        }
    }
}
