//! How much work it is to find the rules of one request, and when it is too much.

use super::RuleError;
use crate::{bounds, charge::RequestError};

/// The evaluations of one request: patterns that were held against values. One that has to read
/// through a whole value counts once for each KiB of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    done: usize,
    most: usize,
}

/// What one evaluation of a pattern takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// The same for every value: a look-up, a comparison with the beginning or the end.
    Constant,
    /// In proportion to the value.
    Linear,
}

impl Effort {
    /// How many evaluations it counts as, for a value of `bytes`.
    fn of(self, bytes: usize) -> usize {
        match self {
            Self::Constant => 1,
            Self::Linear => 1 + bytes / 1_024,
        }
    }

    /// How many it counts as for the longest value.
    pub(super) fn most(self) -> usize {
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
    /// Work that is not bounded: for conditions of which there are few.
    pub(super) fn unbounded() -> Self {
        Self {
            done: 0,
            most: usize::MAX,
        }
    }

    /// How many evaluations there were.
    pub(super) fn done(self) -> usize {
        self.done
    }

    /// Counts one evaluation. False if it is one too many: it must not be made, and whatever is found
    /// must be refused by [`Self::check`].
    pub(super) fn spend(&mut self, effort: Effort, value: Option<&str>) -> bool {
        let units = effort.of(value.map_or(0, str::len));
        self.done = self.done.saturating_add(units);
        self.done <= self.most
    }

    /// Counts `items` that are about to be evaluated one by one as too many if they are.
    pub(super) fn expect(&mut self, items: usize) {
        if items > self.most {
            self.done = self.done.max(items);
        }
    }

    /// Refuses a request that took more than [`bounds::MAX_EVALUATIONS`].
    pub(super) fn check(self) -> Result<(), RequestError> {
        if self.done <= self.most {
            return Ok(());
        }
        let problem = format!(
            "the values match parts of too many patterns: finding their rules takes over {} evaluations",
            self.most
        );
        Err(RequestError::new("entries", problem))
    }
}

/// Refuses rules of which a request could take over [`bounds::MAX_EVALUATIONS`], whatever it is.
pub(super) fn check_heaviest(heaviest: &super::index::Heaviest) -> Result<(), RuleError> {
    let most = bounds::MAX_EVALUATIONS;
    if heaviest.weight <= most {
        return Ok(());
    }
    let whose = match &heaviest.entry {
        Some(entry) => format!("most of them look at \"{entry}\""),
        None => "most of them have no condition by which to find them".to_owned(),
    };
    let problem = format!(
        "one request could take {} evaluations of patterns, over the maximum of {most}, because too many \
         rules have nothing by which to tell that they do not apply; {whose}: give them an exact value, \
         or a pattern with text of its own outside of its wildcards",
        heaviest.weight
    );
    Err(RuleError::new("rules", problem))
}
