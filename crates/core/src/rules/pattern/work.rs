//! The work for finding the rules that apply to a request. A request that would need too much work
//! is rejected.

use crate::{eval::RequestError, limit::bounds};

/// A counter of the pattern evaluations for one request. A pattern that scans the whole value
/// counts as one additional evaluation for each KiB of the value.
#[derive(Clone, Copy, Debug)]
pub(in crate::rules) struct Work {
    done: usize,
    most: usize,
}

/// The effort of one evaluation of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rules) enum Effort {
    /// The effort is constant: a lookup, or a comparison with the beginning or the end of the
    /// value.
    Constant,
    /// The effort is proportional to the length of the value.
    Linear,
}

impl Effort {
    /// Returns the work of one evaluation on a value of `bytes` bytes.
    fn of(self, bytes: usize) -> usize {
        match self {
            Self::Constant => 1,
            Self::Linear => 1 + bytes / 1_024,
        }
    }

    /// Returns the number by which the counter increases for one evaluation with this effort, on a
    /// value of maximum length.
    pub(in crate::rules) fn most(self) -> usize {
        self.of(bounds::MAX_ENTRY_VALUE_BYTES)
    }
}

impl Default for Work {
    fn default() -> Self {
        Self {
            done: 0,
            most: bounds::MAX_EVALUATIONS,
        }
    }
}

impl Work {
    /// Creates a counter without a maximum, for a small number of conditions.
    pub(in crate::rules) fn unbounded() -> Self {
        Self {
            done: 0,
            most: usize::MAX,
        }
    }

    /// Returns the number of evaluations so far.
    pub(in crate::rules) fn done(self) -> usize {
        self.done
    }

    /// Counts one evaluation of a pattern. If the counter exceeds its maximum, returns false, and
    /// the caller must skip the evaluation. If an evaluation was skipped, the results may be wrong,
    /// so the caller must then call [`Self::check`], which rejects the request.
    pub(in crate::rules) fn spend(&mut self, effort: Effort, value: Option<&str>) -> bool {
        let units = effort.of(value.map_or(0, str::len));
        self.done = self.done.saturating_add(units);
        self.done <= self.most
    }

    /// Exhausts the counter if `items`, the number of items about to be evaluated, exceeds the
    /// maximum.
    pub(in crate::rules) fn expect(&mut self, items: usize) {
        if items > self.most {
            self.done = self.done.max(items);
        }
    }

    /// Rejects the request if it took more than [`bounds::MAX_EVALUATIONS`] pattern evaluations.
    pub(in crate::rules) fn check(self) -> Result<(), RequestError> {
        if self.done <= self.most {
            return Ok(());
        }
        let problem = format!(
            "the request's values match parts of too many patterns: finding the applicable rules would take more than \
             {} pattern evaluations",
            self.most
        );
        Err(RequestError::new("entries", problem))
    }
}
