//! One limit's answer.

use crate::time::{Span, Timestamp};

/// When a denied request would pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// After this long, and not one microsecond sooner, if nothing else happens. Zero when allowed. Of
    /// [`Algorithm::Concurrency`](crate::Algorithm::Concurrency) it is an estimate of when a place is free.
    After(Span),
    /// Never: the cost is above what the limit can ever hold.
    Never,
}

impl Retry {
    /// No wait: the request passes now.
    pub const NOW: Self = Self::After(Span::ZERO);

    /// The wait, or `None` for never.
    #[must_use]
    pub fn span(self) -> Option<Span> {
        match self {
            Self::After(span) => Some(span),
            Self::Never => None,
        }
    }
}

/// One limit's answer to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether this limit lets the request pass.
    pub allowed: bool,
    /// Passed, but beyond the limit proper, inside its soft allowance.
    pub over_limit: bool,
    /// The quota: the most that an idle key can spend at once.
    pub limit: u64,
    /// What could still be spent at this instant, after the operation, the soft allowance included.
    pub remaining: u64,
    /// How long until the key is as good as new, if nothing else happens.
    pub reset_after: Span,
    /// How long until the same request would pass; zero when allowed.
    pub retry_after: Retry,
    /// How long an admitted request must be held back: only ever more than zero for a queue.
    pub delay: Span,
    /// How far the count lies beyond the limit, after the operation. Only a fixed window's ever does: where it counts
    /// [in full](crate::Limit::counting_in_full), or was lowered.
    pub excess: u64,
}

impl Outcome {
    /// A placeholder that is overwritten before anybody sees it.
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

/// Why a decision came out as it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every enforced limit admits; all of them were charged.
    Admitted,
    /// At least one enforced limit denies; none was charged, but for those that count denied requests.
    Limited,
    /// The key of charge number `charge` is blocked by hand; nothing was charged and no limit was asked.
    Blocked {
        /// Which of the charges.
        charge: usize,
        /// When the block ends; `None` stands until it is lifted.
        until: Option<Timestamp>,
        /// How long that is from now.
        retry_after: Retry,
    },
    /// The store is full, and what was found in it at a few places is not to be forgotten; or it is out of reach, and the
    /// rule's policy is to deny. Nothing was charged.
    ///
    /// Also, with [`Retry::Never`], the answer to a call whose charges name one key twice, which no store
    /// can decide ([`has_repeated_key`](crate::has_repeated_key)).
    Full {
        /// When it makes sense to try again: as the first of what was found expires. Never for what is too large for the
        /// store.
        retry_after: Retry,
    },
}

impl Decision {
    /// The answer to charges of which two have one key.
    pub const REPEATED_KEY: Self = Self::Full {
        retry_after: Retry::Never,
    };

    /// What the limits say, if all of those that are enforced admit or not.
    #[must_use]
    #[inline]
    pub fn of_limits(admitted: bool) -> Self {
        if admitted {
            Self::Admitted
        } else {
            Self::Limited
        }
    }

    /// The key of charge number `charge` is blocked until then.
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
