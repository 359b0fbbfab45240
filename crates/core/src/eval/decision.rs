//! A store's decision on a request.

use crate::{
    algorithm::RetryAfter,
    eval::{Charge, Effect},
    time::{Span, Timestamp},
};

/// A store's decision on a request, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every enforced limit admitted the request, and the request was charged.
    Admitted,
    /// At least one enforced limit denied the request. The request was charged only to limits that
    /// count denied requests.
    Limited,
    /// The charge with index `charge` is blocked manually, by its key or by the entries of its
    /// request. Nothing was charged, and no
    /// limit was evaluated.
    Blocked {
        /// The index of the blocked charge.
        charge: usize,
        /// The instant at which the block ends; `None` if the block lasts until an operator removes
        /// it.
        until: Option<Timestamp>,
        /// The time from now until the block ends.
        retry_after: RetryAfter,
    },
    /// The request is denied because the store is full and no sampled entry can be evicted. `Full`
    /// is also the decision if the store is unreachable and the rule's fallback policy is to deny.
    /// Nothing was charged.
    ///
    /// `Full` with [`RetryAfter::Never`] is also the decision on a call with two charges on the
    /// same key, because stores do not support repeated keys
    /// ([`has_repeated_key`](crate::has_repeated_key)).
    Full {
        /// The time until the first of the sampled entries expires, or `Never` if the new entry is
        /// too large for the store.
        retry_after: RetryAfter,
    },
}

impl Decision {
    /// The decision on a call that no store can decide, because two charges have the same key, or
    /// because a key or cost exceeds a maximum.
    pub const UNDECIDABLE: Self = Self::Full {
        retry_after: RetryAfter::Never,
    };

    /// The decision of a memory store whose state another process has taken over. If the client
    /// retries, the other process decides the request.
    pub const SEALED: Self = Self::Full {
        retry_after: RetryAfter::After(Span::from_secs(1)),
    };

    /// Returns `Admitted` if all enforced limits admit the request (`admitted`), otherwise
    /// `Limited`.
    #[must_use]
    #[inline]
    pub fn of_limits(admitted: bool) -> Self {
        if admitted {
            Self::Admitted
        } else {
            Self::Limited
        }
    }

    /// Returns the decision on `charges` if a [block by entries](crate::EntryBlocks) denies one of
    /// them. If several charges are blocked, the decision names the charge whose block ends last.
    /// Returns `None` if no charge is blocked, or if `effect` cannot deny a request.
    ///
    /// Every store calls this function before evaluating a limit and before calling a remote
    /// database.
    #[must_use]
    #[inline]
    pub fn of_blocked_charges(
        charges: &[Charge<'_>],
        effect: Effect,
        now: Timestamp,
    ) -> Option<Self> {
        let is_blocked = |charge: &Charge<'_>| charge.blocked.is_some();
        if !charges.iter().any(is_blocked) || !effect.can_deny() {
            return None;
        }
        Self::of_longest_block(charges, now)
    }

    #[cold]
    fn of_longest_block(charges: &[Charge<'_>], now: Timestamp) -> Option<Self> {
        let mut longest = None;
        for (index, charge) in charges.iter().enumerate() {
            if charge.blocked > longest.map(|(_, end)| end) {
                longest = charge.blocked.map(|end| (index, end));
            }
        }
        let (index, end) = longest?;
        // If the block has ended since the charges were made, the request is still denied, and may
        // be repeated immediately.
        let until = end.until();
        let until = until.map(|until| until.max(now.after(Span::from_micros(1))));
        Some(Self::blocked(index, until, now))
    }

    /// Returns the decision on a request in which the charge with index `charge` has a blocked key.
    /// The block ends at `until`, or never if `None`.
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
