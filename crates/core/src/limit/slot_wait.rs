//! How requests wait for a concurrency slot.

use super::bounds::{MAX_SLOT_QUEUE, MAX_SLOT_WAIT, check_count};
use crate::{error::LimitError, time::Span};

/// How requests wait for a slot of a [concurrency limit](crate::Algorithm::Concurrency). A store
/// never waits: its callers do, and decide the request again when a slot may be free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotWait {
    /// The longest wait of a request.
    pub longest: Span,
    /// The maximum number of requests that wait at the same time on one key.
    pub queue: u64,
}

impl SlotWait {
    /// The maximum number of waiting requests on one key if only the wait is given.
    pub const DEFAULT_QUEUE: u64 = 100;

    pub(super) fn check(&self) -> Result<(), LimitError> {
        if self.longest == Span::ZERO {
            let problem = "must be longer than zero; without `wait`, requests are denied at once";
            return Err(LimitError::new("wait", problem));
        }
        if self.longest > MAX_SLOT_WAIT {
            let problem = format!("{} is over the maximum of {MAX_SLOT_WAIT}", self.longest);
            return Err(LimitError::new("wait", problem));
        }
        check_count("queue", self.queue, 1)?;
        if self.queue > MAX_SLOT_QUEUE {
            let problem = format!("{} is over the maximum of {MAX_SLOT_QUEUE}", self.queue);
            return Err(LimitError::new("queue", problem));
        }
        Ok(())
    }
}
