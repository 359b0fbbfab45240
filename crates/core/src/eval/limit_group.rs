//! A group of a rule's limits that share a state. Only sliding window logs share a state; every
//! other limit is in a group of its own.

use crate::{
    algorithm::{Kernel, KernelState, Outcome, RetryAfter},
    limit::{Limit, bounds},
    time::{Span, Timestamp},
};

/// A group of a rule's limits that share a state, compiled into one kernel (the implementation of
/// the algorithm).
#[derive(Clone, Debug)]
pub(crate) struct LimitGroup {
    pub(crate) kernel: Kernel,
    /// The index of each of the group's limits in the rule's list of limits. In a sliding window
    /// log, each limit is a window over the log.
    pub(crate) limit_indices: Vec<usize>,
    pub(crate) denials: DenialCounting,
}

/// A subset of a rule's limits as a bit mask, with one bit per limit in the order of the rule's
/// list.
pub(crate) type Mask = u16;

const _: () = assert!(
    bounds::MAX_LIMITS_PER_RULE <= Mask::BITS as usize,
    "each limit has one bit of the mask"
);

/// How a denied request affects the count of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialCounting {
    /// A denied request is not counted.
    NotCounted,
    /// The cost of a denied request is counted up to the limit, no matter which limit denied the
    /// request.
    Counted,
    /// The full cost of a denied request is counted, but only if this limit itself denied it.
    InFull,
}

impl DenialCounting {
    pub(crate) fn of(limit: &Limit) -> Self {
        match (limit.counts_in_full(), limit.count_denied()) {
            (true, _) => Self::InFull,
            (false, true) => Self::Counted,
            (false, false) => Self::NotCounted,
        }
    }
}

/// The input and the result of evaluating a charge's limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvaluationResult {
    pub(crate) now: Timestamp,
    pub(crate) cost: u64,
    /// The longest time that a queueing limit may delay the request.
    pub(crate) longest_wait: Option<Span>,
    /// The limits that denied the request, as a bit mask.
    pub(crate) denied: Mask,
    /// Whether the cost was charged.
    pub(crate) charged: bool,
}

impl LimitGroup {
    /// Returns true if a limit with this `kernel` and `denials` can share the group's sliding
    /// window log.
    pub(crate) fn shares_log(&self, kernel: &Kernel, denials: DenialCounting) -> bool {
        self.denials == denials
            && matches!((&self.kernel, kernel), (Kernel::Log(_), Kernel::Log(_)))
    }

    pub(crate) fn join(&mut self, kernel: &Kernel, index: usize) {
        if let (Kernel::Log(log), Kernel::Log(other)) = (&mut self.kernel, kernel) {
            log.join(other);
            self.limit_indices.push(index);
        }
    }

    #[inline]
    pub(crate) fn outcome(
        &self,
        limit: &Limit,
        state: &KernelState,
        window: usize,
        result: EvaluationResult,
    ) -> Outcome {
        let now = result.now;
        let status = self.kernel.status(state, now, window);
        let allowed = result.denied & 1 == 0;
        let soft = limit.soft_allowance();
        // If the delay would exceed the maximum, no request can be admitted now, so `remaining` is
        // 0.
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
                let retry = self.kernel.retry(state, now, window, result.cost);
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
