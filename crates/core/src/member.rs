//! A member of a rule's limits: one kernel with the limits that it decides. Only a log kernel
//! decides several.

use crate::{
    kernel::{Kernel, State},
    limit::Limit,
    limits::Mask,
    outcome::{Outcome, Retry},
    time::{Span, Timestamp},
};

/// A kernel and the limits that it decides.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) kernel: Kernel,
    /// For each part of the kernel, the index of its limit in the rule's list.
    pub(crate) parts: Vec<usize>,
    pub(crate) denials: Denials,
}

/// How a denied request affects the count of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denials {
    /// It is not counted.
    Forgotten,
    /// The count fills up to the limit, whichever limit denied the request.
    Counted,
    /// The full cost is counted, if this limit itself denied the request.
    InFull,
}

impl Denials {
    pub(crate) fn of(limit: &Limit) -> Self {
        match (limit.counts_in_full(), limit.count_denied()) {
            (true, _) => Self::InFull,
            (false, true) => Self::Counted,
            (false, false) => Self::Forgotten,
        }
    }
}

/// The evaluation of one key's limits: the input and its result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) now: Timestamp,
    pub(crate) cost: u64,
    /// The longest time that a queue may delay the request.
    pub(crate) longest_wait: Option<Span>,
    /// The limits that denied the request.
    pub(crate) denied: Mask,
    /// Whether the cost was charged.
    pub(crate) charged: bool,
}

impl Member {
    /// Returns true if the limit of `kernel` can share this member's log.
    pub(crate) fn shares_log(&self, kernel: &Kernel, denials: Denials) -> bool {
        self.denials == denials
            && matches!((&self.kernel, kernel), (Kernel::Log(_), Kernel::Log(_)))
    }

    pub(crate) fn join(&mut self, kernel: &Kernel, index: usize) {
        if let (Kernel::Log(log), Kernel::Log(other)) = (&mut self.kernel, kernel) {
            log.join(other);
            self.parts.push(index);
        }
    }

    #[inline]
    pub(crate) fn outcome(
        &self,
        limit: &Limit,
        state: &State,
        part: usize,
        asked: Asked,
    ) -> Outcome {
        let now = asked.now;
        let standing = self.kernel.standing(state, now, part);
        let allowed = asked.denied & 1 == 0;
        let soft = limit.soft_allowance();
        // If the delay would exceed the maximum, the request cannot spend anything, so `remaining`
        // is 0.
        let overlong = match asked.longest_wait {
            Some(longest) if !allowed => self.kernel.overlong(state, now, longest),
            _ => Span::ZERO,
        };
        Outcome {
            allowed,
            over_limit: asked.charged && standing.remaining < soft,
            limit: limit.quota(),
            remaining: if overlong > Span::ZERO {
                0
            } else {
                standing.remaining
            },
            reset_after: standing.reset_after,
            retry_after: if allowed {
                Retry::NOW
            } else {
                let retry = self.kernel.retry(state, now, part, asked.cost);
                retry.max(Retry::After(overlong))
            },
            delay: if asked.charged {
                self.kernel.delay(state, now, asked.cost)
            } else {
                Span::ZERO
            },
            excess: self.kernel.excess(state, now),
        }
    }
}
