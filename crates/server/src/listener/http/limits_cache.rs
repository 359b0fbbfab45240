//! A cache of built limits: building a limit takes longer than deciding on it.

use std::sync::Arc;

use tidegate_core::{LimitError, LimitSpec, Limits};
use tidegate_net::Problem;

use super::fields::FieldLocation;

/// Built limits, by the specs they were built from.
#[derive(Debug, Default)]
pub(super) struct LimitsCache {
    built: Vec<(Vec<LimitSpec>, Arc<Limits>)>,
    /// The index of the entry that is replaced next.
    next: usize,
}

impl LimitsCache {
    /// The number of cached entries. Callers rarely use more than a few limits; further ones are
    /// built again.
    const KEPT: usize = 16;

    /// Returns the limits of `specs` from the cache, or builds them. `location` maps an index in
    /// `specs` to the location in the request, for error messages.
    pub(super) fn limits(
        &mut self,
        specs: Vec<LimitSpec>,
        location: fn(usize) -> FieldLocation,
    ) -> Result<Arc<Limits>, Problem> {
        if let Some((_, limits)) = self.built.iter().find(|(known, _)| *known == specs) {
            return Ok(Arc::clone(limits));
        }
        let limits = Arc::new(build(&specs, location)?);
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

/// Builds all limits, or reports all mistakes in them.
fn build(specs: &[LimitSpec], location: fn(usize) -> FieldLocation) -> Result<Limits, Problem> {
    let (mut limits, mut problems) = (Vec::new(), Vec::new());
    for (index, spec) in specs.iter().enumerate() {
        match spec.build() {
            Ok(limit) => limits.push(limit),
            Err(errors) => problems.extend(
                errors
                    .into_iter()
                    .map(|error| refused(location(index), error)),
            ),
        }
    }
    if !problems.is_empty() {
        return Err(Problem::several(problems));
    }
    Limits::new(limits).map_err(|error| refused(FieldLocation::Body, error))
}

fn refused(location: FieldLocation, error: LimitError) -> Problem {
    Problem::bad(format!("{location}{}", error.field), error.problem)
}

#[cfg(test)]
mod tests {
    use tidegate_core::{AlgorithmName, Limit, notation};

    use super::*;

    #[test]
    fn cached_limits_equal_those_of_their_specs() {
        let mut cache = LimitsCache::default();
        for _ in 0..2 {
            for count in 1..100 {
                let rate = notation::rate(&format!("{count}/s")).unwrap();
                let limits = cache
                    .limits(
                        vec![LimitSpec::shorthand(rate, AlgorithmName::TokenBucket)],
                        FieldLocation::Limit,
                    )
                    .unwrap();
                assert_eq!(limits.iter().map(Limit::quota).collect::<Vec<_>>(), [count]);
            }
        }
        assert_eq!(cache.built.len(), LimitsCache::KEPT);
    }
}
