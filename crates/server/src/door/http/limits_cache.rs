//! The limits that were built last: building one takes longer than deciding on it.

use std::sync::Arc;

use tidegate_core::{LimitError, LimitSpec, Limits};

use super::throttle::build;

#[derive(Debug)]
pub(super) struct LimitsCache {
    built: Vec<(Vec<LimitSpec>, Arc<Limits>)>,
    next: usize,
}

impl LimitsCache {
    /// How many are kept. Callers use a handful of limits; whoever uses more builds them anew.
    const KEPT: usize = 16;

    pub(super) const fn new() -> Self {
        Self {
            built: Vec::new(),
            next: 0,
        }
    }

    /// The limits of `specs`.
    pub(super) fn limits(&mut self, specs: Vec<LimitSpec>) -> Result<Arc<Limits>, Vec<LimitError>> {
        if let Some((_, limits)) = self.built.iter().find(|(known, _)| *known == specs) {
            return Ok(Arc::clone(limits));
        }
        let limits = Arc::new(Limits::new(build(&specs)?).map_err(|error| vec![error])?);
        let entry = (specs, Arc::clone(&limits));
        if self.built.len() < Self::KEPT {
            self.built.push(entry);
        } else {
            self.built[self.next] = entry;
            self.next = (self.next + 1) % Self::KEPT;
        }
        Ok(limits)
    }
}
