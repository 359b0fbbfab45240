//! How requests wait for a concurrency slot.

use super::bounds::{MAX_SLOT_QUEUE, MAX_SLOT_WAIT, check_count};
use crate::{error::LimitError, time::Span};

/// How requests wait for a slot of a [concurrency limit](crate::Algorithm::Concurrency). A store
/// itself never waits. The caller of the store waits, and retries the decision when a slot may be
/// free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotWait {
    /// The longest wait time of a request.
    pub longest: Span,
    /// The maximum number of requests waiting at the same time per key.
    pub queue: u64,
}

impl SlotWait {
    /// The maximum number of waiting requests per key if only the wait time is given.
    pub const DEFAULT_QUEUE: u64 = 100;

    /// Checks the wait time.
    pub(super) fn check_longest(self) -> Result<(), LimitError> {
        if self.longest == Span::ZERO {
            let problem =
                "must be longer than zero; without `wait`, requests are denied immediately";
            return Err(LimitError::new("wait", problem));
        }
        if self.longest > MAX_SLOT_WAIT {
            let problem = format!("{} exceeds the maximum of {MAX_SLOT_WAIT}", self.longest);
            return Err(LimitError::new("wait", problem));
        }
        Ok(())
    }

    /// Checks the number of waiting requests.
    pub(super) fn check_queue(self) -> Result<(), LimitError> {
        check_count("queue", self.queue, 1)?;
        if self.queue > MAX_SLOT_QUEUE {
            let problem = format!("{} exceeds the maximum of {MAX_SLOT_QUEUE}", self.queue);
            return Err(LimitError::new("queue", problem));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Limit, Limits, Rule};

    fn waiting() -> Limit {
        let lease = Span::from_secs(60);
        let limit = Limit::new(Algorithm::Concurrency { limit: 2, lease }).unwrap();
        let longest = Span::from_secs(2);
        limit
            .with_slot_wait(SlotWait { longest, queue: 5 })
            .unwrap()
    }

    #[test]
    fn a_limit_like_another_lets_requests_wait_like_it() {
        let other = Limit::parse_like("40 at once", &waiting()).unwrap();
        assert_eq!(other.slot_wait(), waiting().slot_wait());
    }

    /// In a rule without a key, the limits of a plan, like the rule's own limits, describe the
    /// capacity of the service.
    #[test]
    fn replaced_limits_keep_what_the_rule_says() {
        let rule = Rule::new("all", vec![waiting()]).unwrap();
        let replaced = rule.clone().with_limits(vec![waiting()]).unwrap();
        let keyed = rule.clone().keyed_by(&["user"]).unwrap();
        let keyed = keyed.with_limits(vec![waiting()]).unwrap();
        let facts = |limits: &Limits| (limits.is_service_wide(), limits.has_slot_wait());
        assert_eq!(facts(rule.limits()), (true, true));
        assert_eq!(facts(replaced.limits()), (true, true));
        assert_eq!(facts(keyed.limits()), (false, true));
    }
}
