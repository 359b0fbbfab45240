//! The decision of a store.

use crate::{algorithm::RetryAfter, time::Timestamp};

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
        /// When the block ends; `None` if the block lasts until an operator removes it.
        until: Option<Timestamp>,
        /// The time from now until the block ends.
        retry_after: RetryAfter,
    },
    /// The store is full and none of the sampled entries may be evicted. Or the store is
    /// unreachable, and the rule's fallback policy is to deny. Nothing was charged.
    ///
    /// A call with two charges on the same key also gets this decision, with [`RetryAfter::Never`],
    /// because no store can decide such a call ([`has_repeated_key`](crate::has_repeated_key)).
    Full {
        /// The time until the first of the sampled entries expires. `Never` if the new entry is too
        /// large for the store.
        retry_after: RetryAfter,
    },
}

impl Decision {
    /// The decision for a call with two charges on the same key.
    pub const REPEATED_KEY: Self = Self::Full {
        retry_after: RetryAfter::Never,
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

    /// Returns the decision for a blocked key, which is the key of charge number `charge`. The
    /// block ends at `until`, or never if `until` is `None`.
    #[must_use]
    pub fn blocked(charge: usize, until: Option<Timestamp>, now: Timestamp) -> Self {
        let retry_after = until.map_or(RetryAfter::Never, |until| {
            RetryAfter::After(until.since(now))
        });
        Self::Blocked {
            charge,
            until,
            retry_after,
        }
    }
}
