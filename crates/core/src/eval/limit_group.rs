//! A group of a rule's limits that share one state. Only sliding logs share a state; each other
//! limit is a group by itself.

use crate::{
    algorithm::{Kernel, Outcome, RetryAfter, State},
    eval::Mask,
    limit::Limit,
    time::{Span, Timestamp},
};

/// The limits of a rule that share one state, compiled into one kernel.
#[derive(Clone, Debug)]
pub(crate) struct LimitGroup {
    pub(crate) kernel: Kernel,
    /// For each part of the kernel, the index of its limit in the rule's list. In a sliding log,
    /// each window is a part.
    pub(crate) parts: Vec<usize>,
    pub(crate) denials: DenialCounting,
}

/// How a denied request affects the count of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialCounting {
    /// A denied request is not counted.
    Forgotten,
    /// The cost is counted up to the limit, no matter which limit denied the request.
    Counted,
    /// The full cost is counted, if this limit itself denied the request.
    InFull,
}

impl DenialCounting {
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
pub(crate) struct EvaluationResult {
    pub(crate) now: Timestamp,
    pub(crate) cost: u64,
    /// The longest time that a queue may delay the request.
    pub(crate) longest_wait: Option<Span>,
    /// The limits that denied the request.
    pub(crate) denied: Mask,
    /// Whether the cost was charged.
    pub(crate) charged: bool,
}

impl LimitGroup {
    /// Returns true if the limit of `kernel` can share this group's log.
    pub(crate) fn shares_log(&self, kernel: &Kernel, denials: DenialCounting) -> bool {
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
        result: EvaluationResult,
    ) -> Outcome {
        let now = result.now;
        let status = self.kernel.status(state, now, part);
        let allowed = result.denied & 1 == 0;
        let soft = limit.soft_allowance();
        // If the delay would exceed the maximum, the request cannot spend anything, so `remaining`
        // is 0.
        let excess_delay = match result.longest_wait {
            Some(longest) if !allowed => self.kernel.excess_delay(state, now, longest),
            _ => Span::ZERO,
        };
        Outcome {
            allowed,
            over_limit: result.charged && status.remaining < soft,
            limit: limit.quota(),
            remaining: if excess_delay > Span::ZERO {
                0
            } else {
                status.remaining
            },
            reset_after: status.reset_after,
            retry_after: if allowed {
                RetryAfter::NOW
            } else {
                let retry = self.kernel.retry(state, now, part, result.cost);
                retry.max(RetryAfter::After(excess_delay))
            },
            delay: if result.charged {
                self.kernel.delay(state, now, result.cost)
            } else {
                Span::ZERO
            },
            excess: self.kernel.excess(state, now),
        }
    }
}
