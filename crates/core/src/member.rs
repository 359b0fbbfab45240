//! A member of a rule's limits: a kernel and the limits that it answers for, one but for a log, which several share.

use crate::{
    kernel::{Kernel, State},
    limit::Limit,
    limits::Mask,
    outcome::{Outcome, Retry},
    time::{Span, Timestamp},
};

/// A kernel and the limits that it answers for.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) kernel: Kernel,
    /// The index, in the rule's list, of the limit of each of the kernel's parts.
    pub(crate) parts: Vec<usize>,
    pub(crate) denials: Denials,
}

/// What becomes of a limit's count when the request is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denials {
    /// Nothing.
    Forgotten,
    /// It grows to the brim, whoever denied the request.
    Counted,
    /// It grows by the whole cost, if this limit denied it itself.
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

/// What was asked of one key's limits, and what came of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) now: Timestamp,
    pub(crate) cost: u64,
    /// For how long it may be held back.
    pub(crate) longest_wait: Option<Span>,
    /// The limits that denied it.
    pub(crate) denied: Mask,
    /// Whether it was spent.
    pub(crate) charged: bool,
}

impl Member {
    /// Whether the limit of `kernel` can share this log.
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
        // Where nobody would wait for so long nothing can be spent either.
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
